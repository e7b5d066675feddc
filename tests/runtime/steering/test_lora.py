"""LoRA adapters: the text of merged weights, chosen by each request."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("support.tiny_models", reason="needs the export extra")

from safetensors.numpy import load_file, save_file

import edgerun
from edgerun import Engine, InputError, Speculation
from edgerun.models.bundle import open_bundle
from edgerun.runtime.arguments.load_options import LoadOptions
from edgerun.runtime.devices.providers import cpu_device
from edgerun.runtime.graph.open_graph import open_graph
from edgerun.runtime.graph.session import SessionConfig
from edgerun.runtime.strategies.strategy import parse_strategy
from support.adapters import PREFIX, merged, write_adapter
from support.tiny_models import FAMILY_SETTINGS, exported, write_checkpoint

PROMPT = "the sea and the sand"
OPTIONS: dict[str, Any] = {"raw": True, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
ATTENTION = r"self_attn\.[qkvo]_proj"
EXPERTS = ("gpt_oss", "qwen3_moe", "qwen3_5_moe_text", "qwen3_next")
"""Families with experts, which take no adapter."""
HALF = {"targets": r"\.([qv]_proj|down_proj)", "use_rslora": True, "alpha_pattern": {"v_proj": 5.0}}


def text_of(bundle: Path, **options: Any) -> str:
    with edgerun.load(bundle, threads=1) as engine:
        return engine.generate(PROMPT, **{**OPTIONS, **options}).text


@pytest.mark.parametrize("family", sorted(FAMILY_SETTINGS))
def test_an_adapter_gives_the_text_of_merged_weights(family: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", family)
    adapter = write_adapter(tmp_path / "a", checkpoint, **({"targets": ATTENTION} if family in EXPERTS else {}))
    half = write_adapter(tmp_path / "b", checkpoint, **({"targets": ATTENTION} if family in EXPERTS else HALF), seed=1)
    bundle = exported(checkpoint, tmp_path / "bundle")
    with edgerun.load(bundle, threads=1, lora=[f"all={adapter}", f"half={half}"]) as engine:
        plain = engine.generate(PROMPT, **OPTIONS).text
        found = {name: engine.generate(PROMPT, **OPTIONS, adapter=name, logprobs=0) for name in ("all", "half")}
        assert engine.generate(PROMPT, **OPTIONS).text == plain
    for name, folder in (("all", adapter), ("half", half)):
        other = exported(merged(tmp_path / f"merged-{name}", checkpoint, folder), tmp_path / f"bundle-{name}")
        with edgerun.load(other, threads=1) as engine:
            expected = engine.generate(PROMPT, **OPTIONS, logprobs=0)
        assert found[name].text == expected.text != plain
        logprobs = [[token.logprob for token in reply.logprobs] for reply in (found[name], expected)]
        np.testing.assert_allclose(*logprobs, atol=1e-3)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a bundle, two adapters `a` and `b`, and bundles with each of them merged."""
    folder = tmp_path_factory.mktemp("lora")
    checkpoint = write_checkpoint(folder / "checkpoint")
    exported(checkpoint, folder / "bundle")
    for seed, name in enumerate("ab"):
        adapter = write_adapter(folder / name, checkpoint, seed=seed)
        exported(merged(folder / f"checkpoint-{name}", checkpoint, adapter), folder / f"merged-{name}")
    return folder


@pytest.fixture(scope="module")
def engine(files: Path) -> Iterator[Engine]:
    with edgerun.load(files / "bundle", threads=1, lora=[f"a={files / 'a'}", f"b={files / 'b'}"]) as engine:
        yield engine


def test_answers_with_different_adapters_are_generated_at_a_time(files: Path, engine: Engine) -> None:
    expected = {None: text_of(files / "bundle"), **{name: text_of(files / f"merged-{name}") for name in "ab"}}
    names = [None, "a", "b", None, "b", "a", "a", None]
    with ThreadPoolExecutor(len(names)) as pool:
        replies = list(pool.map(lambda name: engine.generate(PROMPT, **OPTIONS, adapter=name), names))
    assert [reply.text for reply in replies] == [expected[name] for name in names]


def test_caches_of_an_adapter_serve_it_alone(files: Path) -> None:
    with edgerun.load(files / "bundle", threads=1, lora=[f"a={files / 'a'}", f"b={files / 'b'}"]) as engine:
        names, reused = (None, "a", "a", None, "b", "b", "a"), []
        for length, name in enumerate(names, 3):  # every prompt continues those before it
            reused.append(engine.generate(PROMPT * length, **OPTIONS, adapter=name).stats.reused_tokens > 8)
    assert reused == [False, False, True, True, False, True, True]


def test_a_caller_may_change_the_adapter_of_a_sequence(files: Path, engine: Engine) -> None:
    sequence = engine.new_sequence()
    prompt = engine.tokenizer.encode(PROMPT, add_special_tokens=True)
    for name in ("a", "b", None, "b"):
        options = edgerun.GenerateOptions(**OPTIONS, adapter=name)
        text = edgerun.Reply.of(engine.answer(prompt, options, sequence)).text
        assert text == text_of(files / ("bundle" if name is None else f"merged-{name}"))


@pytest.mark.parametrize(
    "changes",
    [
        {"exact": True},
        {"speculation": Speculation.OFF},
        {"speculation": Speculation.parse("suffix")},
        {"num_beams": 3},
        {"strategies": [parse_strategy("negative-prompt:text=of the,guidance=2")]},
    ],
)
def test_an_adapter_answers_the_same_however_it_is_decoded(files: Path, engine: Engine, changes: Any) -> None:
    options = {**OPTIONS, "max_tokens": 60}
    found = engine.generate(PROMPT, **{**options, **changes}, adapter="a").text
    assert found == text_of(files / "merged-a", max_tokens=60, **changes)


def test_several_answers_and_conversations_have_an_adapter(files: Path, engine: Engine) -> None:
    sampled: dict[str, Any] = {**OPTIONS, "temperature": 0.9, "seed": 3, "n": 3}
    with edgerun.load(files / "merged-a", threads=1) as other:
        expected = [choice.text for choice in other.generate(PROMPT, **sampled).choices]
        chat = other.session()
        said = [chat.send(text, max_tokens=8).text for text in ("ab", "of")]
    assert [choice.text for choice in engine.generate(PROMPT, **sampled, adapter="a").choices] == expected
    chat = engine.session()
    assert [chat.send(text, max_tokens=8, adapter="a").text for text in ("ab", "of")] == said


def changed_config(folder: Path, **settings: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **settings}), encoding="utf-8")


def renamed_tensors(folder: Path, old: str, new: str) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file({name.replace(old, new): value for name, value in tensors.items()}, folder / "adapter_model.safetensors")


BROKEN: list[tuple[Callable[[Path], object], str]] = [
    (shutil.rmtree, "adapter_config.json cannot be read: No such file"),
    (lambda folder: (folder / "adapter_model.safetensors").unlink(), "adapter_model.safetensors cannot be read"),
    (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"1"), "is truncated or not a safetensors file"),
    (lambda folder: save_file({}, folder / "adapter_model.safetensors"), "has no tensors"),
    (lambda folder: changed_config(folder, peft_type="IA3"), "has peft_type 'IA3'"),
    (lambda folder: changed_config(folder, use_dora=True), "has use_dora True"),
    (lambda folder: changed_config(folder, bias="all"), "has bias 'all'"),
    (lambda folder: changed_config(folder, lora_alpha="much"), "has lora_alpha 'much'; it must be a number"),
    *(
        (lambda folder, key=key: changed_config(folder, alpha_pattern={key: 1}), f"has lora_alpha {{'{key[:1]}")
        for key in ("(", "x{99999999999999999999}", "(" * 5000 + ")" * 5000)
    ),
    (lambda folder: renamed_tensors(folder, "q_proj", "x_proj"), "self_attn.x_proj', and the model has no such linear"),
    (lambda folder: renamed_tensors(folder, "layers.1", "layers.7"), "and the model has no such linear"),
    (lambda folder: renamed_tensors(folder, "v_proj.lora_B", "v_proj.lora_C"), "has no matrix 'base_model.model.model"),
    (lambda folder: renamed_tensors(folder, "gate_proj.lora_A", "gate"), "and the model has no such linear"),
]


@pytest.mark.parametrize(("damage", "message"), BROKEN)
def test_what_is_wrong_with_an_adapter_is_said_when_it_is_loaded(
    files: Path, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    adapter = shutil.copytree(files / "a", tmp_path / "adapter")
    damage(adapter)
    with pytest.raises(InputError) as caught:
        edgerun.load(files / "bundle", lora=[f"a={adapter}"])
    assert message in f"{caught.value.what}; {caught.value.hint}"


def test_an_adapter_of_another_model_is_refused(files: Path, tmp_path: Path) -> None:
    other = write_adapter(tmp_path / "adapter", write_checkpoint(tmp_path / "checkpoint", hidden_size=32))
    with pytest.raises(
        InputError, match=f"has '{PREFIX}model.layers.0.mlp.down_proj' with 96 inputs and 32 outputs, and"
    ):
        edgerun.load(files / "bundle", lora=[f"a={other}"])


def test_a_model_with_scaled_inputs_is_refused(files: Path, tmp_path: Path) -> None:
    bundle = shutil.copytree(files / "bundle", tmp_path / "bundle")
    manifest = json.loads((bundle / "edge.json").read_bytes())
    manifest["calibration"] = {"origin": "a text", "tokens": 9, "held_out_tokens": 9, "awq": True}
    (bundle / "edge.json").write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(InputError, match="cannot have adapters: AWQ has scaled the inputs of its linears"):
        edgerun.load(bundle, lora=[f"a={files / 'a'}"])


def test_an_adapter_works_with_an_int8_cache(files: Path, engine: Engine) -> None:
    with edgerun.load(files / "bundle", threads=1, kv="int8", lora=[f"a={files / 'a'}"]) as quantized:
        found = quantized.generate(PROMPT, **OPTIONS, adapter="a").text
        assert found != quantized.generate(PROMPT, **OPTIONS).text
    expected = engine.generate(PROMPT, **OPTIONS, adapter="a").text
    assert found[:12] == expected[:12]


def test_names_that_are_wrong_are_one_line(files: Path, engine: Engine, editable_bundle: Path) -> None:
    for given in ("a", "=x", "a="):
        with pytest.raises(InputError, match=f"--lora is '{given}'"):
            edgerun.load(files / "bundle", lora=[given])
    with pytest.raises(InputError, match="--lora is 'a="):
        edgerun.load(files / "bundle", lora=[f"a={files / 'a'}", f"a={files / 'b'}"])
    with pytest.raises(InputError, match="adapter is 'c'"):
        engine.generate(PROMPT, **OPTIONS, adapter="c")
    with edgerun.load(files / "bundle", threads=1) as plain, pytest.raises(InputError, match="was loaded without"):
        plain.generate(PROMPT, **OPTIONS, adapter="a")
    bundle, other = open_bundle(files / "bundle"), SessionConfig(replace(cpu_device(), provider="OtherProvider"))
    with pytest.raises(InputError, match="adapters and control vectors work on the CPU alone, not on"):
        open_graph(bundle, other, cache=False, steering=LoadOptions(lora=["a=b"]))
    with pytest.raises(InputError, match="cannot have adapters and control vectors: edge-run has not exported it"):
        edgerun.load(editable_bundle, lora=[f"a={files / 'a'}"])
