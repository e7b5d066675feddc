"""Completing a calibrated bundle: quality, scales of a quantized KV cache, draft, plan file and report."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from ..models.atomic import temporary_folder, write_atomically
from ..models.bundle import CACHE_SCALES_NAME, GRAPH_NAME, PLAN_NAME, WEIGHTS_NAME, open_bundle
from ..models.manifest import Calibration, GraphLayout, Manifest
from ..models.progress import Progress
from ..models.user_folders import cache_folder
from ..runtime.devices.providers import choose_device
from ..runtime.graph.quantized_cache import key_rotations
from ..runtime.graph.session import GraphSession, SessionConfig
from ..runtime.measure.bundle_timing import BundleTimer
from ..runtime.measure.cache_calibration import calibrated_scales
from ..runtime.measure.logit_quality import measure_quality
from ..runtime.measure.measurement_store import describe_machine
from ..runtime.text.turn_markers import TokenArray
from .allocation.allocate import SENSITIVITY_WORK, measured_tokens
from .allocation.choices import Sensitivity, measure_sensitivities
from .allocation.format_candidates import HEAD_LINEAR, planned_linears, write_plan
from .allocation.linear_times import LinearTimes
from .allocation.plan_costs import weight_count
from .bundle_content import BundleContent, change_manifest
from .bundle_writer import write_bundle
from .calibration.calibration_text import CalibrationText
from .calibration.divergence import Divergence
from .calibration.prepare import CalibratedModel
from .checkpoint.config import DecoderConfig
from .checkpoint.layer_weights import QuantPlan
from .drafts.make_draft import make_draft
from .npu.static_decoder import static_logits
from .quantization.methods import FP32
from .recipe import ExportRecipe
from .report.compared_plans import PlanComparison, uniform_plan
from .report.figures import ModelReport, PlanFigures, PlanKind, Speed, linear_figures, plan_figures
from .report.page import write_report
from .report.tables import megabytes
from .report.text_tasks import TaskFigures, measure_tasks

_STAGE: Final = "measuring quality"
_TASK_STAGE: Final = "answering questions"
_WIDTHS: Final = (1, 2, 4, 8)
_TYPICAL_BANDWIDTHS: Final = (25.0, 50.0, 100.0)
"""Memory bandwidths in GB/s: of an older laptop, of a current one, and of one with a wide bus."""
_PLAN_WORK: Final = 2.5e11
"""Weights times tokens of one measurement of a plan: seconds on two cores."""
_MAX_WEIGHTS: Final = 1_000_000_000
"""Largest model whose sensitivities are measured for the report alone: beyond, that takes longer than the export."""
_CHOSEN: Final = "this model"
_ROUNDS: Final = 12
"""Number of turns in which the bundle's passes are timed."""
_CALIBRATION_TOKENS: Final = 2048
_COMPARED_TOKENS: Final = 1024
"""Held-out tokens on which the caches are compared: each runs through the model twice."""


def complete_bundle(
    folder: Path,
    recipe: ExportRecipe,
    content: BundleContent,
    model: CalibratedModel,
    draft: Path | None,
    manifest: Manifest,
    progress: Progress,
    started: float,
) -> ModelReport:
    """Measure a bundle that has just been written, and add its draft model, plan file and report.

    Args:
        folder: The bundle's folder.
        recipe: The choices of the export.
        content: What was written.
        model: The calibrated model that the bundle was written from.
        draft: The checkpoint of the draft model to make; None for none.
        manifest: Its manifest.
        progress: Receives the stages.
        started: Seconds of `time.perf_counter` at the beginning of the export.

    Raises:
        EdgeError: The draft cannot be made, or ONNX Runtime failed.
        OSError: The disk refused a write.
    """
    config, plan, text, times = content.config, model.plan, model.text, model.times
    quality, shipped = _quality(folder, model, progress)
    parts = ((*text.calibration, *text.more), text.held_out)
    calibration_tokens, held_out_tokens = (sum(map(len, part)) for part in parts)
    calibration = Calibration(text.origin, calibration_tokens, held_out_tokens, awq=recipe.awq)
    change_manifest(folder, calibration=calibration, quality=shipped.as_mapping())
    cache_note = store_cache_scales(folder, text)
    (measured,) = BundleTimer().time_passes([folder], _WIDTHS, _ROUNDS)
    progress(_STAGE, 1.0)
    figures = None if draft is None else make_draft(folder, content, text, draft, recipe, progress)
    sensitivities = _sensitivities(config, recipe, model, progress)
    report = ModelReport(
        model=content.source.folder.resolve().name,
        command=content.command,
        linears=linear_figures(config, plan, sensitivities, times),
        plans=_plans(config, model, quality, recipe, progress),
        file_bytes=sum((folder / file).stat().st_size for file in (GRAPH_NAME, WEIGHTS_NAME)),
        parity=manifest.parity,
        bits_per_weight_in_file=manifest.bits_per_weight,
        calibration=calibration,
        quality=quality,
        shipped=shipped,
        tasks=_tasks(folder, recipe, content, model, progress),
        speed=_speed(times, plan, measured),
        bandwidths=_TYPICAL_BANDWIDTHS if recipe.bandwidth is None else (recipe.bandwidth,),
        drafts=[] if figures is None else [figures],
        budget="" if recipe.parsed_budget is None else str(recipe.parsed_budget),
        seconds=time.perf_counter() - started,
        machine=describe_machine(),
        notes=[*filter(None, (*model.notes, cache_note))],
    )
    if recipe.mixed:
        write_atomically(folder / PLAN_NAME, _plan_text(content, sensitivities, quality).encode())
    write_report(folder, report)
    return report


def _speed(times: LinearTimes | None, plan: QuantPlan, measured: Mapping[int, float]) -> Speed:
    """Predicted and measured milliseconds by width; `measured` are seconds."""
    predicted = {} if times is None else {width: times.milliseconds(plan, width) for width in _WIDTHS}
    return Speed(predicted, {width: 1e3 * seconds for width, seconds in measured.items()})


def _quality(folder: Path, model: CalibratedModel, progress: Progress) -> tuple[Divergence, Divergence]:
    """Divergences of the model with its quantized weights, and of the bundle as ONNX Runtime computes it."""
    progress(_STAGE, 0.0)
    quality = model.evaluator.divergence(model.plan)
    # The matrices of a large model must not stay in memory while the bundle is measured.
    model.evaluator.release()
    shipped = model.evaluator.divergence_of_bundle(folder)
    model.evaluator.release()
    progress(_STAGE, 0.5)
    return quality, shipped


def integer_graphs_note(folder: Path, content: BundleContent, model: CalibratedModel) -> str:
    """Measure graphs for NPUs with integer linears on the held-out text, and describe the result for the user.

    Raises:
        ExportError: ONNX Runtime cannot run them.
    """
    longest = max(map(len, model.text.held_out))
    shapes = [each for each in content.static_shapes if each.logit_rows == each.width and each.capacity >= longest]
    if not shapes:
        return f"graphs for NPUs: not measured, as none has a context of {longest} tokens"
    # Sorted by context, then by width.
    fastest = [shape for shape in shapes if shape.capacity == shapes[0].capacity][-1]
    logits = static_logits(folder, fastest)
    found = model.evaluator.divergence_of(lambda tokens, rows: logits(tokens)[rows])
    return f"graphs for NPUs: mean KL {found.mean_kl:#.3g}, top-1 agreement {found.top1_agreement:.1%} on held-out text"


def _sensitivities(
    config: DecoderConfig, recipe: ExportRecipe, model: CalibratedModel, progress: Progress
) -> Mapping[str, Sequence[Sensitivity]]:
    """Sensitivities of linears in all formats of the search, or in those of a plan that the user may change.

    They take longer than all other figures of the report together, so without mixed weights they are for who asks.
    """
    if model.allocation is not None:
        return model.allocation.sensitivities
    plan = model.plan
    if not (recipe.report or recipe.mixed) or weight_count(config) > _MAX_WEIGHTS:
        return {}
    pairs = [(linear.name, plan[linear.name]) for linear in planned_linears(config) if plan[linear.name] != FP32]
    tokens = measured_tokens(config, SENSITIVITY_WORK)
    alone = partial(model.independent_evaluator.divergence_alone, tokens=tokens)
    return measure_sensitivities(pairs, alone, progress)


def _tasks(
    folder: Path, recipe: ExportRecipe, content: BundleContent, model: CalibratedModel, progress: Progress
) -> Sequence[TaskFigures]:
    """Answers to questions about the user's text, of the bundle and of the float model; none without such a text."""
    if model.task_words is None:
        return ()
    progress(_TASK_STAGE, 0.0)
    plan = ExportRecipe(FP32).quant_plan(content.config)
    with temporary_folder(cache_folder(), "float") as parent:
        write_bundle(parent, replace(content, source=content.original, plan=plan, static_shapes=(), vision=None))
        progress(_TASK_STAGE, 0.3)
        found = measure_tasks(model.task_words, folder, parent, recipe.seed)
    progress(_TASK_STAGE, 1.0)
    return found


def _plans(
    config: DecoderConfig, model: CalibratedModel, quality: Divergence, recipe: ExportRecipe, progress: Progress
) -> list[PlanFigures]:
    """The chosen plan and the plans it is compared with, measured on the same text."""
    plan, times, allocation = model.plan, model.times, model.allocation
    tokens = measured_tokens(config, _PLAN_WORK)

    def divergence(of: QuantPlan) -> float:
        # Plans that were not written have independently quantized linears, so the chosen plan is compared like that.
        evaluator = model.evaluator if allocation is None else model.independent_evaluator
        return evaluator.mean_kl(of, tokens)

    kl = divergence(plan)
    if allocation is None:
        model.evaluator.release()
    chosen = plan_figures(config, plan, _CHOSEN, PlanKind.CHOSEN, kl, times)
    uncalibrated = PlanComparison(config, lambda of: model.uncalibrated_evaluator.mean_kl(of, tokens), times, progress)
    if allocation is None:
        planned = {linear.name: plan[linear.name] for linear in planned_linears(config)}
        if not recipe.calibrated or FP32 in planned.values():
            return [replace(chosen, kl=quality.mean_kl)]
        return [chosen, *uncalibrated.round_to_nearest([planned])]
    formats = [each.weight_format for each in allocation.sensitivities[HEAD_LINEAR]]  # which can have the fewest
    calibrated = PlanComparison(config, divergence, times, progress)
    return [
        chosen,
        *calibrated.baselines(formats, chosen.bytes_read, allocation.frontier),
        *uncalibrated.round_to_nearest([uniform_plan(config, each) for each in formats]),
    ]


def _plan_text(content: BundleContent, sensitivities: Mapping[str, Sequence[Sensitivity]], quality: Divergence) -> str:
    """The text of the plan file, with the cost of each linear as a comment."""
    notes = {}
    for linear in linear_figures(content.config, content.plan, sensitivities):
        note = f"{megabytes(linear.bytes_read)} MB"
        notes[linear.name] = note if linear.kl_alone is None else f"{note}, KL {linear.kl_alone:.2g} alone"
    heading = [
        f"Quantization plan of {content.source.folder.resolve().name}: mean KL {quality.mean_kl:.4g} from float32.",
        "KL of each linear is with that linear alone quantized.",
        "To change formats, edit this file and export again with --plan.",
    ]
    named = {linear.name: content.plan[linear.name] for linear in planned_linears(content.config)}
    return write_plan(named, notes, heading)


def store_cache_scales(folder: Path, text: CalibrationText) -> str:
    """Measure scales on calibration text, store them in a bundle, and compare the caches on held-out text.

    Args:
        folder: the bundle's folder.
        text: its calibration text.

    Returns:
        A sentence on the quality with an int8 cache; empty for a layout that other programs run.

    Raises:
        EdgeError: ONNX Runtime failed.
        OSError: the disk refused a write.
    """
    bundle = open_bundle(folder)
    manifest = bundle.manifest
    if manifest is None or manifest.layout is not GraphLayout.EDGE:
        return ""
    context = manifest.architecture.context
    config = SessionConfig(choose_device("cpu"))
    session = GraphSession(bundle.graph, config)
    bound = session.bind(session.arena(context))
    texts = list(_first(text.calibration, _CALIBRATION_TOKENS, context))
    scales = calibrated_scales(bound, key_rotations(bundle.graph), texts)
    (folder / CACHE_SCALES_NAME).write_text(json.dumps(scales.to_json()) + "\n", encoding="utf-8")
    change_manifest(folder, [CACHE_SCALES_NAME])
    quantized = GraphSession(bundle.graph, replace(config, kv_scales=scales))
    compared = [part.tolist() for part in _first(text.held_out, _COMPARED_TOKENS, context)]
    quality = measure_quality(quantized.bind(quantized.arena(context)), bound, compared)
    return (
        f"With --kv int8 the mean KL from a float cache is {quality.mean_kl:#.3g}, and the most likely token the same "
        f"at {quality.top1_agreement:.1%} of {quality.positions} held-out tokens."
    )


def _first(texts: Sequence[TokenArray], tokens: int, context: int) -> Iterable[TokenArray]:
    """The first texts of about `tokens` tokens together, at least one; each is cut to the context."""
    total = 0
    for text in texts:
        if total >= tokens:
            return
        yield text[:context]
        total += len(text)
