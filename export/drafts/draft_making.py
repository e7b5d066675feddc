"""The draft that an export is asked for: another checkpoint's, or one of the target's own layers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...errors import EdgeError, InputError
from ...models.bundle import DRAFT_FOLDER
from ...models.pairing import vocabulary_difference
from ...models.progress import Progress
from ...runtime.measure.draft_benefit import measure_draft_benefit
from ..bundle_content import BundleContent
from ..bundle_writer import write_bundle
from ..calibration.text_split import CalibrationText
from ..checkpoint.open import open_source
from ..recipe import INT4, DraftRequest, ExportRecipe, with_methods
from ..report import DraftFigures
from .companion import adopt_draft
from .own_draft import adopt_own_draft


@dataclass(frozen=True)
class MadeDraft:
    """A draft in its target's bundle."""

    figures: DraftFigures | None
    """None where no text is long enough to judge it by."""
    note: str = ""
    """What the user should know of it."""


def require_draft(target: Path, request: DraftRequest) -> None:
    """Check, before anything that takes long, that a draft's checkpoint can be exported and has the target's tokens.

    Args:
        target: the folder of the target's tokenizer.
        request: the draft that is asked for.

    Raises:
        CheckpointError: the draft's checkpoint is damaged, incomplete or not supported.
        InputError: it has other tokens.
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
    recipe: ExportRecipe,
    request: DraftRequest,
    progress: Progress,
) -> MadeDraft:
    """Make a draft in the bundle of its target.

    Args:
        folder: the target's bundle.
        target: what it was written from.
        text: of the target.
        recipe: what was asked for.
        request: the draft that was.
        progress: hears the stage "draft".

    Raises:
        EdgeError: the draft cannot be made.
        OSError: the disk refused a write.
    """
    if request.source is None:
        own = adopt_own_draft(folder, request.vocabulary_size, text.calibration, text.held_out, progress)
        made_of = f"the model without {', '.join(own.skips)}" if own.skips else "the model itself"
        tokens = own.tokens if request.vocabulary_size is not None else None
        figures = _judged(folder, text, made_of, tokens, None)
        note = (
            f"the draft does not pay on this machine: {own.tokens_per_second:.0f} tokens a second are expected "
            f"with it, {own.plain_tokens_per_second:.0f} without; it is asked only where it pays"
        )
        note = "" if own.pays else note
        return MadeDraft(figures, note)
    _write_companion(folder / DRAFT_FOLDER, request.source, target, recipe, request)
    head = adopt_draft(folder, request.vocabulary_size, text.calibration, text.held_out, progress)
    tokens, coverage = (None, None) if head is None else (head.tokens, head.coverage)
    figures = _judged(folder, text, request.source.resolve().name, tokens, coverage)
    return MadeDraft(figures)


def _judged(
    folder: Path, text: CalibrationText, made_of: str, tokens: int | None, coverage: float | None
) -> DraftFigures | None:
    try:
        acceptance = measure_draft_benefit(folder, text.held_out)
    except EdgeError:
        return None
    return DraftFigures(made_of, acceptance, tokens, coverage)


def _write_companion(
    folder: Path, source: Path, target: BundleContent, recipe: ExportRecipe, request: DraftRequest
) -> None:
    """Export the draft's own checkpoint into a folder of the target's."""
    form = request.weight_format or (recipe.body if recipe.mixed_precision is None else INT4)
    folder.mkdir()
    with open_source(source) as (config, checkpoint):
        own = ExportRecipe(form, context=recipe.context)
        context = min(own.context_for(config), target.context)
        plan = with_methods(own.quant_plan(config), own.methods)
        write_bundle(
            folder, BundleContent(checkpoint, checkpoint, config, plan, context, target.layout, target.command)
        )
