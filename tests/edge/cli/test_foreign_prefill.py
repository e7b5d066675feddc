"""`--prefill` with models of other tools: their prompts are read with int8 weights, or a line says why they are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("support.tiny_models", reason="needs the export extra")

from edgerun.edge.cli.main import main
from edgerun.models.bundle import open_bundle
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph import open_graph
from edgerun.runtime.graph.model_metadata import metadata_of
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from edgerun.runtime.int8_prompts.int8_graph_files import int8_graph_path
from edgerun.runtime.measure import bundle_timing, prompt_choice
from edgerun.runtime.measure.measurement_store import model_key
from edgerun.runtime.measure.prompt_choice import PROMPT_CHOICES, PromptChoice
from edgerun.runtime.measure.system_load import LoadMeter
from edgerun.runtime.prefill import prefill
from edgerun.runtime.text.tokenizer import TextTokenizer
from support.commands import Capture, Patch, fails, json_of, output_of
from support.layouts import HYBRID_LAYOUTS, LAYOUTS, quantize_products, write_layout

LONG = "the cat sat on the mat and " * 12
TOKENS = 6


@pytest.fixture(autouse=True)
def as_if_large(tmp_path: Path, monkeypatch: Patch) -> None:
    """A cache folder of its own, tiny models as if they were not small, and short measurements."""
    monkeypatch.setenv("EDGERUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(open_graph, "_SMALL_MODEL_BYTES", 0)
    monkeypatch.setattr(bundle_timing, "_MAX_ROUNDS", 2)
    monkeypatch.setattr(prompt_choice, "_SECONDS_BUDGET", 0.0)
    # What is measured beside other programs is not stored.
    monkeypatch.setattr(LoadMeter, "is_busy", property(lambda _: False))


def answer(capsys: Capture, model: Path, *options: str) -> tuple[dict[str, Any], str]:
    """The JSON of an answer to the long prompt, and the statistics on standard error."""
    asked = [str(model), "--raw", "-p", LONG, "-n", str(TOKENS), "--stats", "--json", "--threads", "1"]
    assert main([*asked, "--spec", "off", *options]) == 0
    out, err = capsys.readouterr()
    return json.loads(out), err


def text_after_int8_prompt(model: Path) -> str:
    """What follows the long prompt, read in one pass by the int8 graph; the model's own graph decodes."""
    bundle, config = open_bundle(model), SessionConfig(choose_device("cpu"), 1)
    int8_path = int8_graph_path(bundle, config, make=False)
    assert int8_path is not None
    own, int8 = (GraphSession(path, config, metadata_of(bundle)) for path in (bundle.graph, int8_path))
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
    ("layout", "zero_points"),
    [("genai", False), ("community", True), ("genai-lfm2", False), ("community-qwen3.5-fused", True)],
)
def test_a_prompt_is_read_with_int8_weights(tmp_path: Path, capsys: Capture, layout: str, zero_points: bool) -> None:
    model = quantize_products(
        write_layout(tmp_path / "model", {**LAYOUTS, **HYBRID_LAYOUTS}[layout]), zero_points=zero_points
    )
    plain, line = answer(capsys, model, "--prefill", "plain")
    tokens = plain["usage"]["prompt_tokens"]
    assert plain["prompt_graphs"] == {"tokens": {"base": tokens}, "int8_refusal": "not asked for"}
    assert "int8" not in line

    unmeasured, line = answer(capsys, model)
    assert unmeasured["prompt_graphs"]["int8_refusal"] == "not made yet (edge-run tune makes it)"
    assert "int8 prompt graph: not made yet (edge-run tune makes it)" in line
    assert unmeasured["text"] == plain["text"]

    asked, line = answer(capsys, model, "--prefill", "int8")
    assert asked["text"] == text_after_int8_prompt(model)
    assert asked["prompt_graphs"] == {"tokens": {"int8": tokens}, "int8_refusal": None}
    assert f"int8 prompt graph: {tokens} of {tokens} tokens read" in line


def test_auto_does_what_was_measured_of_a_foreign_model(tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    model = quantize_products(write_layout(tmp_path / "model", LAYOUTS["genai"]))
    monkeypatch.setattr(prompt_choice, "_WORTH", 0.0)
    measured = json_of(capsys, "tune", model, "--threads", "1", "--json")["prompts"]
    assert measured["int8_used"]
    assert measured["mean_kl"] <= measured["kl_limit"]
    # The times of so small a model say nothing.
    monkeypatch.undo()
    monkeypatch.setenv("EDGERUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(open_graph, "_SMALL_MODEL_BYTES", 0)
    for int8_s, refusal in ((0.01, None), (0.03, "not faster here: 0.67 times the speed")):
        choice = PromptChoice(None, {64: 0.02}, {64: int8_s}, 0.0, measured["mean_kl"], measured["kl_limit"])
        PROMPT_CHOICES.save(model_key(open_bundle(model), SessionConfig(choose_device("cpu"), 1)), choice)
        found, line = answer(capsys, model)
        graphs = found["prompt_graphs"]
        assert graphs["int8_refusal"] == refusal
        assert graphs["tokens"].get("int8", 0) == (128 if refusal is None else 0)
        assert f"int8 prompt graph: {refusal or '128 of'}" in line


@pytest.mark.parametrize(
    ("layout", "quantized", "by_name", "by_itself"),
    [
        (
            "optimum",
            True,
            "the int8 prompt graph needs a cache that is extended in place; leave --prefill out",
            "needs a cache that is extended in place",
        ),
        (
            "genai",
            False,
            "cannot have an int8 prompt graph: its graph has no products of quantized weights",
            "its graph has no products of quantized weights (MatMulNBits in float32)",
        ),
    ],
)
def test_a_line_says_why_there_is_none(
    tmp_path: Path, capsys: Capture, layout: str, quantized: bool, by_name: str, by_itself: str
) -> None:
    model = write_layout(tmp_path / "model", LAYOUTS[layout])
    if quantized:
        quantize_products(model)
    assert by_name in fails(capsys, model, "--raw", "-p", LONG, "-n", "2", "--prefill", "int8")
    assert json_of(capsys, "tune", model, "--threads", "1", "--json")["prompts"]["reason"] == by_itself
    found, line = answer(capsys, model)
    assert found["prompt_graphs"]["int8_refusal"] == by_itself
    assert f"int8 prompt graph: {by_itself}" in line
    assert by_itself.partition(" (")[0] in " ".join(output_of(capsys, "inspect", model).split())
