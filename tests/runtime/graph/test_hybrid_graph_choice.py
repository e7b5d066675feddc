"""Several graphs of a hybrid model take turns over one arena: states equal those of sequential decoding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from edgerun.models.bundle import open_bundle
from edgerun.runtime.devices.providers import cpu_device
from edgerun.runtime.graph.bound_graph import NewTokens
from edgerun.runtime.graph.bound_session import BoundSession
from edgerun.runtime.graph.graph_choice import ChosenGraphs, ChosenSession, FurtherGraph
from edgerun.runtime.graph.graph_io import BASE_GRAPH
from edgerun.runtime.graph.model_metadata import metadata_of
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from edgerun.runtime.long_context.dense_attention import long_context_graph
from support.hybrid_graphs import with_end_states
from support.nightly import some_nightly
from support.tiny_models import write_bundle

CONFIG = SessionConfig(cpu_device(), 1)
CONTEXT = 512
TEXT = np.random.default_rng(3).integers(5, 300, CONTEXT).tolist()
TOLERANCE = 2e-4
"""Wide passes and narrow ones differ by float rounding."""


class RandomPasses(FurtherGraph):
    """A further graph that takes passes at random."""

    name = "further"

    def __init__(self, load: Callable[[], GraphSession], seed: int) -> None:
        self._load = load
        self._random = np.random.default_rng(seed)

    def takes(self, new: NewTokens, base: int) -> bool:
        return bool(self._random.random() < 0.5)

    def load(self) -> GraphSession:
        return self._load()


class AllPasses(RandomPasses):
    """A further graph that takes every pass."""

    def takes(self, new: NewTokens, base: int) -> bool:
        return True


@pytest.fixture(scope="module", params=["lfm2", "end states", "both", "qwen3_5_text", "granitemoehybrid"])
def graph(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A graph with states after every token of a pass, in some layers after the last one alone, or linear attention."""
    folder = tmp_path_factory.mktemp("hybrid")
    layers = {"end states": (0, 1, 3), "both": (1,)}.get(request.param)
    family = request.param if layers is None else "lfm2"
    bundle = write_bundle(folder, family, max_position_embeddings=CONTEXT)
    return bundle / "model.onnx" if layers is None else with_end_states(bundle, folder / "edited", layers)


def load(graph: Path) -> GraphSession:
    return GraphSession(graph, CONFIG, metadata_of(open_bundle(graph.parent)))


def load_for_long_contexts(graph: Path) -> GraphSession:
    return GraphSession(graph, CONFIG, metadata_of(open_bundle(graph.parent)), model=long_context_graph(graph))


@pytest.fixture(scope="module")
def expected(graph: Path) -> npt.NDArray[np.float32]:
    """Logits after every token of `TEXT`, one token a pass."""
    alone = load(graph)
    bound = alone.bind(alone.arena(CONTEXT))
    rows = []
    for token in TEXT:
        rows.append(bound.forward([token])[0].copy())
        bound.arena.commit(1)
    return np.array(rows)


@pytest.mark.parametrize("seed", some_nightly(range(4), 2))
def test_random_rejections_and_rewinds_across_graphs_equal_sequential_decoding(
    graph: Path, expected: npt.NDArray[np.float32], seed: int
) -> None:
    """300 times: run a chain whose end is wrong, in either graph, accept some of it, or rewind to any position."""
    random = np.random.default_rng(seed)
    other = load if seed < 2 else load_for_long_contexts
    graphs = ChosenGraphs(load(graph), (RandomPasses(lambda: other(graph), seed),))
    arena = graphs.arena(CONTEXT)
    assert arena.states is not None
    bound = graphs.bind(arena)
    switches, last, rewinds = 0, BASE_GRAPH, 0
    for _ in range(300):
        if random.random() < 0.2 or arena.length > 400:
            arena.rewind_to(int(random.integers(0, arena.length + 1)))
            rewinds += 1
        base, right = arena.length, int(random.integers(1, 60 if random.random() < 0.2 else 9))
        wrong = random.integers(5, 300, random.integers(0, 5)).tolist()
        logits = bound.forward([*TEXT[base : base + right], *wrong])
        np.testing.assert_allclose(logits[:right], expected[base : base + right], atol=TOLERANCE)
        accepted = int(random.integers(0, right + 1))
        arena.commit(accepted)
        switches += bound.last_graph != last
        last = bound.last_graph
    assert arena.states.token_ids == TEXT[: arena.length]
    assert switches > 100
    assert rewinds > 40


def test_what_follows_plain_slots_again_has_their_bits(graph: Path) -> None:
    """Slots and states of another graph are not plain decoding's: rewound to those, the base graph computes the same
    bits as without the other one."""
    graphs, alone = ChosenGraphs(load(graph), (AllPasses(lambda: load(graph), 0),)), load(graph)
    bound, plain = graphs.bind(graphs.arena(CONTEXT)), alone.bind(alone.arena(CONTEXT))
    arena = bound.arena

    def run(session: ChosenSession | BoundSession, tokens: int) -> npt.NDArray[np.float32]:
        first = session.arena.length
        logits = session.forward(TEXT[first : first + tokens]).copy()
        session.arena.commit(tokens)
        return logits

    bound.base_only = True
    np.testing.assert_array_equal(run(bound, 40), run(plain, 40))
    bound.base_only = False
    run(bound, 30)
    assert bound.last_graph == "further"
    bound.base_only = True
    run(bound, 2)
    assert (arena.plain_length, arena.length) == (40, 72)
    arena.rewind_to(arena.plain_length)
    np.testing.assert_array_equal(run(bound, 20), run(plain, 20))
    assert bound.last_graph == BASE_GRAPH
    assert arena.plain_length == 60


def test_arenas_change_and_are_copied_between_graphs(graph: Path, expected: npt.NDArray[np.float32]) -> None:
    graphs = ChosenGraphs(load(graph), (RandomPasses(lambda: load(graph), 7),))
    bound, copy = graphs.bind(graphs.arena(CONTEXT)), graphs.arena(CONTEXT)
    original = bound.arena
    for _ in range(20):
        base = original.length
        np.testing.assert_allclose(bound.forward(TEXT[base : base + 7]), expected[base : base + 7], atol=TOLERANCE)
        original.commit(5)
        copy.copy_from(original, base + 3)
        bound.use(copy)
        for first in (base + 3, base + 4):
            logits = bound.forward(TEXT[first : base + 6])
            np.testing.assert_allclose(logits, expected[first : base + 6], atol=TOLERANCE)
            copy.commit(1)
        bound.use(original)
