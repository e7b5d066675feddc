"""Draft heads in tests: targets whose arenas keep features, engines that draft with them all the time, wrong heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import edgerun
from edgerun import Engine
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph.bound_session import BoundSession
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from edgerun.runtime.kv.features import FeatureSlots
from edgerun.runtime.result import Stats
from edgerun.runtime.speculation.drafters.target_drafts import HiddenStateHead

from .adversarial_drafters import NEARLY_FREE, FixedCost

CPU = SessionConfig(choose_device("cpu"), 1)


def bind_with_features(target: GraphSession, context: int) -> BoundSession:
    """A session of the target whose arena keeps features."""
    arena = target.arena(context)
    assert target.graph_io.feature_size is not None
    arena.features = FeatureSlots(target.graph_io.feature_size)
    return target.bind(arena)


def run_missing(bound: BoundSession, tokens: list[int]) -> None:
    """Run what the target has not read of a sequence, without its last token."""
    if new := tokens[bound.arena.length : -1]:
        bound.forward(new)
        bound.arena.commit(len(new))


def eager_engine(bundle: Path, *, trees: bool = True, **options: Any) -> Engine:
    """An engine for which every draft token pays."""
    engine = edgerun.load(bundle, threads=1, cache=False, **options)
    if not trees:
        assert engine.model._graph is not None
        engine.model._graph.disable_trees()
    engine.model.drafters._pass_cost = FixedCost(NEARLY_FREE)
    if (draft := engine.model.drafters.draft_model()) is not None:
        draft.cost = FixedCost({128: {1: 1e-6, 16: 1.1e-6}})
    return engine


class KnowingHead(HiddenStateHead):
    """A head that knows the answer, as far as its vocabulary has it, and is wrong at every fifth token."""

    text: list[int]

    def logits(self, path: tuple[int, ...]) -> npt.NDArray[np.float32] | None:
        """The logits, with the next token of the answer, or another one, far above all others."""
        found = super().logits(path)
        sequence = [*self._token_ids, *path]
        if found is None or self.text[: len(sequence)] != sequence or len(sequence) == len(self.text):
            return found
        ids = np.arange(found.size) if self.target_ids is None else self.target_ids
        is_next = ids == self.text[len(sequence)]
        if len(sequence) % 5 == 0:
            is_next = np.roll(is_next, 1)
        return np.where(is_next, found.max() + 2, found)


def check_counts(stats: Stats, *, stopped: bool = False) -> None:
    """Check the statistics of an answer; a stop sequence may end before the last accepted token."""
    emitted = 1 + stats.accepted + stats.decode_passes
    assert stats.completion_tokens == emitted or (stopped and 0 < stats.completion_tokens < emitted)
    assert 0 <= stats.accepted <= stats.drafted
    assert stats.decode_passes < stats.target_passes
    for parts in (stats.by_source.values(), stats.by_depth):
        assert sum(part.drafted for part in parts) == stats.drafted
        assert sum(part.accepted for part in parts) == stats.accepted
        assert all(0 <= part.accepted <= part.drafted for part in parts)
    # Who got to one depth was at the depth before.
    accepted = [part.accepted for part in stats.by_depth]
    assert accepted == sorted(accepted, reverse=True)
    assert 0 <= stats.draft_s <= stats.total_s
    assert stats.target_s + stats.host_s + stats.draft_s <= stats.total_s
