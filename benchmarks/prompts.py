"""Random prompts of token ids, the same in every process."""

from __future__ import annotations

import numpy as np


def prompt_tokens(count: int, vocab: int, seed: int = 0) -> list[int]:
    """`count` token ids below `vocab`, without id 0, which ends an answer."""
    return [int(token) for token in np.random.default_rng(seed).integers(1, vocab, count)]
