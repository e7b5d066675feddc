"""Passes over long contexts run in the graph that was measured to be faster, and give the same text."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgerun
from edgerun import Engine, GenerateOptions, Reply, Speculation
from edgerun.edge.cli.main import main
from edgerun.models.bundle import open_bundle
from edgerun.models.json_file import record_from_json
from edgerun.runtime.devices.providers import cpu_device
from edgerun.runtime.graph.bound_graph import BoundGraph, NewTokens
from edgerun.runtime.graph.bound_session import BoundSession
from edgerun.runtime.graph.graph_io import BASE_GRAPH
from edgerun.runtime.graph.open_graph import open_graph
from edgerun.runtime.graph.session import SessionConfig
from edgerun.runtime.long_context import long_graph
from edgerun.runtime.long_context.long_graph import (
    LEAST_CONTEXT,
    LONG_CONTEXT_TIMES,
    WIDTHS,
    LongContextGraph,
)
from edgerun.runtime.measure import system_load
from edgerun.runtime.measure.exactness import WidthNoise, measure_width_noise
from edgerun.runtime.measure.measurement_store import model_key
from edgerun.runtime.measure.system_load import GraphTimes, LoadMeter
from support.tiny_models import write_bundle

CONFIG = SessionConfig(cpu_device(), 1)
FASTER, SLOWER = (2.0, 1.0), (1.0, 2.0)


FAMILIES = pytest.mark.parametrize(
    "long_bundle", ["llama", "lfm2", "qwen3_5_text", "granitemoehybrid"], indirect=True, scope="module"
)
"""With attention alone, and with states that every token changes."""


@pytest.fixture(scope="module")
def long_bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a context of 2,500 tokens."""
    family = getattr(request, "param", "llama")
    return write_bundle(tmp_path_factory.mktemp("long"), family, max_position_embeddings=2500)


@pytest.fixture
def bundle(long_bundle: Path, cache: Path) -> Path:
    """That model with a cache folder of its own."""
    return long_bundle


@pytest.fixture
def store(bundle: Path) -> Callable[..., None]:
    """Keeps measurements of the model: of each width the times of both graphs."""

    def save(**times: tuple[float, float]) -> None:
        seconds = {f"{context}/{width[1:]}": pair for width, pair in times.items() for context in (1, 2)}
        LONG_CONTEXT_TIMES.save(model_key(open_bundle(bundle), CONFIG), GraphTimes(seconds))

    return save


@pytest.fixture
def opened(bundle: Path) -> Callable[[], tuple[BoundGraph, LongContextGraph]]:
    """The model's graphs, bound to an arena with 1,100 filled slots, and the one for long contexts."""

    def make() -> tuple[BoundGraph, LongContextGraph]:
        graphs = open_graph(open_bundle(bundle), CONFIG, cache=True)
        bound = graphs.bind(graphs.arena(2500))
        bound.arena.pad_to(1100, 0.01)
        return bound, graphs.further[-1]

    return make


def prompt(tokens: int) -> list[int]:
    return np.random.default_rng(tokens).integers(5, 300, tokens).tolist()


def answer(engine: Engine, tokens: int, **options: Any) -> Reply:
    return Reply.of(engine.model.answer(None, prompt(tokens), GenerateOptions(**{"ignore_eos": True, **options})))


def engine_of(bundle: Path, **options: Any) -> Engine:
    return edgerun.load(bundle, threads=1, power="performance", **{"draft": None, **options})


@FAMILIES
def test_200_tokens_are_those_of_the_own_graph(
    bundle: Path, store: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    store(**{f"w{width}": SLOWER for width in WIDTHS})
    with engine_of(bundle) as engine:
        expected = answer(engine, 1000, max_tokens=200).text
    store(**{f"w{width}": FASTER for width in WIDTHS})
    taken: list[int] = []
    takes = LongContextGraph.takes

    def recorded(graph: LongContextGraph, new: NewTokens, base: int) -> bool | None:
        found = takes(graph, new, base)
        taken.extend([len(new.ids)] if found else [])
        return found

    monkeypatch.setattr(LongContextGraph, "takes", recorded)
    with engine_of(bundle) as engine:
        assert answer(engine, 1000, max_tokens=200).text == expected
        assert sum(taken) > 150
        plain: dict[str, Any] = {"max_tokens": 200, "speculation": Speculation.OFF}
        with ThreadPoolExecutor() as pool:
            replies = list(pool.map(lambda tokens: answer(engine, tokens, **plain), (1000, 1010, 1000)))
        shared = engine.activity().passes
        assert [reply.text for reply in replies] == [expected, answer(engine, 1010, **plain).text, expected]
        assert shared.texts - shared.passes > 100
        taken.clear()
        assert answer(engine, 1000, max_tokens=200, exact=True).text == expected
        assert not taken
    with engine_of(bundle, draft="auto") as engine:
        assert answer(engine, 1000, max_tokens=200).text == expected
        assert taken


@FAMILIES
def test_what_is_not_known_is_measured_once_and_kept(
    opened: Callable[[], tuple[BoundGraph, LongContextGraph]], bundle: Path
) -> None:
    bound, graph = opened()
    expected = [each[..., :1100, :].copy() for each in bound.arena.buffers.arrays]
    for width in (1, 3, 1):
        bound.forward(prompt(width))
    assert list(graph.times.seconds) == ["1/1", "1/4"]
    for found, before in zip(bound.arena.buffers.arrays, expected, strict=True):
        np.testing.assert_array_equal(found[..., :1100, :], before)
    times = dict(graph.times.seconds)
    bound.forward(prompt(4))
    assert graph.times.seconds == times
    chosen = {width: graph.takes(NewTokens([7] * width, np.arange(1)), 1100) for width in (1, 4)}
    for width in (1, 3):
        bound.forward(prompt(width))
        assert (bound.last_graph == graph.name) is chosen[4 if width > 1 else 1]
    stored = LONG_CONTEXT_TIMES.load(model_key(open_bundle(bundle), CONFIG))
    assert stored == graph.times


def test_what_other_programs_disturbed_is_measured_by_three_processes(
    opened: Callable[[], tuple[BoundGraph, LongContextGraph]], monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = True
    monkeypatch.setattr(LoadMeter, "is_busy", property(lambda _: busy))
    measured: list[NewTokens] = []
    measure = LongContextGraph.measure

    def counted(graph: LongContextGraph, new: NewTokens, *arguments: Any) -> None:
        measured.append(new)
        measure(graph, new, *arguments)

    monkeypatch.setattr(LongContextGraph, "measure", counted)
    least = (float("inf"), float("inf"))
    for process in (1, 2, 3):
        bound, graph = opened()
        bound.forward([7])
        bound.forward([8])
        assert len(measured) == process
        assert graph.times.disturbed == {"1/1": process}
        own, long = graph.times.seconds["1/1"]
        assert own <= least[0]
        assert long <= least[1]
        least = own, long
    bound, graph = opened()
    bound.forward([7])
    bound.forward(prompt(2))
    assert graph.times.disturbed == {"1/1": 3, "1/2": 1}
    assert graph.times.seconds["1/1"] == least
    busy = False
    for _ in range(2):
        bound, graph = opened()
        bound.forward([7])
        bound.forward(prompt(2))
        assert graph.times.disturbed == {"1/1": 3}
        assert [len(new.ids) for new in measured] == [1, 1, 1, 2, 2]


def test_a_slow_pass_is_timed_once_in_each_graph(
    opened: Callable[[], tuple[BoundGraph, LongContextGraph]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a pass over a part of a prompt takes a second, eight of them would make somebody wait."""
    passes: list[NewTokens] = []
    time_pass = long_graph._time_pass

    def counted(bound: BoundSession, new: NewTokens) -> float:
        passes.append(new)
        return time_pass(bound, new)

    monkeypatch.setattr(long_graph, "_time_pass", counted)
    bound, graph = opened()
    bound.forward([7])
    assert len(passes) > 2
    passes.clear()
    monkeypatch.setattr(system_load, "_SLOW_TURN_S", 0.0)
    bound.forward(prompt(2))
    assert len(passes) == 2
    assert "1/2" in graph.times.seconds


def test_short_contexts_wide_passes_and_exact_answers_are_the_own_graphs(
    opened: Callable[[], tuple[BoundGraph, LongContextGraph]], store: Callable[..., None]
) -> None:
    store(**{f"w{width}": FASTER for width in WIDTHS})
    bound, graph = opened()

    def runs(tokens: int) -> str:
        bound.forward(prompt(tokens))
        return bound.last_graph

    assert [runs(1), runs(16), runs(64)] == [graph.name] * 3
    assert runs(65) == BASE_GRAPH
    bound.prefers_base = True
    assert runs(1) == BASE_GRAPH
    bound.prefers_base = False
    bound.arena.rewind_to(LEAST_CONTEXT - 1)
    assert runs(1) == BASE_GRAPH
    bound.arena.pad_to(LEAST_CONTEXT, 0.01)
    assert runs(1) == graph.name


def test_verify_tells_how_far_the_graphs_differ(
    opened: Callable[[], tuple[BoundGraph, LongContextGraph]], bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bound, graph = opened()
    bound.prefers_base = True
    noise = measure_width_noise(bound, [prompt(60)], widths=(1, 2), long_context=bound.further(graph.name))
    assert 0 < noise.long_context < 1e-3
    assert noise.largest == max(*noise.chains.values(), noise.trees)
    assert record_from_json(WidthNoise, asdict(noise)) == noise
    assert bound.further("another") is None
    assert main(["verify", str(bundle), "--limit", "1", "-n", "4", "--threads", "1"]) == 0
    assert "in the graph that runs them" in " ".join(capsys.readouterr().out.split())


@pytest.mark.usefixtures("cache")
def test_a_model_with_a_softcap_runs_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bundle = write_bundle(tmp_path / "model", "gemma2", max_position_embeddings=1500, sliding_window=1400)
    graphs = open_graph(open_bundle(bundle), CONFIG, cache=True)
    bound = graphs.bind(graphs.arena(1500))
    bound.arena.pad_to(1100, 0.01)
    bound.forward([7])
    assert bound.last_graph == BASE_GRAPH
    further = graphs.further[-1]
    assert "softcap" in further.obstacle
    assert not caplog.records


@pytest.mark.parametrize(
    "data",
    [
        {"seconds": []},
        {"seconds": {"1/1": [1.0]}},
        {"seconds": {"1/1": [1.0, 0.0]}},
        {"seconds": {"1/1": [1.0, 1.0]}, "disturbed": {"1/1": 0}},
        {"seconds": {"1/1": [1.0, 1.0]}, "disturbed": {"1/2": 1}},
    ],
)
def test_damaged_measurements_are_refused(data: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="missing|must be"):
        record_from_json(GraphTimes, data)
