"""Baseline plans that a report compares with the chosen plan.

One is a plan with one format for all linears. The other is the rule of ONNX Runtime GenAI's model builder, after
llama.cpp: the head, and what holds v and down in the first and last eighth of the layers and in every third layer
between, get more bits than the other linears.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ...models.manifest import Method, WeightFormat
from ...models.progress import Progress, silent
from ..allocation.format_candidates import HEAD_LINEAR, planned_linears
from ..allocation.linear_times import LinearTimes
from ..allocation.plan_costs import BYTES_READ, Costs, plan_cost
from ..checkpoint.config import DecoderConfig
from ..checkpoint.layer_weights import QuantPlan
from .figures import SIZE_TOLERANCE, PlanFigures, PlanKind, plan_figures

STAGE: Final = "comparing plans"
_STRIDE: Final = 3


@dataclass(frozen=True)
class PlanComparison:
    """Measures plans of one model for a report."""

    config: DecoderConfig
    divergence: Callable[[QuantPlan], float]
    """Measures the mean KL of a plan in nats."""
    times: LinearTimes | None = None
    """Times of passes on this machine; None where they were not measured."""
    progress: Progress = silent
    """Receives the stage "comparing plans"."""

    def baselines(
        self, formats: Sequence[WeightFormat], limit: float, others: Sequence[QuantPlan] = ()
    ) -> list[PlanFigures]:
        """Measure uniform plans, rule-based plans of about as many bytes as the chosen one, and other plans.

        Args:
            formats: The format candidates. Of those that share bits and block size, by several methods or with zero
                points, only the one with the least KL is used, so that the comparison is with the best uniform plan.
            limit: Bytes that the chosen plan reads.
            others: Plans for other budgets.

        Returns:
            The uniform plans in ascending size, the best rule-based plan if there is one, and the others.
        """
        uniform = self._measured(PlanKind.UNIFORM, [(str(each), uniform_plan(self.config, each)) for each in formats])
        best: dict[tuple[int, int], tuple[WeightFormat, PlanFigures]] = {}
        for each, figures in zip(formats, uniform, strict=True):
            known = best.setdefault((each.bits, each.block), (each, figures))
            if figures.kl < known[1].kl:
                best[each.bits, each.block] = each, figures
        of_formats = tuple(each for each, _ in best.values())
        rules = _of_similar_size([*rule_plans(self.config, of_formats, BYTES_READ, limit)], self.config, limit)
        by_rule = self._measured(PlanKind.RULE, [("by rule", plan) for plan in rules])
        return [
            *sorted((figures for _, figures in best.values()), key=lambda figures: figures.bytes_read),
            *sorted(by_rule, key=lambda figures: figures.kl)[:1],
            *self._measured(PlanKind.SEARCHED, [("for another budget", plan) for plan in others]),
        ]

    def round_to_nearest(self, plans: Sequence[QuantPlan]) -> list[PlanFigures]:
        """Measure round-to-nearest, which needs no text, with the bits and block sizes of `plans`."""
        nearest = {}
        for plan in plans:
            rounded = {name: WeightFormat(each.bits, each.block, method=Method.RTN) for name, each in plan.items()}
            nearest[tuple(rounded.values())] = rounded
        named = [(f"{' '.join(dict.fromkeys(map(str, of)))} rtn", plan) for of, plan in nearest.items()]
        return self._measured(PlanKind.NEAREST, named)

    def _measured(self, kind: PlanKind, plans: Sequence[tuple[str, QuantPlan]]) -> list[PlanFigures]:
        """Figures of named plans."""
        found = []
        for number, (name, plan) in enumerate(plans, 1):
            found.append(plan_figures(self.config, plan, name, kind, self.divergence(plan), self.times))
            self.progress(STAGE, number / len(plans))
        return found


def uniform_plan(config: DecoderConfig, weight_format: WeightFormat) -> dict[str, WeightFormat]:
    """A plan with one format for all linears."""
    return {linear.name: weight_format for linear in planned_linears(config)}


def rule_linears(config: DecoderConfig) -> list[str]:
    """The linears that the rule gives more bits: the head first, then from the outer layers inwards."""
    layers = config.layers
    chosen = [
        index
        for index in range(layers)
        if index < layers / 8 or index >= 7 * layers / 8 or (index - round(layers / 8)) % _STRIDE == _STRIDE - 1
    ]
    outer_first = sorted(chosen, key=lambda index: min(index, layers - 1 - index))
    return [HEAD_LINEAR, *(f"layers.{index}.{name}" for index in outer_first for name in ("qkv", "down"))]


def rule_plans(
    config: DecoderConfig, formats: tuple[WeightFormat, ...], costs: Costs, limit: float
) -> Iterator[dict[str, WeightFormat]]:
    """Yield the plans that the rule makes within a limit, for every pair of formats.

    The rest of the limit raises the other linears, from the first layer on, to the next format that fits, so that
    the rule is compared with plans of as many bytes.
    """
    favoured = set(rule_linears(config))
    ascending = sorted(formats, key=lambda each: plan_cost(uniform_plan(config, each), costs, config))
    for place, base in enumerate(ascending):
        for raised in ascending[place + 1 :]:
            plan = {name: raised if name in favoured else base for name in uniform_plan(config, base)}
            if raised.bits <= base.bits or plan_cost(plan, costs, config) > limit:
                continue
            for name in plan:
                trial = {**plan, name: ascending[place + 1]}
                if name not in favoured and plan_cost(trial, costs, config) <= limit:
                    plan = trial
            yield plan


def _of_similar_size(
    plans: Sequence[dict[str, WeightFormat]], config: DecoderConfig, limit: float
) -> list[dict[str, WeightFormat]]:
    """The plans that take nearly all of the limit, or the largest where none does, without duplicates."""
    # A plan is uniform if the rest of the limit has raised all linears.
    different = {tuple(plan.values()): plan for plan in plans if len(set(plan.values())) > 1}.values()
    sized = [(plan_cost(plan, BYTES_READ, config), plan) for plan in different]
    least = min((1 - SIZE_TOLERANCE) * limit, max((size for size, _ in sized), default=0.0))
    return [plan for size, plan in sized if size >= least]
