"""What a chosen plan stands beside in the report: uniform plans, and the best that the rule makes of its bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from ...models.manifest import Method, WeightFormat
from ...models.progress import Progress, silent
from ..allocation.baseline_plans import rule_plans, uniform_plan
from ..allocation.costs import ByteCosts, cost_of
from ..allocation.linear_times import LinearTimes
from ..checkpoint.config import DecoderConfig
from .figures import ALIKE, PlanFigures, PlanKind
from .gather import plan_figures

STAGE: Final = "comparing plans"


def compared_plans(
    config: DecoderConfig,
    forms: Sequence[WeightFormat],
    limit: float,
    divergence: Callable[[Mapping[str, WeightFormat]], float],
    times: LinearTimes | None = None,
    progress: Progress = silent,
    *,
    others: Sequence[Mapping[str, WeightFormat]] = (),
) -> list[PlanFigures]:
    """Measure uniform plans, rule-based plans of nearly the chosen one's bytes, and others.

    Args:
        config: the model's numbers.
        forms: the formats that were to choose from. Of those of as many bits and as large blocks, by several methods or
            with zero points, the one of least KL stands for all, so that a mix is held against the best uniform plan.
        limit: bytes that the chosen plan reads.
        divergence: mean KL in nats of a plan for every chosen unit, measured as the chosen one's was.
        times: of passes on this machine; None where they were not measured.
        progress: hears stage "comparing plans".
        others: plans for other budgets.

    Returns:
        The uniform plans, from the smallest on, the rule-based plan of least KL, if the rule makes any, and the others.
    """
    alike = _alike(forms)
    done, todo = 0, len(forms) + len(others)

    def measured(plan: Mapping[str, WeightFormat], name: str, kind: PlanKind) -> PlanFigures:
        nonlocal done
        figures = plan_figures(config, plan, name, kind, divergence(plan), times)
        done += 1
        progress(STAGE, done / todo)
        return figures

    uniform, best = [], []
    for versions in alike:
        tried = [(measured(uniform_plan(config, form), str(form), PlanKind.UNIFORM), form) for form in versions]
        figures, form = min(tried, key=lambda each: each[0].kl or 0.0)
        uniform.append(figures)
        best.append(form)
    ruled = _as_large([*rule_plans(config, tuple(best), ByteCosts(), limit)], config, limit)
    todo += len(ruled)
    found = sorted(uniform, key=lambda figures: figures.bytes_read)
    if ruled:
        by_rule = [measured(plan, "by rule", PlanKind.RULE) for plan in ruled]
        found.append(min(by_rule, key=lambda figures: figures.kl or 0.0))
    return found + [measured(plan, "for another budget", PlanKind.SEARCHED) for plan in others]


def nearest_plans(
    config: DecoderConfig,
    forms: Sequence[WeightFormat],
    divergence: Callable[[Mapping[str, WeightFormat]], float],
    times: LinearTimes | None = None,
    progress: Progress = silent,
) -> list[PlanFigures]:
    """Measure rounding to nearest, which needs no text, in one format for all units.

    Args:
        config: the model's numbers.
        forms: their bits and blocks are measured.
        divergence: mean KL in nats of a plan of the checkpoint itself, with nothing folded.
        times: of passes on this machine; None where they were not measured.
        progress: hears stage "comparing plans".
    """
    plain = [
        WeightFormat(bits, block, method=Method.RTN) for bits, block in dict.fromkeys((f.bits, f.block) for f in forms)
    ]
    found = []
    for number, form in enumerate(plain, 1):
        plan = uniform_plan(config, form)
        found.append(plan_figures(config, plan, f"{form} rtn", PlanKind.NEAREST, divergence(plan), times))
        progress(STAGE, number / len(plain))
    return found


def _alike(forms: Sequence[WeightFormat]) -> list[list[WeightFormat]]:
    """Formats by bits and blocks."""
    found: dict[tuple[int, int], list[WeightFormat]] = {}
    for form in forms:
        found.setdefault((form.bits, form.block), []).append(form)
    return list(found.values())


def _as_large(
    plans: Sequence[dict[str, WeightFormat]], config: DecoderConfig, limit: float
) -> list[dict[str, WeightFormat]]:
    """Those that take nearly all of the limit, or the largest where none does; none twice, and no uniform ones."""
    sized: list[tuple[float, dict[str, WeightFormat]]] = []
    for plan in plans:
        uniform = len(set(plan.values())) == 1  # what is left over may have raised all the rest
        if not uniform and all(plan != other for _, other in sized):
            sized.append((cost_of(plan, ByteCosts(), config), plan))
    least = min((1 - ALIKE) * limit, max((size for size, _ in sized), default=0.0))
    return [plan for size, plan in sized if size >= least]
