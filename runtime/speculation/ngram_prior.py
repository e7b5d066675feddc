"""The n-gram prior of a model: counted from texts once, found by its tokenizer ever after."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from ...models.bundle import Bundle, digest_file
from ...models.cache import cache_folder
from ..text.tokenizer import TextTokenizer
from .drafters.ngram_table import NgramTable, write_table

_TOKENIZER: Final = "tokenizer.json"
_MOST_BYTES: Final = 64 << 20
_log: Final = logging.getLogger("edgerun")


def open_prior(bundle: Bundle, vocab_size: int) -> NgramTable | None:
    """The table for this model's tokenizer, if one was made; a damaged one is set aside with a warning."""
    key = _key(bundle)
    path = prior_file(bundle)
    if not path.is_file():
        return None
    return NgramTable.open(path, vocab_size=vocab_size, key=key, warn=_log.warning)


def build_prior(bundle: Bundle, tokenizer: TextTokenizer, vocab_size: int, texts: Iterable[str]) -> int:
    """Count texts into the table of this model's tokenizer, replacing what was there; returns its bytes.

    Raises:
        OSError: the file cannot be written.
    """
    sequences = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
    return write_table(prior_file(bundle), sequences, vocab_size=vocab_size, key=_key(bundle), max_bytes=_MOST_BYTES)


def prior_file(bundle: Bundle) -> Path:
    """Where the table lies; models with the same tokenizer share it. It may not exist."""
    digest = hashlib.sha256(_key(bundle).encode()).hexdigest()
    return cache_folder() / "ngram" / f"{digest[:32]}.bin"


def _key(bundle: Bundle) -> str:
    known = bundle.manifest.files.get(_TOKENIZER) if bundle.manifest is not None and bundle.tokenizer is None else None
    return (known or digest_file(bundle.file(_TOKENIZER) or bundle.folder / _TOKENIZER)).sha256
