"""Layers with a sliding window take the slots of their window alone, and compute what they do over all slots."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx", reason="needs the export extra")

import edgerun
from edgerun import GenerateOptions, Speculation
from edgerun.export.check.reference import reference_logits
from edgerun.export.checkpoint.config import read_config
from edgerun.export.checkpoint.safetensors_files import Checkpoint
from edgerun.models.onnx_file.wire import operators_of
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph.graph_io import first_slot
from edgerun.runtime.graph.model_metadata import ModelMetadata
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from edgerun.runtime.prefill import prefill
from support.adversarial_drafters import NEARLY_FREE, FixedCost, random_tree
from support.tiny_models import write_bundle

CPU = SessionConfig(choose_device("cpu"), 1)
FAMILIES = ("gemma2", "gemma3_text", "gemma4_text", "gpt_oss", "mistral")
CONTEXT = 1024
REWINDS = {8: 560, 16: 280}
"""Lengths by turns."""
TEXT = "the and of the and of to in the and of the and of to in the and of " * 26
OPTIONS = GenerateOptions(raw=True, ignore_eos=True, max_tokens=40)


@pytest.mark.parametrize("family", FAMILIES)
def test_trees_and_rewinds_are_those_of_all_slots(tmp_path: Path, family: str) -> None:
    """What lies before the windows is not even read: numbers that are none stand there."""
    graph = write_bundle(tmp_path, family, max_position_embeddings=CONTEXT) / "model.onnx"
    windowed = GraphSession(graph, CPU)
    # Graphs of other tools are left as they are.
    whole = GraphSession(graph, CPU, ModelMetadata(operators=operators_of(graph)))
    tensors, arena = windowed.graph_io.cache, windowed.arena(CONTEXT)
    (window,) = {each.window for each in tensors} - {0}
    assert not any(each.window for each in whole.graph_io.cache)
    own, other = windowed.bind(arena), whole.bind(whole.arena(CONTEXT))
    random = np.random.default_rng(3)
    vocab_size = own.graph_io.vocab_size
    prompt = random.integers(5, vocab_size, 700).tolist()
    committed = list(prompt)
    for each in (own, other):
        prefill(each, prompt, width=40)
    for turn in range(24):
        if turn in REWINDS:
            for each in (arena, other.arena):
                each.rewind_to(REWINDS[turn])
        nodes, base = int(random.integers(1, 9)), arena.length
        tokens = random.integers(5, vocab_size, nodes)
        depths, mask = random_tree(random, nodes)
        tree = {"positions": base + depths, "tree_mask": mask} if turn % 3 else {}
        saved = [array.copy() for array in arena.buffers.arrays]
        for array, tensor in zip(arena.buffers.arrays, tensors, strict=True):
            array[..., : first_slot(tensor.window, base) if tensor.window else 0, :] = np.nan
        logits = own.forward(tokens, **tree).copy()
        np.testing.assert_allclose(logits, other.forward(tokens, **tree), rtol=1e-5, atol=1e-5)
        for array, before in zip(arena.buffers.arrays, saved, strict=True):
            array[..., :base, :] = before[..., :base, :]
            np.testing.assert_array_equal(array[..., base + nodes :, :], before[..., base + nodes :, :])
        path = [0, *(node for node in range(1, nodes) if mask[nodes - 1, node])] if tree else list(range(nodes))
        committed[base:] = tokens[path].tolist()
        for each in (arena, other.arena):
            each.compact(base, path)
        for array, expected in zip(arena.buffers.arrays, other.arena.buffers.arrays, strict=True):
            np.testing.assert_allclose(array[..., : arena.length, :], expected[..., : arena.length, :], atol=1e-5)
    assert first_slot(window, 280) == 256
    source = tmp_path / "checkpoint"
    config = read_config(source)
    expected = reference_logits(Checkpoint(source), config, np.asarray([*committed, 7]), CONTEXT)[-1]
    np.testing.assert_allclose(own.forward([7])[0], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kv", ["float", "int8", "int4"])
def test_long_answers_do_not_depend_on_what_went_before(tmp_path: Path, kv: str) -> None:
    """With drafts, over prefixes that are continued, cut and copied, and beside each other."""
    bundle = write_bundle(tmp_path, "gemma3_text", max_position_embeddings=CONTEXT, head_dim=64)
    prompts = [TEXT, TEXT + " in the", TEXT[: len(TEXT) * 3 // 4], TEXT[: len(TEXT) * 2 // 3] + " to of and"]
    options = {"device": "cpu", "threads": 1, "kv": kv, "learned": False, "history": False, "cache": False}
    with edgerun.load(bundle, prefix_cache=0, **options) as alone:
        expected = [alone.generate(prompt, OPTIONS, speculation=Speculation.OFF) for prompt in prompts]
    assert all(reply.stats.prompt_tokens > 280 for reply in expected)
    with edgerun.load(bundle, parallel=2, **options) as engine:
        engine.model.drafters._pass_cost = FixedCost(NEARLY_FREE)
        replies = [engine.generate(prompt, OPTIONS) for prompt in prompts]
        with ThreadPoolExecutor(2) as threads:
            both = list(threads.map(lambda prompt: engine.generate(prompt, OPTIONS), prompts[2:]))
    assert [each.text for each in [*replies, *both]] == [each.text for each in [*expected, *expected[2:]]]
    assert all(reply.stats.reused_tokens > 100 for reply in replies[1:])
    assert sum(reply.stats.drafted for reply in replies) > 0
