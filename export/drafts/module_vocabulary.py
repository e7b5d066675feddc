"""Chooses the tokens that the LM head of a multi-token-prediction module keeps.

A module has its target's LM head, which is most of what a pass of the module reads where the vocabulary is large. As
for other drafts (see `token_ranking`), tokens are ranked by how often the target writes them. The default is a fixed
number: what it costs in time is small, and text of another kind needs other tokens than the text they were counted in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from ...errors import ExportError
from ...models.bundle import DRAFT_GRAPH_NAME
from ...models.manifest import MANIFEST_NAME, Manifest
from ...models.progress import Progress
from ...runtime.engine_loading import load
from ...runtime.measure.bundle_timing import BundleTimer
from ...runtime.speculation.drafters.target_drafts import HiddenStateHead
from ...runtime.text.turn_markers import TokenArray, answer_start, read_markers
from ..calibration.calibration_text import CalibrationText
from ..recipe import DraftTokens
from ..upgrade.edit.tensors import in_place
from .head_size import TARGET_WIDTHS, Float32Array, Int64Array, StepTimes, best_size, count_agreement
from .token_ranking import TokenRanking, rank_tokens
from .trimmed_head import trim_module, trimmed_module_graph

DEFAULT_TOKENS: Final = 65536
"""Number of tokens that are kept by default, in vocabularies of at least `_LARGE` tokens."""
_LARGE: Final = 2 * DEFAULT_TOKENS
"""Smallest vocabulary that is trimmed by default: below, a pass gets little shorter."""
_SMALLEST_GRAPH: Final = ".draft.smallest.onnx"
_MAX_TEXT_TOKENS: Final = 2048
"""Number of tokens of text on which the agreement is measured."""
_ROUNDS: Final = 12
"""Number of turns in which passes are timed."""
_STAGE: Final = "draft"


def trim_vocabulary(folder: Path, wanted: DraftTokens, text: CalibrationText | None, progress: Progress) -> str:
    """Trim the LM head of the module in a bundle, if it is to have fewer tokens than its target.

    Args:
        folder: The bundle, whose manifest names the module with its whole LM head.
        wanted: Number of tokens, or how it is chosen: by default it is a fixed one if the vocabulary is much larger.
        text: Text of the target: tokens are counted in its calibration part, agreement is measured on the held-out one.
            None if there is none, with which nothing is trimmed.
        progress: Receives the stage "draft".

    Returns:
        A sentence on what was kept; empty if nothing was trimmed.

    Raises:
        InputError: The head cannot have that size.
        ExportError: The head cannot be trimmed, or a graph does not run.
        EdgeError: The bundle cannot be loaded.
        OSError: The disk refused a write.
    """
    vocabulary = Manifest.from_json((folder / MANIFEST_NAME).read_bytes()).architecture.vocab_size
    too_small = wanted is None and vocabulary < _LARGE
    if text is None or wanted == "all" or too_small:
        return ""
    markers = read_markers(folder)
    ranking = rank_tokens(text.calibration, vocabulary, markers.special | markers.ending)
    starts = [answer_start(each, markers) for each in text.held_out]
    if isinstance(wanted, int):
        tokens = wanted
    elif wanted is None:
        tokens = max(DEFAULT_TOKENS, ranking.min_tokens)
    else:
        tokens = _fastest(folder, ranking, text.held_out, starts, progress)
    kept = ranking.kept(tokens)
    if tokens == vocabulary:
        return ""
    trim_module(folder, kept)
    answers = np.concatenate([each[start:] for each, start in zip(text.held_out, starts, strict=True)])
    return (
        f"The multi-token-prediction module drafts {tokens} of {vocabulary} tokens, "
        f"{np.isin(answers, kept).mean():.1%} of those in held-out answers."
    )


def _fastest(
    folder: Path, ranking: TokenRanking, texts: Sequence[TokenArray], starts: Sequence[int], progress: Progress
) -> int:
    """The number of tokens with the most expected tokens per second."""
    agreement = count_agreement(_predictions(folder, texts, starts, progress), ranking)
    smallest = folder / _SMALLEST_GRAPH
    timer = BundleTimer()
    try:
        trimmed = trimmed_module_graph(folder, ranking.kept(ranking.min_tokens))
        smallest.write_bytes(trimmed.model(in_place).SerializeToString())
        on_whole, on_smallest = timer.time_heads(folder, [folder / DRAFT_GRAPH_NAME, smallest], _ROUNDS)
    finally:
        smallest.unlink(missing_ok=True)
    (on_target,) = timer.time_passes([folder], TARGET_WIDTHS, _ROUNDS)
    return best_size(ranking, agreement, StepTimes(on_target, on_whole, on_smallest))


def _predictions(
    folder: Path, texts: Sequence[TokenArray], starts: Sequence[int], progress: Progress
) -> Iterable[tuple[Int64Array, Float32Array]]:
    """Preferred tokens of the target and logits of the module, token by token as in decoding.

    Raises:
        ExportError: The module does not run.
    """
    with load(folder, device="cpu", learned=False) as engine:
        module = engine.model.drafters.draft_model()
        if not isinstance(module, HiddenStateHead):
            raise ExportError(
                "the exported multi-token-prediction module does not run on this machine",
                "give the number of its tokens, or --draft-vocab all",
            )
        bound = engine.model.new_sequence().bound
        arena, done = bound.arena, 0
        for text, start in zip(texts, starts, strict=True):
            arena.rewind_to(0)
            module.attach(arena)
            module.reset(())
            # The successor of the last token is unknown, and before the second one the module has no features.
            read = text[: min(_MAX_TEXT_TOKENS - done, engine.context)].tolist()[:-1]
            for index, token in enumerate(read):
                module.append(token)
                logits = module.logits(()) if index >= max(start - 1, 1) else None
                preferred = bound.forward((token,))[0].argmax(keepdims=True)
                arena.commit(1)
                if logits is not None:
                    yield preferred, logits[None]
            done += len(read)
            progress(_STAGE, done / _MAX_TEXT_TOKENS)
            if done + 1 >= _MAX_TEXT_TOKENS:
                return
