"""Makes the draft model that an export requests, from its checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ...errors import EdgeError, InputError
from ...models.bundle import DRAFT_FOLDER, open_bundle
from ...models.file_system import move, remove
from ...models.manifest import HeadKind
from ...models.pairing import name_draft, vocabulary_difference
from ...models.progress import Progress
from ...runtime.measure.bundle_timing import BundleTimer
from ...runtime.measure.draft_benefit import measure_draft_benefit
from ..bundle_content import BundleContent, read_manifest
from ..bundle_writer import write_bundle
from ..calibration.calibration_text import CalibrationText
from ..checkpoint.open import open_source
from ..quantization.methods import FP32, with_methods
from ..recipe import DraftTokens, ExportRecipe
from ..report.figures import DraftFigures
from ..upgrade.editable import EditableGraph
from .head_size import TARGET_WIDTHS, agreement_by_size, best_size, kept_share, ranked_text
from .trimmed_head import head_tokens, write_trimmed

_STAGE: Final = "draft"
_ROUNDS: Final = 12
"""Number of turns in which passes are timed."""


@dataclass(frozen=True)
class DraftRequest:
    """The draft to export with a target, found from a recipe and the checkpoints."""

    source: Path | None = None
    """Its checkpoint; None for a module in the target's checkpoint."""
    kind: HeadKind | None = None
    """The kind of draft head; None for a draft model."""
    optional: bool = False
    """Whether the target is exported without it, with a note, where it cannot be used."""


def require_draft(target: Path, source: Path) -> None:
    """Check that a draft's checkpoint can be exported and has the target's vocabulary, before anything slow.

    Args:
        target: Folder with the target's tokenizer.
        source: The draft's checkpoint.

    Raises:
        CheckpointError: The draft's checkpoint is damaged, incomplete or not supported.
        InputError: The draft has another vocabulary.
    """
    with open_source(source) as (_, draft):
        difference = vocabulary_difference(target, draft.folder)
    if difference:
        raise InputError(
            f"the draft {source} has another vocabulary than the model: {difference}",
            "give a draft with the same tokenizer",
        )


def make_draft(
    folder: Path,
    target: BundleContent,
    text: CalibrationText,
    source: Path,
    recipe: ExportRecipe,
    progress: Progress,
) -> DraftFigures | None:
    """Make a draft model in the bundle of its target.

    Args:
        folder: The target's bundle.
        target: The content of that bundle.
        text: Text of the target.
        source: The draft's checkpoint.
        recipe: The recipe of the target.
        progress: Receives the stage "draft".

    Returns:
        Figures of the draft; None where no text is long enough to measure it on.

    Raises:
        EdgeError: The draft cannot be made.
        OSError: The disk refused a write.
    """
    _write_bundle(folder / DRAFT_FOLDER, source, target, recipe)
    kept, coverage = adopt_draft(folder, recipe.draft_tokens, text, progress)
    try:
        benefit = measure_draft_benefit(folder, text.held_out)
    except EdgeError:
        return None
    return DraftFigures(source.resolve().name, benefit, kept, coverage)


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


def adopt_draft(
    target: Path, wanted: DraftTokens, text: CalibrationText, progress: Progress
) -> tuple[int | None, float | None]:
    """Name the bundle in a target's `DRAFT_FOLDER` as its draft, and trim its head if a size is given.

    Args:
        target: The target's bundle, with the draft's bundle inside.
        wanted: Number of tokens of the draft's head; `auto` for the fastest, None or `all` for all.
        text: Text of the target: tokens are counted in its calibration part, agreement is measured on the held-out one.
        progress: Receives the stage "draft".

    Returns:
        The number of tokens of the head, and the share of the tokens of held-out answers that it has; None for both
        where no size is given.

    Raises:
        InputError: The head cannot have that size, or no text is given.
        ExportError: The head cannot be trimmed.
        OSError: The disk refused a write.
    """
    draft = target / DRAFT_FOLDER
    tokens = coverage = None
    if wanted not in (None, "all"):
        progress(_STAGE, 0.0)
        tokens, coverage = _trim(target, draft, wanted, text, progress)
    name_draft(target, draft)
    progress(_STAGE, 1.0)
    return tokens, coverage


def _trim(
    target: Path, draft: Path, wanted: DraftTokens, text: CalibrationText, progress: Progress
) -> tuple[int, float]:
    whole = open_bundle(draft)
    # Tokens beyond the target's are padding.
    shared = min(head_tokens(EditableGraph.open(whole.graph)), read_manifest(target).architecture.vocab_size)
    ranking, starts = ranked_text(target, shared, text)
    trimmed = draft.with_name(f".{draft.name}.trimmed")
    try:
        if isinstance(wanted, int):
            tokens = wanted
        else:
            agreement = agreement_by_size(
                target, draft, ranking, text.held_out, starts, lambda done: progress(_STAGE, 0.5 * done)
            )
            write_trimmed(whole, trimmed, ranking.kept(ranking.min_tokens))
            times = BundleTimer().time_passes([target, draft, trimmed], TARGET_WIDTHS, _ROUNDS)
            remove(trimmed)
            tokens = best_size(ranking, agreement, times[0], times[1][1], times[2][1])
        kept = ranking.kept(tokens)
        if tokens < ranking.order.size:
            write_trimmed(whole, trimmed, kept)
            remove(draft)
            move(trimmed, draft)
    finally:
        remove(trimmed)
    return tokens, kept_share(text.held_out, starts, kept)
