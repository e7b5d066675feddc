"""Drafts from what the target has computed: draft heads and Medusa heads.

An EAGLE-3 head, or a multi-token-prediction module, pairs the target's features of each token with the token after it,
and predicts the token after that. So a sequence whose last token, the anchor, has not been run has a pair for every
token but the anchor, and the head's first prediction comes after the anchor. For a draft token there are no features
yet: in their place the head reads the state that it computed for the token before, which makes drafting sequential,
one pass for each draft token that is continued. When the target has verified them, the accepted tokens run again with
the target's features, together with what comes next.

The head has a KV cache of its own. It begins at the first token whose features are known, at most `FEATURE_WINDOW`
tokens back, and follows the sequence wherever that goes: fewer tokens mean worse drafts, never another text.

Medusa heads read the target's last hidden state before the anchor, so one run a round serves every path: head k
proposes what follows k draft tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import numpy as np

from ...graph.head_session import HeadSession, MedusaSession
from ...kv.arena import KVArena, shared_tokens
from ...kv.features import FeatureSlots
from ..pass_cost import PassCost
from ..tree import Source
from .draft_model import (
    PREFILL_WIDTH,
    ROUNDS_SERVED,
    USUAL_CATCH_UP,
    DraftModel,
    Floats,
    Int32,
    is_chain,
)
from .interface import ModelDrafter, Path, TopTokens

_OBSERVED_RUNS: Final = 16
"""Number of runs over which their time is averaged."""


class HiddenStateHead(DraftModel):
    """A `DraftModel` that reads the features which the target's passes leave in their arena; see `attach`.

    Args:
        bound: session of the head.
        cost: as for `DraftModel`.
        target_vocab: as for `DraftModel`.
        target_ids: as for `DraftModel`. The embedding always has the target's ids.
        source: what its candidates are counted under.
    """

    def __init__(
        self,
        bound: HeadSession,
        cost: PassCost,
        target_vocab: int,
        target_ids: Int32 | None = None,
        source: Source = Source.EAGLE,
    ) -> None:
        super().__init__(bound, cost, target_vocab, target_ids)
        self.source = source
        self._own_ids.fill(-1)
        embedded = min(bound.graph_io.input_vocab, target_vocab)
        self._own_ids[:embedded] = np.arange(embedded)
        self._session: Final = bound
        feature_size, state_size = bound.graph_io.head.sizes if bound.graph_io.head is not None else (0, 0)
        self._no_features: Final = np.empty((0, feature_size), np.float32)
        self._no_states: Final = np.empty((0, state_size), np.float32)
        self._features: FeatureSlots | None = None
        self._first = 0
        """Index in the sequence of the token whose pair is in the first slot."""
        self._states: dict[Path, Floats] = {}
        """The head's state after each path that was run."""

    def attach(self, arena: KVArena) -> None:
        """Read the features of the sequence in the target's `arena` from now on."""
        self._features = arena.features

    def reset(self, token_ids: Sequence[int]) -> None:
        """Replace the sequence; cache slots of the common prefix are kept."""
        # The pair of a token holds the token after it too.
        same = shared_tokens(self._token_ids, token_ids) - 1 - self._first
        self._arena.rewind_to(min(self._arena.length, max(same, 0)))
        self._token_ids = list(token_ids)
        self._stale = True

    @property
    def pending(self) -> int:
        """Number of pairs of the sequence that are not in the KV cache yet."""
        return max(len(self._token_ids) - 1 - self._first - self._arena.length, 0)

    def seconds(self, path: Path) -> float:
        """Expected seconds: a pass for the sequence, and one for each token of the path that was not run."""
        self._commit_accepted()
        if path in self._logits:
            return 0.0
        context = self._arena.length
        steps = sum(path[:depth] not in self._logits for depth in range(1, len(path) + 1))
        seconds = steps * self.cost.seconds(1, context)
        if () not in self._logits:
            later = max(self.pending - USUAL_CATCH_UP, 0)
            seconds += later / PREFILL_WIDTH * self.cost.seconds(PREFILL_WIDTH, context) / ROUNDS_SERVED
            seconds += self.cost.seconds(max(self.pending - later, 1), context)
        return seconds

    def width(self, path: Path) -> int:
        """Number of tokens that have to run for the logits after the sequence and `path`."""
        return max(1, self.pending + sum(path[:depth] not in self._logits for depth in range(1, len(path) + 1)))

    def _run_path(self, path: Path) -> None:
        for depth in range(len(path) + 1):
            node = path[:depth]
            if node not in self._logits and not (self._run_draft_token(node) if node else self._run_sequence()):
                return

    def _commit_accepted(self) -> None:
        """Forget draft tokens once the sequence has grown: accepted ones run again with the target's features."""
        if self._stale:
            self._drop_draft()
            self._stale = False

    def _drop_draft(self) -> None:
        super()._drop_draft()
        self._states.clear()

    def _run_sequence(self) -> bool:
        """Run the missing pairs of the sequence; False if their features are not known."""
        arena, features, end = self._arena, self._features, len(self._token_ids) - 1
        if features is None or end < 1 or not features.start < end <= features.end:
            return False
        first = self._first + arena.length
        if first < features.start or end - first > features.window or end - self._first >= arena.limit:
            # A head that begins later drafts worse for a while, and can be anywhere in the context.
            self._first = first = max(features.start, end - min(features.window, max(arena.limit // 2, 1)))
            arena.rewind_to(0)
        elif first >= end:  # all slots are there, but not the logits of the last one
            first = end - 1
            arena.rewind_to(first - self._first)
        tokens = self._own(self._token_ids[first + 1 : end + 1])
        if tokens.min() < 0:
            return False
        for start in range(first, end, PREFILL_WIDTH):
            stop = min(start + PREFILL_WIDTH, end)
            logits, state = self._forward_states(
                tokens[start - first : stop - first], features.read(start, stop), self._no_states
            )
            arena.commit(stop - start)
        self._logits[()], self._states[()] = logits[: self.head].copy(), state
        return True

    def _run_draft_token(self, path: Path) -> bool:
        """Run the last token of a path, whose parent was run; False if it cannot be."""
        scratch, base = len(self._scratch), self._arena.length
        token = self._own(path[-1:])
        if base + scratch + 1 > self._arena.limit or token[0] < 0:
            return False
        state = self._states[path[:-1]][None]
        if is_chain([*self._scratch, path]):
            logits, new = self._forward_states(token, self._no_features, state)
        else:
            visible = np.zeros((1, scratch + 1), np.bool_)
            visible[0, [*(self._slots[path[:depth]] for depth in range(1, len(path))), scratch]] = True
            positions = np.array([base + len(path) - 1], np.int64)
            logits, new = self._forward_states(token, self._no_features, state, positions, visible)
        self._slots[path] = scratch
        self._scratch.append(path)
        self._logits[path], self._states[path] = logits[: self.head].copy(), new
        return True

    def _forward_states(
        self,
        tokens: Int32,
        features: Floats,
        states: Floats,
        positions: np.ndarray[tuple[int], np.dtype[np.int64]] | None = None,
        mask: np.ndarray[tuple[int, int], np.dtype[np.bool_]] | None = None,
    ) -> tuple[Floats, Floats]:
        """Run a pass behind the draft tokens that were run; returns logits and state of its last token."""
        with self._timed_pass(tokens.size):
            return self._session.forward_states(tokens, features, states, positions=positions, tree_mask=mask)


class MedusaDraft(ModelDrafter):
    """Medusa heads over one sequence.

    Args:
        session: the heads.
        target_vocab: vocabulary size of the target; further tokens of the heads are padding.
    """

    source = Source.MEDUSA

    def __init__(self, session: MedusaSession, target_vocab: int) -> None:
        self._session: Final = session
        self._target_vocab: Final = target_vocab
        self._features: FeatureSlots | None = None
        self._length = 0
        self._found: tuple[np.typing.NDArray[np.int64], Floats] | None = None
        """What the heads propose behind the sequence; None if they were not run."""
        self._seconds = session.seconds
        """Average time of a run."""

    def attach(self, arena: KVArena) -> None:
        """Read the features of the sequence in the target's `arena` from now on."""
        self._features = arena.features
        self._found = None

    def reset(self, token_ids: Sequence[int]) -> None:
        """Replace the sequence."""
        self._length = len(token_ids)
        self._found = None

    def append(self, token: int) -> None:
        """Append a token to the sequence."""
        del token
        self._length += 1
        self._found = None

    def has_logits(self, path: Path) -> bool:
        """Whether `top_tokens(path)` takes no time."""
        return self._found is not None or len(path) >= self._session.heads

    def seconds(self, path: Path) -> float:
        """Expected seconds of `top_tokens(path)` now."""
        return 0.0 if self.has_logits(path) else self._seconds

    def top_tokens(self, path: Path, count: int, temperature: float = 1.0) -> TopTokens:
        """The `count` most probable tokens after the sequence and as many tokens as `path` has.

        The probabilities have temperature 1, and how often such tokens are accepted is learned.

        Raises:
            EdgeError: ONNX Runtime failed.
        """
        del temperature
        features, last = self._features, self._length - 2
        if len(path) >= self._session.heads or features is None or not features.start <= last < features.end:
            return TopTokens((), ())
        if self._found is None:
            started = time.perf_counter()
            self._found = self._session.run(features.read(last, last + 1)[0])
            seconds = time.perf_counter() - started
            self._spent += seconds
            self._seconds += (seconds - self._seconds) / _OBSERVED_RUNS
        ids, probabilities = (each[len(path)] for each in self._found)
        known = ids < self._target_vocab
        return TopTokens(tuple(ids[known][:count].tolist()), tuple(probabilities[known][:count].tolist()))
