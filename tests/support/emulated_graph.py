"""A decoder that is a function of the text, for devices that are emulated: a pass takes a given time, and no processor.

Every cache slot holds the id of its token and its position, and a pass checks that what each new token attends to is a
text without gaps. So a lost or doubled slot is an error, whatever the function says.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from edgerun.runtime.graph.bound_graph import BoundGraph, NewTokens
from edgerun.runtime.graph.graph_io import (
    CacheMode,
    CacheTensor,
    GraphIO,
    GraphValue,
    InputRole,
    LogitsMode,
)
from edgerun.runtime.kv.arena import InPlaceArena
from edgerun.runtime.kv.buffers import CacheTensorType, NumpyBuffers

Text: TypeAlias = tuple[int, ...]
Floats: TypeAlias = npt.NDArray[np.float32]
LogitsAfter: TypeAlias = Callable[[Text], Floats]

_SLOTS: Final = CacheTensorType(np.dtype(np.float64), (1, 1, 0, 2), 2)
"""A slot: token id and position."""


class EmulatedGraph(BoundGraph):
    """A graph that computes the logits after every token with a function of the text up to it.

    Args:
        logits_after: logits float32 `[V]` after a text.
        vocab: size of the vocabulary.
        limit: context.
        seconds: how long a pass of some width takes; None for no time.
    """

    def __init__(
        self,
        logits_after: LogitsAfter,
        vocab: int,
        limit: int = 256,
        seconds: Callable[[int], float] | None = None,
    ) -> None:
        value = GraphValue("logits", "tensor(float)", ("R", vocab))
        roles = (InputRole.TOKENS, InputRole.POSITIONS, InputRole.BIAS, InputRole.LOGIT_POSITIONS)
        self.graph_io = GraphIO(
            vocab,
            vocab,
            (CacheTensor("past", "present", _SLOTS),),
            1,
            CacheMode.IN_PLACE,
            None,
            dict.fromkeys(roles, value),
            value,
            LogitsMode.SELECTED,
            causal=True,
        )
        self.arena = InPlaceArena([_SLOTS], limit)
        self.passes = 0
        self._logits_after = logits_after
        self._seconds = seconds

    def run(self, new: NewTokens) -> Floats:
        """Check the text that each token attends to, and compute the wanted logits."""
        started = time.perf_counter()
        self.passes += 1
        ids, wanted, positions, tree_mask, *_ = new
        arena, count, base = self.arena, len(ids), self.arena.length
        arena.reserve(count)
        buffers = arena.buffers
        assert isinstance(buffers, NumpyBuffers)
        slots = buffers.arrays[0][0, 0]
        places = np.arange(base, base + count) if positions is None else np.asarray(positions)
        slots[base : base + count] = np.stack([ids, places], axis=1)
        mask = np.tri(count, dtype=np.bool_) if tree_mask is None else tree_mask
        visible = np.ones((count, base + count), np.bool_)
        visible[:, base + count - mask.shape[1] :] = mask
        rows = []
        for row in wanted.tolist():
            seen = slots[: base + count][visible[row]]
            assert seen[:, 1].tolist() == list(range(len(seen))), f"a text with positions {seen[:, 1].tolist()}"
            assert seen[-1].tolist() == [ids[row], places[row]]
            rows.append(self._logits_after(tuple(int(token) for token in seen[:, 0])))
        if self._seconds is not None:
            time.sleep(max(self._seconds(count) - (time.perf_counter() - started), 0.0))
        return np.stack(rows)
