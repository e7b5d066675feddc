"""A draft model: a small language model over one sequence, run only when needed.

It keeps the sequence and, behind it, cache slots of any draft tokens, in an arena of its own. Nothing runs until logits
are needed: then everything that is missing, of the sequence and of the draft, goes through in one pass. Slots of draft
tokens are kept until the sequence grows: slots of accepted tokens become the sequence's, and those that continue
it stay draft tokens. So a fully accepted chain costs no further pass: the next pass runs its last token together with
the target's own next token. Where that was run too, while the target verified (`ahead`), the next round finds its
logits, and the logits of what was run behind it.

A path is the tuple of draft tokens behind the sequence; `()` is the sequence itself. Token ids are the target's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ...graph.bound_graph import BoundGraph
from ...kv.arena import KVArena, shared_tokens
from ..pass_cost import PassCost
from .interface import ModelDrafter, Path, TopTokens

Floats: TypeAlias = npt.NDArray[np.float32]
Int32: TypeAlias = npt.NDArray[np.int32]

USUAL_CATCH_UP: Final = 2
"""Number of tokens missing from the cache after a fully accepted draft."""
ROUNDS_SERVED: Final = 32
"""Number of rounds over which the cost of the prefill is spread: an answer of a line or two."""
_OBSERVED_EVERY: Final = 4
"""One of this many passes refines the pass cost: the bookkeeping takes a tenth of a small model's pass."""
PREFILL_WIDTH: Final = 128
"""Maximum number of tokens of the sequence in a pass."""
_UNKNOWN: Final = -1


class DraftModel(ModelDrafter):
    """A draft model over one sequence. Between calls, the arena's committed slots always belong to the sequence.

    A sequence that is longer than the model's context, or has a token that is not in its vocabulary, cannot be
    continued: then there are no next tokens, and asking for them costs nothing.

    Args:
        bound: session of the model. If the graph takes no mask or no positions, paths are run one at a time.
        cost: cost of its passes; refined by them.
        target_vocab: vocabulary size of the target. Tokens of the draft model beyond it are padding, never drafted.
        target_ids: int32 `[V]`, target ids of the tokens of the LM head; None if they are the same. A trimmed head has
            few tokens. If the embedding has no more tokens than the head, it is trimmed likewise.
        exchange: keeps the arena and tokens of a sequence in the prefix cache and returns an arena with what it has of
            another one; None to keep the present sequence only.
        unread: the token in whose places the target has features of images, which the model leaves out as it reads the
            text alone (Multimodal Speculative Decoding, 2025); None for none.
    """

    def __init__(
        self,
        bound: BoundGraph,
        cost: PassCost,
        target_vocab: int,
        target_ids: Int32 | None = None,
        exchange: Callable[[KVArena, Sequence[int], Sequence[int]], KVArena] | None = None,
        unread: int | None = None,
    ) -> None:
        graph_io = bound.graph_io
        self.cost: Final = cost
        self.passes = 0
        """Number of passes run so far."""
        self._bound: Final = bound
        self._exchange: Final = exchange
        self._unread: Final = unread
        self._branches: Final = graph_io.supports_trees
        self.target_ids: Final = target_ids
        """int32, target ids of the tokens of the LM head; None if they are the same."""
        self.head: Final = min(graph_io.vocab_size, target_vocab)
        """Number of tokens of the LM head, without padding."""
        self._own_ids: Final = np.full(target_vocab, _UNKNOWN, np.int32)
        """The embedding's id of each token of the target."""
        if target_ids is None or graph_io.input_vocab > graph_io.vocab_size:
            shared = min(graph_io.input_vocab, target_vocab)
            self._own_ids[:shared] = np.arange(shared)
        else:
            self._own_ids[target_ids] = np.arange(target_ids.size)
        self._scores = np.empty(self.head, np.float32)
        self._timings: list[tuple[int, int, float]] = []
        """Width, context and seconds of passes that the cost has not learned from."""
        self._token_ids: list[int] = []
        self._stale = True
        """Whether the sequence has changed since accepted draft tokens were committed or dropped."""
        # All three describe draft tokens behind the slots of the sequence; empty while slots of the sequence are
        # missing.
        self._scratch: list[Path] = []
        """The path of each scratch slot, in slot order."""
        self._slots: dict[Path, int] = {}
        """The first scratch slot of each path."""
        self._logits: dict[Path, Floats] = {}

    @property
    def _arena(self) -> KVArena:
        return self._bound.arena

    @property
    def pending(self) -> int:
        """Number of tokens of the sequence that are not in the KV cache yet."""
        self._commit_accepted()
        return len(self._token_ids) - self._arena.length

    def reset(self, token_ids: Sequence[int]) -> None:
        """Replace the sequence; cache slots of the common prefix are kept."""
        new = list(token_ids) if self._unread is None else [each for each in token_ids if each != self._unread]
        if new[: len(self._token_ids)] != self._token_ids:
            same = shared_tokens(self._token_ids, new)
            if same < self._arena.length:
                self._drop_draft()
                if self._exchange is None:
                    self._arena.rewind_to(same)
                else:
                    self._bound.use(self._exchange(self._arena, self._token_ids, new))
        self._token_ids = new

    def append(self, token: int) -> None:
        """Append a token to the sequence."""
        if token != self._unread:
            self._token_ids.append(token)
            self._stale = True

    def seconds(self, path: Path) -> float:
        """Expected seconds of `top_tokens(path)` now.

        Missing tokens of the sequence are run once and serve all later rounds: of more than a few, a share is counted.
        """
        if self.has_logits(path):
            return 0.0
        context = self._arena.length
        later = max(self.pending - USUAL_CATCH_UP, 0)
        spread = later / PREFILL_WIDTH * self.cost.seconds(PREFILL_WIDTH, context) / ROUNDS_SERVED
        return self.cost.seconds(self.width(path) - later, context) + spread

    def has_logits(self, path: Path) -> bool:
        """Whether the logits after the sequence and `path` are known."""
        self._commit_accepted()
        return path in self._logits

    def width(self, path: Path) -> int:
        """Number of tokens that have to run for the logits after the sequence and `path`, if they are not known."""
        missing = self.pending + sum(path[:depth] not in self._slots for depth in range(1, len(path) + 1))
        return max(1, missing) + self._arena.replay_at(self._arena.length + self._common(path))

    def take_seconds_spent(self) -> float:
        """Seconds that the model has run since the last call of this method, from which its cost is refined."""
        for width, context, seconds in self._timings:
            self.cost.observe(width, context, seconds)
        self._timings.clear()
        return super().take_seconds_spent()

    def catch_up(self, tokens: int) -> None:
        """Run the first `tokens` of the sequence's missing tokens.

        Raises:
            EdgeError: as for `top_tokens`.
        """
        started = time.perf_counter()
        self._commit_accepted()
        length = self._arena.length
        missing = self._own(self._token_ids[length : length + tokens])
        if missing.size and missing.min() >= 0 and length + missing.size <= self._arena.limit:
            self._forward(missing)
            self._arena.commit(missing.size)
        self._spent += time.perf_counter() - started

    def top_tokens(self, path: Path, count: int, temperature: float = 1.0) -> TopTokens:
        """The `count` most probable tokens after the sequence and `path`; one pass, or none if the logits are there.

        Raises:
            EdgeError: ONNX Runtime failed; the cache slots of the sequence are intact.
        """
        logits = self.logits(path)
        if logits is None:
            return TopTokens((), ())
        started = time.perf_counter()
        top = self._largest(logits, count, temperature)
        self._spent += time.perf_counter() - started
        return top

    def logits(self, path: Path) -> Floats | None:
        """Logits float32 `[head]` after the sequence and `path`; None if they cannot be computed."""
        started = time.perf_counter()
        self._commit_accepted()
        if path not in self._logits:
            self._run_path(path)
        self._spent += time.perf_counter() - started
        return self._logits.get(path)

    def _run_path(self, path: Path) -> None:
        """Run what is missing for a path and keep its logits; does nothing if that is not possible."""
        arena, sequence = self._arena, self._token_ids
        if not path and arena.length == len(sequence):
            # The last token of the sequence is in the cache, but its logits are not known: run it again.
            self._drop_draft()
            arena.rewind_to(len(sequence) - 1)
        if self._own(path).min(initial=0) < 0:
            return
        if not self._branches:  # the scratch slots are a chain, which is dropped from where it differs from the path
            del self._scratch[self._common(path) :]
            self._slots = {scratch: slot for slot, scratch in enumerate(self._scratch)}
        # The path itself, and its prefixes that have no slot.
        prefixes = [path[:depth] for depth in range(1, len(path) + 1)]
        nodes = [node for node in prefixes if node == path or node not in self._slots]
        missing = self._own(sequence[arena.length :])
        if len(sequence) + len(self._scratch) + len(nodes) > arena.limit or missing.min(initial=0) < 0:
            return
        while missing.size > PREFILL_WIDTH:
            self._forward(missing[:PREFILL_WIDTH])
            arena.commit(PREFILL_WIDTH)
            missing = missing[PREFILL_WIDTH:]
        if self._bound.graph_io.states and missing.size > USUAL_CATCH_UP:
            # A later prompt may leave this one anywhere in the answer; this is where its states are known.
            arena.last_prefill = (arena.length, arena.length + missing.size)
        arena.hold_from(arena.length)
        logits = self._run(missing, nodes)
        arena.commit(missing.size)
        for node in nodes:
            # If a node ran again, its first slot stays: the slots of its children were computed with that one.
            self._slots.setdefault(node, len(self._scratch))
            self._scratch.append(node)
        self._logits[path] = logits[: self.head].copy()

    def _run(self, missing: Int32, nodes: Sequence[Path]) -> Floats:
        """Run one pass over missing tokens of the sequence and then nodes; returns the logits of the last input.

        Either no token of the sequence is missing or there are no scratch slots, so the new slots, and the scratch
        slots that they may or may not attend to, are always the last ones.
        """
        behind, scratch = missing.size, len(self._scratch)
        tokens = np.concatenate([missing, self._own([node[-1] for node in nodes])]) if nodes else missing
        if is_chain([*self._scratch, *nodes]):
            return self._forward(tokens)
        depths = np.array([len(node) for node in nodes], np.int64)
        positions = np.concatenate([self._arena.length + np.arange(behind), len(self._token_ids) - 1 + depths])
        mask = np.tri(tokens.size, scratch + tokens.size, scratch, dtype=np.bool_)
        slots = dict(self._slots)
        for slot, node in enumerate(nodes, scratch):
            ancestors = [slots[node[:depth]] for depth in range(1, len(node))]
            slots.setdefault(node, slot)
            visible = mask[behind + slot - scratch]
            visible[behind:] = False
            visible[[behind + each for each in (*ancestors, slot)]] = True
        return self._forward(tokens, positions, mask)

    def _forward(
        self,
        tokens: Int32,
        positions: npt.NDArray[np.int64] | None = None,
        mask: npt.NDArray[np.bool_] | None = None,
    ) -> Floats:
        with self._timed_pass(tokens.size):
            logits = self._bound.forward(tokens, logits_for=(tokens.size - 1,), positions=positions, tree_mask=mask)
        last: Floats = logits[0]
        return last

    @contextmanager
    def _timed_pass(self, width: int) -> Iterator[None]:
        """Run a pass over `width` tokens behind the scratch slots, and observe its time now and then."""
        arena = self._arena
        base, before = arena.length, arena.replayed
        started = time.perf_counter()
        # Scratch slots count as committed during the pass: it writes behind them, and growing the arena keeps them.
        arena.commit(len(self._scratch))
        try:
            yield
        finally:
            arena.rewind_to(base)
        if self.passes % _OBSERVED_EVERY == 0:
            # The cost is shared with other sequences, whose threads may be using it.
            replayed = arena.replayed - before
            self._timings.append((width + replayed, base, time.perf_counter() - started))
        self.passes += 1

    def _common(self, path: Path) -> int:
        """Number of leading scratch slots of a chain that hold tokens of `path` before its last one."""
        pairs = zip(self._scratch, (path[:depth] for depth in range(1, len(path))), strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def _commit_accepted(self) -> None:
        """Turn the scratch slots of accepted draft tokens into slots of the sequence, now that it has grown."""
        if not self._scratch and not self._logits:
            return
        arena = self._arena
        behind = tuple(self._token_ids[arena.length :])
        if not behind:
            return
        accepted: list[int] = []
        while len(accepted) < len(behind) and (slot := self._slots.get(behind[: len(accepted) + 1])) is not None:
            accepted.append(slot)
        kept, logits = dict[Path, int](), dict[Path, Floats]()
        if len(accepted) == len(behind):
            # What continues the sequence was run after it, so that these slots come after the accepted ones.
            kept = {path: slot for path, slot in self._slots.items() if _continues(path, behind)}
            known = {path: each for path, each in self._logits.items() if path == behind or _continues(path, behind)}
            logits = {path[len(behind) :]: each for path, each in known.items()}
        slots = [*accepted, *sorted(kept.values())]
        if slots == list(range(len(slots))):
            arena.commit(len(accepted))
        elif accepted:
            base = arena.length - 1  # the last token of the sequence plays the anchor
            arena.rewind_to(base)
            arena.compact(base, [0, *(1 + slot for slot in slots)])
            arena.rewind_to(base + 1 + len(accepted))
        self._drop_draft()
        for path in sorted(kept, key=kept.__getitem__):
            self._slots[path[len(behind) :]] = len(self._scratch)
            self._scratch.append(path[len(behind) :])
        self._logits.update(logits)

    def _drop_draft(self) -> None:
        self._scratch.clear()
        self._slots.clear()
        self._logits.clear()

    def _own(self, tokens: Sequence[int]) -> Int32:
        """The model's ids of the target's tokens, int32; -1 for tokens that are not in its vocabulary."""
        own: Int32 = self._own_ids[np.asarray(tokens, np.intp)]
        return own

    def _largest(self, logits: Floats, count: int, temperature: float) -> TopTokens:
        """Softmax in float32 and its largest values, found by taking the maximum repeatedly.

        With 4096 and 151936 tokens and a count of 4 that takes 3 and 56 us; partitioning takes 37 and 1010.
        """
        scores = np.subtract(logits, logits.max(), out=self._scores)
        if temperature != 1:
            scores /= np.float32(temperature)
        best: list[int] = []
        values: list[np.float32] = []
        for _ in range(min(count, self.head)):
            best.append(int(scores.argmax()))
            values.append(scores[best[-1]])
            scores[best[-1]] = -np.inf
        scores[best] = values
        np.exp(scores, out=scores)
        ids = best if self.target_ids is None else self.target_ids[best].tolist()
        return TopTokens(tuple(ids), tuple((scores[best] / scores.sum()).tolist()))


def _continues(path: Path, beginning: Path) -> bool:
    return len(path) > len(beginning) and path[: len(beginning)] == beginning


def is_chain(paths: Sequence[Path]) -> bool:
    """Whether each path continues the one before, and the first one the sequence."""
    return all(path[:-1] == above for above, path in zip(((), *paths), paths, strict=False))
