"""The text to calibrate with: a file's, or the model's own words, asked for once and kept."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

import numpy as np

from ...models.atomic import write_atomically
from ...models.progress import Progress
from ...runtime.measure.self_text import read_texts, sample_texts
from ...runtime.text.turn_markers import TokenArray
from ..bundle_content import BundleContent
from ..bundle_writer import write_bundle
from ..checkpoint.config import DecoderConfig
from ..checkpoint.source import ModelSource
from ..recipe import INT8, CalibrationRequest, ExportRecipe, with_methods
from .text_split import CalibrationText, divided

LONGEST_TEXT: Final = 512
"""Tokens of a text; a longer one is several."""
_STAGE: Final = "text"
_TRIAL: Final = "trial"
_TOKENS_FILE: Final = "text.ids"
_LENGTHS_FILE: Final = "text.lengths"


def obtain_text(
    checkpoint: ModelSource,
    config: DecoderConfig,
    context: int,
    request: CalibrationRequest,
    folder: Path,
    progress: Progress,
) -> CalibrationText:
    """Text for a model, as it would read it.

    Whoever reads or writes it does so with a trial export in 8 bits, which is next to the float model; `folder` has
    the text from then on.

    Raises:
        InputError: the file cannot be read, or there is too little text.
        CheckpointError: a tensor cannot be read.
        ExportError: the trial export failed.
        OSError: the disk refused a write.
    """
    longest = min(LONGEST_TEXT, context)
    texts = _kept(folder)
    if texts is None:
        progress(_STAGE, 0.0)
        trial = folder / _TRIAL
        shutil.rmtree(trial, ignore_errors=True)
        trial.mkdir(parents=True)
        recipe = ExportRecipe(INT8, context=context)
        plan = with_methods(recipe.quant_plan(config), recipe.methods)
        content = BundleContent(checkpoint, checkpoint, config, plan, context, recipe.layout, "")
        write_bundle(trial, content, lambda _, fraction: progress(_STAGE, 0.5 * fraction))
        if request.file is None:
            texts = sample_texts(
                trial,
                request.max_tokens,
                longest,
                request.seed,
                lambda share: progress(_STAGE, 0.5 + 0.5 * share),
                sliding_windows=any(layer.window is not None for layer in config.attention),
            )
        else:
            texts = _first(read_texts(trial, request.file, request.max_tokens, longest), request.max_tokens)
        shutil.rmtree(trial)
        _keep(folder, texts)
        progress(_STAGE, 1.0)
    origin = "the model's own words" if request.file is None else request.file.name
    return divided(texts, origin, longest, request.seed)


def _first(texts: list[TokenArray], tokens: int) -> list[TokenArray]:
    """Texts up to that many tokens, taken from all over the file."""
    order = np.random.default_rng(0).permutation(len(texts))
    found: list[TokenArray] = []
    for number in order.tolist():
        if sum(map(len, found)) >= tokens:
            break
        found.append(texts[number])
    return found


def _keep(folder: Path, texts: list[TokenArray]) -> None:
    for name, values in (
        (_TOKENS_FILE, np.concatenate(texts) if texts else np.zeros(0, np.int64)),
        (_LENGTHS_FILE, np.array([len(text) for text in texts], np.int64)),
    ):
        write_atomically(folder / name, values.astype("<i8").tobytes())


def _kept(folder: Path) -> list[TokenArray] | None:
    """What an earlier run obtained; the lengths are written last."""
    if not (folder / _LENGTHS_FILE).is_file():
        return None
    tokens, lengths = (np.frombuffer((folder / name).read_bytes(), "<i8") for name in (_TOKENS_FILE, _LENGTHS_FILE))
    return [part.astype(np.int64) for part in np.split(tokens, np.cumsum(lengths)[:-1])] if len(lengths) else []
