"""What precedes an export by text: the text, what the model does with it, rounded units, and formats chosen among them.

All of it lies in a work folder, so that an interrupted export goes on where it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ...models.manifest import Method, WeightFormat
from ...models.progress import Progress
from ..allocation.allocate import Allocation, measures_for, require_affordable
from ..allocation.budget import Budget, Measure
from ..allocation.format_candidates import LADDER, REPAIRED, chosen_linears
from ..allocation.linear_times import LinearTimes, known_or_measured
from ..allocation.plan_file import read_plan
from ..allocation.plan_selection import Mixing
from ..allocation.quantized_weights import QuantizedLinearStore
from ..bundle_content import BundleContent, SourceModel
from ..checkpoint.config import DecoderConfig
from ..recipe import (
    FP32,
    CalibrationRequest,
    ExportRecipe,
    ExportRequest,
    MixedPrecisionRequest,
    with_methods,
)
from .awq import fold
from .calibrated_source import CalibratedSource
from .collect_statistics import collect_statistics
from .divergence import PlanEvaluator
from .successive import round_successively
from .text_source import obtain_text
from .text_split import CalibrationText

FOLDED_FOR: Final = WeightFormat(4, 64)
"""The format by which factors are chosen where units have several: the one in the middle."""


@dataclass(frozen=True)
class CalibratedModel:
    """All that an export has found out before it writes."""

    content: BundleContent
    text: CalibrationText
    judge: PlanEvaluator
    """Measures divergences on the text that nothing was chosen by."""
    candidates: PlanEvaluator
    """The same, with each unit rounded by itself, as plans are searched for."""
    unobserved: PlanEvaluator
    """The same of the checkpoint as it is: nothing folded, and rounded without knowing any inputs."""
    allocation: Allocation | None = None
    times: LinearTimes | None = None


def prepare(model: SourceModel, request: ExportRequest, folder: Path, progress: Progress) -> CalibratedModel:
    """Observe a model as a recipe asks, and choose the formats of its units.

    Args:
        model: the model as its checkpoint has it.
        request: what is asked for; its recipe is not `data_free`.
        folder: keeps what is found out; of this model and the settings of `settings_of`.
        progress: hears what is being done.

    Raises:
        CheckpointError: a tensor cannot be read.
        InputError: the text is too short, the budget out of reach, the plan not one of this model, or it has experts.
        ExportError: a trial export failed.
        OSError: the disk refused a write.
    """
    recipe, checkpoint, config, context = request.recipe, model.source, model.config, model.context
    calibration = recipe.calibration or CalibrationRequest()
    plan = (
        None
        if recipe.mixed_precision is None or recipe.mixed_precision.plan is None
        else read_plan(recipe.mixed_precision.plan, config)
    )
    if recipe.mixed_precision is not None and recipe.mixed_precision.budget is not None:
        _require_affordable(config, recipe.mixed_precision.budget)
    text = obtain_text(checkpoint, config, context, calibration, folder, progress)
    source, correction_targets = checkpoint, None
    if recipe.calibrated:
        source = observed = _observed(model, text, recipe, folder, progress)
        correction_targets = observed.correction_target
    store = QuantizedLinearStore(source, config, folder / "units", correction_targets)
    model = SourceModel(source, config, context)
    allocation = times = None
    if recipe.mixed_precision is not None and plan is None:
        allocation, times = _mixed(model, text, recipe, recipe.mixed_precision, store, folder, progress)
        plan = dict(allocation.plan)
    formats = with_methods(recipe.quant_plan(config) if plan is None else plan, recipe.methods)
    candidates = PlanEvaluator(source, config, text.held_out, store.weights, folder / "candidates", context)
    if any(form.method is Method.GPTQ for form in formats.values()):
        key = hashlib.sha256(repr(sorted(formats.items())).encode()).hexdigest()[:16]
        store = round_successively(
            source, config, text, formats, folder / f"rounded-{key}", context, progress, correction_targets
        )
    else:
        _round(config, formats, store, progress)
    content = BundleContent(store.view(formats), checkpoint, config, formats, context, recipe.layout, request.command)
    judge = PlanEvaluator(source, config, text.held_out, store.weights, folder / "held-out", context)
    plain = QuantizedLinearStore(checkpoint, config, folder / "unobserved" / "units")
    unobserved = PlanEvaluator(checkpoint, config, text.held_out, plain.weights, folder / "unobserved", context)
    return CalibratedModel(content, text, judge, candidates, unobserved, allocation, times)


def _require_affordable(config: DecoderConfig, budget: Budget) -> None:
    """Refuse a budget of bytes that no plan keeps to before anything is measured; of times nothing is known yet."""
    if budget.measure is not Measure.MILLISECONDS:
        require_affordable(config, budget, measures_for(budget, config)[0], LADDER)


def _round(
    config: DecoderConfig, plan: Mapping[str, WeightFormat], store: QuantizedLinearStore, progress: Progress
) -> None:
    """Round all units of a plan that are not yet: here, one after the other, not from the threads that write."""
    linears = list(chosen_linears(config))
    for number, linear in enumerate(linears, 1):
        store.make(linear, plan[linear.name])
        progress("rounding", number / len(linears))


def _mixed(
    model: SourceModel,
    text: CalibrationText,
    recipe: ExportRecipe,
    mix: MixedPrecisionRequest,
    store: QuantizedLinearStore,
    folder: Path,
    progress: Progress,
) -> tuple[Allocation, LinearTimes]:
    """Formats chosen under the budget, and the times of linears."""
    timed = (*LADDER, *REPAIRED) if mix.low_rank_correction else LADDER
    times = known_or_measured(model.config, timed, progress)
    mixing = Mixing(model, text, recipe, mix, store, times, folder)
    return mixing.allocation(progress), mixing.times


def settings_of(recipe: ExportRecipe, context: int) -> str:
    """What the results in a work folder depend on, besides the model."""
    request = recipe.calibration or CalibrationRequest()
    file = None
    if request.file is not None and request.file.is_file():
        about = request.file.stat()
        file = (request.file.name, about.st_size, about.st_mtime_ns)
    mix = recipe.mixed_precision
    marks = None if mix is None else (mix.zero_points, mix.powers_of_two, mix.low_rank_correction)
    return repr((file, request.max_tokens, request.seed, recipe.method, recipe.awq, recipe.calibrated, marks, context))


def _observed(
    model: SourceModel, text: CalibrationText, recipe: ExportRecipe, folder: Path, progress: Progress
) -> CalibratedSource:
    """The checkpoint, rounded by what is known of the inputs of its linears."""
    statistics = collect_statistics(
        model.source,
        model.config,
        text,
        folder / "statistics",
        model.context,
        _wants_moments(recipe),
        lambda fraction: progress("observing", fraction),
    )
    if not recipe.awq:
        return CalibratedSource(model.source, model.config, statistics)
    form = FOLDED_FOR if recipe.mixed_precision is not None or recipe.body in (None, FP32) else recipe.body
    form = replace(form, method=recipe.methods.get(form.bits))
    folded, of_folded = fold(model.source, model.config, statistics, form, progress)
    return CalibratedSource(folded, model.config, of_folded)


def _wants_moments(recipe: ExportRecipe) -> bool:
    return recipe.awq or recipe.mixed_precision is not None or Method.GPTQ in recipe.methods.values()
