"""The graph for long contexts computes what the model's own graph does, over the same cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgerun.models.onnx_file.graph_editor import CannotRewriteError
from edgerun.models.onnx_file.model_messages import Message, attribute_values, read_model, set_attribute
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph.bound_session import BoundSession
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from edgerun.runtime.long_context.dense_attention import long_context_graph
from edgerun.runtime.prefill import prefill
from support.adversarial_drafters import random_tree
from support.tiny_models import ATTENTION_FAMILIES, HYBRID_FAMILIES, write_bundle

CPU = SessionConfig(choose_device("cpu"), 1)
UNSUPPORTED = {
    "gemma2": "softcap",
    "gpt_oss": "sinks",
    "gemma4_text": "reads the cache of another layer",
    "mistral": "no GroupQueryAttention over all slots",
}
CASES: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in ATTENTION_FAMILIES if family not in UNSUPPORTED),
    ("llama", {"num_key_value_heads": 4}),
    ("llama", {"num_key_value_heads": 1, "head_dim": 24}),
    *((family, {}) for family in HYBRID_FAMILIES),
    ("qwen3_5_text", {"head_dim": 256}),
]


def both(bundle: Path) -> tuple[BoundSession, BoundSession]:
    """The model's own graph and the one for long contexts over one arena."""
    graph = bundle / "model.onnx"
    own = GraphSession(graph, CPU)
    long = GraphSession(graph, CPU, model=long_context_graph(graph))
    arena = own.arena(200)
    return own.bind(arena), long.bind(arena)


@pytest.mark.parametrize(("family", "overrides"), CASES, ids=lambda value: str(value).replace(" ", ""))
def test_logits_and_slots_are_those_of_the_own_graph(
    tmp_path: Path, tiny_bundle_of: Callable[[str, str], Path], family: str, overrides: dict[str, Any]
) -> None:
    own, long = both(write_bundle(tmp_path, family, **overrides) if overrides else tiny_bundle_of(family, "fp32"))
    arena, random = own.arena, np.random.default_rng(5)
    assert long.graph_io.tensor_types == own.graph_io.tensor_types
    vocab_size = own.graph_io.vocab_size
    prefill(own, random.integers(5, vocab_size, 30).tolist())
    for turn in range(24):
        nodes = int(random.integers(1, 9))
        tokens = random.integers(5, vocab_size, nodes)
        depths, mask = random_tree(random, nodes)
        base = arena.length
        tree = {"positions": base + depths, "tree_mask": mask} if turn % 3 and own.graph_io.supports_trees else {}
        wanted = [nodes - 1] if turn % 4 == 1 else None
        results = []
        for bound in (own, long):
            logits = bound.forward(tokens, logits_for=wanted, **tree).copy()
            results.append((logits, [each[..., base : base + nodes, :].copy() for each in arena.buffers.arrays]))
        np.testing.assert_allclose(results[1][0], results[0][0], rtol=1e-4, atol=2e-4)
        for found, expected in zip(results[1][1], results[0][1], strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
        path = [0, *(node for node in range(1, nodes) if mask[nodes - 1, node])] if tree else list(range(nodes))
        arena.compact(base, path)
        if turn == 15:
            arena.rewind_to(20)


def test_a_pass_sees_committed_slots_and_writes_its_own_alone(tiny_bundle: Path) -> None:
    own, long = both(tiny_bundle)
    prefill(own, list(range(20, 60)))
    arena = own.arena
    logits = long.forward([5, 6, 7]).copy()
    arena.buffers.fill(40, arena.capacity, 50.0)
    before = [array.copy() for array in arena.buffers.arrays]
    np.testing.assert_array_equal(long.forward([5, 6, 7]), logits)
    for array, expected in zip(arena.buffers.arrays, before, strict=True):
        assert (array[..., 40:43, :] != 50.0).all()
        others = array.copy()
        others[..., 40:43, :] = 50.0
        np.testing.assert_array_equal(others, expected)


@pytest.mark.parametrize(("family", "reason"), UNSUPPORTED.items())
def test_attention_with_more_is_left_as_it_is(
    tiny_bundle_of: Callable[[str, str], Path], family: str, reason: str
) -> None:
    with pytest.raises(CannotRewriteError, match=reason):
        long_context_graph(tiny_bundle_of(family, "fp32") / "model.onnx")


@pytest.fixture
def edited(tiny_bundle: Path, tmp_path: Path) -> Callable[[Message], Path]:
    """Writes a changed graph of the tiny model, beside its weights."""

    def write(model: Message) -> Path:
        (tmp_path / "model.onnx.data").write_bytes((tiny_bundle / "model.onnx.data").read_bytes())
        (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
        return tmp_path / "model.onnx"

    return write


def test_a_window_in_the_operator_is_left_as_it_is(tiny_bundle: Path, edited: Callable[[Message], Path]) -> None:
    model = read_model(tiny_bundle / "model.onnx")
    for each in model.graph.node:
        if "kv_num_heads" in attribute_values(each):
            set_attribute(each, "local_window_size", 12)
    with pytest.raises(CannotRewriteError, match="local_window_size 12"):
        long_context_graph(edited(model))


def test_onnx_operators_may_have_their_long_name(tiny_bundle: Path, edited: Callable[[Message], Path]) -> None:
    model = read_model(tiny_bundle / "model.onnx")
    for each in model.opset_import:
        each.domain = each.domain or "ai.onnx"
    assert long_context_graph(edited(model))
