"""Completing a calibrated bundle: quality, scales of an int8 KV cache, draft, plan file and report."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from ..models.atomic import write_atomically
from ..models.bundle import GRAPH_NAME, PLAN_NAME, WEIGHTS_NAME
from ..models.manifest import MANIFEST_NAME, Calibration, Manifest
from ..models.progress import Progress
from ..runtime.measure.bundle_timing import BundleTimer
from ..runtime.measure.measurement_store import describe_machine
from .allocation.format_candidates import planned_linears
from .allocation.plan_costs import weight_count
from .allocation.plan_file import write_plan
from .allocation.sensitivity import STAGE as SENSITIVITY_STAGE
from .allocation.sensitivity import Sensitivity
from .bundle_content import BundleContent
from .bundle_writer import WrittenBundle
from .calibration.divergence import Divergence
from .calibration.kv_calibration import store_cache_scales
from .calibration.prepare import CalibratedModel
from .checkpoint.layer_weights import QuantPlan
from .drafts.make_draft import make_draft
from .recipe import FP32, ExportRecipe, ExportRequest
from .report import (
    ModelReport,
    PlanComparison,
    PlanFigures,
    PlanKind,
    Speed,
    linear_figures,
    megabytes,
    plan_figures,
    search_steps,
    write_report,
)

_STAGE: Final = "measuring quality"
_WIDTHS: Final = (1, 2, 4, 8)
_TYPICAL_BANDWIDTHS: Final = (25.0, 50.0, 100.0)
"""Memory bandwidths in GB/s: of an older laptop, of a current one, and of one with a wide bus."""
_PLAN_WORK: Final = 2.5e11
"""Weights times tokens of one measurement of a plan: seconds on two cores."""
_SENSITIVITY_WORK: Final = 3e10
"""Weights times tokens of one measurement of a sensitivity."""
_MAX_WEIGHTS: Final = 1_000_000_000
"""Largest model whose sensitivities are measured for the report alone: beyond, that takes longer than the export."""
_MIN_TOKENS: Final = 256
_CHOSEN: Final = "this model"
_ROUNDS: Final = 12
"""Number of turns in which the bundle's passes are timed."""


def complete_bundle(
    folder: Path,
    request: ExportRequest,
    model: CalibratedModel,
    written: WrittenBundle,
    progress: Progress,
    started: float,
) -> ModelReport:
    """Measure a bundle that has just been written, and add its draft, plan file and report.

    Args:
        folder: The bundle's folder.
        request: The export.
        model: The calibrated model that the bundle was written from.
        written: Figures of writing it.
        progress: Receives the stages.
        started: Seconds of `time.perf_counter` at the beginning of the export.

    Raises:
        EdgeError: The draft cannot be made, or ONNX Runtime failed.
        OSError: The disk refused a write.
    """
    content, text, recipe = model.content, model.text, request.recipe
    progress(_STAGE, 0.0)
    quality = model.evaluator.divergence(content.plan)
    # The matrices of a large model must not stay in memory while the bundle is measured.
    model.evaluator.release()
    shipped = model.evaluator.divergence_of_bundle(folder)
    model.evaluator.release()
    progress(_STAGE, 0.5)
    calibration_tokens, held_out_tokens = (sum(map(len, part)) for part in (text.calibration, text.held_out))
    calibration = Calibration(text.origin, calibration_tokens, held_out_tokens, awq=recipe.awq)
    _record(folder, calibration, shipped)
    cache_quality = store_cache_scales(folder, text)
    (measured,) = BundleTimer().time_passes([folder], _WIDTHS, _ROUNDS)
    progress(_STAGE, 1.0)
    drafts, notes = [], [*_notes(content.plan), *model.notes]
    if cache_quality is not None:
        notes.append(
            f"With --kv int8 the mean KL from a float cache is {cache_quality.mean_kl:#.3g}, and the most likely token "
            f"the same at {cache_quality.top1_agreement:.1%} of {cache_quality.positions} held-out tokens."
        )
    if recipe.draft is not None:
        made = make_draft(folder, content, text, recipe, progress)
        drafts = [] if made.figures is None else [made.figures]
        notes += [made.note] if made.note else []
    times, sensitivities = model.times, _sensitivities(model, progress)
    predicted = {} if times is None else {width: times.milliseconds(content.plan, width) for width in _WIDTHS}
    mixed = recipe.mixed_precision
    report = ModelReport(
        model=request.source.resolve().name,
        command=content.command,
        linears=linear_figures(content.config, content.plan, sensitivities, times),
        plans=_plans(model, quality, recipe, progress),
        file_bytes=sum((folder / file).stat().st_size for file in (GRAPH_NAME, WEIGHTS_NAME)),
        parity=written.parity.as_mapping(),
        bits_per_weight_in_file=written.bits_per_weight,
        calibration=calibration,
        quality=quality,
        shipped=shipped,
        speed=Speed(predicted, {width: 1e3 * seconds for width, seconds in measured.items()}),
        bandwidths=_TYPICAL_BANDWIDTHS if mixed is None or mixed.bandwidth is None else (mixed.bandwidth / 1e9,),
        drafts=drafts,
        budget="" if mixed is None or mixed.budget is None else str(mixed.budget),
        search=[] if model.allocation is None else search_steps(model.allocation.history),
        seconds=time.perf_counter() - started,
        machine=describe_machine(),
        notes=notes,
    )
    if mixed is not None:
        write_atomically(folder / PLAN_NAME, _plan_text(content, sensitivities, quality).encode())
    write_report(folder, report)
    return report


def _record(folder: Path, calibration: Calibration, quality: Divergence) -> None:
    """Write the calibration and the measured quality into the manifest."""
    path = folder / MANIFEST_NAME
    manifest = Manifest.from_json(path.read_bytes(), str(path))
    recorded = replace(manifest, calibration=calibration, quality=quality.as_mapping())
    write_atomically(path, recorded.to_json().encode())


def _notes(plan: QuantPlan) -> list[str]:
    """Note on the low-rank corrections of a plan, if it has any."""
    ranks = sorted(each.rank for each in plan.values() if each.rank)
    if not ranks:
        return []
    sizes = f"rank {ranks[0]}" if ranks[0] == ranks[-1] else f"ranks {ranks[0]} to {ranks[-1]}"
    return [f"{len(ranks)} {'linears have' if len(ranks) > 1 else 'linear has'} a low-rank correction of {sizes}."]


def _sensitivities(model: CalibratedModel, progress: Progress) -> Mapping[str, Sequence[Sensitivity]]:
    """Sensitivities of linears: those of the search, or those of the plan where there was no search."""
    if model.allocation is not None:
        return model.allocation.sensitivities
    config, plan = model.content.config, model.content.plan
    weights = weight_count(config)
    if weights > _MAX_WEIGHTS:
        return {}
    linears = [linear.name for linear in planned_linears(config) if plan[linear.name] != FP32]
    tokens = max(_MIN_TOKENS, int(_SENSITIVITY_WORK / weights))
    found = {}
    for number, linear in enumerate(linears, 1):
        kl = model.independent_evaluator.divergence_alone(linear, plan[linear], tokens)
        found[linear] = (Sensitivity(plan[linear], kl),)
        progress(SENSITIVITY_STAGE, number / len(linears))
    return found


def _plans(model: CalibratedModel, quality: Divergence, recipe: ExportRecipe, progress: Progress) -> list[PlanFigures]:
    """The chosen plan and the plans it is compared with, measured on the same text."""
    content, times, allocation = model.content, model.times, model.allocation
    config = content.config
    tokens = max(_MIN_TOKENS, int(_PLAN_WORK / weight_count(config)))

    def divergence(plan: QuantPlan) -> float:
        # Plans that were not written have independently quantized linears, so the chosen plan is compared like that.
        evaluator = model.evaluator if allocation is None else model.independent_evaluator
        return evaluator.divergence(plan, tokens).mean_kl

    def uncalibrated_divergence(plan: QuantPlan) -> float:
        return model.uncalibrated_evaluator.divergence(plan, tokens).mean_kl

    kl = divergence(content.plan)
    if allocation is None:
        model.evaluator.release()
    chosen = plan_figures(config, content.plan, _CHOSEN, PlanKind.CHOSEN, kl, times)
    uncalibrated = PlanComparison(config, uncalibrated_divergence, times, progress)
    if allocation is None:
        used = {content.plan[linear.name] for linear in planned_linears(config)}
        if not recipe.calibrated or len(used) > 1 or FP32 in used:
            return [replace(chosen, kl=quality.mean_kl)]
        return [chosen, *uncalibrated.round_to_nearest(list(used))]
    measured = (each.weight_format for known in allocation.sensitivities.values() for each in known)
    # Only some linears can have a low-rank correction, so a uniform plan has none.
    formats = [each for each in {(each, each.method): each for each in measured}.values() if not each.rank]
    calibrated = PlanComparison(config, divergence, times, progress)
    return [
        chosen,
        *calibrated.baselines(formats, chosen.bytes_read, allocation.frontier),
        *uncalibrated.round_to_nearest(formats),
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
