"""Tiny models that fill blocks of masked tokens, and a naive decoder for them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from edgerun.export.check import reference
from edgerun.export.checkpoint.safetensors_files import Checkpoint
from support.tiny_models import exported, write_checkpoint, write_json

FAMILIES: Final = {
    "sdar": ("qwen3", {"block_size": 4}),
    "sdar_moe": ("qwen3_moe", {"block_size": 4}),
    "Fast_dLLM_Qwen": ("qwen2", {"bd_size": 8}),
}
"""By family: the one with the same tensors, and settings of config.json."""


def write_block_model(folder: Path, family: str = "sdar", **overrides: Any) -> Path:
    """Write a random checkpoint to `folder`/checkpoint, whose last token is the mask; returns its bundle."""
    base, settings = FAMILIES[family]
    source = write_checkpoint(folder / "checkpoint", base, **overrides)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    mask = config["vocab_size"] - 1
    write_json(source / "config.json", {**config, "model_type": family, "mask_token_id": mask, **settings})
    return exported(source, folder / "bundle")


@contextmanager
def _blocks_seen(size: int) -> Iterator[None]:
    """Let the reference decoder's tokens attend to their whole block of `size`."""

    def masked(_: Any, __: int, length: int) -> npt.NDArray[np.bool_]:
        block = np.arange(length) // size
        return np.asarray(block[:, None] < block)

    with patch.object(reference, "masked_positions", masked):
        yield


class NaiveBlocks:
    """Computes every pass over the whole text, in float64 and without a cache.

    Args:
        checkpoint: a checkpoint that `write_block_model` has written.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._weights: Final = Checkpoint(checkpoint)
        self._config: Final = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
        self.size: Final = int(self._config.get("block_size") or self._config["bd_size"])
        self.mask: Final = int(self._config["mask_token_id"])
        self._shifted: Final = "bd_size" in self._config

    def logits(self, cells: Sequence[int]) -> npt.NDArray[np.float64]:
        """Logits float64 `[n, V]` of the tokens themselves, minus infinity for the mask."""
        with _blocks_seen(self.size):
            found = reference.reference_logits(self._weights, self._config, np.asarray(cells), 256)
        logits = np.array(found, np.float64)
        if self._shifted:
            logits[1:] = logits[:-1].copy()
        logits[:, self.mask] = -np.inf
        return logits

    def text(
        self, prompt: Sequence[int], count: int, keeps: Callable[[npt.NDArray[np.float64]], npt.NDArray[np.bool_]]
    ) -> list[int]:
        """The first `count` tokens of the answer; `keeps` says which candidates to keep, given their confidence."""
        text = list(prompt)
        while len(text) < len(prompt) + count:
            start = len(text) // self.size * self.size
            cells = [*text, *[self.mask] * (start + self.size - len(text))]
            while self.mask in cells:
                logits = self.logits(cells)
                places = np.flatnonzero(np.asarray(cells) == self.mask)
                probabilities = np.exp(logits[places] - logits[places].max(axis=1, keepdims=True))
                probabilities /= probabilities.sum(axis=1, keepdims=True)
                confidence = probabilities.max(axis=1)
                kept = keeps(confidence)
                if not kept.any():
                    kept = confidence == confidence.max()
                for place, token in zip(places[kept], probabilities.argmax(axis=1)[kept], strict=True):
                    cells[int(place)] = int(token)
            text = cells
        return text[len(prompt) :][:count]
