"""The endless, reproducible stream of training batches: batch k is a pure function of (examples, seed, k)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .corpus import Pair
from .tasks import TaskMaker
from .tokenizer import ChatCodec

# Conversations cut into one group of batches. Larger pools sort into batches of more even length.
POOL_EXAMPLES = 8192
# The first word of a command, which decides whether an answer is of any use, is rarely more tokens than this.
LEAD = 3


@dataclass(frozen=True)
class Example:
    """One encoded conversation.

    ids: token ids; answer: for each id, whether the model must produce it; likely and share, both
    [answer.sum(), k] and only in distillation: a teacher's most likely ids at each answer position (int64) and
    their probabilities (float32, summing to 1).
    """

    ids: list[int]
    answer: list[bool]
    likely: NDArray[np.int64] | None = None
    share: NDArray[np.float32] | None = None

    def clipped(self, context: int) -> Example:
        """The example cut to the model's context."""
        if len(self.ids) <= context:
            return self
        kept = sum(self.answer[:context])
        return Example(
            self.ids[:context],
            self.answer[:context],
            None if self.likely is None else self.likely[:kept],
            None if self.share is None else self.share[:kept],
        )


# Gives the example at a place in the endless sequence of training examples, and many at once for speed.
ExampleSource = Callable[[range], list[Example]]


@dataclass(frozen=True)
class Batch:
    """Right-padded token ids and the positions that carry loss.

    ids: int64 [B, T]; predicts: bool [B, T], true where the *next* token is one the model must produce;
    targets: int64 [N], those next tokens; leads: bool [N], which of them are among the first `LEAD` of an answer;
    likely, share: [N, k] as in `Example`; tokens: real (unpadded) tokens.
    """

    ids: Tensor
    predicts: Tensor
    targets: Tensor
    leads: Tensor
    tokens: int
    likely: Tensor | None = None
    share: Tensor | None = None

    def to(self, device: torch.device) -> Batch:
        """The same batch on `device`."""
        return Batch(
            self.ids.to(device),
            self.predicts.to(device),
            self.targets.to(device),
            self.leads.to(device),
            self.tokens,
            None if self.likely is None else self.likely.to(device),
            None if self.share is None else self.share.to(device),
        )


def collate(examples: Sequence[Example], pad: int) -> Batch:
    """Pad encoded conversations to the longest of them."""
    length = max(len(example.ids) for example in examples)
    ids = np.full((len(examples), length), pad, dtype=np.int64)
    answer = np.zeros((len(examples), length), dtype=np.bool_)
    for row, example in enumerate(examples):
        ids[row, : len(example.ids)] = example.ids
        answer[row, : len(example.answer)] = example.answer
    predicts = np.zeros_like(answer)
    predicts[:, :-1] = answer[:, 1:]
    earlier = np.pad(answer, ((0, 0), (LEAD, 0)))[:, : answer.shape[1]]
    likely = [example.likely for example in examples if example.likely is not None]
    share = [example.share for example in examples if example.share is not None]
    return Batch(
        torch.from_numpy(ids),
        torch.from_numpy(predicts),
        torch.from_numpy(ids[:, 1:][answer[:, 1:]]),
        torch.from_numpy(~earlier[:, 1:][answer[:, 1:]]),
        sum(len(example.ids) for example in examples),
        torch.from_numpy(np.concatenate(likely)) if likely else None,
        torch.from_numpy(np.concatenate(share)) if share else None,
    )


def cut_by_cost(lengths: Sequence[int], parts: int) -> list[int]:
    """Boundaries that cut ascending `lengths` into `parts` runs of about equal total; parts + 1 integers."""
    total = np.cumsum(np.asarray(lengths, dtype=np.float64))
    bounds = np.searchsorted(total, total[-1] * np.arange(1, parts) / parts) + 1
    edges = [0, *bounds.tolist(), len(lengths)]
    # Each run needs at least one example, even where one long example is worth several runs.
    for i in range(1, parts):
        edges[i] = min(max(edges[i], edges[i - 1] + 1), len(lengths) - (parts - i))
    return edges


def epoch_order(count: int, seed: int, epoch: int) -> list[int]:
    """The order in which epoch `epoch` visits `count` items."""
    order: list[int] = np.random.default_rng((seed, 1, epoch)).permutation(count).tolist()
    return order


def in_epochs(count: int, seed: int, places: range) -> list[int]:
    """The item at each place of the endless sequence "all items shuffled, all items shuffled again, ..."."""
    orders = {epoch: epoch_order(count, seed, epoch) for epoch in {place // count for place in places}}
    return [orders[place // count][place % count] for place in places]


def task_examples(pairs: Sequence[Pair], maker: TaskMaker, codec: ChatCodec, seed: int) -> ExampleSource:
    """Conversations freshly made from the pairs in every epoch; place k always gives the same conversation."""

    def source(places: range) -> list[Example]:
        chats = [
            maker.make(pairs[index], random.Random(f"{seed}/{place}"))
            for place, index in zip(places, in_epochs(len(pairs), seed, places), strict=True)
        ]
        return [Example(ids, answer) for ids, answer in codec.encode_chats(chats)]

    return source


class BatchStream:
    """Batches of similar-length conversations, addressed by number so that a resumed run sees the same data."""

    def __init__(
        self, source: ExampleSource, *, pad: int, batch_tokens: int, context: int, seed: int, pool: int = POOL_EXAMPLES
    ) -> None:
        self.source, self.pad, self.context, self.seed, self.pool_examples = source, pad, context, seed, pool
        self._number, self._pool = 0, self._encode(0)
        # Batches per pool are counted on the first pool and then kept, so that a batch number leads to its pool
        # without looking at the pools in between.
        total = sum(len(example.ids) for example in self._pool)
        self.per_pool = max(1, min(round(total / batch_tokens), pool))

    def batch(self, number: int) -> Batch:
        """Batch `number`, counted from 0."""
        pool, place = divmod(number, self.per_pool)
        if pool != self._number:
            self._number, self._pool = pool, self._encode(pool)
        edges = cut_by_cost([len(example.ids) for example in self._pool], self.per_pool)
        part = int(np.random.default_rng((self.seed, 2, pool)).permutation(self.per_pool)[place])
        return collate(self._pool[edges[part] : edges[part + 1]], self.pad)

    def _encode(self, pool: int) -> list[Example]:
        examples = self.source(range(pool * self.pool_examples, (pool + 1) * self.pool_examples))
        return sorted((example.clipped(self.context) for example in examples), key=lambda example: len(example.ids))
