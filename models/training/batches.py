"""The endless, reproducible stream of training batches: batch k is a pure function of (pairs, seed, k)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .corpus import Pair
from .tasks import Chat, TaskMaker
from .tokenizer import ChatCodec

Encoded = tuple[list[int], list[bool]]
# Conversations cut into one group of batches. Larger pools sort into batches of more even length.
POOL_EXAMPLES = 8192


@dataclass(frozen=True)
class Batch:
    """Right-padded token ids and the positions that carry loss.

    ids: int64 [B, T]; predicts: bool [B, T], true where the *next* token is one the model must produce;
    targets: int64 [predicts.sum()], those next tokens; tokens: real (unpadded) tokens.
    """

    ids: Tensor
    predicts: Tensor
    targets: Tensor
    tokens: int

    def to(self, device: torch.device) -> Batch:
        """The same batch on `device`."""
        return Batch(self.ids.to(device), self.predicts.to(device), self.targets.to(device), self.tokens)


def collate(examples: Sequence[Encoded], pad: int) -> Batch:
    """Pad encoded conversations to the longest of them."""
    length = max(len(ids) for ids, _ in examples)
    ids = np.full((len(examples), length), pad, dtype=np.int64)
    answer = np.zeros((len(examples), length), dtype=np.bool_)
    for row, (tokens, flags) in enumerate(examples):
        ids[row, : len(tokens)] = tokens
        answer[row, : len(flags)] = flags
    predicts = np.zeros_like(answer)
    predicts[:, :-1] = answer[:, 1:]
    targets = ids[:, 1:][answer[:, 1:]]
    return Batch(
        torch.from_numpy(ids),
        torch.from_numpy(predicts),
        torch.from_numpy(targets),
        sum(len(tokens) for tokens, _ in examples),
    )


def cut_by_cost(lengths: Sequence[int], parts: int) -> list[int]:
    """Boundaries that cut ascending `lengths` into `parts` runs of about equal padded cost; parts + 1 integers."""
    cost = np.cumsum(np.asarray(lengths, dtype=np.float64))
    bounds = np.searchsorted(cost, cost[-1] * np.arange(1, parts) / parts) + 1
    edges = [0, *bounds.tolist(), len(lengths)]
    # Each run needs at least one example, even where one long example is worth several runs.
    for i in range(1, parts):
        edges[i] = min(max(edges[i], edges[i - 1] + 1), len(lengths) - (parts - i))
    return edges


class BatchStream:
    """Batches of similar-length conversations, addressed by number so that a resumed run sees the same data."""

    def __init__(
        self,
        pairs: Sequence[Pair],
        make: Callable[[Pair, random.Random], Chat] | TaskMaker,
        codec: ChatCodec,
        *,
        batch_tokens: int,
        context: int,
        seed: int,
    ) -> None:
        if not pairs:
            raise ValueError("no training pairs")
        self.pairs, self.codec, self.context, self.seed = list(pairs), codec, context, seed
        self.make = make.make if isinstance(make, TaskMaker) else make
        self.pool_examples = min(POOL_EXAMPLES, max(64, len(self.pairs)))
        # The number of batches per pool is measured once on the first pool and then kept, so that a batch number
        # maps to a pool without looking at the pools in between.
        self._pool_number, self._pool = 0, self._encode_pool(0)
        total = sum(len(ids) for ids, _ in self._pool)
        self.per_pool = max(1, min(round(total / batch_tokens), self.pool_examples))
        self._edges = self._cut()

    def batch(self, number: int) -> Batch:
        """Batch `number` (counted from 0)."""
        pool, place = divmod(number, self.per_pool)
        if pool != self._pool_number:
            self._pool_number, self._pool = pool, self._encode_pool(pool)
            self._edges = self._cut()
        order = np.random.default_rng((self.seed, 2, pool)).permutation(self.per_pool)
        part = int(order[place])
        return collate(self._pool[self._edges[part] : self._edges[part + 1]], self.codec.end)

    def _cut(self) -> list[int]:
        return cut_by_cost([len(ids) for ids, _ in self._pool], self.per_pool)

    def _encode_pool(self, pool: int) -> list[Encoded]:
        chats = []
        for place in range(pool * self.pool_examples, (pool + 1) * self.pool_examples):
            epoch, index = divmod(place, len(self.pairs))
            pair = self.pairs[self._shuffled(epoch)[index]]
            chats.append(self.make(pair, random.Random(f"{self.seed}/{place}")))
        encoded = self.codec.encode_chats(chats)
        fitting = [(ids[: self.context], flags[: self.context]) for ids, flags in encoded]
        return sorted(fitting, key=lambda example: len(example[0]))

    def _shuffled(self, epoch: int) -> list[int]:
        cached: tuple[int, list[int]] | None = getattr(self, "_order", None)
        if cached is None or cached[0] != epoch:
            cached = (epoch, np.random.default_rng((self.seed, 1, epoch)).permutation(len(self.pairs)).tolist())
            self._order = cached
        return cached[1]
