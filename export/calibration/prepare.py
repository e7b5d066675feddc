"""Calibrates a model and chooses its formats before its export.

All intermediate results lie in a work folder, so that an interrupted export is resumed.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ...models.manifest import Method, WeightFormat
from ...models.progress import Progress
from ..allocation.allocate import Allocation, cost_limits, require_feasible
from ..allocation.budget import Budget, Measure
from ..allocation.format_candidates import BASE_FORMATS, LOW_RANK_FORMATS, planned_linears
from ..allocation.linear_times import LinearTimes, load_or_measure
from ..allocation.plan_file import read_plan
from ..allocation.plan_selection import PlanSearch
from ..allocation.quantized_weights import QuantizedLinearStore
from ..bundle_content import BundleContent, SourceModel
from ..checkpoint.config import DecoderConfig
from ..checkpoint.layer_weights import QuantPlan
from ..recipe import FP32, CalibrationRequest, ExportRecipe, ExportRequest, with_methods
from .awq import apply_awq
from .calibrated_source import CalibratedSource
from .calibration_text import CalibrationText, calibration_text
from .collect_statistics import StatisticsStore, collect_statistics, rare_experts
from .divergence import PlanEvaluator
from .sequential import STAGE, quantize_sequentially

_STATISTICS: Final = "statistics"
"""Folder of the inputs' statistics in the work folder."""
AWQ_FORMAT: Final = WeightFormat(4, 64)
"""Format by which AWQ scales are chosen where linears have different formats: one in the middle."""


@dataclass(frozen=True)
class CalibratedModel:
    """A model ready to be written, and what was measured on the way."""

    content: BundleContent
    text: CalibrationText
    evaluator: PlanEvaluator
    """Measures plans on held-out text, with the linears as the bundle has them."""
    independent_evaluator: PlanEvaluator
    """Measures plans on held-out text, with each linear quantized independently, as in the search."""
    uncalibrated_evaluator: PlanEvaluator
    """Measures plans of the checkpoint on held-out text, without AWQ scaling and without statistics."""
    allocation: Allocation | None = None
    times: LinearTimes | None = None
    notes: tuple[str, ...] = ()
    """Notes on the calibration for the report."""


def prepare(model: SourceModel, request: ExportRequest, folder: Path, progress: Progress) -> CalibratedModel:
    """Calibrate a model and choose the formats of its linears as a recipe demands.

    Args:
        model: The checkpoint's model.
        request: The export; its recipe is not `data_free`.
        folder: Work folder of this model and the settings of `settings_of`.
        progress: Receives the stages.

    Raises:
        CheckpointError: A tensor cannot be read.
        InputError: There is too little text, no plan is within the budget, or the plan file does not fit the model.
        ExportError: A trial export failed.
        OSError: The disk refused a write.
    """
    recipe, checkpoint, config = request.recipe, model, model.config
    mixed = recipe.mixed_precision
    plan: QuantPlan | None = None if mixed is None or mixed.plan is None else read_plan(mixed.plan, config)
    if mixed is not None and mixed.budget is not None:
        _require_feasible_bytes(config, mixed.budget)
    text = calibration_text(checkpoint, recipe.calibration or CalibrationRequest(), folder, progress)
    correction_targets, notes = None, []
    if recipe.calibrated:
        calibrated = calibrated_source(checkpoint, text, recipe, folder, progress)
        correction_targets = calibrated.correction_target
        notes = rare_experts(StatisticsStore(folder / _STATISTICS, config), config)
        model = replace(checkpoint, source=calibrated)
    store = QuantizedLinearStore(model.source, config, folder / "linears", correction_targets)
    allocation = times = None
    if mixed is not None and plan is None:
        formats = (*BASE_FORMATS, *LOW_RANK_FORMATS) if mixed.low_rank_correction else BASE_FORMATS
        search = PlanSearch(model, text, recipe, store, load_or_measure(config, formats, progress), folder)
        allocation = search.run(progress)
        plan, times = allocation.plan, search.times
    plan = with_methods(recipe.quant_plan(config) if plan is None else plan, recipe.methods)
    independent = PlanEvaluator(model, text.held_out, store.weights, folder / "independent")
    if any(each.method is Method.GPTQ for each in plan.values()):
        key = hashlib.sha256(repr(sorted(plan.items())).encode()).hexdigest()[:16]
        store = quantize_sequentially(model, text, plan, folder / f"sequential-{key}", progress, correction_targets)
    else:
        _quantize_all(config, plan, store, progress)
    uncalibrated = QuantizedLinearStore(checkpoint.source, config, folder / "uncalibrated" / "linears")
    return CalibratedModel(
        content=BundleContent(
            store.view(plan),
            checkpoint.source,
            config,
            plan,
            model.context,
            recipe.layout,
            request.command,
            recipe.hidden_states,
            recipe.npu,
        ),
        text=text,
        evaluator=PlanEvaluator(model, text.held_out, store.weights, folder / "held-out"),
        independent_evaluator=independent,
        uncalibrated_evaluator=PlanEvaluator(checkpoint, text.held_out, uncalibrated.weights, folder / "uncalibrated"),
        allocation=allocation,
        times=times,
        notes=tuple(notes),
    )


def settings_of(recipe: ExportRecipe, context: int) -> str:
    """The settings that the results in a work folder depend on, as text."""
    request = recipe.calibration or CalibrationRequest()
    file = None
    if request.file is not None and request.file.is_file():
        about = request.file.stat()
        file = (request.file.name, about.st_size, about.st_mtime_ns)
    mixed = recipe.mixed_precision
    formats = None
    if mixed is not None:
        formats = (mixed.zero_points, mixed.half_scales, mixed.low_rank_correction)
    return repr(
        (file, request.max_tokens, request.seed, recipe.method, recipe.awq, recipe.calibrated, formats, context)
    )


def _require_feasible_bytes(config: DecoderConfig, budget: Budget) -> None:
    """Refuse a budget of bytes that no plan can meet before anything is measured; times are not known yet."""
    if budget.measure is not Measure.MILLISECONDS:
        require_feasible(config, budget, cost_limits(budget, config)[0], BASE_FORMATS)


def _quantize_all(config: DecoderConfig, plan: QuantPlan, store: QuantizedLinearStore, progress: Progress) -> None:
    """Quantize all linears of a plan one after the other, before the threads that write the bundle need them."""
    linears = list(planned_linears(config))
    for number, linear in enumerate(linears, 1):
        store.make(linear, plan[linear.name])
        if linear.paired is not None:
            store.make(linear.paired, plan[linear.paired.name])
        progress(STAGE, number / len(linears))


def calibrated_source(
    model: SourceModel, text: CalibrationText, recipe: ExportRecipe, folder: Path, progress: Progress
) -> CalibratedSource:
    """The checkpoint, quantized with the statistics of its linears' inputs, with AWQ scaling if the recipe has it.

    Args:
        model: The checkpoint's model.
        text: The calibration text.
        recipe: A calibrated recipe.
        folder: Work folder of this model and the settings of `settings_of`.
        progress: Receives the stages.

    Raises:
        CheckpointError: A tensor cannot be read.
        OSError: The disk refused a write.
    """
    mixed = recipe.mixed_precision is not None
    second_moments = recipe.awq or mixed or Method.GPTQ in recipe.methods.values()
    statistics = collect_statistics(model, text, folder / _STATISTICS, second_moments, progress)
    if not recipe.awq:
        return CalibratedSource(model.source, model.config, statistics)
    weight_format = AWQ_FORMAT if mixed or recipe.body in (None, FP32) else recipe.body
    weight_format = replace(weight_format, method=recipe.methods.get(weight_format.bits))
    scaled, scaled_statistics = apply_awq(model.source, model.config, statistics, weight_format, progress)
    return CalibratedSource(scaled, model.config, scaled_statistics)
