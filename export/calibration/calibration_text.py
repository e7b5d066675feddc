"""Calibration text of a model, in a calibration and a held-out part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from ...errors import InputError
from ...models.atomic import write_atomically
from ...models.file_system import remove
from ...models.progress import Progress
from ...runtime.measure.self_text import read_texts, sample_texts
from ...runtime.text.turn_markers import TokenArray
from ..bundle_content import BundleContent, SourceModel
from ..bundle_writer import write_bundle
from ..checkpoint.config import DecoderConfig
from ..checkpoint.layout import fused_linears
from ..quantization.methods import INT8, with_methods
from ..recipe import ExportRecipe

DEFAULT_CALIBRATION_TOKENS: Final = 16384
"""Maximum tokens of calibration text by default, except for models with narrow linears."""
MAX_TEXT_TOKENS: Final = 512
"""Largest number of tokens of one text; a longer one is cut into several."""
MIN_TOKENS: Final = 1024
"""Smallest number of tokens of both parts that can be calibrated with."""
_TOKENS_PER_INPUT: Final = 16
_FEWEST_TOKENS: Final = 4096
_HELD_OUT_SHARE: Final = 4
"""One token in so many is held out."""
_LEARNED_FACTOR: Final = 8
"""How much more text is read by default where rounding is learned."""
LEARNED_CHECK_SHARE: Final = 16
"""At least one token in so many is then read for that alone, so that its error can be measured on unknown text."""
_STAGE: Final = "text"
_TRIAL: Final = "trial"
_TEXT_FILE: Final = "text.npz"


class CalibrationText(NamedTuple):
    """Texts as token ids, int64 [n] each, of at least two tokens."""

    calibration: tuple[TokenArray, ...]
    """Texts from which statistics are collected and by which plans are chosen."""
    held_out: tuple[TokenArray, ...]
    """Texts on which the exported model is measured."""
    origin: str
    """Source of the texts for people: a file's name, or the model itself."""
    more: tuple[TokenArray, ...] = ()
    """Texts that are read for learned rounding alone."""


def calibration_text(model: SourceModel, recipe: ExportRecipe, folder: Path, progress: Progress) -> CalibrationText:
    """Read or sample the calibration text of a model, and keep it in a folder.

    The text is tokenized or sampled with a trial export in 8 bits, which is close to the float model.

    Args:
        model: The model.
        recipe: Source, size and seed of the text.
        folder: Folder that keeps the text; it is reused from there.
        progress: Receives the stage "text".

    Raises:
        InputError: The file cannot be read, or there is too little text.
        CheckpointError: A tensor cannot be read.
        ExportError: The trial export failed.
        OSError: The disk refused a write.
    """
    max_text_tokens = min(MAX_TEXT_TOKENS, model.context)
    most, file = default_tokens(model.config), recipe.calibration_file
    max_tokens = recipe.calibration_tokens or most * (_LEARNED_FACTOR if recipe.learns else 1)
    kept = folder / _TEXT_FILE
    if kept.is_file():
        with np.load(kept, allow_pickle=False) as stored:
            texts = [stored[name] for name in stored]
    else:
        progress(_STAGE, 0.0)
        trial = folder / _TRIAL
        remove(trial)
        trial.mkdir(parents=True)
        in_8_bits = ExportRecipe(INT8, context=model.context)
        plan = with_methods(in_8_bits.quant_plan(model.config), in_8_bits.methods)
        content = BundleContent(
            source=model.source, original=model.source, config=model.config, plan=plan, context=model.context
        )
        write_bundle(trial, content, lambda _, fraction: progress(_STAGE, 0.5 * fraction))
        if file is None:
            texts = sample_texts(
                trial,
                max_tokens,
                max_text_tokens,
                recipe.seed,
                lambda share: progress(_STAGE, 0.5 + 0.5 * share),
            )
        else:
            # Texts from all over the file, until they have `max_tokens` tokens.
            read = read_texts(trial, file, max_tokens, max_text_tokens, recipe.seed)
            shuffled = [read[number] for number in np.random.default_rng(recipe.seed).permutation(len(read))]
            texts = shuffled[: int(np.searchsorted(np.cumsum([*map(len, shuffled)]), max_tokens)) + 1]
        remove(trial)
        write_atomically(kept, lambda file: np.savez(file, *texts))
        progress(_STAGE, 1.0)
    origin = "text sampled from the model itself" if file is None else file.name
    return split_texts(texts, origin, max_text_tokens, recipe.seed, most if recipe.learns else None)


def default_tokens(config: DecoderConfig) -> int:
    """Number of tokens of calibration text by default.

    The second moments of a linear's inputs need a multiple of the number of inputs; more text costs a small model time
    and brings nothing.
    """
    widest = max(linear.columns for linear in fused_linears(config))
    return min(DEFAULT_CALIBRATION_TOKENS, max(_FEWEST_TOKENS, _TOKENS_PER_INPUT * widest))


def split_texts(
    texts: Sequence[TokenArray], origin: str, max_text_tokens: int, seed: int = 0, most: int | None = None
) -> CalibrationText:
    """Split texts into a calibration and a held-out part, in random order.

    Args:
        texts: Token ids; duplicates are dropped.
        origin: Source of the texts.
        max_text_tokens: Length at which longer texts are cut.
        seed: Seed of the order, which is also the order of the batches, so that the first few are a fair sample.
        most: Number of tokens of both parts, where all further text is for learned rounding; None for all.

    Raises:
        InputError: There are too few tokens.
    """
    pieces = {
        piece.tobytes(): piece
        for text in texts
        for piece in np.split(np.asarray(text, np.int64), range(max_text_tokens, len(text), max_text_tokens))
        if len(piece) > 1
    }
    total = sum(map(len, pieces.values()))
    if total < MIN_TOKENS:
        raise InputError(
            f"the calibration text has {total} tokens", f"give at least {MIN_TOKENS}, better some ten thousand"
        )
    found = list(pieces.values())
    if len(found) < _HELD_OUT_SHARE:
        found = [part for piece in found for part in np.array_split(piece, min(_HELD_OUT_SHARE, len(piece) // 2))]
    order = np.random.default_rng(seed).permutation(len(found))
    parts = held_out, calibration, more = list[TokenArray](), list[TokenArray](), list[TokenArray]()
    wanted = total if most is None else min(most, total - total // LEARNED_CHECK_SHARE)
    read = 0
    for number in order.tolist():
        part = 0 if _HELD_OUT_SHARE * read < wanted else 1 if read < wanted else 2
        parts[part].append(found[number])
        read += len(found[number])
    return CalibrationText(tuple(calibration), tuple(held_out), origin, tuple(more))
