"""`--prefill`: which graph reads a long prompt, in statistics, `tune` and `inspect`; also of models of other tools."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="needs the export extra")

from edgerun.edge.cli.main import main
from edgerun.export import INT4
from edgerun.models.bundle import open_bundle
from edgerun.runtime.devices.providers import cpu_device
from edgerun.runtime.graph import open_graph
from edgerun.runtime.graph.model_metadata import metadata_of
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from edgerun.runtime.int8_prompts import prompt_graph
from edgerun.runtime.int8_prompts.int8_graph_files import int8_graph_path
from edgerun.runtime.measure import prompt_choice, system_load
from edgerun.runtime.measure.measurement_store import model_key
from edgerun.runtime.measure.prompt_choice import PROMPT_CHOICES, PromptChoice
from edgerun.runtime.measure.system_load import GraphTimes, LoadMeter
from edgerun.runtime.prefill import prefill
from edgerun.runtime.text.tokenizer import TextTokenizer
from support.commands import Capture, Patch, fails, json_of, output_of
from support.layouts import HYBRID_LAYOUTS, LAYOUTS, quantize_products, write_layout
from support.tiny_models import write_bundle

LONG = "the cat sat on the mat and " * 12
TOKENS = 6
CONFIG = SessionConfig(cpu_device(), 1)
NOT_MADE = "not made yet (edge-run tune makes it)"
FAMILIES = ("llama", "lfm2", "qwen3_5_text")
"""Also models whose states every token changes."""


@pytest.fixture(autouse=True)
def as_if_large(monkeypatch: Patch, cache: Path) -> None:
    """A cache folder of its own, tiny models as if they were not small, and short measurements."""
    monkeypatch.setattr(open_graph, "_SMALL_MODEL_BYTES", 0)
    monkeypatch.setattr(system_load, "_SECONDS_BUDGET", 0.0)
    monkeypatch.setattr(prompt_graph, "TOKENS_TO_LOAD", 0)


@pytest.fixture
def bundle(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(write_bundle(tmp_path, getattr(request, "param", "llama"), weights=INT4))


def answer(capsys: Capture, model: str | Path, *options: str) -> tuple[dict[str, Any], str]:
    """The JSON of an answer to the long prompt, and the statistics on standard error."""
    asked = [str(model), "--raw", "-p", LONG, "-n", str(TOKENS), "--stats", "--json", "--threads", "1"]
    assert main([*asked, "--spec", "off", *options]) == 0
    out, err = capsys.readouterr()
    return json.loads(out), err


def text_after_int8_prompt(model: Path) -> str:
    """What follows the long prompt, read in one pass by the int8 graph; the model's own graph decodes."""
    bundle = open_bundle(model)
    int8_path = int8_graph_path(bundle, CONFIG, make=False)
    own, int8 = (GraphSession(path, CONFIG, metadata_of(bundle)) for path in (bundle.graph, int8_path))
    tokenizer = TextTokenizer(bundle, own.graph_io.vocab_size)
    prompt = tokenizer.encode(LONG, add_special_tokens=True)
    arena = own.arena(512)
    tokens = [int(np.argmax(prefill(int8.bind(arena), prompt, width=len(prompt)).logits))]
    bound = own.bind(arena)
    while len(tokens) < TOKENS:
        tokens.append(int(np.argmax(bound.forward(tokens[-1:])[-1])))
        arena.commit(1)
    return tokenizer.decode(tokens)


@pytest.mark.parametrize(
    ("name", "zero_points"),
    [
        *((family, False) for family in FAMILIES),
        *(("genai", False), ("community", True), ("genai-lfm2", False), ("community-qwen3.5-fused", True)),
    ],
)
def test_a_prompt_is_read_with_int8_weights(tmp_path: Path, capsys: Capture, name: str, zero_points: bool) -> None:
    if name in FAMILIES:
        model = write_bundle(tmp_path, name, weights=INT4)
    else:
        layout = write_layout(tmp_path / "model", {**LAYOUTS, **HYBRID_LAYOUTS}[name])
        model = quantize_products(layout, zero_points=zero_points)
    plain, line = answer(capsys, model, "--prefill", "plain")
    tokens = plain["usage"]["prompt_tokens"]
    assert plain["prompt_graphs"] == {"tokens": {"base": tokens}, "int8_refusal": "not asked for"}
    assert "int8" not in line

    unmeasured, line = answer(capsys, model)
    assert unmeasured["prompt_graphs"] == {"tokens": {"base": tokens}, "int8_refusal": NOT_MADE}
    assert f"int8 prompt graph: {NOT_MADE}" in line
    assert unmeasured["text"] == plain["text"]

    asked, line = answer(capsys, model, "--prefill", "int8")
    assert asked["prompt_graphs"] == {"tokens": {"int8": tokens}, "int8_refusal": None}
    assert f"int8 prompt graph: {tokens} of {tokens} tokens read" in line
    if name not in FAMILIES:  # whose contexts are too short for a single pass
        assert asked["text"] == text_after_int8_prompt(model)


def test_tune_measures_and_inspect_shows_it(bundle: str, capsys: Capture, monkeypatch: Patch) -> None:
    assert f"int8 prompt graph: {NOT_MADE}" in output_of(capsys, "inspect", bundle)
    tuned = ("tune", bundle, "--threads", "1", "--json")
    assert json_of(capsys, *tuned, "--prefill", "plain")["prompts"] == {"int8_used": False, "reason": "not asked for"}
    for worth, used in ((0.0, True), (1e9, False)):
        monkeypatch.setattr(prompt_choice, "_WORTH", worth)
        prompts = json_of(capsys, *tuned)["prompts"]
        assert prompts["int8_used"] is used
        assert prompts["speedup"] > 0
        assert 0 <= prompts["mean_kl"] <= prompts["kl_limit"]
        assert set(prompts["int8_milliseconds"]) == {"64", "128"}, "wider passes do not fit the context of 256"
    assert "int8 prompt graph: not faster here" in output_of(capsys, *tuned[:-1])
    assert "--prefill" in fails(capsys, bundle, "-p", "x", "--prefill", "fast")


def test_auto_does_what_was_measured_of_a_foreign_model(tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    model = quantize_products(write_layout(tmp_path / "model", LAYOUTS["genai"]))
    monkeypatch.setattr(LoadMeter, "is_busy", property(lambda _: False))  # or nothing would be stored
    monkeypatch.setattr(prompt_choice, "_WORTH", 0.0)
    measured = json_of(capsys, "tune", model, "--threads", "1", "--json")["prompts"]
    assert measured["int8_used"]
    assert measured["mean_kl"] <= measured["kl_limit"]
    monkeypatch.setattr(prompt_choice, "_WORTH", 1.05)  # the times of so small a model say nothing
    for int8_s, refusal in ((0.01, None), (0.03, "not faster here: 0.67 times the speed")):
        times = GraphTimes({"64": (0.02, int8_s)})
        choice = PromptChoice(None, times, measured["mean_kl"], measured["kl_limit"])
        PROMPT_CHOICES.save(model_key(open_bundle(model), CONFIG), choice)
        found, line = answer(capsys, model)
        graphs = found["prompt_graphs"]
        assert graphs["int8_refusal"] == refusal
        assert graphs["tokens"].get("int8", 0) == (128 if refusal is None else 0)
        assert f"int8 prompt graph: {refusal or '128 of'}" in line


@pytest.mark.parametrize(
    ("layout", "quantized", "said", "reason"),
    [
        ("optimum", True, "the int8 prompt graph ", "needs a cache that is extended in place"),
        (
            *("genai", False, "cannot have an int8 prompt graph: "),
            "its graph has no products of quantized weights (MatMulNBits in float32)",
        ),
    ],
)
def test_a_line_says_why_there_is_none(
    tmp_path: Path, capsys: Capture, layout: str, quantized: bool, said: str, reason: str
) -> None:
    model = write_layout(tmp_path / "model", LAYOUTS[layout])
    if quantized:
        quantize_products(model)
    assert f"{said}{reason}" in fails(capsys, model, "--raw", "-p", LONG, "-n", "2", "--prefill", "int8")
    assert json_of(capsys, "tune", model, "--threads", "1", "--json")["prompts"]["reason"] == reason
    found, line = answer(capsys, model)
    assert found["prompt_graphs"]["int8_refusal"] == reason
    assert f"int8 prompt graph: {reason}" in line
    assert reason.partition(" (")[0] in " ".join(output_of(capsys, "inspect", model).split())


def test_verify_finds_damage(bundle: str, tmp_path: Path, capsys: Capture) -> None:
    answer(capsys, bundle, "--prefill", "int8")
    (weights,) = tmp_path.glob("cache/prompt-int8/*/int8.data")
    weights.write_bytes(bytes(weights.stat().st_size))
    assert str(weights) in fails(capsys, "verify", bundle, "--threads", "1", "--limit", "1")
    assert not weights.exists()


@pytest.mark.parametrize("bundle", FAMILIES, indirect=True)
def test_the_exactness_report_does_not_depend_on_it(bundle: str, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "prompts.txt").write_text(LONG, encoding="utf-8")
    verify = ["verify", bundle, "--threads", "1", "--prompts", str(tmp_path / "prompts.txt"), "-n", "12", "--json"]

    def report() -> dict[str, Any]:
        found = json_of(capsys, *verify)
        texts = {
            mode: {name: found[mode][name] for name in ("texts", "identical", "near_ties")}
            for mode in ("greedy", "exact")
        }
        return {**texts, **{name: found[name] for name in ("noise", "epsilon", "counterexample", "passed")}}

    before = report()
    answer(capsys, bundle, "--prefill", "int8")
    faster = PromptChoice(None, GraphTimes({"64": (0.03, 0.02)}), 0.001, 0.02)
    PROMPT_CHOICES.save(model_key(open_bundle(Path(bundle)), CONFIG), faster)
    assert "int8" in answer(capsys, bundle)[0]["prompt_graphs"]["tokens"]
    assert report() == before


def test_a_graph_of_earlier_weights_is_not_used(
    bundle: str, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    def text() -> str:
        found, _ = answer(capsys, bundle, "--prefill", "int8")
        assert found["prompt_graphs"]["tokens"]["int8"] >= 128
        return str(found["text"])

    first = text()
    other = write_bundle(tmp_path / "other", weights=INT4, seed=5)
    shutil.rmtree(bundle)
    shutil.copytree(other, bundle)
    second = text()
    assert second != first
    assert len(list(tmp_path.glob("cache/prompt-int8/*"))) == 2
    monkeypatch.setenv("EDGERUN_CACHE", str(tmp_path / "empty"))
    assert text() == second
