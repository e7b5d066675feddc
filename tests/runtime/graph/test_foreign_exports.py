"""Models exported by other tools give the expected tokens as they are and upgraded, with and without speculation."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from tokenizers import Tokenizer

import edgerun
from edgerun import Engine, GenerateOptions, Speculation
from edgerun.edge.cli.main import main
from edgerun.export import FP32, ExportRecipe, export_model
from edgerun.runtime.graph.graph_io import GraphIO
from edgerun.runtime.result import Reply
from support.adversarial_drafters import NEARLY_FREE, FixedCost
from support.foreign_export_script import EXPORTERS, GREEDY_TOKENS, HYBRIDS, PROMPT
from support.foreign_exporters import Exporter, ForeignExports, expected_tokens
from support.shared_data import data_path

SPECULATIONS = (Speculation.OFF, Speculation.AUTO)
VARIANTS = [
    pytest.param(exporter, family, variant, id=f"{exporter.value}-{family}-{variant}")
    for exporter in Exporter
    for family in EXPORTERS[exporter.value]
    for variant in exporter.variants(family)
]
CHEAP = {128: {1: 1.0, 16: 1.2}}
"""Not so flat that Jacobi predictions fill every pass."""


def tokens_of(llm: Engine, prompt: list[int], speculation: Speculation) -> tuple[list[int], Reply]:
    """The greedy tokens after `prompt`, and the reply."""
    text = llm.model.new_sequence()
    # Near ties of 8-bit activations are decided by plain passes; a larger difference shows.
    exact = speculation is not Speculation.OFF
    options = GenerateOptions(max_tokens=GREEDY_TOKENS, temperature=0, speculation=speculation, exact=exact)
    reply = Reply.of(llm.model.answer(text, prompt, options))
    return text.token_ids[len(prompt) :], reply


@pytest.mark.parametrize(("exporter", "family", "variant"), VARIANTS)
def test_tokens_are_the_expected_ones(
    foreign_exports: ForeignExports, exporter: Exporter, family: str, variant: str
) -> None:
    """For float32 those of transformers; for int4 those that onnxruntime-genai decodes from the same file."""
    model = foreign_exports.of(exporter, family)
    check_tokens(model / variant, expected_tokens(model, "int4" if variant == "int4" else "greedy"))


@pytest.mark.parametrize(
    ("exporter", "family", "variant"), [each for each in VARIANTS if each.values[1] not in HYBRIDS]
)
def test_upgraded_models_give_the_same_tokens(
    foreign_exports: ForeignExports, tmp_path: Path, exporter: Exporter, family: str, variant: str
) -> None:
    model = foreign_exports.of(exporter, family)
    quantized = variant == "int4"
    recipe = ExportRecipe(None if quantized else FP32)
    bundle = export_model(model / variant, tmp_path / "upgraded", recipe).bundle
    assert check_tokens(bundle, expected_tokens(model, "int4" if quantized else "greedy")).supports_trees


def check_tokens(folder: Path, expected: list[int]) -> GraphIO:
    """Decode with and without speculation; returns the graph's inputs and outputs."""
    assert len(expected) == GREEDY_TOKENS
    with edgerun.load(folder, threads=1, cache=False) as llm:
        llm.model.drafters._pass_cost = FixedCost(CHEAP)
        prompt = llm.tokenizer.encode(PROMPT, add_special_tokens=True)
        for speculation in SPECULATIONS:
            tokens, reply = tokens_of(llm, prompt, speculation)
            assert tokens == expected, speculation
            assert (reply.stats.drafted > 0) == (speculation is not Speculation.OFF)
        return llm.graph_io


def test_an_old_decoder_with_stacked_cache_and_no_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = data_path("onnx/tiny-random-gpt2-fp32")
    tiny = pytest.importorskip("support.tiny_models", reason="needs the export extra")
    tokenizer = tmp_path / "tokenizer.json"
    tiny.tiny_tokenizer(1000).save(str(tokenizer))
    prompt = Tokenizer.from_file(str(tokenizer)).encode(PROMPT).ids
    expected = greedy_with_stacked_cache(folder / "past.onnx", prompt, GREEDY_TOKENS)
    assert len(set(expected)) > 3
    with edgerun.load(folder, threads=1, cache=False, tokenizer=tokenizer) as llm:
        llm.model.drafters._pass_cost = FixedCost(NEARLY_FREE)
        for speculation in SPECULATIONS:
            assert tokens_of(llm, prompt, speculation)[0] == expected, speculation
    assert main([str(folder), "--tokenizer", str(tokenizer), "-p", PROMPT, "--raw", "-n", "20", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == Tokenizer.from_file(str(tokenizer)).decode(expected[:20])


def greedy_with_stacked_cache(graph: Path, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens of a graph with int32 inputs and `past_i` [2, 1, heads, slots, size], one pass per token."""
    session = onnxruntime.InferenceSession(str(graph), providers=["CPUExecutionProvider"])
    past = {
        value.name: np.zeros((2, 1, value.shape[2], 0, value.shape[4]), np.float32)
        for value in session.get_inputs()
        if value.name.startswith("past_")
    }
    new, cached, tokens = prompt, 0, []
    while len(tokens) < count:
        total = cached + len(new)
        feeds = {
            "input_ids": np.array([new], np.int32),
            "position_ids": np.arange(cached, total, dtype=np.int32)[None],
            "attention_mask": np.ones((1, total), np.int32),
        }
        logits, *present = session.run(None, feeds | past)
        names = [value.name.replace("present", "past") for value in session.get_outputs()]
        past = dict(zip(names[1:], present, strict=True))
        new, cached = [int(logits[0, -1].argmax())], total
        tokens += new
    return tokens
