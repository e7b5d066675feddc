"""Timing passes and graph nodes of bundles."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from edgerun.export import ExportRecipe, WeightFormat
from edgerun.models.bundle import open_bundle
from edgerun.models.user_folders import cache_folder
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph import packed_files
from edgerun.runtime.graph.bound_session import BoundSession
from edgerun.runtime.graph.model_metadata import metadata_of
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from edgerun.runtime.measure import bundle_timing
from edgerun.runtime.measure.bundle_timing import (
    PASSES_PER_TURN,
    WARM_UP_PASSES,
    BundleTimer,
    bind_filled,
    packed_graphs,
    read_profile,
    time_in_turns,
)
from support.tiny_models import write_bundle


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("timed")
    return [write_bundle(folder / str(bits), weights=ExportRecipe(WeightFormat(bits, 32))) for bits in (4, 8)]


def test_large_bundles_are_packed_for_the_machine_and_the_copies_are_removed(
    bundles: list[Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with packed_graphs(bundles) as graphs:
        assert [graph for _, graph in graphs] == [bundle / "model.onnx" for bundle in bundles]
    monkeypatch.setattr(packed_files, "_MIN_WEIGHT_BYTES", 0)
    with packed_graphs(bundles) as graphs:
        assert all(cache in graph.parents and graph.is_file() for _, graph in graphs)
        assert cache_folder() == cache
    assert list(cache.glob("timing-*")) == []


def test_turns_alternate_in_order_and_start_with_warm_up_passes(
    bundles: list[Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[tuple[BoundSession, int]] = []
    time_pass = bundle_timing.time_pass

    def record(bound: BoundSession, width: int) -> float:
        passes.append((bound, width))
        return time_pass(bound, width)

    monkeypatch.setattr(bundle_timing, "time_pass", record)
    with packed_graphs(bundles) as graphs:
        config = SessionConfig(choose_device("cpu"), 1)
        one, other = (bind_filled(GraphSession(graph, config), bundle) for bundle, graph in graphs)
        times = time_in_turns([one, other], (1, 4), 2)
    turn = [1] * WARM_UP_PASSES + [1] * PASSES_PER_TURN + [4] * PASSES_PER_TURN
    assert passes == [(bound, width) for bound in (one, other, other, one) for width in turn]
    assert [{width: len(seconds) for width, seconds in by_width.items()} for by_width in times] == [
        {1: 2 * PASSES_PER_TURN, 4: 2 * PASSES_PER_TURN}
    ] * 2


@pytest.mark.parametrize("loads", [1, 3])
def test_node_times_are_means_over_the_fastest_timed_passes(
    bundles: list[Path], cache: Path, monkeypatch: pytest.MonkeyPatch, loads: int
) -> None:
    lengths = []

    def numbered(profile: Path) -> list[dict[str, float]]:
        """Give each pass its number as the time; each load's nodes take a thousandth more than the load before."""
        lengths.append(len(read_profile(profile)))
        slower = 1 + (len(lengths) - 1) // len(bundles) / 1000
        return [{"node": slower * number, "twice": slower * 2 * number} for number in range(lengths[-1])]

    monkeypatch.setattr(bundle_timing, "read_profile", numbered)
    monkeypatch.setattr(bundle_timing, "_LOADS", loads)
    found = BundleTimer(threads=1).time_nodes(bundles, (1, 4), rounds=2 * loads)
    turn = WARM_UP_PASSES + 2 * PASSES_PER_TURN
    assert lengths == [2 * turn] * len(bundles) * loads
    for by_width in found:
        for place, width in enumerate((1, 4)):
            first = WARM_UP_PASSES + place * PASSES_PER_TURN
            timed = [first + number for number in range(PASSES_PER_TURN)]
            timed += [turn + number for number in timed]
            chosen = timed[: -(-len(timed) // 3)]
            mean = sum(chosen) / len(chosen) * (1 + (loads - 1) / 2000)
            assert by_width[width].nodes == pytest.approx({"node": mean, "twice": 2 * mean})
            assert by_width[width].seconds > 0


def test_the_profile_gives_a_time_for_every_linear_of_every_pass(tmp_path: Path) -> None:
    bundle = open_bundle(write_bundle(tmp_path, weights=ExportRecipe(WeightFormat(4, 32))))
    config = SessionConfig(choose_device("cpu"), 1, profile=tmp_path / "profile")
    session = GraphSession(bundle.graph, config, metadata_of(bundle))
    bound = session.bind(session.arena(64))
    for width in (1, 5, 2):
        bound.forward(list(range(width)))
    file = session.end_profile()
    assert file.parent == tmp_path
    passes = read_profile(file)
    linears = {node.name for node in onnx.load(bundle.graph).graph.node if node.op_type == "MatMulNBits"}
    assert len(passes) == 3
    assert linears
    assert all(linears <= nodes.keys() and min(nodes.values()) >= 0 for nodes in passes)
    assert all(sum(nodes.values()) < 10 for nodes in passes)
