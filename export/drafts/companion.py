"""A draft model of its own checkpoint, in its target's bundle."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from ...errors import BundleError, InputError
from ...models.bundle import DRAFT_FOLDER, Bundle, open_bundle
from ...models.manifest import MANIFEST_NAME, GraphLayout
from ...models.pairing import name_draft, pair
from ...models.progress import Progress
from ...runtime.measure.bundle_timing import BundleTimer
from ...runtime.text.turn_markers import TokenArray, answer_start, read_markers
from ..upgrade.edit.editable import EditableGraph
from .frequencies import rank_tokens
from .head_size import TARGET_ROWS, StepTimes, agreement_by_size, best_size, speed
from .trimmed_head import head_tokens, write_trimmed

CHOSEN: Final = 0
"""Asks for as many tokens as pay."""
_STAGE: Final = "draft"
_ROUNDS: Final = 12
"""Turns of the measurement."""


@dataclass(frozen=True)
class HeadReport:
    """What trimming a draft's head costs and gains."""

    tokens: int
    """That it has now."""
    all_tokens: int
    """That it had."""
    least: int
    """That have to stay."""
    coverage: float
    """Share of the tokens of answers that were not counted that the head can say."""
    agreement: float
    """Share of their positions where draft and target prefer the same token."""
    whole_agreement: float
    """The same with the whole head."""
    step_ms: float
    """Milliseconds of the draft's step."""
    whole_step_ms: float
    """The same with the whole head."""
    tokens_per_second: float
    """Expected of chains of the best length."""
    whole_tokens_per_second: float
    """The same with the whole head."""

    def as_mapping(self) -> dict[str, float]:
        """The numbers by name."""
        return {name: round(value, 6) for name, value in vars(self).items()}


def require_fitting(target: Path, draft: Path) -> None:
    """Check that a bundle may be the draft of another, as it is.

    Raises:
        BundleError: it has another vocabulary.
        InputError: one of them is of a layout in which that cannot be.
    """
    for folder, manifest in ((each.folder, each.manifest) for each in map(open_bundle, (target, draft))):
        if manifest is None:
            raise BundleError(f"{folder} has no {MANIFEST_NAME}", "export the model again")
        if manifest.layout is not GraphLayout.EDGE:
            raise InputError("a draft is made for edge-run's own layout only", "leave --layout or --draft out")
    pair(open_bundle(target), open_bundle(draft))


def adopt_draft(
    target: Path,
    vocabulary: int | None,
    counted: Sequence[TokenArray],
    held_out: Sequence[TokenArray],
    progress: Progress,
) -> HeadReport | None:
    """Make the bundle in a target's `DRAFT_FOLDER` its draft: trim its head if asked to, and name it in the manifest.

    Args:
        target: a bundle, with the draft's whole bundle inside.
        vocabulary: tokens of the draft's head; `CHOSEN` for as many as pay, None for all.
        counted: text of the target, ids int64 [n] each, for counting.
        held_out: other such text, for judging.
        progress: hears the stage "draft".

    Returns:
        What trimming does; None where the head stays whole unasked.

    Raises:
        BundleError: the draft has another vocabulary.
        InputError: the head cannot have so many tokens, or there is no text.
        ExportError: the head cannot be trimmed.
        OSError: the disk refused a write.
    """
    draft = target / DRAFT_FOLDER
    require_fitting(target, draft)
    report = None
    if vocabulary is not None:
        progress(_STAGE, 0.0)
        report = _trim(target, draft, vocabulary, counted, held_out, progress)
    name_draft(target, draft)
    progress(_STAGE, 1.0)
    return report


def _trim(
    target: Path,
    draft: Path,
    vocabulary: int,
    counted: Sequence[TokenArray],
    held_out: Sequence[TokenArray],
    progress: Progress,
) -> HeadReport:
    whole = open_bundle(draft)
    markers = read_markers(target)
    ranking = rank_tokens(counted, _shared_tokens(target, whole), markers.special | markers.ending)
    if vocabulary != CHOSEN:
        ranking.kept(vocabulary)  # before anything that takes long
    starts = [answer_start(text, markers) for text in held_out]
    agreement = agreement_by_size(target, draft, ranking, held_out, starts, lambda done: progress(_STAGE, 0.5 * done))
    answers = np.concatenate([text[start:] for text, start in zip(held_out, starts, strict=True)])
    least = draft.with_name(f".{draft.name}.least")
    trimmed = draft.with_name(f".{draft.name}.trimmed")
    try:
        write_trimmed(whole, least, ranking.kept(ranking.least))
        on_target, on_whole, on_least = BundleTimer().time_passes([target, draft, least], TARGET_ROWS, _ROUNDS)
        progress(_STAGE, 0.8)
        times = StepTimes(on_target, on_whole[1], on_least[1])
        tokens = best_size(ranking, agreement, times) if vocabulary == CHOSEN else vocabulary
        if tokens < ranking.order.size:
            write_trimmed(whole, trimmed, ranking.kept(tokens))
            again_whole, on_trimmed = BundleTimer().time_passes([draft, trimmed], (1,), _ROUNDS)
            shutil.rmtree(draft)
            trimmed.rename(draft)
        else:
            again_whole = on_trimmed = on_whole
    finally:
        shutil.rmtree(least, ignore_errors=True)
        shutil.rmtree(trimmed, ignore_errors=True)
    return HeadReport(
        tokens=tokens,
        all_tokens=ranking.order.size,
        least=ranking.least,
        coverage=float(np.isin(answers, ranking.kept(tokens)).mean()),
        agreement=float(agreement[tokens]),
        whole_agreement=float(agreement[-1]),
        step_ms=1e3 * on_trimmed[1],
        whole_step_ms=1e3 * again_whole[1],
        tokens_per_second=speed(float(agreement[tokens]), on_trimmed[1], on_target),
        whole_tokens_per_second=speed(float(agreement[-1]), again_whole[1], on_target),
    )


def _shared_tokens(target: Path, whole: Bundle) -> int:
    """Tokens that the draft's head and the target both have; what is beyond only pads."""
    manifest = open_bundle(target).manifest
    own = head_tokens(EditableGraph.open(whole.graph))
    return own if manifest is None else min(own, manifest.architecture.vocab_size)
