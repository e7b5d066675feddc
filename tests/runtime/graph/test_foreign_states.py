"""Rewinding graphs of other tools; their layers that keep a state: answers in parts, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

import edgerun
from edgerun import BundleError, GenerateOptions, Speculation
from edgerun.edge.cli.main import main
from edgerun.errors import EdgeError
from edgerun.models.bundle import open_bundle
from edgerun.models.manifest import DeviceKind
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph import session
from edgerun.runtime.graph.model_metadata import metadata_of
from edgerun.runtime.graph.open_graph import open_graph
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from support.adversarial_drafters import NEARLY_FREE, FixedCost
from support.layout_kinds import CONTEXT, VOCABULARY, Weights
from support.layout_reference import Decoder
from support.layouts import HYBRID_LAYOUTS, LAYOUTS, write_layout

EVERY = {**LAYOUTS, **HYBRID_LAYOUTS}
PROMPT = "the and of the and of to in the and of the and of to in the and of"
OPTIONS = GenerateOptions(raw=True, ignore_eos=True, max_tokens=60, speculation=Speculation.OFF)
NAMES = (
    *("genai-qwen3.5", "community-lfm2", "community-qwen3.5", "optimum-qwen3.5-two-decoders"),
    *("optimum", "optimum-merged", "stacked", "keys-transposed", "genai", "renamed-genai"),
)
"""States of several kinds, of one kind, beside a growing cache, and a first graph that takes none; attention alone."""
TOLERANCE = 2e-4
"""Wide passes and narrow ones differ by float rounding."""


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: write_layout(tmp_path_factory.mktemp("layout"), EVERY[name]))


@pytest.fixture(scope="module")
def graph_of(folder_of: Callable[[str], Path]) -> Callable[[str], GraphSession]:
    return cache(lambda name: load(folder_of(name)))


def load(folder: Path) -> GraphSession:
    bundle = open_bundle(folder)
    return GraphSession(bundle.graph, SessionConfig(choose_device("cpu"), 1), metadata_of(bundle))


def logits_after(name: str, token_ids: list[int]) -> np.ndarray:
    """Logits of the reference after each token, `[n, vocabulary]`."""
    return Decoder.of(EVERY[name]).forward(token_ids)


actions = st.lists(
    st.one_of(
        st.tuples(st.just("read"), st.integers(1, 40), st.floats(0, 1)),
        st.tuples(st.just("rewind"), st.floats(0, 1)),
        st.tuples(st.just("copy")),
        st.tuples(st.just("restore"), st.floats(0, 1)),
    ),
    min_size=3,
    max_size=12,
)


@pytest.mark.parametrize("name", NAMES)
def test_any_order_of_passes_and_rewinds_gives_the_reference_logits(
    name: str, graph_of: Callable[[str], GraphSession]
) -> None:
    """Passes of which a part is committed, rewinds to anywhere, and copies of the arena."""
    graph = graph_of(name)

    @settings(max_examples=20)
    @given(actions=actions, seed=st.integers(0, 99))
    def check(actions: list[tuple], seed: int) -> None:
        random = np.random.default_rng(seed)
        bound, text = graph.bind(graph.arena(CONTEXT)), []
        for kind, *values in actions:
            arena = bound.arena
            if kind == "read":
                width, share = values
                new = random.integers(5, VOCABULARY, width).tolist()
                logits = bound.forward(new)
                np.testing.assert_allclose(logits, logits_after(name, [*text, *new])[-width:], atol=TOLERANCE)
                accepted = round(share * width)
                arena.commit(accepted)
                text += new[:accepted]
            elif kind == "rewind":
                length = round(values[0] * len(text))
                arena.rewind_to(length)
                del text[length:]
            elif kind == "restore":
                length = round(values[0] * len(text))
                snapshot = arena.snapshot()
                arena.rewind_to(length)
                arena.restore(snapshot)
            else:
                copied = graph.arena(CONTEXT)
                copied.copy_from(arena, arena.length)
                bound = graph.bind(copied)
            assert bound.arena.length == len(text)
        last = bound.forward([7])[0]
        np.testing.assert_allclose(last, logits_after(name, [*text, 7])[-1], atol=TOLERANCE)

    check()


def test_a_failed_pass_over_a_growing_cache_can_be_repeated(
    graph_of: Callable[[str], GraphSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots that were to be written again are gone from a cache that grows, so they are no longer committed."""
    name, text = "community-qwen3.5", np.random.default_rng(0).integers(5, VOCABULARY, 30).tolist()
    graph = graph_of(name)
    bound = graph.bind(graph.arena(CONTEXT))
    bound.forward(text)
    bound.arena.commit(12)  # 12 of 30 tokens, which run once more in the next pass

    def fail() -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(bound, "_run_session", fail)
        patch.setattr(bound, "_first_session", None)
        with pytest.raises(EdgeError, match="out of memory"):
            bound.forward([8])
    length = bound.arena.length
    assert len(bound.arena.snapshot()[0][0, 0, 0]) == length
    bound.forward(text[length:12])
    bound.arena.commit(12 - length)
    np.testing.assert_allclose(bound.forward([8])[0], logits_after(name, [*text[:12], 8])[-1], atol=TOLERANCE)


def test_inspect_names_the_states(folder_of: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(folder_of("genai-qwen3.5")), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["state_layers"] == "0: convolution, float32 [64, 2] each; 0: recurrent, float32 [2, 16, 16] each"
    assert facts["layers"] == 2
    assert main(["inspect", str(folder_of("community-lfm2-float16")), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state_layers"] == "0: convolution, float16 [64, 3] each"


# A graph of its own for the embedding


def test_a_model_in_parts_answers_like_one_graph(
    folder_of: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """From the folder, and from the decoder's file."""
    whole, parts = folder_of("community-lfm2"), folder_of("community-lfm2-parts")
    texts = []
    for path in (whole, parts, parts / "onnx" / "decoder_model_merged_q4.onnx"):
        assert main([str(path), "-p", PROMPT, "--raw", "-n", "20", "--json"]) == 0
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert texts[0] == texts[1] == texts[2]
    weights = [open_bundle(path).weight_bytes for path in (whole, parts)]
    assert weights[1] == pytest.approx(weights[0], rel=0.02)
    assert open_bundle(whole).fingerprint != open_bundle(parts).fingerprint


def test_an_embedding_beside_a_decoder_that_takes_token_ids_is_ignored(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    source = folder_of("community-lfm2-parts")
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(source / name, tmp_path)
    shutil.copy(source / "onnx" / "embed_tokens_q4.onnx", tmp_path)
    shutil.copy(source / "onnx" / "embed_tokens_q4.onnx_data", tmp_path)
    decoder = write_layout(tmp_path / "whole", replace(HYBRID_LAYOUTS["community-lfm2"], weights=Weights.INSIDE))
    shutil.copy(decoder / "onnx" / "model.onnx", tmp_path / "decoder_model_merged_q4.onnx")
    with (
        edgerun.load(tmp_path, threads=1, cache=False) as joined,
        edgerun.load(decoder, threads=1, cache=False) as alone,
    ):
        assert joined.generate(PROMPT, OPTIONS).text == alone.generate(PROMPT, OPTIONS).text


def test_a_model_in_parts_is_refused_on_other_devices(folder_of: Callable[[str], Path]) -> None:
    bundle = open_bundle(folder_of("community-lfm2-parts"))
    gpu = SessionConfig(replace(choose_device("cpu"), provider="WebGpuExecutionProvider", kind=DeviceKind.GPU), 1)
    with pytest.raises(BundleError, match=r"its embedding in embed_tokens_q4\.onnx, which works on the CPU alone"):
        open_graph(bundle, gpu, cache=False)


# What is refused


def test_an_int8_cache_is_refused_where_it_grows(folder_of: Callable[[str], Path]) -> None:
    with pytest.raises(BundleError, match=r"which a quantized KV cache needs; leave --kv out") as error:
        edgerun.load(folder_of("optimum-qwen3.5-two-decoders"), kv="int8")
    assert "\n" not in str(error.value)


def test_other_devices_are_refused(folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the graph is probed there; the device is one in name only."""
    cpu = choose_device("cpu")

    def load_on_cpu(model: str, options: onnxruntime.SessionOptions, *_: object) -> tuple[object, dict[str, int]]:
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"]), {}

    monkeypatch.setattr(session, "load_on_device", load_on_cpu)
    bundle = open_bundle(folder_of("genai-qwen3.5"))
    gpu = SessionConfig(replace(cpu, provider="WebGpuExecutionProvider", kind=DeviceKind.GPU), 1)
    with pytest.raises(
        BundleError, match=r"keeps states \(past\.0\.conv\), which works on the CPU alone, not on WebGpu"
    ):
        GraphSession(bundle.graph, gpu, metadata_of(bundle))


@pytest.mark.parametrize("name", ["genai-qwen3.5", "renamed-genai-states", "optimum-lfm2-merged"])
def test_an_upgrade_is_refused(
    name: str, folder_of: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """States that renamed inputs have are found too, and a merged graph is not taken apart first."""
    pytest.importorskip("edgerun.export.upgrade.pipeline", reason="needs the export extra")
    source = folder_of(name)
    first = {"renamed-genai-states": "pa_c_0", "genai-qwen3.5": "past.0.conv"}.get(name, "past_conv.0")
    assert main(["export", str(source), str(tmp_path / "out")]) == 2
    (graph,) = source.rglob("*.onnx")
    assert (
        capsys.readouterr()
        .err.strip()
        .endswith(
            f"{graph} has layers that keep a state ({first}), which cannot be upgraded; "
            "run it as it is, or export its checkpoint with edge-run export"
        )
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("layout", ["genai-qwen3.5", "community-lfm2"])
def test_a_model_with_states_drafts(folder_of: Callable[[str], Path], tmp_path: Path, layout: str) -> None:
    target = write_layout(tmp_path, LAYOUTS["genai"])
    with edgerun.load(target, draft=folder_of(layout), cache=False) as loaded:
        loaded.model.drafters._pass_cost = FixedCost(NEARLY_FREE)
        expected = loaded.generate(PROMPT, OPTIONS)
        reply = loaded.generate(PROMPT, OPTIONS, speculation=Speculation.parse("model"))
        assert reply.text == expected.text
        assert reply.stats.drafted > 0


def test_a_window_of_states_is_refused_by_name(tmp_path: Path) -> None:
    """`state_window` of GenAI's model builder, which ONNX Runtime has on CUDA alone."""
    folder = write_layout(tmp_path, HYBRID_LAYOUTS["genai-qwen3.5"])
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    for node in model.graph.node:
        if node.op_type == "LinearAttention":
            node.attribute.append(helper.make_attribute("state_window", 4))
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(BundleError) as error:
        edgerun.load(folder)
    assert str(error.value) == (
        f"{folder / 'model.onnx'} returns the states after several tokens (state_window), which works on CUDA alone; "
        "export it again without state_window"
    )


def test_a_state_of_other_channels_is_refused(tmp_path: Path) -> None:
    """The channels of the output are reversed: the graph runs, and would write nonsense."""
    folder = write_layout(tmp_path, HYBRID_LAYOUTS["community-lfm2"])
    graph = folder / "onnx" / "model.onnx"
    model = onnx.load(graph, load_external_data=False)
    for node in model.graph.node:
        if "present_conv.0" in node.output:
            reverse = [helper.make_tensor("reversed", 7, [1], [-1]), helper.make_tensor("far", 7, [1], [-99])]
            model.graph.initializer.extend([*reverse, helper.make_tensor("channels", 7, [1], [1])])
            turned = ["state", "reversed", "far", "channels", "reversed"]
            model.graph.node.append(helper.make_node("Slice", turned, ["present_conv.0"], "turned"))
            node.output[:] = ["state"]
            break
    graph.write_bytes(model.SerializeToString())
    with pytest.raises(BundleError) as error:
        edgerun.load(folder, cache=False)
    assert str(error.value) == (
        f"{graph} gives other logits for the same tokens in several passes than in one: "
        "its cache does not work as its inputs declare; choose another variant of the model"
    )


def test_an_output_of_another_size_than_declared_is_refused(tmp_path: Path) -> None:
    """The graph runs, but not with a state of the size that its input has."""
    folder = write_layout(tmp_path, HYBRID_LAYOUTS["community-lfm2"])
    graph = folder / "onnx" / "model.onnx"
    model = onnx.load(graph, load_external_data=False)
    present = next(value for value in model.graph.output if value.name == "present_conv.0")
    doubled = helper.make_node("Concat", ["longer", "longer"], ["present_conv.0"], "doubled", axis=2)
    for node in model.graph.node:
        node.output[:] = ["longer" if name == "present_conv.0" else name for name in node.output]
    model.graph.node.append(doubled)
    model.graph.output.remove(present)
    model.graph.output.append(helper.make_tensor_value_info("present_conv.0", 1, ["batch_size", 64, "length"]))
    graph.write_bytes(model.SerializeToString())
    onnxruntime.InferenceSession(str(graph), providers=["CPUExecutionProvider"])
    with pytest.raises(BundleError, match="present_conv.0") as error:
        edgerun.load(folder)
    assert "\n" not in str(error.value)
