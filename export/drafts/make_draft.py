"""Makes the draft model that an export requests, from a checkpoint of its own or from the target's own layers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from ...errors import BundleError, EdgeError, InputError
from ...models.bundle import DRAFT_FOLDER, Bundle, open_bundle
from ...models.draft_heads import HeadKind
from ...models.file_system import move, remove
from ...models.manifest import MANIFEST_NAME, GraphLayout
from ...models.pairing import name_draft, pair, vocabulary_difference
from ...models.progress import Progress
from ...runtime.measure.bundle_timing import BundleTimer
from ...runtime.measure.draft_benefit import measure_draft_benefit
from ...runtime.text.turn_markers import answer_start, read_markers
from ..bundle_content import BundleContent
from ..bundle_writer import write_bundle
from ..calibration.calibration_text import CalibrationText
from ..checkpoint.open import open_source
from ..quantization.methods import FP32, with_methods
from ..recipe import ExportRecipe
from ..report.figures import DraftFigures
from ..upgrade.editable import EditableGraph
from .head_size import (
    FASTEST_SIZE,
    TARGET_WIDTHS,
    StepTimes,
    agreement_by_size,
    best_size,
    rank_tokens,
    tokens_per_second,
)
from .layer_skip_draft import adopt_layer_skip_draft
from .trimmed_head import head_tokens, write_trimmed

_STAGE: Final = "draft"
_ROUNDS: Final = 12
"""Number of turns in which passes are timed."""


@dataclass(frozen=True)
class DraftRequest:
    """The draft to export with a target, found from a recipe and the checkpoints."""

    source: Path | None = None
    """Its checkpoint; None for a draft made of the target's layers, or for a module in the target's checkpoint."""
    kind: HeadKind | None = None
    """The kind of draft head; None for a draft model."""
    optional: bool = False
    """Whether the target is exported without it, with a note, where it cannot be used."""


@dataclass(frozen=True)
class MadeDraft:
    """A draft in its target's bundle."""

    figures: DraftFigures | None
    """None where no text is long enough to measure the draft on."""
    note: str = ""
    """Something that the user should know."""


def require_draft(target: Path, request: DraftRequest) -> None:
    """Check that a draft's checkpoint can be exported and has the target's vocabulary, before anything slow.

    Args:
        target: Folder with the target's tokenizer.
        request: The requested draft.

    Raises:
        CheckpointError: The draft's checkpoint is damaged, incomplete or not supported.
        InputError: The draft has another vocabulary.
    """
    if request.source is None:
        return
    with open_source(request.source) as (_, draft):
        difference = vocabulary_difference(target, draft.folder)
    if difference:
        raise InputError(
            f"the draft {request.source} has another vocabulary than the model: {difference}",
            "give a draft with the same tokenizer",
        )


def make_draft(
    folder: Path,
    target: BundleContent,
    text: CalibrationText,
    request: DraftRequest,
    recipe: ExportRecipe,
    progress: Progress,
) -> MadeDraft:
    """Make a draft model in the bundle of its target.

    Args:
        folder: The target's bundle.
        target: The content of that bundle.
        text: Text of the target.
        request: The draft model.
        recipe: The recipe of the target.
        progress: Receives the stage "draft".

    Raises:
        EdgeError: The draft cannot be made.
        OSError: The disk refused a write.
    """
    tokens = recipe.draft_tokens
    size = tokens if isinstance(tokens, int) else FASTEST_SIZE if tokens == "auto" else None
    if request.source is None:
        own = adopt_layer_skip_draft(folder, size, text, progress)
        made_of = f"the model without {', '.join(own.skips)}" if own.skips else "the model itself"
        note = (
            f"the draft does not pay on this machine: {own.tokens_per_second:.0f} tokens per second are expected "
            f"with it, {own.plain_tokens_per_second:.0f} without; it is used only on machines where it pays"
        )
        return MadeDraft(
            _figures(folder, text, made_of, None if size is None else own.tokens, None), "" if own.pays else note
        )
    _write_bundle(folder / DRAFT_FOLDER, request.source, target, recipe)
    trimming = adopt_draft(folder, size, text, progress)
    kept, coverage = (None, None) if trimming is None else (trimming.tokens, trimming.coverage)
    return MadeDraft(_figures(folder, text, request.source.resolve().name, kept, coverage))


def _figures(
    folder: Path, text: CalibrationText, made_of: str, tokens: int | None, coverage: float | None
) -> DraftFigures | None:
    try:
        benefit = measure_draft_benefit(folder, text.held_out)
    except EdgeError:
        return None
    return DraftFigures(made_of, benefit, tokens, coverage)


def _write_bundle(folder: Path, source: Path, target: BundleContent, recipe: ExportRecipe) -> None:
    """Export the draft's checkpoint into a folder of the target's bundle."""
    folder.mkdir()
    with open_source(source) as (config, checkpoint):
        own = ExportRecipe(recipe.draft_format or FP32, context=recipe.context)
        content = BundleContent(
            source=checkpoint,
            original=checkpoint,
            config=config,
            plan=with_methods(own.quant_plan(config), own.methods),
            context=min(own.context_for(config), target.context),
            layout=target.layout,
            command=target.command,
        )
        write_bundle(folder, content)


@dataclass(frozen=True)
class TrimmingReport:
    """Effect of trimming a draft's LM head."""

    tokens: int
    """Number of tokens of the trimmed head."""
    all_tokens: int
    """Number of tokens of the whole head."""
    min_tokens: int
    """Number of tokens that are always kept."""
    coverage: float
    """Share of the tokens of held-out answers that the trimmed head has."""
    agreement: float
    """Share of positions of held-out answers where draft and target prefer the same token."""
    whole_agreement: float
    """Agreement with the whole head."""
    step_ms: float
    """Milliseconds of the draft's step."""
    whole_step_ms: float
    """Milliseconds of the draft's step with the whole head."""
    tokens_per_second: float
    """Expected tokens per second of draft chains of the best length."""
    whole_tokens_per_second: float
    """Expected tokens per second with the whole head."""


def require_fitting(target: Path, draft: Path) -> None:
    """Check that a bundle can be the draft of another as it is.

    Raises:
        BundleError: The bundle has another vocabulary.
        InputError: One of the bundles has a layout without drafts.
    """
    for folder, manifest in ((each.folder, each.manifest) for each in map(open_bundle, (target, draft))):
        if manifest is None:
            raise BundleError(f"{folder} has no {MANIFEST_NAME}", "export the model again")
        if manifest.layout is not GraphLayout.EDGE:
            raise InputError("drafts need edge-run's own layout", "leave --layout or --draft out")
    pair(open_bundle(target), open_bundle(draft))


def adopt_draft(
    target: Path, vocabulary_size: int | None, text: CalibrationText, progress: Progress
) -> TrimmingReport | None:
    """Name the bundle in a target's `DRAFT_FOLDER` as its draft, and trim its head if a size is given.

    Args:
        target: The target's bundle, with the draft's bundle inside.
        vocabulary_size: Number of tokens of the draft's head; `FASTEST_SIZE` for the fastest, None for all.
        text: Text of the target: tokens are counted in its calibration part, agreement is measured on the held-out one.
        progress: Receives the stage "draft".

    Returns:
        The effect of trimming; None where no size is given.

    Raises:
        BundleError: The draft has another vocabulary.
        InputError: The head cannot have that size, or no text is given.
        ExportError: The head cannot be trimmed.
        OSError: The disk refused a write.
    """
    draft = target / DRAFT_FOLDER
    require_fitting(target, draft)
    report = None
    if vocabulary_size is not None:
        progress(_STAGE, 0.0)
        report = _trim(target, draft, vocabulary_size, text, progress)
    name_draft(target, draft)
    progress(_STAGE, 1.0)
    return report


def _trim(target: Path, draft: Path, vocabulary_size: int, text: CalibrationText, progress: Progress) -> TrimmingReport:
    whole = open_bundle(draft)
    markers = read_markers(target)
    ranking = rank_tokens(text.calibration, _shared_tokens(target, whole), markers.special | markers.ending)
    if vocabulary_size != FASTEST_SIZE:
        ranking.kept(vocabulary_size)  # raises before the measurements
    held_out = text.held_out
    starts = [answer_start(each, markers) for each in held_out]
    agreement = agreement_by_size(target, draft, ranking, held_out, starts, lambda done: progress(_STAGE, 0.5 * done))
    answers = np.concatenate([each[start:] for each, start in zip(held_out, starts, strict=True)])
    smallest = draft.with_name(f".{draft.name}.smallest")
    trimmed = draft.with_name(f".{draft.name}.trimmed")
    timer = BundleTimer()
    try:
        write_trimmed(whole, smallest, ranking.kept(ranking.min_tokens))
        on_target, on_whole, on_smallest = timer.time_passes([target, draft, smallest], TARGET_WIDTHS, _ROUNDS)
        progress(_STAGE, 0.8)
        times = StepTimes(on_target, on_whole[1], on_smallest[1])
        tokens = best_size(ranking, agreement, times) if vocabulary_size == FASTEST_SIZE else vocabulary_size
        if tokens < ranking.order.size:
            write_trimmed(whole, trimmed, ranking.kept(tokens))
            whole_again, on_trimmed = timer.time_passes([draft, trimmed], (1,), _ROUNDS)
            remove(draft)
            move(trimmed, draft)
        else:
            whole_again = on_trimmed = on_whole
    finally:
        for folder in (smallest, trimmed):
            remove(folder)
    trimmed_agreement, whole_agreement = float(agreement[tokens]), float(agreement[-1])
    return TrimmingReport(
        tokens=tokens,
        all_tokens=ranking.order.size,
        min_tokens=ranking.min_tokens,
        coverage=float(np.isin(answers, ranking.kept(tokens)).mean()),
        agreement=trimmed_agreement,
        whole_agreement=whole_agreement,
        step_ms=1e3 * on_trimmed[1],
        whole_step_ms=1e3 * whole_again[1],
        tokens_per_second=tokens_per_second(trimmed_agreement, on_trimmed[1], on_target),
        whole_tokens_per_second=tokens_per_second(whole_agreement, whole_again[1], on_target),
    )


def _shared_tokens(target: Path, draft: Bundle) -> int:
    """Number of tokens that both the draft's head and the target have; the others are padding."""
    manifest = open_bundle(target).manifest
    own = head_tokens(EditableGraph.open(draft.graph))
    return own if manifest is None else min(own, manifest.architecture.vocab_size)
