"""Times of units: measured on models of their shape, told apart, and added up for any plan."""

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
from edgerun.export.allocation.format_candidates import BASE_FORMATS, LOW_RANK_FORMATS, planned_linears, with_embedding
from edgerun.export.allocation.linear_times import (
    ROWS,
    LinearTimes,
    at_rows,
    linear_kind,
    load_or_measure,
    measure,
    timed_form,
)
from edgerun.export.allocation.plan_costs import plan_cost
from edgerun.export.allocation.plan_selection import measured_over_predicted
from edgerun.export.allocation.timing_bundles import TimingBundle, timing_bundles, uniform_bundles
from edgerun.export.checkpoint.config import DecoderConfig, read_config
from edgerun.models.manifest import Method
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph import prepacked
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from edgerun.runtime.measure.bundle_timing import BundleTimer, packed_graphs
from support.known_timings import KnownMachine, use_machine
from support.tiny_models import write_checkpoint

FORMS = (WeightFormat(2, 32), WeightFormat(4, 32), WeightFormat(8, 32))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGERUN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def config_of(folder: Path, family: str = "qwen2", **settings: object) -> DecoderConfig:
    return read_config(write_checkpoint(folder / "checkpoint", family, **settings))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("layers", [2, 30])
def test_any_plan_is_predicted_where_times_add_up(cache: Path, tmp_path: Path, tied: bool, layers: int) -> None:
    config = config_of(tmp_path, tie_word_embeddings=tied)
    config = replace(config, layers=layers, attention=config.attention[:1] * layers)
    machine = KnownMachine()
    times = measure(config, (*BASE_FORMATS, *LOW_RANK_FORMATS), timer=machine)
    rng = np.random.default_rng(0)
    linears = [linear.name for linear in planned_linears(config)]
    plan = with_embedding(config, {linear: BASE_FORMATS[rng.integers(len(BASE_FORMATS))] for linear in linears})
    plan |= {
        "layers.0.qkv": LOW_RANK_FORMATS[0],
        "layers.1.o": LOW_RANK_FORMATS[2],
        "layers.1.down": LOW_RANK_FORMATS[4],
    }
    assert LinearTimes.from_json(json.loads(json.dumps(times.to_json())), config) == times
    for rows in ROWS:
        assert times.milliseconds(plan, rows) == pytest.approx(1e3 * machine.pass_of(plan, layers, rows))
        assert plan_cost(plan, times.costs(rows), config) == pytest.approx(times.milliseconds(plan, rows))
        assert times.scaled(2).milliseconds(plan, rows) == pytest.approx(2 * times.milliseconds(plan, rows))
    assert list(cache.glob("units-*")) == []


def test_times_are_measured_once_for_a_shape_and_its_conditions(cache: Path, tmp_path: Path) -> None:
    config, machine = config_of(tmp_path), KnownMachine()
    first = load_or_measure(config, FORMS, timer=machine)
    assert load_or_measure(config, FORMS, timer=machine) == first
    load_or_measure(config, [replace(FORMS[0], method=Method.HQQ, zero_points=True), *FORMS], timer=machine)
    assert machine.timed_bundles == [6]
    load_or_measure(replace(config, hidden_size=2 * config.hidden_size), FORMS, timer=machine)
    machine.conditions = "another"
    load_or_measure(config, FORMS, timer=machine)
    assert machine.timed_bundles == [6, 6, 6]
    for file in (cache / "linear-times").iterdir():
        file.write_text("{}")
    assert load_or_measure(config, FORMS, timer=machine) == first
    assert machine.timed_bundles[3:] == [6]


@pytest.mark.parametrize("tied", [True, False])
def test_whole_passes_say_how_much_slower_the_machine_is(
    cache: Path, tmp_path: Path, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, machine = config_of(tmp_path, tie_word_embeddings=tied), KnownMachine()
    use_machine(monkeypatch, machine)
    times = load_or_measure(config, FORMS)
    forms = {linear.name: FORMS[place % 3] for place, linear in enumerate(planned_linears(config))}
    plan = with_embedding(config, forms)
    for slow in (1.5, 0.7, 1.0):
        machine.slow = slow
        assert measured_over_predicted(times, plan, [1, 4]) == pytest.approx(slow)
    assert list(cache.glob("plan-*")) == []


@pytest.mark.parametrize(
    "damaged",
    [
        {},
        {"units": 3, "rest": {"1": 1.0}},
        {"units": {"o": {"four/32": {"1": 1.0}}}, "rest": {"1": 1.0}},
        {"units": {"o": {"4/32": {"1": "x"}}}, "rest": {"1": 1.0}},
        {"units": {"o": {"4/32": {}}}, "rest": {"1": 1.0}},
    ],
)
def test_damaged_times_are_not_read(damaged: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r".+"):
        LinearTimes.from_json(damaged, config_of(tmp_path))


def test_times_survive_json(tmp_path: Path, cache: Path) -> None:
    config = config_of(tmp_path)
    times = measure(config, FORMS, timer=KnownMachine())
    assert LinearTimes.from_json(json.loads(json.dumps(times.to_json())), config) == times


@given(st.dictionaries(st.integers(1, 64), st.floats(0.1, 10), min_size=1), st.integers(1, 80))
def test_rows_between_are_interpolated(times: dict[int, float], rows: int) -> None:
    found = at_rows(times, rows)
    assert math.isfinite(found)
    if rows in times:
        assert found == pytest.approx(times[rows])
    elif min(times) < rows < max(times):
        assert min(times.values()) - 1e-9 <= found <= max(times.values()) + 1e-9


def test_there_is_a_model_in_the_largest_blocks_of_each_number_of_bits(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    plans = [set(bundle.plan.values()) for bundle in uniform_bundles(config, (*BASE_FORMATS, *LOW_RANK_FORMATS))]
    assert plans == [{WeightFormat(bits, 128)} for bits in (2, 4, 8)]
    deep = replace(config, layers=10**5, attention=config.attention[:1] * 10**5)
    (bundle,) = uniform_bundles(deep, FORMS[:1])
    assert 2 < bundle.config.layers < deep.layers


def test_every_kind_of_unit_has_every_format_somewhere(tmp_path: Path) -> None:
    for layers in (1, 2, 40):
        config = config_of(tmp_path)
        config = replace(config, layers=layers, attention=config.attention[:1] * layers)
        bundles = timing_bundles(config, BASE_FORMATS)
        found = {(linear_kind(name), form) for bundle in bundles for name, form in bundle.plan.items()}
        assert found == {
            (k, form) for k in ("embedding", "head", "qkv", "o", "gate_up", "down") for form in BASE_FORMATS
        }
        assert bundles[0].config.layers == layers


@pytest.mark.parametrize("family", ["llama", "gemma2", "olmo2", "phi3"])
def test_the_models_run_and_their_nodes_are_timed(family: str, cache: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, family)
    times = measure(config, (*FORMS, LOW_RANK_FORMATS[0]), rounds=1, timer=BundleTimer(threads=1))
    assert {kind for kind, _ in times.linears} == {"qkv", "o", "gate_up", "down", "head"}
    assert all(min(each.values()) > 0 for each in times.linears.values())
    assert set(times.rest) == set(ROWS)
    plan = {name: timed_form(WeightFormat(4, 32, method=Method.K_QUANT)) for name in ("embedding", "head")}
    plan |= {linear.name: FORMS[1] for linear in planned_linears(config)}
    plan |= {"layers.0.down": LOW_RANK_FORMATS[0], "layers.0.gate_up": LOW_RANK_FORMATS[0]}
    assert math.isfinite(times.milliseconds(plan, 3))
    with pytest.raises(KeyError):
        times.milliseconds(plan | {"head": WeightFormat(4, 128)}, 1)


def test_no_two_matrices_share_a_place_in_memory(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepacked, "_MIN_WEIGHT_BYTES", 0)
    config = config_of(tmp_path, hidden_size=256, intermediate_size=512)
    sizes = []
    for layers in (1, 2):
        short = replace(config, layers=layers, attention=config.attention[:layers], tied_head=True)
        names = [linear.name for linear in planned_linears(short)]
        TimingBundle(short, with_embedding(short, dict.fromkeys(names, FORMS[1]))).write(tmp_path / str(layers))
        with packed_graphs([tmp_path / str(layers)]) as [(bundle, graph)]:
            GraphSession(graph, SessionConfig(choose_device("cpu"), 1))
            sizes.append(sum(file.stat().st_size for file in graph.parent.iterdir()) - bundle.weight_bytes)
    layer = 256 * (512 + 256 + 1024 + 512) // 2
    assert sizes[1] - sizes[0] > layer
