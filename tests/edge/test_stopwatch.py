"""The stopwatch: every pass of every model is timed, on the weights it would be used with, and nothing is left over."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgerun.errors import BundleError
from edgerun.export import ExportRecipe, WeightFormat
from edgerun.models.cache import cache_folder
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph import prepacked
from edgerun.runtime.graph.bound_session import BoundSession
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from edgerun.runtime.measure import bundle_timing as stopwatch
from edgerun.runtime.measure import node_timing as node_stopwatch
from edgerun.runtime.measure.bundle_timing import (
    FIRST_PASSES,
    PASSES,
    BundleStopwatch,
    packed_graphs,
    ready,
    take_turns,
    undisturbed,
)
from edgerun.runtime.measure.node_profile import read_passes
from edgerun.runtime.measure.node_timing import BundleNodeStopwatch
from support.tiny_models import write_bundle


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("timed")
    return [write_bundle(folder / str(bits), weights=ExportRecipe(WeightFormat(bits, 32))) for bits in (4, 8)]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGERUN_CACHE", str(tmp_path))
    return tmp_path


def test_every_bundle_gets_a_time_for_every_number_of_rows(bundles: list[Path], cache: Path) -> None:
    times = BundleStopwatch(threads=1)(bundles, (1, 4), rounds=2)
    assert len(times) == len(bundles)
    assert all(list(of_one) == [1, 4] and min(of_one.values()) > 0 for of_one in times)
    assert list(cache.glob("timing-*")) == []


def test_large_bundles_are_packed_for_the_machine_and_the_twins_go(
    bundles: list[Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with packed_graphs(bundles) as graphs:
        assert [graph for _, graph in graphs] == [bundle / "model.onnx" for bundle in bundles]
    monkeypatch.setattr(prepacked, "_MIN_WEIGHT_BYTES", 0)
    with packed_graphs(bundles) as graphs:
        assert all(cache in graph.parents and graph.is_file() for _, graph in graphs)
        assert cache_folder() == cache
    assert list(cache.glob("timing-*")) == []


def test_turns_go_back_and_forth_and_start_with_passes_that_do_not_count(
    bundles: list[Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[tuple[BoundSession, int]] = []
    really = stopwatch.one_pass

    def noted(bound: BoundSession, rows: int) -> float:
        passes.append((bound, rows))
        return really(bound, rows)

    monkeypatch.setattr(stopwatch, "one_pass", noted)
    with packed_graphs(bundles) as graphs:
        config = SessionConfig(choose_device("cpu"), 1)
        one, other = (ready(GraphSession(graph, config), bundle) for bundle, graph in graphs)
        times = take_turns([one, other], (1, 4), 2)
    turn = [1] * FIRST_PASSES + [1] * PASSES + [4] * PASSES
    assert passes == [(which, rows) for which in (one, other, other, one) for rows in turn]
    assert [{rows: len(seconds) for rows, seconds in of_one.items()} for of_one in times] == [
        {1: 2 * PASSES, 4: 2 * PASSES}
    ] * 2


def test_what_is_no_bundle_is_said_so(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(BundleError):
        BundleStopwatch()([tmp_path / "nothing"], (1,), 1)


@pytest.mark.parametrize("loads", [1, 3])
def test_nodes_are_those_of_the_passes_that_count(
    bundles: list[Path], cache: Path, monkeypatch: pytest.MonkeyPatch, loads: int
) -> None:
    lengths = []

    def numbered(profile: Path) -> list[dict[str, float]]:
        """Each load's nodes take a thousandth more than those of the load before."""
        lengths.append(len(read_passes(profile)))
        slower = 1 + (len(lengths) - 1) // len(bundles) / 1000
        return [{"node": slower * number, "twice": slower * 2 * number} for number in range(lengths[-1])]

    monkeypatch.setattr(node_stopwatch, "read_passes", numbered)
    monkeypatch.setattr(node_stopwatch, "_LOADS", loads)
    found = BundleNodeStopwatch(threads=1)(bundles, (1, 4), rounds=2 * loads)
    turn = FIRST_PASSES + 2 * PASSES
    assert lengths == [2 * turn] * len(bundles) * loads
    for of_one in found:
        for place, rows in enumerate((1, 4)):
            first = FIRST_PASSES + place * PASSES
            counted = [first + each for each in range(PASSES)] + [turn + first + each for each in range(PASSES)]
            chosen = counted[: -(-len(counted) // 3)]
            mean = sum(chosen) / len(chosen) * (1 + (loads - 1) / 2000)
            assert of_one[rows].nodes == pytest.approx({"node": mean, "twice": 2 * mean})
            assert of_one[rows].seconds > 0


def test_the_faster_third_is_averaged() -> None:
    assert undisturbed([5.0, 1.0, 9.0, 3.0, 7.0, 2.0]) == 1.5
    assert undisturbed([4.0]) == 4.0
