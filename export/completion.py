"""What follows when a calibrated bundle is written: its quality, its draft, its plan as a file, and the report."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields, replace
from pathlib import Path
from typing import Final

from ..models.atomic import write_atomically
from ..models.bundle import GRAPH_NAME, PLAN_NAME, WEIGHTS_NAME
from ..models.manifest import MANIFEST_NAME, Calibration, Manifest, WeightFormat
from ..models.progress import Progress
from ..runtime.measure.bundle_timing import BundleTimer
from ..runtime.measure.machine import machine
from .allocation.format_candidates import chosen_linears, weight_count
from .allocation.plan_file import write_plan
from .allocation.sensitivity import Solo
from .bundle_content import BundleContent
from .bundle_writer import WrittenBundle
from .calibration.divergence import Divergence
from .calibration.prepare import CalibratedModel
from .drafts.draft_making import make_draft
from .recipe import FP32, ExportRecipe, ExportRequest
from .report import (
    ModelReport,
    PlanFigures,
    PlanKind,
    Speed,
    compared_plans,
    linear_figures,
    megabytes,
    nearest_plans,
    plan_figures,
    search_steps,
    write_report,
)

_STAGE: Final = "judging"
_ROWS: Final = (1, 2, 4, 8)
_USUAL_BANDWIDTHS: Final = (25.0, 50.0, 100.0)
"""GB/s of memory in laptops of some years ago, of today, and with wide buses."""
_COMPARED_WORK: Final = 2.5e11
"""Weights times tokens of a plan that the chosen one is compared with: seconds of two cores."""
_SOLO_WORK: Final = 3e10
"""The same of a unit by itself."""
_MOST_SOLO_WEIGHTS: Final = 1_000_000_000
"""Weights of a model above which units are not measured for the report alone: it would take longer than the export."""
_FEWEST_TOKENS: Final = 256
_CHOSEN: Final = "this model"
_ROUNDS: Final = 12
"""Turns in which the bundle's passes are timed."""


def complete_bundle(
    folder: Path,
    request: ExportRequest,
    prepared: CalibratedModel,
    written: WrittenBundle,
    progress: Progress,
    started: float,
) -> ModelReport:
    """Judge a bundle that has just been written, and add what belongs to it.

    Args:
        folder: the bundle's.
        request: what to export and how.
        prepared: what it was made by.
        written: what writing it found out.
        progress: hears what is being done.
        started: seconds of `time.perf_counter` when the export began.

    Raises:
        EdgeError: the draft cannot be made, or ONNX Runtime failed.
        OSError: the disk refused a write.
    """
    content, text, recipe = prepared.content, prepared.text, request.recipe
    progress(_STAGE, 0.0)
    rounded = prepared.judge.divergence(content.plan)
    # A large model's matrices are not to lie in memory beside the next one's that is measured.
    prepared.judge.release()
    shipped = prepared.judge.divergence_of_bundle(folder)
    prepared.judge.release()
    progress(_STAGE, 0.5)
    calibration = Calibration(
        text.origin,
        sum(map(len, text.calibration)),
        sum(map(len, text.held_out)),
        folded=recipe.awq,
    )
    _amend(folder, calibration, shipped)
    (measured,) = BundleTimer().time_passes([folder], _ROWS, _ROUNDS)
    progress(_STAGE, 1.0)
    drafts, notes = [], _notes(content.plan)
    if recipe.draft is not None:
        made = make_draft(folder, content, text, recipe, recipe.draft, progress)
        drafts = [] if made.figures is None else [made.figures]
        notes += [made.note] if made.note else []
    times, solos = prepared.times, _solos(prepared, progress)
    predicted = {} if times is None else {rows: times.milliseconds(content.plan, rows) for rows in _ROWS}
    report = ModelReport(
        model=request.source.resolve().name,
        command=content.command,
        linears=linear_figures(content.config, content.plan, solos, times),
        plans=_plans(prepared, rounded, recipe, progress),
        file_bytes=sum((folder / file).stat().st_size for file in (GRAPH_NAME, WEIGHTS_NAME)),
        parity=written.parity.as_mapping(),
        calibration=calibration,
        quality=rounded,
        shipped=shipped,
        speed=Speed(predicted, {rows: 1e3 * seconds for rows, seconds in measured.items()}),
        bandwidths=_bandwidths(recipe),
        drafts=drafts,
        budget=""
        if recipe.mixed_precision is None or recipe.mixed_precision.budget is None
        else str(recipe.mixed_precision.budget),
        search=[] if prepared.allocation is None else search_steps(prepared.allocation.history),
        seconds=time.perf_counter() - started,
        machine=machine(),
        notes=notes,
    )
    if recipe.mixed_precision is not None:
        write_atomically(folder / PLAN_NAME, _plan_text(content, solos, rounded).encode())
    write_report(folder, report)
    return report


def _amend(folder: Path, calibration: Calibration, quality: Divergence) -> None:
    """Let the manifest say what the bundle was calibrated with, and how near it stays."""
    path = folder / MANIFEST_NAME
    manifest = Manifest.from_json(path.read_bytes(), str(path))
    named = zip((field.name for field in fields(quality)), astuple(quality), strict=True)
    numbers = {key: float(value) for key, value in named if key != "tokens"}
    write_atomically(path, replace(manifest, calibration=calibration, quality=numbers).to_json().encode())


def _notes(plan: Mapping[str, WeightFormat]) -> list[str]:
    """What else there is to say: how many units are repaired."""
    ranks = sorted(weight_format.rank for weight_format in plan.values() if weight_format.rank)
    if not ranks:
        return []
    sizes = f"rank {ranks[0]}" if ranks[0] == ranks[-1] else f"ranks {ranks[0]} to {ranks[-1]}"
    return [f"{len(ranks)} of the units {'are' if len(ranks) > 1 else 'is'} repaired by factors of {sizes}."]


def _bandwidths(recipe: ExportRecipe) -> Sequence[float]:
    """GB/s that the report speaks of: that of the machine that was asked about, else usual ones."""
    asked = None if recipe.mixed_precision is None else recipe.mixed_precision.bandwidth
    return _USUAL_BANDWIDTHS if asked is None else (asked / 1e9,)


def _solos(prepared: CalibratedModel, progress: Progress) -> Mapping[str, Sequence[Solo]]:
    """What formats do to units by themselves: all that were tried, or those of the plan where there was no choice."""
    if prepared.allocation is not None:
        return prepared.allocation.solos
    config, plan = prepared.content.config, prepared.content.plan
    weights = weight_count(config)
    if weights > _MOST_SOLO_WEIGHTS:
        return {}
    linears = [linear.name for linear in chosen_linears(config) if plan[linear.name] != FP32]
    tokens = max(_FEWEST_TOKENS, int(_SOLO_WORK / weights))
    found = {}
    for number, linear in enumerate(linears, 1):
        found[linear] = (Solo(plan[linear], prepared.candidates.solo(linear, plan[linear], tokens)),)
        progress("measuring units", number / len(linears))
    return found


def _plans(
    prepared: CalibratedModel, rounded: Divergence, recipe: ExportRecipe, progress: Progress
) -> list[PlanFigures]:
    """The chosen plan and those it is compared with, on as much text as they are."""
    content, times, allocation = prepared.content, prepared.times, prepared.allocation
    config = content.config
    tokens = max(_FEWEST_TOKENS, int(_COMPARED_WORK / weight_count(config)))

    def divergence(plan: Mapping[str, WeightFormat]) -> float:
        # Against mixes and formats that were not written, each unit is rounded by itself, as theirs are.
        evaluator = prepared.judge if allocation is None else prepared.candidates
        return evaluator.divergence(plan, tokens).mean_kl

    def nearest(plan: Mapping[str, WeightFormat]) -> float:
        return prepared.unobserved.divergence(plan, tokens).mean_kl

    kl = divergence(content.plan)
    if allocation is None:
        prepared.judge.release()
    chosen = plan_figures(config, content.plan, _CHOSEN, PlanKind.CHOSEN, kl, times)
    if allocation is None:
        used = {content.plan[linear.name] for linear in chosen_linears(config)}
        if not recipe.calibrated or len(used) > 1 or FP32 in used:
            return [replace(chosen, kl=rounded.mean_kl)]
        return [chosen, *nearest_plans(config, list(used), nearest, times, progress)]
    tried = {(each.form, each.form.method): each.form for solos in allocation.solos.values() for each in solos}
    # What only some units can be is no plan for all.
    weight_formats = [weight_format for weight_format in tried.values() if not weight_format.rank]
    return [
        chosen,
        *compared_plans(
            config, weight_formats, chosen.bytes_read, divergence, times, progress, others=allocation.seeds
        ),
        *nearest_plans(config, weight_formats, nearest, times, progress),
    ]


def _plan_text(content: BundleContent, solos: Mapping[str, Sequence[Solo]], rounded: Divergence) -> str:
    """The plan as a file, with what each unit costs."""
    notes = {}
    for linear in linear_figures(content.config, content.plan, solos):
        note = f"{megabytes(linear.bytes_read)} MB"
        notes[linear.name] = note if linear.solo_kl is None else f"{note}, KL {linear.solo_kl:.2g} by itself"
    heading = [
        f"Weights of {content.source.folder.resolve().name}: mean KL {rounded.mean_kl:.4g} from the float32 model.",
        "Edit formats and export again with --plan and this file.",
    ]
    named = {linear.name: content.plan[linear.name] for linear in chosen_linears(content.config)}
    return write_plan(named, notes, heading)
