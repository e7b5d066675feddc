"""Quantization-aware training: forward passes use the weights as an export stores them.

A block of weights along a row shares a scale, which puts the weight of largest magnitude on the lowest code (see
`export.quantization.codes`); codes are whole numbers from -2 ** (bits - 1) to 2 ** (bits - 1) - 1. Rounding has no
useful gradient, so its gradient is taken to be 1 (straight-through estimator, Bengio, Leonard and Courville,
arXiv:1308.3432), and the weights before rounding are updated.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

_NEGLIGIBLE = 1e-30


@dataclass(frozen=True)
class BlockRounding:
    """Symmetric rounding to nearest in blocks along the last axis; the last block of a row may be shorter."""

    bits: int
    block: int

    @classmethod
    def parse(cls, text: str) -> BlockRounding:
        """Read `4/128`.

        Raises:
            ValueError: the text is not bits (2, 4 or 8), a slash and a block size (32, 64 or 128).
        """
        found = re.fullmatch(r"([248])/(32|64|128)", text)
        if found is None:
            raise ValueError(f"{text!r} is not BITS/BLOCK with 2, 4 or 8 bits and blocks of 32, 64 or 128")
        return cls(int(found[1]), int(found[2]))

    def __call__(self, weight: Tensor) -> Tensor:
        """Round weight [N, K], with the gradient of the identity; returns float32."""
        return weight + (self.rounded(weight.detach()) - weight).detach()

    def rounded(self, weight: Tensor) -> Tensor:
        """Round weight float32 [N, K] as an export does; rounding the result again does not change it."""
        half = 2 ** (self.bits - 1)
        columns = weight.shape[-1]
        padded = functional.pad(weight, (0, -columns % self.block))
        blocks = padded.reshape(*padded.shape[:-1], -1, self.block)
        largest, smallest = blocks.amax(-1, keepdim=True), blocks.amin(-1, keepdim=True)
        extreme = torch.where(largest >= -smallest, largest, smallest)
        scale = extreme / -half
        usable = extreme.abs() > _NEGLIGIBLE
        codes = torch.round(blocks / torch.where(usable, scale, 1.0)).clamp(-half, half - 1)
        stored = torch.where(usable, codes * scale, 0.0)
        return stored.flatten(-2)[..., :columns]
