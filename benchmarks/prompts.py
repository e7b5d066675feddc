"""The token ids that every engine is given: drawn at random, the same in every process."""

from __future__ import annotations

import numpy as np


def prompt_tokens(count: int, vocab: int, seed: int = 0) -> list[int]:
    """`count` token ids below `vocab`; id 0, which ends a text, is not among them."""
    return [int(token) for token in np.random.default_rng(seed).integers(1, vocab, count)]
