"""Block diffusion: models that fill blocks of masked tokens (Arriola et al. 2025, arXiv 2503.09573)."""

from __future__ import annotations

from dataclasses import dataclass

from .json_file import Count, WholeNumber


@dataclass(frozen=True)
class BlockDiffusion:
    """How a model that fills blocks of masked tokens is decoded."""

    size: Count
    """Number of tokens of a block. Within a block all tokens attend to each other."""
    mask: WholeNumber
    """Token id that stands for a token that is not known yet."""
    shifted: bool = False
    """Whether the logits of a token are computed at the place before it, as in models for one token at a time."""
    bidirectional: bool = False
    """Whether all tokens of a text attend to each other, those behind a block too. Then a block may have any size, and
    `size` is the usual one."""
