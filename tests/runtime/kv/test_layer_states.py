"""States beside the KV cache: rewinding, replays, copies, snapshots and other graphs equal sequential decoding."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from edgerun.errors import EdgeError
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph.bound_graph import NewTokens
from edgerun.runtime.graph.graph_choice import ChosenGraphs, FurtherGraph
from edgerun.runtime.graph.graph_io import BASE_GRAPH
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from edgerun.runtime.kv.arena import KVArena
from edgerun.runtime.long_context.dense_attention import long_context_graph
from support.hybrid_graphs import with_end_states
from support.nightly import some_nightly
from support.tiny_models import write_bundle

CPU = SessionConfig(choose_device("cpu"), 1)
CONTEXT = 512
TEXT = np.random.default_rng(3).integers(5, 300, CONTEXT).tolist()
TOLERANCE = 2e-4
"""Wide passes and narrow ones differ by float rounding."""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("lfm2"), "lfm2", conv_L_cache=4, max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def strips(bundle: Path) -> GraphSession:
    """A graph that returns the states followed by the inputs at all tokens."""
    return GraphSession(bundle / "model.onnx", CPU)


@pytest.fixture(
    scope="module",
    params=[(), (0, 1, 3), (1,), "qwen3_5_text", "granitemoehybrid", "qwen3_5_moe_text"],
    ids=["strips", "end states", "both", "delta nets", "Mamba-2", "experts"],
)
def graph(
    request: pytest.FixtureRequest, bundle: Path, strips: GraphSession, tmp_path_factory: pytest.TempPathFactory
) -> GraphSession:
    """The same graph, in which some layers return the states after the last token alone; or linear attention."""
    if request.param == ():
        return strips
    folder = tmp_path_factory.mktemp("other")
    if isinstance(request.param, str):
        path = write_bundle(folder, request.param, max_position_embeddings=CONTEXT) / "model.onnx"
    else:
        path = with_end_states(bundle, folder / "bundle", request.param)
    return GraphSession(path, CPU)


@pytest.fixture(scope="module")
def expected(graph: GraphSession) -> npt.NDArray[np.float32]:
    """Logits after every token of `TEXT`, one token a pass."""
    bound = graph.bind(graph.arena(CONTEXT))
    rows = []
    for token in TEXT:
        rows.append(bound.forward([token])[0].copy())
        bound.arena.commit(1)
    return np.array(rows)


def new(graph: GraphSession | ChosenGraphs) -> tuple[Any, Any]:
    arena = graph.arena(CONTEXT)
    return graph.bind(arena), arena


def read(bound: Any, stop: int, width: int = 100) -> None:
    """Run and commit the slots of `TEXT` up to `stop`."""
    while bound.arena.length < stop:
        tokens = TEXT[bound.arena.length : min(stop, bound.arena.length + width)]
        bound.forward(tokens, logits_for=(len(tokens) - 1,))
        bound.arena.commit(len(tokens))


def spacing_of(arena: KVArena) -> int:
    return arena.states.spacing


def has_strips(arena: KVArena) -> bool:
    """Whether states after every token of a pass are known, also of a wide one."""
    return all(each.of_every_token for each in arena.states.types)


def check_next(bound: Any, expected: npt.NDArray[np.float32], width: int = 3) -> None:
    """The logits of the next tokens are those of sequential decoding."""
    first = bound.arena.length
    logits = bound.forward(TEXT[first : first + width])
    np.testing.assert_allclose(logits, expected[first : first + width], atol=TOLERANCE)


@pytest.mark.parametrize("seed", some_nightly(range(4), 4))
def test_random_rewinds_and_replays_equal_sequential_decoding(
    graph: GraphSession, expected: npt.NDArray[np.float32], seed: int
) -> None:
    """500 times: run a chain whose end is wrong, accept some of it, or rewind to any position before."""
    random = np.random.default_rng(seed)
    bound, arena = new(graph)
    read(bound, 200)
    rewinds = 0
    for _ in range(500):
        if random.random() < 0.3 or arena.length > 400:
            arena.rewind_to(int(random.integers(0, arena.length + 1)))
            rewinds += 1
        base, right = arena.length, int(random.integers(1, 9))
        wrong = random.integers(5, 300, random.integers(0, 5)).tolist()
        logits = bound.forward([*TEXT[base : base + right], *wrong])
        np.testing.assert_allclose(logits[:right], expected[base : base + right], atol=TOLERANCE)
        accepted = int(random.integers(0, right + 1))
        if accepted and random.random() < 0.5:
            arena.compact(base, range(accepted))
        else:
            arena.commit(accepted)
        assert arena.length == base + accepted
    assert arena.states.token_ids == TEXT[: arena.length]
    assert rewinds > 100
    assert arena.replayed > 0
    if has_strips(arena):
        assert arena.replayed <= rewinds * (spacing_of(arena) - 1)


@pytest.mark.parametrize("seed", some_nightly(range(6), 6))
def test_chains_of_short_passes_equal_sequential_decoding_wherever_they_are_cut(
    graph: GraphSession, expected: npt.NDArray[np.float32], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a draft model runs them: its draft tokens are rewound after every pass, committed again, and given up."""
    random = np.random.default_rng(seed)
    bound, arena = new(graph)
    read(bound, 30)
    arena.states._most_held = (2, 4, 1)[seed // 2]
    for _ in range(60):
        if random.random() < 0.1 or arena.length > 400:
            arena.rewind_to(int(random.integers(0, min(arena.length, 400) + 1)))
        base, drafted = arena.length, 0
        arena.hold_from(base)
        for _ in range(int(random.integers(1, 6))):
            first, right = base + drafted, int(random.choice([1, 1, 1, 2, 3, 40]))
            wrong = random.integers(5, 300, random.choice([0, 0, 1, 2])).tolist()
            arena.commit(drafted)
            if random.random() < 0.1:
                with monkeypatch.context() as patched:
                    patched.setattr(bound, "_run_session", _fail)
                    with pytest.raises(EdgeError, match="failed to run"):
                        bound.forward([7])
            logits = bound.forward([*TEXT[first : first + right], *wrong])
            np.testing.assert_allclose(logits[:right], expected[first : first + right], atol=TOLERANCE)
            arena.rewind_to(base)
            drafted += right
            if wrong:
                arena.commit(drafted + len(wrong))
                bound.forward(wrong)
                arena.rewind_to(base)
            if random.random() < 0.4:
                drafted = int(random.integers(0, drafted + 1))
            assert len(arena.states._held) <= arena.states._most_held
        arena.commit(int(random.integers(0, drafted + 1)))
        assert arena.states.token_ids == TEXT[: arena.length]
    check_next(bound, expected)
    assert arena.replayed > 0 or arena.replay is None


@pytest.mark.parametrize("position", [89, 70, 60, 33, 0])
def test_rewinding_within_the_last_pass_replays_what_has_no_state(
    graph: GraphSession, expected: npt.NDArray[np.float32], position: int
) -> None:
    bound, arena = new(graph)
    read(bound, 60, width=60)
    read(bound, 90, width=30)
    arena.rewind_to(position)
    check_next(bound, expected)
    if position >= 60 and arena.replay is None:
        assert arena.replayed == 0
    else:
        assert arena.replayed == position % (spacing_of(arena) if has_strips(arena) else 60)


def test_accepted_tokens_run_once_more_until_a_pass_is_accepted_as_a_whole(
    graph: GraphSession, expected: npt.NDArray[np.float32]
) -> None:
    bound, arena = new(graph)
    read(bound, 20, width=20)
    replays = []
    for width, accepted in [(4, 2), (3, 1), (5, 5), (1, 1), (6, 3), (2, 2)]:
        before, base, announced = arena.replayed, arena.length, arena.replay
        logits = bound.forward(TEXT[base : base + width])
        np.testing.assert_allclose(logits, expected[base : base + width], atol=TOLERANCE)
        arena.compact(base, range(accepted))
        replays.append(arena.replayed - before)
        assert announced in (None, replays[-1])
    assert replays == ([0] * 6 if arena.replay is None else [0, 2, 3, 0, 0, 3])


def test_many_tokens_run_again_in_several_passes(graph: GraphSession, expected: npt.NDArray[np.float32]) -> None:
    bound, arena = new(graph)
    read(bound, 400, width=400)
    bound.forward(TEXT[400:403])
    arena.commit(1)
    arena.rewind_to(399)
    check_next(bound, expected)
    replayed = arena.replayed
    assert replayed == (399 % spacing_of(arena) if has_strips(arena) else 399)
    arena.commit(3)
    check_next(bound, expected)
    if has_strips(arena):  # states are known at multiples of the spacing
        arena.rewind_to(spacing_of(arena) * 3)
        check_next(bound, expected)
        assert arena.replayed == replayed
        arena.rewind_to(spacing_of(arena) * 2 + 5)
        check_next(bound, expected, width=1)
        assert arena.replayed == replayed + 5
        # Slots that ran once more, in a wide pass, are not plain decoding's.
        assert arena.plain_length == spacing_of(arena) * 2


def test_states_of_the_last_prefill_pass_are_kept(graph: GraphSession) -> None:
    """Answers that begin again there must have the same bits, so its first token may not be part of a wider pass."""
    bound, arena = new(graph)
    read(bound, 77, width=77)
    logits = bound.forward(TEXT[77:100], logits_for=(22,))[0].copy()
    arena.commit(23)
    arena.last_prefill = (77, 100)
    for token in TEXT[100:140]:
        bound.forward([token])
        arena.commit(1)
    bound.forward(TEXT[140:150])
    arena.compact(140, range(4))
    bound.forward(TEXT[144:150])
    arena.rewind_to(77)
    before = arena.replayed
    np.testing.assert_array_equal(bound.forward(TEXT[77:100], logits_for=(22,))[0], logits)
    assert arena.replayed == before


@pytest.mark.parametrize("slots", [0, 10, 64, 130, 201])
def test_copies_and_snapshots_continue_as_the_original(
    graph: GraphSession, expected: npt.NDArray[np.float32], slots: int
) -> None:
    bound, arena = new(graph)
    read(bound, 201)
    copied_bound, copied = new(graph)
    read(copied_bound, 30)
    copied.copy_from(arena, slots)
    assert copied.states.token_ids == TEXT[:slots]
    restored_bound, restored = new(graph)
    arena.rewind_to(slots)
    restored.restore(arena.snapshot())
    for each in (copied_bound, restored_bound, bound):
        assert each.arena.length == slots
        check_next(each, expected)
    restored.rewind_to(slots // 2)
    check_next(restored_bound, expected)


def test_wide_passes_do_not_keep_what_earlier_ones_returned(graph: GraphSession) -> None:
    bound, arena = new(graph)
    returned = []
    for start in range(0, 500, 50):
        bound.forward(TEXT[start : start + 50])
        arena.commit(50)
        returned += [weakref.ref(each) for each in arena.states._outputs]
    assert len(returned) == 10 * len(arena.states.buffers)
    assert len({id(each()) for each in returned if each() is not None}) <= 2 * len(arena.states.buffers)


def test_damaged_snapshots_are_refused(strips: GraphSession) -> None:
    bound, arena = new(strips)
    read(bound, 80)
    *slots, token_ids, positions, states = arena.snapshot()  # of a graph with states of one type
    for damaged in (
        (),
        (token_ids[:-1], positions[:1], states[:1]),
        (token_ids, positions + 100, states),
        (token_ids, positions * 0, states),
        (token_ids, positions, states[:, :, :1]),
        (token_ids, positions, states.astype(np.float64)),
        (token_ids.astype(np.int32), positions, states),
    ):
        with pytest.raises(ValueError, match="expected"):
            new(strips)[1].restore((*slots, *damaged))


def test_what_is_not_known_cannot_be_committed(graph: GraphSession) -> None:
    bound, arena = new(graph)
    read(bound, 20)
    with pytest.raises(ValueError, match="cannot commit"):
        arena.commit(1)
    bound.forward(TEXT[20:25])
    with pytest.raises(ValueError, match="along a chain"):
        arena.compact(20, [0, 2])
    arena.rewind_to(10)
    with pytest.raises(ValueError, match="cannot commit"):
        arena.commit(1)


class SomePasses(FurtherGraph):
    """A further graph that takes a share of the passes, at random."""

    name = "further"

    def __init__(self, load: Callable[[], GraphSession], share: float, seed: int = 0) -> None:
        self._load = load
        self._share = share
        self._random = np.random.default_rng(seed)

    def takes(self, new: NewTokens, base: int) -> bool:
        return bool(self._random.random() < self._share)

    def load(self, base: GraphSession) -> GraphSession:
        return self._load()


@pytest.mark.parametrize("seed", some_nightly(range(4), 2))
def test_random_rejections_and_rewinds_across_graphs_equal_sequential_decoding(
    graph: GraphSession, expected: npt.NDArray[np.float32], seed: int
) -> None:
    """300 times: run a chain whose end is wrong, in either graph, accept some of it, or rewind to any position."""
    random = np.random.default_rng(seed)
    other = graph if seed < 2 else GraphSession(graph._graph, CPU, model=long_context_graph(graph._graph))
    graphs = ChosenGraphs(graph, (SomePasses(lambda: other, 0.5, seed),))
    bound, arena = new(graphs)
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


def test_what_follows_plain_slots_again_has_their_bits(graph: GraphSession) -> None:
    """Slots and states of another graph are not plain decoding's: rewound to those, the base graph computes the same
    bits as without the other one."""
    bound, arena = new(ChosenGraphs(graph, (SomePasses(lambda: graph, 1.0),)))
    plain, _ = new(graph)

    def run(session: Any, tokens: int) -> npt.NDArray[np.float32]:
        first = session.arena.length
        logits = session.forward(TEXT[first : first + tokens]).copy()
        session.arena.commit(tokens)
        return logits

    bound.prefers_base = True
    np.testing.assert_array_equal(run(bound, 40), run(plain, 40))
    bound.prefers_base = False
    run(bound, 30)
    assert bound.last_graph == "further"
    bound.prefers_base = True
    run(bound, 2)
    assert (arena.plain_length, arena.length) == (40, 72)
    arena.rewind_to(arena.plain_length)
    np.testing.assert_array_equal(run(bound, 20), run(plain, 20))
    assert bound.last_graph == BASE_GRAPH
    assert arena.plain_length == 60


def test_arenas_change_and_are_copied_between_graphs(graph: GraphSession, expected: npt.NDArray[np.float32]) -> None:
    graphs = ChosenGraphs(graph, (SomePasses(lambda: graph, 0.5, 7),))
    (bound, original), copy = new(graphs), graphs.arena(CONTEXT)
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


def _fail() -> None:
    raise RuntimeError
