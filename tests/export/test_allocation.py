"""Formats unit by unit: what they cost, which are worth it, and plans that fit a budget with the least divergence."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgerun.errors import InputError
from edgerun.export.allocation.allocate import Allocation, allocate, measures_for
from edgerun.export.allocation.baseline_plans import favoured_linears, rule_plans, uniform_plan
from edgerun.export.allocation.budget import Budget, Measure, parse_budget
from edgerun.export.allocation.choices import (
    Choice,
    Level,
    choices_of,
    fits,
    lowered,
    plan_of,
    total_costs,
    without_beaten_repairs,
    worthwhile,
)
from edgerun.export.allocation.costs import ByteCosts, cost_of
from edgerun.export.allocation.format_candidates import (
    LADDER,
    REPAIRED,
    bytes_read,
    chosen_linears,
    levels,
    weight_count,
)
from edgerun.export.allocation.lagrange import cheapest, seed_plan
from edgerun.export.allocation.polish import polished, without_vain_levels
from edgerun.export.allocation.quantized_weights import QuantizedLinearStore
from edgerun.export.allocation.search import Measured, SearchSettings, evolve
from edgerun.export.allocation.sensitivity import Solo, solo_divergences
from edgerun.export.calibration.divergence import PlanEvaluator
from edgerun.export.checkpoint.config import DecoderConfig, read_config
from edgerun.export.checkpoint.layout import FusedLinear
from edgerun.export.checkpoint.safetensors_files import Checkpoint
from edgerun.export.recipe import DEFAULT_METHODS
from edgerun.models.manifest import WeightFormat
from support.tiny_models import write_checkpoint

LINEARS = 5
FORMS = tuple(WeightFormat(bits, 64) for bits in (2, 4, 8))
QUICK = SearchSettings(generations=60, patience=15, offspring=12, survivors=(4,))


def toy_choices(seed: int, linears: int = LINEARS) -> tuple[Choice, ...]:
    """Units of random sizes whose divergence falls with their bits."""
    random = np.random.default_rng(seed)
    choices = []
    for index in range(linears):
        size, need = random.uniform(1, 4), random.exponential()
        rungs = tuple(Level(form, (size * form.bits,), need / 6 ** (place + 1)) for place, form in enumerate(FORMS))
        choices.append(Choice(f"unit {index}", rungs))
    return tuple(choices)


def alone(choice: Choice, plan: Mapping[str, WeightFormat]) -> float:
    return next(level.divergence for level in choice.levels if level.form == plan[choice.linear])


def toy_divergence(choices: tuple[Choice, ...], seed: int) -> Callable[[Mapping[str, WeightFormat]], float]:
    """A divergence that does not add up: neighbours in few bits make each other worse, or better."""
    together = np.random.default_rng(seed + 1).uniform(-0.6, 1.5, len(choices))

    def divergence(plan: Mapping[str, WeightFormat]) -> float:
        each = [
            next(level.divergence for level in choice.levels if level.form == plan[choice.linear]) for choice in choices
        ]
        pairs = (more * math.sqrt(one * other) for more, one, other in zip(together, each, each[1:], strict=False))
        return sum(each) + sum(pairs)

    return divergence


def best_of_all(choices: tuple[Choice, ...], limits: list[float], divergence) -> float:
    every = product(*(range(len(choice.levels)) for choice in choices))
    return min(divergence(plan_of(choices, picks)) for picks in every if fits(choices, picks, limits))


def middling_limit(choices: tuple[Choice, ...], share: float = 0.4) -> list[float]:
    least, most = (total_costs(choices, (pick,) * len(choices))[0] for pick in (0, len(FORMS) - 1))
    return [least + share * (most - least)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny", "qwen2", hidden_size=96)


@pytest.fixture(scope="module")
def config(checkpoint: Path) -> DecoderConfig:
    return read_config(checkpoint)


class TestBudget:
    @pytest.mark.parametrize(
        ("text", "budget"),
        [
            ("3.5bpw", Budget(3.5, Measure.BITS)),
            (" 300 MB ", Budget(300, Measure.MEGABYTES)),
            ("9ms", Budget(9, Measure.MILLISECONDS)),
            ("20.5MS@4", Budget(20.5, Measure.MILLISECONDS, 4)),
        ],
    )
    def test_reads_what_people_write(self, text: str, budget: Budget) -> None:
        assert parse_budget(text) == budget
        assert parse_budget(str(budget)) == budget

    @pytest.mark.parametrize(
        "text", ["", "3.5", "bpw", "-3bpw", "0MB", "nanbpw", "1e3MB", "9ms@0", "3bpw@4", "3 GB", f"{10**400}MB"]
    )
    def test_refuses_what_is_none(self, text: str) -> None:
        with pytest.raises(InputError, match="is no budget"):
            parse_budget(text)

    def test_counts_bytes_as_packed(self, config: DecoderConfig) -> None:
        """Blocks are whole, and each has 8 bytes beside its codes; an embedding is as in the file."""
        assert bytes_read(FusedLinear("layers.0.o", (), (10,), 96), WeightFormat(4, 64)) == 10 * (2 * 32 + 2 * 8)
        assert bytes_read(FusedLinear("head", (), (10,), 96), WeightFormat(2, 32)) == 10 * (3 * 8 + 3 * 8)
        assert bytes_read(FusedLinear("embedding", (), (10,), 96), WeightFormat(8, 32, zero_points=True)) == 10 * (
            96 + 12 + 3
        )
        assert bytes_read(FusedLinear("head", (), (10,), 96), WeightFormat(32)) == 3840
        assert Budget(4, Measure.BITS).limit(config) == weight_count(config) / 2

    def test_shared_matrix_counts_once(self, config: DecoderConfig) -> None:
        names = [linear.name for linear in chosen_linears(config)]
        assert "embedding" not in names
        assert weight_count(config) == sum(linear.weight_count for linear in chosen_linears(config))
        assert "embedding" in [linear.name for linear in chosen_linears(replace(config, tied_head=False))]


class TestWorthwhile:
    rungs = st.lists(
        st.builds(
            lambda *numbers: Level(WeightFormat(4, 32), (float(numbers[0]), float(numbers[1])), float(numbers[2])),
            *(st.integers(0, 4) for _ in range(3)),
        ),
        min_size=1,
        max_size=8,
    )

    @given(rungs)
    def test_nothing_is_spent_in_vain(self, offered: list[Level]) -> None:
        kept = worthwhile(offered)
        assert list(kept) == sorted(kept, key=lambda level: level.costs)
        for level in offered:
            at_most = [
                other
                for other in kept
                if other.divergence <= level.divergence
                and all(ours <= theirs for ours, theirs in zip(other.costs, level.costs, strict=True))
            ]
            assert at_most == [level] if level in kept else at_most


class TestRepairs:
    PLAIN = (Level(WeightFormat(2, 64), (10.0,), 1.0), Level(WeightFormat(4, 64), (20.0,), 0.2))

    @pytest.mark.parametrize(
        ("cost", "divergence", "wins"),
        [
            (15.0, 0.61, False),
            (15.0, 0.59, True),
            (10.0, 1.0, False),
            (9.0, 1.5, True),
            (20.0, 0.2, False),
            (25.0, 0.2, False),
            (25.0, 0.1, True),
        ],
    )
    def test_they_have_to_win_at_equal_cost(self, cost: float, divergence: float, wins: bool) -> None:
        level = Level(WeightFormat(2, 64, rank=32), (cost,), divergence)
        assert (level in without_beaten_repairs([*self.PLAIN, level])) is wins
        assert without_beaten_repairs(self.PLAIN) == list(self.PLAIN)

    def test_choices_have_only_those_that_win(self, config: DecoderConfig) -> None:
        def solos(kl: float) -> list[Solo]:
            found = {"int2/64": 1.0, "int8/32": 0.0, "int2/64+rank16": kl}
            return [Solo(form, found[str(form)]) for form in (*LADDER, *REPAIRED) if str(form) in found]

        for kl, kept in ((0.001, 3), (0.9, 2)):
            choices = choices_of(config, {linear.name: solos(kl) for linear in chosen_linears(config)}, [ByteCosts()])
            assert len({choice.linear: choice for choice in choices}["layers.0.gate_up"].levels) == kept


class TestSeed:
    @given(st.integers(0, 1000), st.floats(0.01, 1.2))
    def test_fits_and_leaves_nothing_over(self, seed: int, share: float) -> None:
        choices = toy_choices(seed)
        limits = middling_limit(choices, share)
        picks = seed_plan(choices, limits)
        assert fits(choices, picks, limits)
        for index, pick in enumerate(picks):
            for dearer in range(pick + 1, len(FORMS)):
                assert not fits(choices, (*picks[:index], dearer, *picks[index + 1 :]), limits)

    @pytest.mark.parametrize("seed", range(5))
    def test_is_near_the_best_where_divergences_add_up(self, seed: int) -> None:
        choices = toy_choices(seed, linears=7)
        limits = middling_limit(choices)

        def added(plan: Mapping[str, WeightFormat]) -> float:
            return sum(
                next(each.divergence for each in choice.levels if each.form == plan[choice.linear])
                for choice in choices
            )

        assert added(plan_of(choices, seed_plan(choices, limits))) <= 1.6 * best_of_all(choices, limits, added)

    def test_keeps_several_limits(self) -> None:
        """A level that is cheap in bytes may be dear in time."""
        fast, small = Level(FORMS[1], (4.0, 1.0), 0.5), Level(FORMS[0], (2.0, 3.0), 0.4)
        choices = tuple(Choice(f"unit {index}", (small, fast)) for index in range(2))
        assert seed_plan(choices, [8.0, 2.5]) == (1, 1)
        assert seed_plan(choices, [8.0, math.inf]) == (0, 0)
        assert cheapest(choices, [math.inf, 2.5]) == (1, 1)


class TestSearch:
    @pytest.mark.parametrize("seed", range(4))
    def test_finds_the_best_plan(self, tmp_path: Path, seed: int) -> None:
        choices = toy_choices(seed)
        limits, divergence = middling_limit(choices), toy_divergence(choices, seed)
        measured = Measured(choices, [divergence, divergence])
        found = evolve(choices, seed_plan(choices, limits), limits, measured, QUICK, tmp_path / "search.json")
        picks = polished(choices, found.picks, limits, measured, 60)
        assert fits(choices, picks, limits)
        assert measured(picks) == pytest.approx(best_of_all(choices, limits, divergence))

    def test_goes_on_where_it_was_interrupted(self, tmp_path: Path) -> None:
        choices = toy_choices(3, linears=9)
        limits, divergence = middling_limit(choices), toy_divergence(choices, 3)
        start = cheapest(choices, limits)
        whole = evolve(choices, start, limits, Measured(choices, [divergence]), QUICK, tmp_path / "whole.json")
        left = 40

        def failing(plan: Mapping[str, WeightFormat]) -> float:
            nonlocal left
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
            return divergence(plan)

        parts = tmp_path / "parts.json"
        with pytest.raises(KeyboardInterrupt):
            evolve(choices, start, limits, Measured(choices, [failing]), QUICK, parts)
        assert parts.is_file()
        assert evolve(choices, start, limits, Measured(choices, [divergence]), QUICK, parts) == whole

    @pytest.mark.parametrize("damage", [b"", b"{}", b'{"plan": {"unit 0": "int3/64"}}', b"\xff"])
    def test_a_damaged_state_is_no_state(self, tmp_path: Path, damage: bytes) -> None:
        choices = toy_choices(0)
        limits, measured = middling_limit(choices), Measured(choices, [toy_divergence(choices, 0)])
        state = tmp_path / "search.json"
        sound = evolve(choices, seed_plan(choices, limits), limits, measured, QUICK, state)
        state.write_bytes(damage)
        assert evolve(choices, seed_plan(choices, limits), limits, measured, QUICK, state) == sound

    def test_ends_when_its_time_is_up(self, tmp_path: Path) -> None:
        choices = toy_choices(1)
        limits, ticks = middling_limit(choices), iter(range(1000))
        measured = Measured(choices, [toy_divergence(choices, 1)])
        short = replace(QUICK, seconds=3, patience=100)

        def clock() -> float:
            return float(next(ticks))

        evolve(choices, cheapest(choices, limits), limits, measured, short, tmp_path / "search.json", clock=clock)
        assert next(ticks) < 8

    def test_a_state_that_no_longer_fits_is_lowered(self, tmp_path: Path) -> None:
        choices = toy_choices(3, linears=9)
        roomy, narrow = (middling_limit(choices, share) for share in (0.6, 0.3))
        measured, state = Measured(choices, [toy_divergence(choices, 3)]), tmp_path / "search.json"
        whole = evolve(choices, seed_plan(choices, roomy), roomy, measured, QUICK, state)
        none_left = replace(QUICK, generations=0)
        found = evolve(choices, cheapest(choices, narrow), narrow, measured, none_left, state)
        assert fits(choices, found.picks, narrow)
        assert not fits(choices, whole.picks, narrow)
        assert found.picks == lowered(choices, whole.picks, narrow)
        assert found.divergence == measured(found.picks)

    @pytest.mark.parametrize("seed", range(6))
    def test_what_loses_least_is_lowered_first(self, seed: int) -> None:
        choices = toy_choices(seed)
        highest = (len(FORMS) - 1,) * LINEARS
        for share in (0.0, 0.2, 0.5, 0.8, 1.0):
            limits = middling_limit(choices, share)
            limits[0] *= 1 + 1e-12
            picks = lowered(choices, highest, limits)
            assert fits(choices, picks, limits)
            free = [index for index in range(LINEARS) if picks[index] < highest[index]]
            for index in free:
                raised = (*picks[:index], picks[index] + 1, *picks[index + 1 :])
                assert total_costs(choices, raised)[0] > total_costs(choices, picks)[0]
        assert lowered(choices, highest, middling_limit(choices, 2.0)) == highest

    def test_a_level_that_buys_nothing_goes(self, tmp_path: Path) -> None:
        """What a unit gains by itself may be worth nothing beside the others."""
        choices = toy_choices(2)

        def divergence(plan: Mapping[str, WeightFormat]) -> float:
            return sum(1 / form.bits for linear, form in plan.items() if linear != choices[0].linear)

        measured = Measured(choices, [divergence])
        picks = polished(choices, (2,) * LINEARS, [math.inf], measured, 60)
        assert picks == (0, *(2,) * (LINEARS - 1))
        assert without_vain_levels(choices, (2,) * LINEARS, measured) == picks

    def test_formats_that_hold_the_weights_alike(self, tmp_path: Path) -> None:
        """Of a checkpoint trained for few bits: there is nothing to search for, and the cheapest of them stays."""
        choices, asked = toy_choices(2), 0

        def divergence(plan: Mapping[str, WeightFormat]) -> float:
            nonlocal asked
            asked += 1
            return sum(0.0 if form.bits > 2 else 0.01 for form in plan.values())

        measured = Measured(choices, [divergence])
        dear = (len(FORMS) - 1,) * LINEARS
        found = evolve(choices, dear, [math.inf], measured, QUICK, tmp_path / "search.json")
        assert (found.picks, found.divergence, asked) == (dear, 0, 1)
        picks = without_vain_levels(choices, polished(choices, dear, [math.inf], measured, 60), measured)
        assert picks == (FORMS.index(WeightFormat(4, 64)),) * LINEARS


class TestSolo:
    def test_measures_once(self, tmp_path: Path, config: DecoderConfig) -> None:
        linears, asked = list(chosen_linears(config))[:2], []

        def solo(linear: str, form: WeightFormat) -> float:
            asked.append((linear, form))
            if len(asked) == 4:
                raise KeyboardInterrupt
            return len(asked) / 8

        with pytest.raises(KeyboardInterrupt):
            solo_divergences(linears, FORMS, solo, tmp_path / "solo.json")
        found = solo_divergences(linears, FORMS, solo, tmp_path / "solo.json")
        assert len(asked) == 2 * len(FORMS) + 1
        assert [each.divergence for each in found[linears[0].name]] == [1 / 8, 2 / 8, 3 / 8]
        assert [each.form for each in found[linears[1].name]] == list(FORMS)

    def test_methods_of_one_format_are_apart(self, tmp_path: Path, config: DecoderConfig) -> None:
        forms = [form for form in levels((DEFAULT_METHODS,)) for form in (form, replace(form, method=None))]
        linear = next(chosen_linears(config))
        found = solo_divergences([linear], forms, lambda _, form: 1.0 if form.method else 2.0, tmp_path / "solo.json")
        assert [each.divergence for each in found[linear.name]] == [1.0, 2.0] * len(LADDER)


class TestUnitStore:
    @pytest.mark.parametrize("form", levels((DEFAULT_METHODS,), zero_points=True)[::3], ids=str)
    def test_keeps_what_the_source_rounds(
        self, tmp_path: Path, checkpoint: Path, config: DecoderConfig, form: WeightFormat
    ) -> None:
        source = Checkpoint(checkpoint)
        for linear in chosen_linears(config):
            QuantizedLinearStore(source, config, tmp_path).make(linear, form)
        store = QuantizedLinearStore(_Unreadable(source), config, tmp_path)
        view = store.view(uniform_plan(config, form))
        for linear in chosen_linears(config):
            for name in linear.weights:
                for rows in source.row_ranges(name):
                    some = replace(rows, start=rows.start + 1)
                    for stored, rounded in zip(view.quantized(some, form), source.quantized(some, form), strict=True):
                        assert (stored is None) == (rounded is None)
                        if rounded is not None:
                            np.testing.assert_array_equal(stored, rounded)
            exact = np.concatenate([source.read(name) for name in linear.weights])
            assert np.abs(store.weights(linear, form) - exact).mean() < np.abs(exact).mean()

    def test_a_tied_embedding_is_its_head(self, tmp_path: Path, checkpoint: Path, config: DecoderConfig) -> None:
        store = QuantizedLinearStore(Checkpoint(checkpoint), config, tmp_path)
        embedding, *_, head = (linear for linear in _all_units(config))
        store.make(embedding, INT4)
        assert len(list(tmp_path.iterdir())) == 1
        np.testing.assert_array_equal(store.weights(head, INT4), store.weights(embedding, INT4))
        store.remove()
        assert not tmp_path.exists()


class TestComparison:
    def test_rule_favours_head_and_outer_layers(self, config: DecoderConfig) -> None:
        many = replace(config, layers=24)
        favoured = favoured_linears(many)
        assert favoured[:3] == ["head", "layers.0.qkv", "layers.0.down"]
        assert {"layers.23.down", "layers.5.qkv", "layers.8.qkv"} <= set(favoured)
        assert not {"layers.3.qkv", "layers.4.down"} & set(favoured)

    @settings(max_examples=20)
    @given(st.floats(2.0, 12.0))
    def test_rule_plans_fit(self, config: DecoderConfig, bits: float) -> None:
        limit = Budget(bits, Measure.BITS).limit(config)
        for plan in rule_plans(config, LADDER, ByteCosts(), limit):
            assert cost_of(plan, ByteCosts(), config) <= limit
            assert plan["head"].bits >= max(form.bits for form in plan.values())


class TestAllocate:
    def evaluator(self, tmp_path: Path, checkpoint: Path, config: DecoderConfig) -> PlanEvaluator:
        source = Checkpoint(checkpoint)
        text = [np.random.default_rng(seed).integers(0, config.vocab_size, 40) for seed in range(4)]
        store = QuantizedLinearStore(source, config, tmp_path / "units")
        return PlanEvaluator(source, config, text, store.weights, tmp_path / "states", 64)

    def test_beats_uniform_plans_and_spends_nothing_in_vain(
        self, tmp_path: Path, checkpoint: Path, config: DecoderConfig
    ) -> None:
        evaluator, forms = self.evaluator(tmp_path, checkpoint, config), levels((DEFAULT_METHODS,))

        def divergence(plan: Mapping[str, WeightFormat]) -> float:
            return evaluator.divergence(plan).mean_kl

        uniform = uniform_plan(config, WeightFormat(4, 64))
        limit = cost_of(uniform, ByteCosts(), config)
        budget = Budget(limit * 8 / weight_count(config), Measure.BITS)
        measures = measures_for(budget, config)
        found = allocate(config, evaluator.solo, [divergence], budget, measures, forms, folder=tmp_path, settings=QUICK)
        assert cost_of(found.plan, ByteCosts(), config) <= limit * (1 + 1e-9)
        assert found.plan["embedding"] == found.plan["head"]
        assert divergence(found.plan) == pytest.approx(found.divergence)
        assert found.divergence < divergence(uniform)
        for linear in chosen_linears(config):
            for form in forms:
                if bytes_read(linear, form) < bytes_read(linear, found.plan[linear.name]) and linear.name != "head":
                    assert divergence({**found.plan, linear.name: form}) > found.divergence
        costs = [cost_of(plan, ByteCosts(), config) for plan in found.seeds]
        assert costs == sorted(costs)
        again = allocate(config, _refused, [divergence], budget, measures, forms, folder=tmp_path, settings=QUICK)
        assert again.plan == found.plan

    @staticmethod
    def _limited_as_a_whole(
        config: DecoderConfig, folder: Path, slowness: Callable[[Mapping[str, WeightFormat]], float]
    ) -> tuple[Budget, Allocation]:
        """A plan of 6 bits, where divergences add up."""

        def alone(linear: str, form: WeightFormat) -> float:
            return (1 + len(linear)) * 4.0**-form.bits * form.block

        def together(plan: Mapping[str, WeightFormat]) -> float:
            return sum(alone(linear, form) for linear, form in plan.items())

        budget = Budget(6.0, Measure.BITS)
        measures = measures_for(budget, config)
        return budget, allocate(
            config, alone, [together], budget, measures, LADDER, folder=folder, settings=QUICK, slowness=slowness
        )

    @pytest.mark.parametrize("noise", [0.0, 0.004])
    def test_what_a_plan_costs_as_a_whole_is_limited(self, tmp_path: Path, config: DecoderConfig, noise: float) -> None:
        chance = np.random.default_rng(0)

        def slowness(plan: Mapping[str, WeightFormat]) -> float:
            few = np.mean([form.bits == 2 for form in plan.values()])
            return float((1.2 + 0.2 * few) * (1 + noise * chance.standard_normal()))

        budget, found = self._limited_as_a_whole(config, tmp_path, slowness)
        limit = budget.limit(config)
        few = np.mean([form.bits == 2 for linear, form in found.plan.items() if linear != "embedding"])
        cost = cost_of(found.plan, ByteCosts(), config)
        assert found.slowness == pytest.approx(1.2 + 0.2 * few, rel=0.05)
        assert 0.9 * limit < found.slowness * cost < 1.02 * limit
        assert found.costs[0] == pytest.approx(cost)

    def test_a_plan_is_measured_after_its_last_correction_too(self, tmp_path: Path, config: DecoderConfig) -> None:
        asked: list[Mapping[str, WeightFormat]] = []

        def slowness(plan: Mapping[str, WeightFormat]) -> float:
            """Of a machine that gets slower all the time."""
            asked.append(plan)
            return float(1.1 ** len(asked))

        budget, found = self._limited_as_a_whole(config, tmp_path, slowness)
        assert asked[-1] == found.plan
        assert found.slowness == pytest.approx(1.1 ** len(asked))
        assert found.slowness * cost_of(found.plan, ByteCosts(), config) < 1.11 * budget.limit(config)

    def test_an_unreachable_budget_is_named(self, tmp_path: Path, checkpoint: Path, config: DecoderConfig) -> None:
        budget = parse_budget("1.5bpw")
        measures = measures_for(budget, config)
        with pytest.raises(
            InputError, match=r"no plan of this model keeps to 1\.5bpw; budgets from \d\.\d+bpw to \d+\."
        ):
            allocate(config, _refused, [_refused], budget, measures, LADDER, folder=tmp_path, settings=QUICK)


INT4 = WeightFormat(4, 64)


def _all_units(config: DecoderConfig):
    from edgerun.export.checkpoint.layout import fused_linears

    return fused_linears(config)


def _refused(*_: object) -> float:
    raise AssertionError("measured again")


class _Unreadable:
    """A source that rounds no more."""

    def __init__(self, source: Checkpoint) -> None:
        self.shape, self.row_ranges, self.read = source.shape, source.row_ranges, source.read

    quantized = staticmethod(_refused)
