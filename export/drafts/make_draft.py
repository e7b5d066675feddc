"""Makes the draft model that an export requests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...errors import EdgeError, InputError
from ...models.bundle import DRAFT_FOLDER
from ...models.draft_heads import HeadKind
from ...models.pairing import vocabulary_difference
from ...models.progress import Progress
from ...runtime.measure.draft_benefit import measure_draft_benefit
from ..bundle_content import BundleContent
from ..bundle_writer import write_bundle
from ..calibration.calibration_text import CalibrationText
from ..checkpoint.open import open_source
from ..quantization.methods import FP32, with_methods
from ..recipe import ExportRecipe
from ..report import DraftFigures
from .layer_skip_draft import adopt_layer_skip_draft
from .separate_draft import FASTEST_SIZE, adopt_draft


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
