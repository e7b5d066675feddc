"""Special tokens of a bundle, and where the last turn of a text begins."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import BundleError
from ...models.json_file import is_whole, read_json_object

TokenArray = npt.NDArray[np.int64]
"""Token ids, int64 [n]."""


@dataclass(frozen=True)
class Markers:
    """Ids of the tokens that do not stand for text."""

    special: frozenset[int]
    """All special tokens of the tokenizer."""
    ending: frozenset[int]
    """Tokens that end a text."""

    @property
    def opening(self) -> frozenset[int]:
        """Tokens that may open a turn."""
        return self.special - self.ending


def read_markers(folder: Path) -> Markers:
    """Read the special tokens of the tokenizer in a folder, and the end tokens that its configuration files name.

    Raises:
        BundleError: a file is missing or damaged.
    """
    tokenizer = _read(folder / "tokenizer.json")
    added = [token for token in tokenizer.get("added_tokens") or () if isinstance(token, dict)]
    special: list[Any] = [token.get("id") for token in added if token.get("special")]
    ending: list[Any] = []
    for name in ("generation_config.json", "config.json"):
        value = _read(folder / name).get("eos_token_id") if (folder / name).is_file() else None
        ending += value if isinstance(value, list) else [value]
    settings = folder / "tokenizer_config.json"
    named = _read(settings).get("eos_token") if settings.is_file() else None
    text = named.get("content") if isinstance(named, dict) else named
    ending += [token.get("id") for token in added if text is not None and token.get("content") == text]
    return Markers(*(frozenset(int(token) for token in each if is_whole(token, 0)) for each in (special, ending)))


def answer_start(text: TokenArray, markers: Markers) -> int:
    """Return the index after the last token that may open a turn; 0 if the text has none."""
    opened = np.flatnonzero(np.isin(text[:-1], list(markers.opening)))
    return int(opened[-1]) + 1 if opened.size else 0


def _read(path: Path) -> dict[str, Any]:
    return read_json_object(path, BundleError, "export the model again")
