"""A draft model: a small language model that says what may come next, with probabilities, at a price per pass.

It keeps the text and, behind it, rows for any tokens that were guessed there, in an arena of its own. Nothing is run
before it is asked for: then everything that is missing, of the text and of the guesses, goes through in one pass. Rows
of guesses are kept until the text is known, and those that came true become rows of the text. So a chain of guesses
that is accepted as a whole costs no pass again: the next one runs its last token and the target's own together.

A path is the tokens guessed behind the text; `()` is the text itself. Ids are the target's throughout.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ...graph.bound_session import BoundSession
from ..pass_cost import PassCost

Path: TypeAlias = tuple[int, ...]
Floats: TypeAlias = npt.NDArray[np.float32]
Int32: TypeAlias = npt.NDArray[np.int32]

_USUAL_CATCH_UP: Final = 2
"""Rows that a text lacks after a fully accepted draft."""
_ROUNDS_SERVED: Final = 32
"""Rounds over which the cost of reading the text is spread: an answer of a line or two."""
_OBSERVED_EVERY: Final = 4
"""Passes of which one refines the cost: the bookkeeping takes a tenth of a small model's pass."""
_TEXT_ROWS: Final = 128
"""Most rows of the text in a pass."""
_UNKNOWN: Final = -1


class Likely(NamedTuple):
    """The likeliest next tokens, best first, and their probabilities."""

    tokens: tuple[int, ...]
    probabilities: tuple[float, ...]


class DraftModel:
    """A draft model over one text. Between calls, the arena's committed rows are those of the text, come what may.

    A text longer than the model's context, or with a token that it does not have, cannot be continued: then nothing is
    likely, and asking costs nothing.

    Args:
        bound: its session. If the graph takes no mask or no positions, guesses are run one path at a time.
        cost: what its passes cost; refined with each.
        target_vocab: the target's vocabulary. What the draft has beyond it is padding and never guessed.
        target_ids: int32 `[V]`, the target's ids of the head's tokens; None if they are the same. A trimmed head has
            few of them. If the embedding has no more than the head, it is trimmed likewise.

    Raises:
        ValueError: `target_ids` are not one each for the head's tokens, all different and of the target's.
    """

    def __init__(self, bound: BoundSession, cost: PassCost, target_vocab: int, target_ids: Int32 | None = None) -> None:
        graph_io = bound.graph_io
        if target_ids is not None:
            check_target_ids(target_ids, graph_io.vocab_size, target_vocab)
        self.cost: Final = cost
        self.passes = 0
        """Run so far."""
        self._bound: Final = bound
        self._arena: Final = bound.arena
        self._branches: Final = graph_io.supports_trees
        self.target_ids: Final = target_ids
        """int32, the target's ids of the head's tokens; None if they are the same."""
        self.head: Final = min(graph_io.vocab_size, target_vocab)
        """Tokens of the head; those that only pad it do not count."""
        self._own_ids: Final = np.full(target_vocab, _UNKNOWN, np.int32)
        """The embedding's ids of the target's tokens."""
        if target_ids is None or graph_io.input_vocab > graph_io.vocab_size:
            shared = min(graph_io.input_vocab, target_vocab)
            self._own_ids[:shared] = np.arange(shared)
        else:
            self._own_ids[target_ids] = np.arange(target_ids.size)
        self._scores = np.empty(self.head, np.float32)
        self._spent = 0.0
        self._text: list[int] = []
        # All three are about guesses behind the rows of the text, and empty while rows of the text are missing.
        self._rows: list[Path] = []
        """The scratch rows in the order of their slots."""
        self._slots: dict[Path, int] = {}
        """The first of them by path."""
        self._logits: dict[Path, Floats] = {}

    @property
    def pending(self) -> int:
        """Tokens of the text that have no row yet."""
        self._settle()
        return len(self._text) - self._arena.length

    def follow(self, tokens: Sequence[int]) -> None:
        """Make `tokens` the text; rows of the common beginning are kept."""
        new = list(tokens)
        if new[: len(self._text)] != self._text:
            pairs = enumerate(zip(self._text, new, strict=False))
            same = next((i for i, (old, token) in pairs if old != token), len(new))
            if same < self._arena.length:
                self._arena.rewind_to(same)
                self._forget_guesses()
        self._text = new

    def append(self, token: int) -> None:
        """Let the text grow by one token."""
        self._text.append(token)

    def seconds(self, path: Path) -> float:
        """What `likely(path)` is expected to take now.

        Rows that the text lacks are run once and serve every round to come: of more than a few, a share is counted.
        """
        missing = self.pending
        if path in self._logits:
            return 0.0
        context = self._arena.length
        now = min(missing, _USUAL_CATCH_UP)
        later = missing - now
        rows = max(1, now + sum(path[:depth] not in self._slots for depth in range(1, len(path) + 1)))
        spread = later / _TEXT_ROWS * self.cost.seconds(_TEXT_ROWS, context) / _ROUNDS_SERVED
        return self.cost.seconds(rows, context) + spread

    def spent(self) -> float:
        """Seconds that the model took since this was last asked for."""
        spent, self._spent = self._spent, 0.0
        return spent

    def likely(self, path: Path, count: int, temperature: float = 1.0) -> Likely:
        """The `count` likeliest tokens after the text and `path`; one pass, or none if that is known already.

        Raises:
            EdgeError: ONNX Runtime failed; the text keeps its rows.
        """
        return self.likely_each((path,), count, temperature)[0]

    def likely_each(self, paths: Sequence[Path], count: int, temperature: float = 1.0) -> list[Likely]:
        """`likely` for several paths, in one pass together where the graph takes a mask."""
        started = time.perf_counter()
        logits = self._logits_of(paths)
        likely = [Likely((), ()) if row is None else self._largest(row, count, temperature) for row in logits]
        self._spent += time.perf_counter() - started
        return likely

    def logits(self, path: Path) -> Floats | None:
        """Logits float32 `[head]` after the text and `path`, None if that cannot be run; passes as for `likely`."""
        started = time.perf_counter()
        logits = self._logits_of((path,))[0]
        self._spent += time.perf_counter() - started
        return logits

    def _logits_of(self, paths: Sequence[Path]) -> list[Floats | None]:
        if not self._text:
            raise ValueError("a text of no tokens has no next one")
        self._settle()
        if () in paths and () not in self._logits and self._arena.length == len(self._text):
            # The text's last row is there, but not what came of it: it runs again.
            self._forget_guesses()
            self._arena.rewind_to(len(self._text) - 1)
        unknown = [path for path in sorted(set(paths), key=len) if path not in self._logits]
        unknown = [path for path in unknown if self._own(path).min(initial=0) >= 0]
        for together in [unknown] if self._branches else [[path] for path in unknown]:
            if together:
                self._ask(together)
        return [self._logits.get(path) for path in paths]

    def _ask(self, paths: Sequence[Path]) -> None:
        """Run what is missing for some paths and keep what comes of it; do nothing if it cannot be run."""
        arena, text = self._arena, self._text
        if arena.length == 0 and len(paths) > 1:
            # A first pass has no choice of positions (see `BoundSession.forward`), so no branches either.
            self._ask([()])
            paths = [path for path in paths if path]
        if not self._branches:
            self._cut_to(paths[0])
        nodes = self._to_run(paths)
        missing = self._own(text[arena.length :])
        if len(text) + len(self._rows) + len(nodes) > arena.limit or missing.min(initial=0) < 0:
            return
        while missing.size > _TEXT_ROWS:
            self._forward(missing[:_TEXT_ROWS], (0,))
            arena.commit(_TEXT_ROWS)
            missing = missing[_TEXT_ROWS:]
        logits = self._run(missing, nodes, [missing.size + nodes.index(p) if p else missing.size - 1 for p in paths])
        arena.commit(missing.size)
        for node in nodes:
            # Of a row that ran again, the first stays: rows that go on from it have seen that one.
            self._slots.setdefault(node, len(self._rows))
            self._rows.append(node)
        for path, row in zip(paths, logits, strict=True):
            self._logits[path] = row[: self.head].copy()

    def _to_run(self, paths: Sequence[Path]) -> list[Path]:
        """The paths themselves and those to them that have no row, each after the one it goes on from."""
        ordered = dict[Path, None]()
        for path in paths:
            for depth in range(1, len(path) + 1):
                if depth == len(path) or path[:depth] not in self._slots:
                    ordered[path[:depth]] = None
        return list(ordered)

    def _run(self, missing: Int32, nodes: Sequence[Path], rows: Sequence[int]) -> Floats:
        """One pass over missing rows of the text and then nodes; returns the logits of `rows`, counted from the first.

        Either no row of the text is missing or there are no scratch rows, so the new rows, and the scratch rows that
        they may see or not, are always the last.
        """
        behind, scratch = missing.size, len(self._rows)
        tokens = np.concatenate([missing, self._own([node[-1] for node in nodes])]) if nodes else missing
        if _is_chain([*self._rows, *nodes]):
            return self._forward(tokens, rows)
        depths = np.array([len(node) for node in nodes], np.int64)
        positions = np.concatenate([self._arena.length + np.arange(behind), len(self._text) - 1 + depths])
        mask = np.tri(tokens.size, scratch + tokens.size, scratch, dtype=np.bool_)
        slots = dict(self._slots)
        for slot, node in enumerate(nodes, scratch):
            above = [slots[node[:depth]] for depth in range(1, len(node))]
            slots.setdefault(node, slot)
            seen = mask[behind + slot - scratch]
            seen[behind:] = False
            seen[[behind + each for each in (*above, slot)]] = True
        return self._forward(tokens, rows, positions, mask)

    def _forward(
        self,
        tokens: Int32,
        rows: Sequence[int],
        positions: npt.NDArray[np.int64] | None = None,
        mask: npt.NDArray[np.bool_] | None = None,
    ) -> Floats:
        arena = self._arena
        base = arena.length
        started = time.perf_counter()
        # Scratch rows count as committed for the time of the pass: it writes behind them, and growth keeps them.
        arena.commit(len(self._rows))
        try:
            logits = self._bound.forward(tokens, logits_for=rows, positions=positions, tree_mask=mask)
        finally:
            arena.rewind_to(base)
        if self.passes % _OBSERVED_EVERY == 0:
            self.cost.observe(tokens.size, base, time.perf_counter() - started)
        self.passes += 1
        return logits

    def _cut_to(self, path: Path) -> None:
        """Leave of the scratch rows, which are a chain, those that `path` goes on from."""
        kept = 0
        while kept < min(len(self._rows), len(path) - 1) and self._rows[kept] == path[: kept + 1]:
            kept += 1
        del self._rows[kept:]
        self._slots = {row: slot for slot, row in enumerate(self._rows)}

    def _settle(self) -> None:
        """Now that the text has grown: make the scratch rows of guesses that came true rows of the text."""
        if not self._rows and not self._logits:
            return
        arena = self._arena
        behind = tuple(self._text[arena.length :])
        if not behind:
            return
        true: list[int] = []
        while len(true) < len(behind) and (slot := self._slots.get(behind[: len(true) + 1])) is not None:
            true.append(slot)
        logits = self._logits.get(behind) if len(true) == len(behind) else None
        if true:
            base = arena.length - 1  # the text's last row, as the one that the branch grows from
            arena.rewind_to(base)
            arena.compact(base, [0, *(1 + slot for slot in true)])
        self._forget_guesses()
        if logits is not None:
            self._logits[()] = logits

    def _forget_guesses(self) -> None:
        self._rows.clear()
        self._slots.clear()
        self._logits.clear()

    def _own(self, tokens: Sequence[int]) -> Int32:
        """The model's ids of the target's tokens, int32; -1 for those that it does not have."""
        own: Int32 = self._own_ids[np.asarray(tokens, np.intp)]
        return own

    def _largest(self, logits: Floats, count: int, temperature: float) -> Likely:
        """Softmax in float32, of which only the largest are looked for: the maximum, time and again.

        At 4096 and 151936 tokens and a count of 4 that takes 3 and 56 us; by partitioning it takes 37 and 1010.
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
        return Likely(tuple(ids), tuple((scores[best] / scores.sum()).tolist()))


def _is_chain(paths: Sequence[Path]) -> bool:
    """Whether each path goes on from the one before, and the first from the text."""
    return all(path[:-1] == above for above, path in zip(((), *paths), paths, strict=False))


def check_target_ids(target_ids: Int32, head: int, target_vocab: int) -> None:
    """Check that the ids of a head's tokens in the target's vocabulary can be used.

    Raises:
        ValueError: they are not one for each, all different and of the target's; the message goes on from "it".
    """
    if target_ids.shape != (head,):
        raise ValueError(f"has {target_ids.size} ids for a head of {head} tokens")
    if target_ids.min() < 0 or target_ids.max() >= target_vocab:
        raise ValueError(f"has ids from {target_ids.min()} to {target_ids.max()}, but the target {target_vocab} tokens")
    if np.unique(target_ids).size < head:
        raise ValueError("has an id more than once")
