"""Bit allocation: sensitivities, the chosen plan, plans measured as a whole, and the store of quantized linears."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgerun.export.allocation.allocate import Allocation, allocate, cost_measures
from edgerun.export.allocation.choices import Sensitivity, measure_sensitivities
from edgerun.export.allocation.format_candidates import (
    BASE_FORMATS,
    allowed_formats,
    format_candidates,
    planned_linears,
)
from edgerun.export.allocation.plan_costs import (
    BYTES_READ,
    Budget,
    Measure,
    bytes_read,
    plan_cost,
    weight_count,
)
from edgerun.export.allocation.quantized_weights import QuantizedLinearStore
from edgerun.export.bundle_content import SourceModel
from edgerun.export.calibration.divergence import PlanEvaluator
from edgerun.export.checkpoint.config import DecoderConfig, read_config
from edgerun.export.checkpoint.layer_weights import FusedLinear
from edgerun.export.checkpoint.layout import fused_linears
from edgerun.export.checkpoint.safetensors_files import Checkpoint
from edgerun.export.quantization.methods import DEFAULT_METHODS
from edgerun.export.report.compared_plans import uniform_plan
from edgerun.models.manifest import Method, WeightFormat
from support.tiny_models import write_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny", "qwen2", hidden_size=96)


@pytest.fixture(scope="module")
def config(checkpoint: Path) -> DecoderConfig:
    return read_config(checkpoint)


def refused(*_: object) -> float:
    raise AssertionError("measured again")


def test_each_sensitivity_is_measured_once(tmp_path: Path, checkpoint: Path, config: DecoderConfig) -> None:
    """Also that of a format with another method, which compares equal; after an interruption too."""
    source, linears = Checkpoint(checkpoint), [each.name for each in planned_linears(config)][:2]
    text = [np.random.default_rng(seed).integers(0, config.vocab_size, 40) for seed in range(2)]
    formats = [*FORMATS, replace(FORMATS[0], method=Method.RTN)]
    store = QuantizedLinearStore(source, config, tmp_path / "linears")
    quantized: list[str] = []

    def sensitivities(weights: Callable[..., Any]) -> dict[str, list[Sensitivity]]:
        evaluator = PlanEvaluator(SourceModel(source, config, 64), text, weights, tmp_path / "states")
        return measure_sensitivities(list(product(linears, formats)), evaluator.divergence_alone)

    def interrupted(linear: FusedLinear, weight_format: WeightFormat) -> Any:
        quantized.append(linear.name)
        if len(quantized) == 4:
            raise KeyboardInterrupt
        return store.weights(linear, weight_format)

    with pytest.raises(KeyboardInterrupt):
        sensitivities(interrupted)
    found = sensitivities(interrupted)
    assert len(quantized) == 2 * len(formats) + 1
    assert sensitivities(refused) == found
    assert [each.weight_format for each in found[linears[1]]] == formats
    (tmp_path / "states" / "mean-kl.json").write_text("damaged", encoding="utf-8")
    with pytest.raises(AssertionError, match="measured again"):
        sensitivities(refused)


class TestAllocation:
    def test_beats_uniform_plans_and_wastes_no_bytes(
        self, tmp_path: Path, checkpoint: Path, config: DecoderConfig
    ) -> None:
        source = Checkpoint(checkpoint)
        text = [np.random.default_rng(seed).integers(0, config.vocab_size, 40) for seed in range(4)]
        store = QuantizedLinearStore(source, config, tmp_path / "linears")
        evaluator = PlanEvaluator(SourceModel(source, config, 64), text, store.weights, tmp_path / "states")
        formats = format_candidates(DEFAULT_METHODS)

        def divergence(plan: Mapping[str, WeightFormat]) -> float:
            return evaluator.divergence(plan).mean_kl

        uniform = uniform_plan(config, WeightFormat(4, 64))
        limit = plan_cost(uniform, BYTES_READ, config)
        budget = Budget(limit * 8 / weight_count(config), Measure.BITS)
        sensitivities = measure_sensitivities(allowed_formats(config, formats), evaluator.divergence_alone)
        arguments = config, sensitivities, (divergence, divergence), budget, cost_measures(budget, config)
        found = allocate(*arguments)
        assert plan_cost(found.plan, BYTES_READ, config) <= limit * (1 + 1e-9)
        assert found.plan["embedding"] == found.plan["head"]
        assert divergence(found.plan) == pytest.approx(found.divergence)
        assert found.divergence < divergence(uniform)
        for linear in planned_linears(config):
            for each in formats:
                if bytes_read(linear, each) < bytes_read(linear, found.plan[linear.name]) and linear.name != "head":
                    assert divergence({**found.plan, linear.name: each}) > found.divergence
        costs = [plan_cost(plan, BYTES_READ, config) for plan in found.frontier]
        assert costs == sorted(costs)
        assert allocate(*arguments).plan == found.plan

    @pytest.mark.parametrize("noise", [0.0, 0.004])
    def test_the_budget_limits_the_measured_cost(self, config: DecoderConfig, noise: float) -> None:
        generator = np.random.default_rng(0)

        def ratio(plan: Mapping[str, WeightFormat]) -> float:
            few = np.mean([each.bits == 2 for each in plan.values()])
            return float((1.2 + 0.2 * few) * (1 + noise * generator.standard_normal()))

        budget, found = _measured_as_a_whole(config, ratio)
        limit = budget.limit(config)
        few = np.mean([each.bits == 2 for linear, each in found.plan.items() if linear != "embedding"])
        cost = plan_cost(found.plan, BYTES_READ, config)
        assert found.measured_ratio == pytest.approx(1.2 + 0.2 * few, rel=0.05)
        assert 0.9 * limit < found.measured_ratio * cost < 1.02 * limit

    def test_a_plan_is_measured_after_its_last_correction(self, config: DecoderConfig) -> None:
        measured: list[Mapping[str, WeightFormat]] = []

        def ratio(plan: Mapping[str, WeightFormat]) -> float:
            """The ratio on a machine that gets slower all the time."""
            measured.append(plan)
            return float(1.1 ** len(measured))

        budget, found = _measured_as_a_whole(config, ratio)
        assert measured[-1] == found.plan
        assert found.measured_ratio == pytest.approx(1.1 ** len(measured))
        assert found.measured_ratio * plan_cost(found.plan, BYTES_READ, config) < 1.11 * budget.limit(config)


def _measured_as_a_whole(
    config: DecoderConfig, measured_ratio: Callable[[Mapping[str, WeightFormat]], float]
) -> tuple[Budget, Allocation]:
    """A plan of 6 bits, where divergences add up."""

    def alone(linear: str, weight_format: WeightFormat) -> float:
        return (1 + len(linear)) * 4.0**-weight_format.bits * weight_format.block

    def together(plan: Mapping[str, WeightFormat]) -> float:
        return sum(alone(linear, each) for linear, each in plan.items())

    budget = Budget(6.0, Measure.BITS)
    costs = cost_measures(budget, config)
    sensitivities = measure_sensitivities(allowed_formats(config, BASE_FORMATS), alone)
    return budget, allocate(config, sensitivities, (together, together), budget, costs, measured_ratio)


INT4 = WeightFormat(4, 64)
FORMATS = tuple(WeightFormat(bits, 64) for bits in (2, 4, 8))


class _Unreadable(Checkpoint):
    """A source that cannot quantize any more."""

    def quantized(self, *_: object) -> None:
        raise AssertionError("quantized again")


@pytest.mark.parametrize("weight_format", format_candidates(DEFAULT_METHODS, zero_points=True)[::3], ids=str)
def test_rows_are_those_of_the_source(
    tmp_path: Path, checkpoint: Path, config: DecoderConfig, weight_format: WeightFormat
) -> None:
    source = Checkpoint(checkpoint)
    for linear in planned_linears(config):
        QuantizedLinearStore(source, config, tmp_path).make(linear, weight_format)
    store = QuantizedLinearStore(_Unreadable(checkpoint), config, tmp_path)
    for linear in planned_linears(config):
        for name in linear.weights:
            for rows in source.row_ranges(name):
                part = rows._replace(start=rows.start + 1)
                pairs = zip(store.quantized(part, weight_format), source.quantized(part, weight_format), strict=True)
                for stored, expected in pairs:
                    assert (stored is None) == (expected is None)
                    if expected is not None:
                        np.testing.assert_array_equal(stored, expected)
        exact = np.concatenate([source.read(name) for name in linear.weights])
        assert np.abs(store.weights(linear, weight_format) - exact).mean() < np.abs(exact).mean()


def test_a_tied_embedding_is_its_head(tmp_path: Path, checkpoint: Path, config: DecoderConfig) -> None:
    store = QuantizedLinearStore(Checkpoint(checkpoint), config, tmp_path)
    embedding, *_, head = fused_linears(config)
    store.make(embedding, INT4)
    assert len(list(tmp_path.iterdir())) == 1
    np.testing.assert_array_equal(store.weights(head, INT4), store.weights(embedding, INT4))
