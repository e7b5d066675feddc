"""Measuring pass costs, and storing them."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest

from edgerun.errors import ContextError
from edgerun.models.bundle import open_bundle
from edgerun.runtime.devices.processor import Power
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph.bound_session import BoundSession
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from edgerun.runtime.measure import measurement_store, pass_timing, system_load
from edgerun.runtime.measure.measurement_store import model_key
from edgerun.runtime.measure.pass_timing import PASS_COSTS, WIDTHS, load_or_measure_pass_cost, measure_pass_cost
from edgerun.runtime.speculation.pass_cost import Doubt, PassCost
from support.static_bundles import static_graphs, write_static_bundle

TIMES = {1: 8.1e-3, 2: 10.7e-3, 3: 14.9e-3, 4: 18.0e-3, 6: 24.7e-3, 8: 31.3e-3}
CONFIG = SessionConfig(choose_device("cpu"), 1)


@pytest.fixture(scope="module")
def graph(tiny_bundle: Path) -> GraphSession:
    return GraphSession(tiny_bundle / "model.onnx", CONFIG)


@pytest.fixture
def bound(graph: GraphSession) -> BoundSession:
    return graph.bind(graph.arena(256))


@pytest.mark.parametrize("contexts", [None, [100]])
def test_measuring_leaves_committed_slots_unchanged(bound: BoundSession, contexts: list[int] | None) -> None:
    bound.forward(list(range(20, 50)))
    bound.arena.commit(30)
    (slots,) = bound.arena.snapshot()
    logits = bound.forward([7]).copy()
    fractions: list[float] = []
    cost = measure_pass_cost(bound, seconds_budget=0.05, contexts=contexts, progress=fractions.append)
    assert bound.arena.length == 30
    np.testing.assert_array_equal(bound.arena.snapshot()[0], slots)
    np.testing.assert_array_equal(bound.forward([7]), logits)
    assert list(cost.measured) == [512]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0


def test_fixed_widths_are_measured_as_they_are(tmp_path: Path, cache: Path) -> None:
    folder = write_static_bundle(tmp_path, widths=(1, 3, 40), contexts=(64,))
    graphs, bundle = static_graphs(folder), open_bundle(folder)
    bound = graphs.bind(graphs.arena(64))
    cost = load_or_measure_pass_cost(bundle, CONFIG, bound)
    # The graph for prefill gives the logits of one position, so it verifies nothing.
    assert cost.stairs == tuple(cost.measured[512]) == (1, 3)
    assert [path.name for path in (cache / "pass-cost").iterdir()] == [PASS_COSTS.file(model_key(bundle, CONFIG)).name]
    again = load_or_measure_pass_cost(bundle, CONFIG, bound)
    assert (again.stairs, again.measured[512]) == ((1, 3), pytest.approx(cost.measured[512]))
    PASS_COSTS.save(model_key(bundle, CONFIG), PassCost({64: {1: 1.0, 4: 2.0}}, stairs=True))
    assert load_or_measure_pass_cost(bundle, CONFIG, bound).stairs == (1, 3), "the graphs were exported anew"


def test_widths_that_do_not_fit_the_context_are_left_out(graph: GraphSession) -> None:
    bound = graph.bind(graph.arena(20))
    assert tuple(measure_pass_cost(bound, contexts=[15]).measured[512]) == (1, 2, 3, 4, 5)
    assert tuple(measure_pass_cost(bound, contexts=[19]).measured[512]) == (1,)
    with pytest.raises(ContextError):
        measure_pass_cost(bound, contexts=[20])
    assert bound.arena.length == 0
    bound.forward([1, 2, 3])
    bound.arena.commit(3)
    with pytest.raises(ValueError, match="below 3"):
        measure_pass_cost(bound, contexts=[2])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"seconds": 5}',
        b'{"seconds": {}}',
        b'{"seconds": {"512": 5}}',
        b'{"seconds": {"512": {}}}',
        b'{"seconds": {"512": {"one": 0.1}}}',
        b'{"seconds": {"much": {"1": 0.1}}}',
        b'{"seconds": {"-1": {"1": 0.1}}}',
        b'{"seconds": {"512": {"1": "0.1"}}}',
        b'{"seconds": {"512": {"1": 0}}}',
        b'{"seconds": {"512": {"1": NaN}}}',
        b'{"seconds": {"512": {"1": 1e-300, "2": 1' + b"0" * 400 + b"}}}",
        b'{"seconds": {"512": {"1": 0.1, "' + b"9" * 5000 + b'": 0.1}}}',
    ],
)
def test_pass_cost_is_measured_again_if_its_file_is_damaged(
    tiny_bundle: Path, bound: BoundSession, cache: Path, content: bytes
) -> None:
    bundle = open_bundle(tiny_bundle)
    key = model_key(bundle, CONFIG)
    (cache / "pass-cost").mkdir(parents=True)
    PASS_COSTS.file(key).write_bytes(content)
    assert PASS_COSTS.load(key) is None
    load_or_measure_pass_cost(bundle, CONFIG, bound)
    assert PASS_COSTS.load(key) is not None


@pytest.mark.parametrize("change", ["machine", "RUNTIME_VERSION", "default_threads", "threads", "power", "model"])
def test_each_machine_runtime_mode_and_model_has_its_own_file(
    tiny_bundle: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    bundle, config = open_bundle(tiny_bundle), dataclasses.replace(CONFIG, threads=0)
    file = PASS_COSTS.file(model_key(bundle, config))
    if change in ("power", "threads"):
        config = dataclasses.replace(config, **{change: Power.SAVER if change == "power" else 62})
    elif change == "model":
        bundle = dataclasses.replace(bundle, manifest=None)
    else:
        monkeypatch.setattr(measurement_store, change, "0" if change == "RUNTIME_VERSION" else lambda: 63)
    assert PASS_COSTS.file(model_key(bundle, config)) != file


def test_the_oldest_files_are_deleted(tiny_bundle: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement_store, "_MAX_FILES", 2)
    (cache / "pass-cost").mkdir(parents=True)
    for age, name in enumerate(("new", "old", "oldest")):
        (cache / "pass-cost" / f"{name}.json").write_bytes(b"{}")
        os.utime(cache / "pass-cost" / f"{name}.json", (100 - age, 100 - age))
    (cache / "pass-cost" / "gone.json").symlink_to("removed-by-another-process")
    file = PASS_COSTS.save(model_key(open_bundle(tiny_bundle), CONFIG), PassCost({0: TIMES}))
    assert set((cache / "pass-cost").iterdir()) == {file, cache / "pass-cost" / "new.json"}


class SyntheticMachine:
    """Passes of known times, some of them disturbed by other programs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *busy: bool, times: dict[int, float] = TIMES) -> None:
        self.busy = [*busy]
        self.times = times
        self.measured = 0
        self.passes: list[tuple[int, float]] = []
        """Width and seconds of every pass."""
        monkeypatch.setattr(pass_timing, "time_pass", self._time_pass)
        for module in (pass_timing, system_load):
            monkeypatch.setattr(module, "LoadMeter", lambda _threads: self)
        monkeypatch.setattr(system_load, "perf_counter", lambda: sum(seconds for _, seconds in self.passes))

    @property
    def _is_busy_now(self) -> bool:
        return bool(self.busy) and self.busy[0]

    @property
    def is_busy(self) -> bool:
        """Asked once at the end of every measurement, and before one that may be left out."""
        self.measured += 1
        return self.busy.pop(0) if self.busy else False

    def wait(self, seconds: float) -> None:
        assert 0 < seconds < 1

    def _time_pass(self, _bound: object, width: int) -> float:
        seconds = float(np.interp(width, [*self.times], [*self.times.values()]))
        seconds *= (40.0 if width > 1 else 1.5) if self._is_busy_now else 1.0
        self.passes.append((width, seconds))
        return seconds


def seconds_of(cost: PassCost) -> dict[int, float]:
    return {width: seconds for width, seconds in cost.measured[512].items() if width in TIMES}


@pytest.mark.parametrize(("seconds_budget", "widths"), [(5.0, WIDTHS), (0.0, (1, 2, 4, 8))])
def test_a_small_time_budget_measures_fewer_widths(
    bound: BoundSession, monkeypatch: pytest.MonkeyPatch, seconds_budget: float, widths: tuple[int, ...]
) -> None:
    SyntheticMachine(monkeypatch)
    assert tuple(measure_pass_cost(bound, seconds_budget=seconds_budget).measured[512]) == widths


def test_a_disturbed_measurement_is_repeated(bound: BoundSession, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = SyntheticMachine(monkeypatch, True, False)
    fractions: list[float] = []
    cost = measure_pass_cost(bound, seconds_budget=0.1, progress=fractions.append)
    assert (cost.doubt, machine.measured) == (None, 2)
    assert seconds_of(cost).items() <= {width: pytest.approx(TIMES[width]) for width in TIMES}.items()
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0


@pytest.mark.parametrize("busy", [True, False])
def test_what_stays_disturbed_or_implausible_is_doubtful(
    bound: BoundSession, monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    machine = SyntheticMachine(monkeypatch, *[busy] * 3, times={1: 0.003, 2: 0.129, 16: 0.5})
    cost = measure_pass_cost(bound, seconds_budget=0.01)
    assert (cost.doubt, machine.measured) == (Doubt.BUSY, 3)
    assert cost.seconds(2, 0) < 4 * cost.seconds(1, 0), "used for now, without what cannot be"


@pytest.mark.parametrize("busy", [False, True])
def test_a_slow_device_is_measured_with_few_narrow_passes(
    bound: BoundSession, monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    slow = {1: 5.0, 2: 8.0, 4: 14.0, 8: 30.0, 16: 60.0}
    machine = SyntheticMachine(monkeypatch, *[busy] * 3, times=slow)
    cost = measure_pass_cost(bound)
    assert tuple(cost.measured[512]) == (1, 2)
    assert max(width for width, _ in machine.passes) == 2, "a wide pass takes a minute"
    assert len(machine.passes) <= 5
    assert machine.measured == 1, "not repeated, whatever else runs"
    assert (cost.doubt is None) == (not busy)


def test_a_device_of_half_a_second_a_pass_takes_ten_seconds(
    bound: BoundSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = SyntheticMachine(monkeypatch, times={1: 0.6, 2: 0.9, 4: 1.4, 16: 4.0})
    cost = measure_pass_cost(bound)
    assert tuple(cost.measured[512]) == (1, 2, 4)
    assert sum(seconds for _, seconds in machine.passes) < 10


def test_doubtful_costs_are_measured_again_when_the_machine_is_idle(
    tiny_bundle: Path, bound: BoundSession, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = open_bundle(tiny_bundle)
    busy = SyntheticMachine(monkeypatch, *[True] * 4)
    first = load_or_measure_pass_cost(bundle, CONFIG, bound)
    assert (first.doubt, busy.measured) == (Doubt.BUSY, 3)
    still_busy = load_or_measure_pass_cost(bundle, CONFIG, bound)
    assert (still_busy.doubt, still_busy.measurements, busy.measured) == (Doubt.BUSY, 1, 4)
    idle = load_or_measure_pass_cost(bundle, CONFIG, bound)
    assert (idle.doubt, idle.measurements) == (None, 2)
    for width, seconds in seconds_of(idle).items():
        assert seconds == pytest.approx(TIMES[width])
    measured = busy.measured
    assert load_or_measure_pass_cost(bundle, CONFIG, bound).doubt is None
    assert busy.measured == measured, "costs that nothing is known against are not measured again"


def test_doubtful_costs_are_not_measured_for_ever(
    tiny_bundle: Path, bound: BoundSession, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = open_bundle(tiny_bundle)
    PASS_COSTS.save(model_key(bundle, CONFIG), PassCost({512: TIMES}, Doubt.OUTDATED, 8))
    machine = SyntheticMachine(monkeypatch)
    assert load_or_measure_pass_cost(bundle, CONFIG, bound).doubt is Doubt.OUTDATED
    assert machine.measured == 0
