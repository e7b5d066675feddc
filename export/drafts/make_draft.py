"""Makes the draft model that an export requests."""

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
from ..calibration.calibration_text import CalibrationText
from ..checkpoint.open import open_source
from ..recipe import INT4, DraftRequest, ExportRecipe, with_methods
from ..report import DraftFigures
from .layer_skip_draft import adopt_layer_skip_draft
from .separate_draft import adopt_draft


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
    folder: Path, target: BundleContent, text: CalibrationText, recipe: ExportRecipe, progress: Progress
) -> MadeDraft:
    """Make the draft that a recipe requests in the bundle of its target.

    Args:
        folder: The target's bundle.
        target: The content of that bundle.
        text: Text of the target.
        recipe: The recipe, which requests a draft.
        progress: Receives the stage "draft".

    Raises:
        EdgeError: The draft cannot be made.
        OSError: The disk refused a write.
    """
    request = recipe.draft
    assert request is not None  # noqa: S101 -- see the docstring
    if request.source is None:
        own = adopt_layer_skip_draft(folder, request.vocabulary_size, text, progress)
        made_of = f"the model without {', '.join(own.skips)}" if own.skips else "the model itself"
        note = (
            f"the draft does not pay on this machine: {own.tokens_per_second:.0f} tokens per second are expected "
            f"with it, {own.plain_tokens_per_second:.0f} without; it is used only on machines where it pays"
        )
        tokens = own.tokens if request.vocabulary_size is not None else None
        return MadeDraft(_figures(folder, text, made_of, tokens, None), "" if own.pays else note)
    _write_bundle(folder / DRAFT_FOLDER, request.source, target, recipe, request)
    trimming = adopt_draft(folder, request.vocabulary_size, text, progress)
    tokens, coverage = (None, None) if trimming is None else (trimming.tokens, trimming.coverage)
    return MadeDraft(_figures(folder, text, request.source.resolve().name, tokens, coverage))


def _figures(
    folder: Path, text: CalibrationText, made_of: str, tokens: int | None, coverage: float | None
) -> DraftFigures | None:
    try:
        benefit = measure_draft_benefit(folder, text.held_out)
    except EdgeError:
        return None
    return DraftFigures(made_of, benefit, tokens, coverage)


def _write_bundle(
    folder: Path, source: Path, target: BundleContent, recipe: ExportRecipe, request: DraftRequest
) -> None:
    """Export the draft's checkpoint into a folder of the target's bundle."""
    weight_format = request.weight_format or (recipe.body if recipe.mixed_precision is None else INT4)
    folder.mkdir()
    with open_source(source) as (config, checkpoint):
        own = ExportRecipe(weight_format, context=recipe.context)
        context = min(own.context_for(config), target.context)
        plan = with_methods(own.quant_plan(config), own.methods)
        content = BundleContent(checkpoint, checkpoint, config, plan, context, target.layout, target.command)
        write_bundle(folder, content)
