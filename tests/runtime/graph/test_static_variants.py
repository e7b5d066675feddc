"""Graphs of fixed shapes agree with the one whose shapes vary, pass by pass and over whole texts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgerun.errors import BundleError, ContextError
from edgerun.models.bundle import open_bundle
from edgerun.runtime.graph.bound_graph import BoundGraph
from edgerun.runtime.graph.session import GraphSession
from edgerun.runtime.graph.static_variants import StaticGraphs
from edgerun.runtime.prefill import prefill
from edgerun.runtime.speculation.pass_cost import PassCost
from edgerun.runtime.speculation.replay import OracleDrafter
from edgerun.runtime.speculation.speculator import Speculator
from support.adversarial_drafters import random_tree
from support.static_bundles import CPU, float_graph, greedy_text, static_graphs, write_static_bundle

TOLERANCE = 0.03
"""Largest difference of a logit, relative to the standard deviation of the logits: float16 against float32."""
VOCABULARY = 300
WIDTHS = (1, 4, 40)
CONTEXTS = (64, 256)


@pytest.fixture(scope="module")
def graphs_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[StaticGraphs, GraphSession]]:
    """The graphs of fixed shapes of a family, and the one to agree with."""

    @cache
    def graphs(family: str) -> tuple[StaticGraphs, GraphSession]:
        bundle = write_static_bundle(tmp_path_factory.mktemp("static"), family, WIDTHS, CONTEXTS)
        return static_graphs(bundle), float_graph(bundle)

    return graphs


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama with narrow graphs only."""
    return write_static_bundle(tmp_path_factory.mktemp("static"), widths=(1, 4), contexts=(32, 64))


@pytest.mark.parametrize("family", ["llama", "mistral"])
@given(data=st.data())
@settings(max_examples=12)
def test_passes_agree(
    graphs_of: Callable[[str], tuple[StaticGraphs, GraphSession]], family: str, data: st.DataObject
) -> None:
    """Any sequence of prefill, chains, trees and rewinding, through both contexts; a mistral has a window of 12."""
    graphs = graphs_of(family)
    pair: list[BoundGraph] = [graph.bind(graph.arena(256)) for graph in graphs]
    random = np.random.default_rng(data.draw(st.integers(0, 1000), "seed"))
    for _ in range(data.draw(st.integers(2, 6), "steps")):
        length = pair[0].arena.length
        nodes = data.draw(st.sampled_from((1, 2, 4, 7, 40, 70)), "tokens")
        tokens = random.integers(0, VOCABULARY, min(nodes, 256 - length))
        kind = data.draw(st.sampled_from(("prefill", "chain", "tree", "rewind")), "kind")
        if kind == "rewind" or not tokens.size:
            for bound in pair:
                bound.arena.rewind_to(length // 3)
            continue
        if kind == "tree" and length and tokens.size < 8:
            depths, mask = random_tree(random, tokens.size)
            found, expected = (
                bound.forward(tokens, positions=length + depths, tree_mask=mask).copy() for bound in pair
            )
            path = np.flatnonzero(mask[-1]).tolist()
            for bound in pair:
                bound.arena.compact(length, path)
        else:
            wanted = (tokens.size - 1,) if kind == "prefill" else None
            found, expected = (bound.forward(tokens, logits_for=wanted).copy() for bound in pair)
            for bound in pair:
                bound.arena.commit(tokens.size)
        assert found.shape == expected.shape
        assert np.abs(found - expected).max() < TOLERANCE * expected.std()


def test_greedy_text_is_the_same_also_in_trees_and_where_the_context_grows(
    graphs_of: Callable[[str], tuple[StaticGraphs, GraphSession]],
) -> None:
    graphs, graph = graphs_of("llama")
    prompt = np.random.default_rng(3).integers(5, VOCABULARY, 50).tolist()
    expected, _ = greedy_text(graph, prompt, 60)
    assert greedy_text(graphs, prompt, 60)[0] == expected
    drafter = OracleDrafter()
    speculator = Speculator([drafter], PassCost({0: {1: 1.0, 4: 1.1}}, stairs=True))
    drafter.set_answer(expected, len(prompt))
    assert greedy_text(graphs, prompt, 60, speculator) == (expected, 16)


def test_graphs_are_loaded_when_they_are_needed(bundle: Path) -> None:
    graphs = static_graphs(bundle)
    bound = graphs.bind(graphs.arena(64))
    assert (graphs.graph_io.widths, graphs.capacities, bound.arena.capacity) == ((1, 4), (32, 64), 32)
    assert list(graphs.compiled.loaded) == ["model_npu_w1_c32.onnx"]
    prefill(bound, list(range(5, 35)))
    assert list(graphs.compiled.loaded) == ["model_npu_w1_c32.onnx", "model_npu_w4_c32.onnx"]
    bound.forward([7, 8])
    assert bound.arena.capacity == 32
    bound.arena.commit(2)
    bound.forward([9])
    assert bound.arena.capacity == 64
    assert list(graphs.compiled.loaded)[2:] == ["model_npu_w1_c64.onnx"]
    bound.arena.rewind_to(9)
    bound.forward([9])
    assert bound.arena.capacity == 32
    bound.arena.rewind_to(0)
    bound.arena.pad_to(64, 0.0)
    with pytest.raises(ContextError, match="context full: 65 of 64 tokens"):
        bound.forward([9])


def test_only_ids_come_back_where_nothing_else_is_needed(bundle: Path) -> None:
    graphs = static_graphs(bundle)
    bound = graphs.bind(graphs.arena(64))
    logits = bound.forward([5, 6, 7]).copy()
    bound.whole_logits = False
    ids = bound.forward([5, 6, 7])
    np.testing.assert_array_equal(ids.argmax(axis=1), logits.argmax(axis=1))
    assert np.count_nonzero(ids == 0) == 3
    assert ids.min() == ids[0].min() < -1e20
    bound.whole_logits = True
    np.testing.assert_array_equal(bound.forward([5, 6, 7]), logits)


def test_a_bundle_without_such_graphs_says_how_to_write_them(bundle: Path, tiny_bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="has no graphs for an NPU, which needs fixed shapes") as caught:
        StaticGraphs(open_bundle(tiny_bundle), CPU, cache=False)
    assert "edge-run export" in (caught.value.hint or "")
    copy = shutil.copytree(bundle, tmp_path / "copy")
    manifest = (copy / "edge.json").read_text(encoding="utf-8")
    (copy / "edge.json").write_text(manifest.replace('"width": 4', '"width": 3', 1), encoding="utf-8")
    with pytest.raises(BundleError, match="lacks the NPU's graph for passes of (3|4) tokens and a context of (32|64)"):
        static_graphs(copy)
