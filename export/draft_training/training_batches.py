"""Endless, reproducible stream of training batches.

Batch k is a pure function of (examples, seed, k).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

POOL_EXAMPLES = 8192
"""Number of conversations that are sorted by length and cut into batches. Larger pools have less padding."""
LEAD = 3
"""Number of answer tokens with a loss weight of their own. The first word of a command, which decides whether an answer
is useful, rarely has more tokens."""


@dataclass(frozen=True)
class Example:
    """One encoded conversation.

    `top_ids` and `top_probs` exist only in distillation.
    """

    ids: list[int]
    """Token ids."""
    answer: list[bool]
    """For each token, whether it is part of the answer, which the model must produce."""
    top_ids: NDArray[np.int64] | None = None
    """The teacher's most likely token ids at each answer position, [answer.sum(), k]."""
    top_probs: NDArray[np.float32] | None = None
    """Their probabilities, [answer.sum(), k]. The target gives what is missing to 1 to other tokens."""

    def clipped(self, context: int) -> Example:
        """Return the example truncated to the model's context."""
        if len(self.ids) <= context:
            return self
        kept = sum(self.answer[:context])
        return Example(
            self.ids[:context],
            self.answer[:context],
            None if self.top_ids is None else self.top_ids[:kept],
            None if self.top_probs is None else self.top_probs[:kept],
        )


ExampleSource = Callable[[range], list[Example]]
"""Returns the examples at a range of places in the endless sequence of training examples."""


class Batch(NamedTuple):
    """Right-padded token ids and the positions whose loss counts."""

    ids: Tensor
    """Token ids, int64 [B, T]."""
    predicts: Tensor
    """Whether the *next* token is part of an answer, bool [B, T]."""
    targets: Tensor
    """The answer tokens, int64 [N]."""
    leads: Tensor
    """Which of `targets` are among the first `LEAD` of an answer, bool [N]."""
    tokens: int
    """Number of tokens without padding."""
    top_ids: Tensor | None = None
    """As in `Example`, int64 [N, k]."""
    top_probs: Tensor | None = None
    """As in `Example`, float32 [N, k]."""

    def to(self, device: torch.device) -> Batch:
        """The same batch on `device`."""
        return self._replace(**{name: each.to(device) for name, each in self._asdict().items() if hasattr(each, "to")})


def collate(examples: Sequence[Example], pad: int) -> Batch:
    """Pad encoded conversations to the length of the longest."""
    length = max(len(example.ids) for example in examples)
    ids = np.full((len(examples), length), pad, dtype=np.int64)
    answer = np.zeros((len(examples), length), dtype=np.bool_)
    for row, example in enumerate(examples):
        ids[row, : len(example.ids)] = example.ids
        answer[row, : len(example.answer)] = example.answer
    predicts = np.zeros_like(answer)
    predicts[:, :-1] = answer[:, 1:]
    earlier = np.pad(answer, ((0, 0), (LEAD, 0)))[:, : answer.shape[1]]
    top_ids = [example.top_ids for example in examples if example.top_ids is not None]
    top_probs = [example.top_probs for example in examples if example.top_probs is not None]
    return Batch(
        torch.from_numpy(ids),
        torch.from_numpy(predicts),
        torch.from_numpy(ids[:, 1:][answer[:, 1:]]),
        torch.from_numpy(~earlier[:, 1:][answer[:, 1:]]),
        sum(len(example.ids) for example in examples),
        torch.from_numpy(np.concatenate(top_ids)) if top_ids else None,
        torch.from_numpy(np.concatenate(top_probs)) if top_probs else None,
    )


def cut_by_cost(lengths: Sequence[int], parts: int) -> list[int]:
    """Cut ascending `lengths` into `parts` runs of about equal total; returns parts + 1 boundaries."""
    total = np.cumsum(np.asarray(lengths, dtype=np.float64))
    bounds = np.searchsorted(total, total[-1] * np.arange(1, parts) / parts) + 1
    edges = [0, *bounds.tolist(), len(lengths)]
    # Each run needs at least one example, even where one long example is worth several runs.
    for i in range(1, parts):
        edges[i] = min(max(edges[i], edges[i - 1] + 1), len(lengths) - (parts - i))
    return edges


def in_epochs(count: int, seed: int, places: range) -> list[int]:
    """The item at each place of the endless sequence "all items shuffled, all items shuffled again, ..."."""
    epochs = {place // count for place in places}
    orders = {epoch: np.random.default_rng((seed, 1, epoch)).permutation(count).tolist() for epoch in epochs}
    return [orders[place // count][place % count] for place in places]


class BatchStream:
    """Batches of conversations of similar length, addressed by number so that a resumed run sees the same data."""

    def __init__(
        self, source: ExampleSource, *, pad: int, batch_tokens: int, context: int, seed: int, pool: int = POOL_EXAMPLES
    ) -> None:
        self.source, self.pad, self.context, self.seed, self.pool_examples = source, pad, context, seed, pool
        self._number, self._pool = 0, self._encode(0)
        # All pools have as many batches as the first one, so that the pool of a batch follows from its
        # number without reading the pools before it.
        total = sum(len(example.ids) for example in self._pool)
        self.per_pool = max(1, min(round(total / batch_tokens), pool))

    def batch(self, number: int) -> Batch:
        """Return batch `number`, counted from 0."""
        return collate(self.examples(number), self.pad)

    def examples(self, number: int) -> list[Example]:
        """Return the examples of a batch."""
        pool, place = divmod(number, self.per_pool)
        if pool != self._number:
            self._number, self._pool = pool, self._encode(pool)
        edges = cut_by_cost([len(example.ids) for example in self._pool], self.per_pool)
        part = int(np.random.default_rng((self.seed, 2, pool)).permutation(self.per_pool)[place])
        return self._pool[edges[part] : edges[part + 1]]

    def _encode(self, pool: int) -> list[Example]:
        examples = self.source(range(pool * self.pool_examples, (pool + 1) * self.pool_examples))
        return sorted((example.clipped(self.context) for example in examples), key=lambda example: len(example.ids))
