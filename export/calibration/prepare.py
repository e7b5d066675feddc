"""Calibrates a model and chooses its formats before its export.

All intermediate results lie in a work folder, so that an interrupted export is resumed.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from ...errors import InputError
from ...models.manifest import Method, WeightFormat
from ...models.progress import Progress
from ..allocation.allocate import Allocation, cost_measures, require_feasible, search_plan
from ..allocation.format_candidates import BASE_FORMATS, planned_linears, read_plan
from ..allocation.linear_times import LinearTimes, load_or_measure
from ..allocation.plan_costs import Measure
from ..allocation.quantized_weights import QuantizedLinearStore
from ..bundle_content import SourceModel
from ..checkpoint.layer_weights import QuantPlan
from ..checkpoint.source import ModelSource
from ..quantization.codes import StatisticsOf
from ..quantization.methods import FP32, with_methods
from ..quantization.option_values import DeviceChoice
from ..recipe import ExportRecipe
from ..report.text_tasks import read_task_text
from .awq import apply_awq
from .calibration_text import CalibrationText, calibration_text
from .collect_statistics import StatisticsStore, collect_statistics, rare_experts
from .divergence import PlanEvaluator
from .output_moments import require_torch
from .sequential import STAGE, quantize_sequentially

_STATISTICS: Final = "statistics"
_OUTPUTS: Final = "outputs"
_LINEARS: Final = "linears"
"""Folders of statistics of inputs and outputs and of quantized linears in the work folder."""
AWQ_FORMAT: Final = WeightFormat(4, 64)
"""Format by which AWQ scales are chosen where linears have different formats: one in the middle."""
_FORMAT: Final = 3
"""Raised when what a work folder holds changes, so that results of another version are not mixed with new ones."""


class CalibratedModel(NamedTuple):
    """A model ready to be written, and what was measured on the way."""

    source: ModelSource
    """The checkpoint, with the codes of the plan's linears."""
    plan: QuantPlan
    text: CalibrationText
    statistics: StatisticsStore
    """Statistics of the checkpoint's inputs, AWQ scaling not applied; there are none without calibration."""
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
    task_words: list[str] | None = None
    """Words of the text that questions are made from, for the report; None for no questions."""


def prepare(checkpoint: SourceModel, recipe: ExportRecipe, folder: Path, progress: Progress) -> CalibratedModel:
    """Calibrate a model and choose the formats of its linears as a recipe demands.

    Args:
        checkpoint: The checkpoint's model.
        recipe: The recipe.
        folder: Work folder of this model and the settings of `settings_of`.
        progress: Receives the stages.

    Raises:
        CheckpointError: A tensor cannot be read.
        InputError: There is too little text, no plan is within the budget, the plan file does not fit the model, or
            gradients were asked for and are not available.
        ExportError: A trial export failed.
        OSError: The disk refused a write.
    """
    config, budget = checkpoint.config, recipe.parsed_budget
    if recipe.gradients:
        require_torch(recipe.method)
        from .gradients import require_gradients  # noqa: PLC0415 -- PyTorch is an extra, imported when used

        require_gradients(checkpoint)
    task_words = None if recipe.eval is None else read_task_text(recipe.eval)
    plan: QuantPlan | None = None if recipe.plan is None else read_plan(recipe.plan, config)
    if plan is not None and recipe.device == DeviceChoice.NPU and any(each.bits in (3, 5, 6) for each in plan.values()):
        raise InputError("graphs for NPUs have no linears of 3, 5 and 6 bits", "give them 2, 4 or 8 in the plan")
    if budget is not None and budget.measure is not Measure.MILLISECONDS:
        # A budget of bytes that no plan can meet is refused before anything is measured; times are not known yet.
        require_feasible(config, budget, cost_measures(budget, config)[0], BASE_FORMATS)
    model, text, store = calibrate(checkpoint, recipe, folder, progress)
    allocation = times = None
    if budget is not None:
        times = load_or_measure(config, BASE_FORMATS, progress)
        evaluator = PlanEvaluator(model, text.calibration, store.weights, folder / "calibration")
        allocation, times = search_plan(config, recipe, budget, evaluator, times, progress)
        plan = allocation.plan
    plan = with_methods(recipe.quant_plan(config) if plan is None else plan, recipe.methods)
    independent = PlanEvaluator(model, text.held_out, store.weights, folder / "independent")
    store = _quantized(model, text, plan, store, recipe, folder, progress)
    uncalibrated = QuantizedLinearStore(checkpoint.source, config, folder / "uncalibrated" / "linears")
    statistics = StatisticsStore(folder / _STATISTICS, config)
    return CalibratedModel(
        source=store,
        plan=plan,
        text=text,
        statistics=statistics,
        evaluator=PlanEvaluator(model, text.held_out, store.weights, folder / "held-out"),
        independent_evaluator=independent,
        uncalibrated_evaluator=PlanEvaluator(checkpoint, text.held_out, uncalibrated.weights, folder / "uncalibrated"),
        allocation=allocation,
        times=times,
        notes=tuple(rare_experts(statistics, config)) if recipe.calibrated else (),
        task_words=task_words,
    )


def _quantized(
    model: SourceModel,
    text: CalibrationText,
    plan: QuantPlan,
    store: QuantizedLinearStore,
    recipe: ExportRecipe,
    folder: Path,
    progress: Progress,
) -> QuantizedLinearStore:
    """Quantize every linear by a plan, GPTQ one after the other; returns the store that has them."""
    config = model.config
    if any(each.method is Method.GPTQ for each in plan.values()):
        key = hashlib.sha256(repr(sorted(plan.items())).encode()).hexdigest()[:16]
        store = QuantizedLinearStore(model.source, config, folder / f"sequential-{key}", store.statistics)
        outputs = None
        if recipe.gradients:
            from .gradients import collect_gradients  # noqa: PLC0415 -- likewise

            outputs = collect_gradients(model, text, folder / _OUTPUTS, recipe.seed, progress)
        quantize_sequentially(model, text, plan, store, progress, outputs)
        if recipe.learns and outputs is not None:
            from .learned_rounding import learn_rounding  # noqa: PLC0415 -- likewise

            learned = QuantizedLinearStore(store, config, folder / f"learned-{key}")
            learn_rounding(model, text, plan, store, learned, outputs, progress)
            store = learned
    else:
        # One after the other, before the threads that write the bundle need them.
        linears = list(planned_linears(config))
        for number, linear in enumerate(linears, 1):
            store.make(linear, plan[linear.name])
            if linear.paired is not None:
                store.make(linear.paired, plan[linear.paired.name])
            progress(STAGE, number / len(linears))
    return store


def calibrate(
    checkpoint: SourceModel, recipe: ExportRecipe, folder: Path, progress: Progress
) -> tuple[SourceModel, CalibrationText, QuantizedLinearStore]:
    """Calibrate a model; arguments as for `prepare`.

    Returns:
        The model, AWQ scaling applied; the text; and the store of linears, quantized with the statistics of their
        inputs where the recipe is calibrated.
    """
    text = calibration_text(checkpoint, recipe, folder, progress)
    if not recipe.calibrated:
        return checkpoint, text, QuantizedLinearStore(checkpoint.source, checkpoint.config, folder / _LINEARS)
    second_moments = recipe.awq or recipe.mixed or Method.GPTQ in recipe.methods.values()
    statistics: StatisticsOf = collect_statistics(checkpoint, text, folder / _STATISTICS, second_moments, progress).of
    scaled = checkpoint.source
    if recipe.awq:
        weight_format = _awq_format(recipe)
        weight_format = replace(weight_format, method=recipe.methods.get(weight_format.bits))
        scaled, statistics = apply_awq(checkpoint.source, checkpoint.config, statistics, weight_format, progress)
    store = QuantizedLinearStore(scaled, checkpoint.config, folder / _LINEARS, statistics)
    return replace(checkpoint, source=scaled), text, store


def _awq_format(recipe: ExportRecipe) -> WeightFormat:
    """The format by which AWQ scales are chosen."""
    return AWQ_FORMAT if recipe.mixed or recipe.body in (None, FP32) else recipe.body


def settings_of(recipe: ExportRecipe, context: int) -> str:
    """The settings that the results in a work folder depend on, as text."""
    file, text = None, recipe.calibration_file
    if text is not None and text.is_file():
        about = text.stat()
        file = (text.name, about.st_size, about.st_mtime_ns)
    tokens = recipe.calibration_tokens
    formats = (recipe.zero_points, recipe.half_scales) if recipe.mixed else None
    # All linears are scaled by AWQ, whatever their own format.
    method = f"{recipe.method} for {_awq_format(recipe)}" if recipe.awq else recipe.method
    return repr((_FORMAT, file, tokens, recipe.seed, method, recipe.calibrated, formats, context))
