"""Several graphs over one cache on the CPU: which one runs a pass, and what becomes of one that cannot be loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from edgerun.errors import BundleError
from edgerun.models.bundle import open_bundle
from edgerun.runtime.devices.providers import cpu_device
from edgerun.runtime.graph.bound_graph import BoundGraph, NewTokens
from edgerun.runtime.graph.graph_choice import ChosenGraphs, FurtherGraph, is_consecutive
from edgerun.runtime.graph.graph_io import BASE_GRAPH
from edgerun.runtime.graph.model_metadata import metadata_of
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from edgerun.runtime.prefill import prefill

CONFIG = SessionConfig(cpu_device(), 1)
PROMPT = list(range(20, 50))


class WidePasses(FurtherGraph):
    """A further graph for the last logits of eight tokens and more, 12 at a time."""

    name = "wide"

    def __init__(self, load: Callable[[], GraphSession]) -> None:
        self._load = load
        self.loaded = 0

    def takes(self, new: NewTokens, base: int) -> bool:
        return len(new.ids) >= 8 and new.wanted.tolist() in ([], [len(new.ids) - 1]) and is_consecutive(new, base)

    def prefill_width(self, preferred: int, remaining: int) -> int:
        del remaining
        return min(preferred, 12)

    def load(self, base: GraphSession) -> GraphSession:
        self.loaded += 1
        return self._load()


def load(folder: Path) -> GraphSession:
    bundle = open_bundle(folder)
    return GraphSession(bundle.graph, CONFIG, metadata_of(bundle))


def graphs_run(bound: BoundGraph, token_ids: list[int]) -> list[str]:
    """The graphs that ran the passes of a prefill."""
    found = []

    def progress(_: str, fraction: float) -> None:
        if fraction:
            found.append(bound.last_graph)

    prefill(bound, token_ids, progress=progress)
    return found


def tree_logits(bound: BoundGraph) -> npt.NDArray[np.float32]:
    base = bound.arena.length
    mask = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], np.bool_)
    return bound.forward([7, 8, 6], positions=base + np.array([0, 1, 1]), tree_mask=mask).copy()


def test_each_pass_runs_in_the_graph_that_takes_it(tiny_bundle: Path) -> None:
    wide = WidePasses(lambda: load(tiny_bundle))
    graphs, alone = ChosenGraphs(load(tiny_bundle), (wide,)), load(tiny_bundle)
    bound, expected = graphs.bind(graphs.arena(64)), alone.bind(alone.arena(64))
    bound.prefers_base = True
    assert graphs_run(bound, PROMPT) == [BASE_GRAPH]
    assert "wide" not in graphs.loaded
    bound.prefers_base = False
    bound.arena.rewind_to(0)
    assert graphs_run(bound, PROMPT) == ["wide", "wide", BASE_GRAPH]
    prefill(expected, PROMPT)
    np.testing.assert_allclose(tree_logits(bound), tree_logits(expected), atol=1e-4)
    assert bound.last_graph == BASE_GRAPH
    bound.forward(list(range(12)))  # all logits are wanted
    assert bound.last_graph == BASE_GRAPH
    bound.forward(list(range(12)), logits_for=[11], tree_mask=np.tri(12, 14, 2, dtype=np.bool_))
    assert bound.last_graph == "wide"


def test_sequences_share_a_further_graph_and_may_change_their_arena(tiny_bundle: Path) -> None:
    wide = WidePasses(lambda: load(tiny_bundle))
    graphs = ChosenGraphs(load(tiny_bundle), (wide,))
    first, second = (graphs.bind(graphs.arena(64)) for _ in range(2))
    alone = prefill(first, PROMPT).logits
    expected = alone.copy()
    assert graphs_run(second, PROMPT[::-1]) == ["wide", "wide", BASE_GRAPH]
    second.use(graphs.arena(64))
    again = prefill(second, PROMPT).logits
    np.testing.assert_array_equal(again, expected)
    assert wide.loaded == 1
    graphs.release("wide")
    assert "wide" not in graphs.loaded
    prefill(graphs.bind(graphs.arena(64)), PROMPT)
    assert wide.loaded == 2


def test_a_further_graph_that_cannot_be_loaded_costs_a_line_and_no_answer(
    tiny_bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def damaged() -> GraphSession:
        raise BundleError("wide.onnx is damaged", "delete it")

    wide = WidePasses(damaged)
    graphs = ChosenGraphs(load(tiny_bundle), (wide,))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert set(graphs_run(graphs.bind(graphs.arena(64)), PROMPT)) == {BASE_GRAPH}
    assert caplog.text.count("wide.onnx is damaged") == 1
    assert graphs.failures == {"wide": "wide.onnx is damaged"}
    assert wide.loaded == 1


def test_a_graph_for_other_passes_than_trees_that_cannot_be_loaded_leaves_trees(tiny_bundle: Path) -> None:
    class Needed(WidePasses):
        required = True

    def damaged() -> GraphSession:
        raise BundleError("it is damaged")

    graphs = ChosenGraphs(load(tiny_bundle), (Needed(damaged),))
    with pytest.raises(BundleError, match="it is damaged"):
        prefill(graphs.bind(graphs.arena(64)), PROMPT)
    assert graphs.graph_io.supports_trees


@pytest.mark.parametrize(("family", "changed"), [("llama", {"num_key_value_heads": 1}), ("lfm2", {"conv_L_cache": 4})])
def test_a_graph_with_another_cache_or_other_states_is_not_used(
    tmp_path: Path, family: str, changed: dict[str, int]
) -> None:
    tiny = pytest.importorskip("support.tiny_models", reason="needs the export extra")
    own, other = tiny.write_bundle(tmp_path / "own", family), tiny.write_bundle(tmp_path / "other", family, **changed)
    graphs = ChosenGraphs(load(own), (WidePasses(lambda: load(other)),))
    assert set(graphs_run(graphs.bind(graphs.arena(64)), PROMPT)) == {BASE_GRAPH}
    assert "cache of other tensors" in graphs.failures["wide"]
