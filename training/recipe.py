"""Training, validation and held-out pairs of the recipe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..export.draft_training.torch_llama import ModelShape
from .corpus import Pair, load_heldout, load_nl2bash, load_tldr, split_validation, without
from .everyday import load_everyday

TARGET_SHAPE = ModelShape()
VALIDATION_PER_MILLE = 10
EVERYDAY_COPIES = 6


@dataclass(frozen=True)
class Pairs:
    """The three disjoint sets of pairs of a run."""

    train: list[Pair]
    validation: list[Pair]
    heldout: list[Pair]


def load_pairs(data: Path, seed: int = 1) -> Pairs:
    """Read both corpora and the everyday table without the held-out pairs."""
    heldout = load_heldout(data)
    corpora = without(load_tldr(data) + load_nl2bash(data), heldout)
    train, validation = split_validation(corpora, VALIDATION_PER_MILLE)
    everyday = without(load_everyday(EVERYDAY_COPIES, seed), heldout + validation)
    return Pairs(train + everyday, validation, heldout)


def tokenizer_texts(pairs: list[Pair]) -> Iterator[str]:
    """Yield the texts that the tokenizer is trained on."""
    for pair in pairs:
        yield pair.request
        yield pair.command
        yield from ([pair.about] if pair.about else [])
