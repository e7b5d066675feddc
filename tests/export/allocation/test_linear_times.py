"""Times of linears: measured, separated, and added up for any plan."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgerun.export import WeightFormat
from edgerun.export.allocation.allocate import measured_over_predicted
from edgerun.export.allocation.format_candidates import BASE_FORMATS, completed_plan, planned_linears
from edgerun.export.allocation.linear_times import (
    WIDTHS,
    LinearTimes,
    WholePass,
    fit_passes,
    interpolated,
    linear_kind,
    load_or_measure,
    measure,
    timed_format,
)
from edgerun.export.allocation.plan_costs import plan_cost
from edgerun.export.allocation.timing_bundles import TimingBundle, timing_bundles, uniform_bundles
from edgerun.export.checkpoint.config import DecoderConfig, read_config
from edgerun.models.manifest import Method
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph import packed_files
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from edgerun.runtime.measure.bundle_timing import BundleTimer, packed_graphs
from support.known_timings import KnownMachine, use_machine
from support.nightly import some_nightly
from support.tiny_models import write_checkpoint

FORMATS = (WeightFormat(2, 32), WeightFormat(4, 32), WeightFormat(8, 32))


def config_of(folder: Path, family: str = "qwen2", **settings: object) -> DecoderConfig:
    return read_config(write_checkpoint(folder / "checkpoint", family, **settings))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("layers", [2, pytest.param(30, marks=pytest.mark.nightly)])
def test_a_plan_is_predicted_exactly_where_times_add_up(cache: Path, tmp_path: Path, tied: bool, layers: int) -> None:
    config = config_of(tmp_path, tie_word_embeddings=tied)
    config = replace(config, layers=layers, attention=config.attention[:1] * layers)
    machine = KnownMachine()
    times = measure(config, BASE_FORMATS, timer=machine)
    rng = np.random.default_rng(0)
    linears = [linear.name for linear in planned_linears(config)]
    plan = completed_plan(config, {linear: BASE_FORMATS[rng.integers(len(BASE_FORMATS))] for linear in linears})
    assert LinearTimes.from_json(json.loads(json.dumps(times.to_json())), config) == times
    slow = replace(times, slowdown=2)
    for width in WIDTHS:
        assert times.milliseconds(plan, width) == pytest.approx(1e3 * machine.pass_of(plan, layers, width))
        assert plan_cost(plan, times.costs(width), config) == pytest.approx(times.milliseconds(plan, width))
        assert slow.milliseconds(plan, width) == pytest.approx(2 * times.milliseconds(plan, width))
    assert list(cache.glob("linears-*")) == []


def test_times_are_cached_by_shape_and_conditions(cache: Path, tmp_path: Path) -> None:
    config, machine = config_of(tmp_path), KnownMachine()
    first = load_or_measure(config, FORMATS, timer=machine)
    assert load_or_measure(config, FORMATS, timer=machine) == first
    load_or_measure(config, [replace(FORMATS[0], method=Method.GPTQ, zero_points=True), *FORMATS], timer=machine)
    assert machine.timed_bundles == [6]
    load_or_measure(replace(config, hidden_size=2 * config.hidden_size), FORMATS, timer=machine)
    machine.conditions = "another"
    load_or_measure(config, FORMATS, timer=machine)
    assert machine.timed_bundles == [6, 6, 6]
    for file in (cache / "linear-times").iterdir():
        file.write_text("{}", encoding="utf-8")
    assert load_or_measure(config, FORMATS, timer=machine) == first
    assert machine.timed_bundles[3:] == [6]


@pytest.mark.parametrize("tied", [True, False])
def test_whole_passes_measure_the_slowdown_of_the_machine(
    cache: Path, tmp_path: Path, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, machine = config_of(tmp_path, tie_word_embeddings=tied), KnownMachine()
    use_machine(monkeypatch, machine)
    times = load_or_measure(config, FORMATS)
    formats = {linear.name: FORMATS[place % 3] for place, linear in enumerate(planned_linears(config))}
    plan = completed_plan(config, formats)
    for slow in (1.5, 0.7, 1.0):
        machine.slow = slow
        assert measured_over_predicted(times, plan, [1, 4]) == pytest.approx(slow)
    assert list(cache.glob("plan-*")) == []


@pytest.mark.parametrize(
    "damaged",
    [
        {},
        {"linears": 3, "overhead": {"1": 1.0}},
        {"linears": {"o": {"four/32": {"1": 1.0}}}, "overhead": {"1": 1.0}},
        {"linears": {"o": {"4/32": {"1": "x"}}}, "overhead": {"1": 1.0}},
        {"linears": {"o": {"4/32": {}}}, "overhead": {"1": 1.0}},
    ],
)
def test_damaged_times_are_rejected(damaged: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r".+"):
        LinearTimes.from_json(damaged, config_of(tmp_path))


@given(st.dictionaries(st.integers(1, 64), st.floats(0.1, 10), min_size=1), st.integers(1, 80))
def test_widths_in_between_are_interpolated(times: dict[int, float], width: int) -> None:
    found = interpolated(times, width)
    assert math.isfinite(found)
    if width in times:
        assert found == pytest.approx(times[width])
    elif min(times) < width < max(times):
        assert min(times.values()) - 1e-9 <= found <= max(times.values()) + 1e-9


def test_uniform_bundles_have_the_largest_blocks_of_each_bit_width(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    plans = [set(bundle.plan.values()) for bundle in uniform_bundles(config, BASE_FORMATS)]
    assert plans == [{WeightFormat(bits, 128)} for bits in (2, 4, 8)]
    deep = replace(config, hidden_size=2048, intermediate_size=8192, layers=100, attention=config.attention[:1] * 100)
    (bundle,) = uniform_bundles(deep, FORMATS[:1])
    assert 2 < bundle.config.layers < deep.layers


def test_every_kind_of_linear_has_every_format_in_some_bundle(tmp_path: Path) -> None:
    for layers in (1, 2, 40):
        config = config_of(tmp_path)
        config = replace(config, layers=layers, attention=config.attention[:1] * layers)
        bundles = timing_bundles(config, BASE_FORMATS)
        found = {
            (linear_kind(name), weight_format) for bundle in bundles for name, weight_format in bundle.plan.items()
        }
        assert found == {
            (k, weight_format)
            for k in ("embedding", "head", "qkv", "o", "gate_up", "down")
            for weight_format in BASE_FORMATS
        }
        assert bundles[0].config.layers == layers


@pytest.mark.parametrize("family", some_nightly(["llama", "gemma2", "olmo2", "phi3"], every=2))
def test_timing_bundles_run_and_their_nodes_are_timed(family: str, cache: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, family)
    times = measure(config, FORMATS, rounds=1, timer=BundleTimer(threads=1))
    assert {kind for kind, _ in times.linears} == {"qkv", "o", "gate_up", "down", "head"}
    assert all(min(each.values()) > 0 for each in times.linears.values())
    assert set(times.overhead) == set(WIDTHS)
    plan = {name: timed_format(WeightFormat(4, 32, method=Method.K_QUANT)) for name in ("embedding", "head")}
    plan |= {linear.name: FORMATS[1] for linear in planned_linears(config)}
    assert math.isfinite(times.milliseconds(plan, 3))
    with pytest.raises(KeyError):
        times.milliseconds(plan | {"head": WeightFormat(4, 128)}, 1)


def test_no_two_matrices_share_memory(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_files, "_MIN_WEIGHT_BYTES", 0)
    config = config_of(tmp_path, hidden_size=256, intermediate_size=512)
    sizes = []
    for layers in (1, 2):
        short = replace(config, layers=layers, attention=config.attention[:layers], tied_head=True)
        names = [linear.name for linear in planned_linears(short)]
        TimingBundle(short, completed_plan(short, dict.fromkeys(names, FORMATS[1]))).write(tmp_path / str(layers))
        with packed_graphs([tmp_path / str(layers)]) as [(bundle, graph)]:
            GraphSession(graph, SessionConfig(choose_device("cpu"), 1))
            sizes.append(sum(file.stat().st_size for file in graph.parent.iterdir()) - bundle.weight_bytes)
    layer = 256 * (512 + 256 + 1024 + 512) // 2
    assert sizes[1] - sizes[0] > layer


BITS = (2, 4, 8)


def whole_pass(layers: int, linears: dict[int, float], factors: dict[int, float], layer: float) -> WholePass:
    """A pass whose linears take `factors` times as long in it as alone."""
    milliseconds = layers * layer + sum(factors[bits] * each for bits, each in linears.items())
    return WholePass(layers, milliseconds, linears)


def passes(factors: dict[int, float], layer: float) -> list[WholePass]:
    """Passes over a model for each number of bits, and over one with all."""
    uniform = [{bits: 2.0 + bits} for bits in BITS]
    return [whole_pass(24, linears, factors, layer) for linears in (*uniform, dict.fromkeys(BITS, 1.0))]


@given(st.lists(st.floats(0.85, 1.15), min_size=3, max_size=3), st.floats(0.01, 0.1))
def test_fitted_passes_are_close_where_linears_take_longer_together(values: list[float], layer: float) -> None:
    factors = dict(zip(BITS, values, strict=True))
    fit = fit_passes(passes(factors, layer))
    rng = np.random.default_rng(0)
    for _ in range(10):
        linears = dict(zip(BITS, map(float, rng.uniform(0, 4, 3)), strict=True))
        expected = whole_pass(24, linears, factors, layer).milliseconds
        assert whole_pass(24, linears, *fit).milliseconds == pytest.approx(expected, rel=0.03)


def test_few_and_disturbed_passes() -> None:
    good = passes(dict.fromkeys(BITS, 1.0), 0.04)
    slow = WholePass(24, 10 * good[0].milliseconds, good[0].by_bits)
    factors, _ = fit_passes([slow, *good[1:]])
    assert all(0.5 < factor < 1.5 for factor in factors.values())
    factors, layer = fit_passes([WholePass(2, 5.0, {4: 4.0})])
    assert 2 * layer + 4 * factors[4] == pytest.approx(5.0)
    assert factors[4] == pytest.approx(1.0)
    assert set(fit_passes(good[:2])[0]) == {2, 4}
