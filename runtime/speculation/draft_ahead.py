"""Runs a draft model ahead, in a thread, while the target verifies on another device.

While the target verifies a draft, the draft model continues what the verification is likely to leave: the likeliest of
all outcomes first, then what is likely to come after it (PEARL's post-verify, Liu et al. 2024, for trees). What the
target confirms is a known result in the next round, which then drafts without waiting; the rest is dropped. Only what
is likely to end with the target's pass is begun, so that dropping it costs no time.

The thread keeps logits and nothing else. It chooses no draft token, so that drafts, and with them the text, are those
of taking turns.
"""

from __future__ import annotations

import logging
import operator
import threading
import time
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple

import numpy as np

from ...errors import EdgeError
from ..scheduling.work_thread import WorkThread
from .drafters.draft_model import DraftModel
from .drafters.interface import Path
from .growth import TreeGrowth
from .tree import Tree

_LEAST_CHANCE: Final = 0.02
"""Probability of being used below which nothing is run: it would take power for nothing."""
_LEAST_SHARE: Final = 0.04
"""Duration of a step of the model, relative to the target's pass, below which it takes turns with the target: the
thread costs more than the step then (measured in docs/log.md, "Drafting ahead")."""
_CATCH_UP: Final = 8
"""Number of missing tokens of the sequence up to which they run together with draft tokens; before, parts are run."""
_WIDEST: Final = 128
_CHILDREN: Final = 3
"""Number of next tokens that are considered after each path."""
_log: Final = logging.getLogger("edgerun")


class PassesAhead(NamedTuple):
    """What the draft model did while the target ran."""

    passes: int = 0
    """Number of its passes over draft tokens."""
    kept: int = 0
    """Number of those whose tokens agree with what the target then emitted; the others were dropped."""
    hidden_s: float = 0.0
    """Seconds that the model ran while the target did, parts of a prompt included."""
    waited_s: float = 0.0
    """Seconds that the next round waited for the end of its last pass."""

    def __or__(self, other: PassesAhead) -> PassesAhead:
        """Both together."""
        return PassesAhead(*map(operator.add, self, other))


NOTHING_AHEAD: Final = PassesAhead()


class DraftAhead:
    """Runs the draft model of one sequence ahead: `start` with the target's pass, `stop` after it, then `settle`.

    Between `start` and `settle`, the model belongs to the thread.

    Args:
        model: the draft model.
        thread: the thread.
    """

    def __init__(self, model: DraftModel, thread: WorkThread) -> None:
        self.total = NOTHING_AHEAD
        """What was run ahead since this object was made, as far as it was settled."""
        self._model: Final = model
        self._thread: Final = thread
        self._idle: Final = threading.Lock()
        """Held while the thread works."""
        self._started = self._stopped = False
        self._error: BaseException | None = None
        self._ran: list[Path] = []
        self._length = 0
        self._longest = 0
        self._ends = 0.0
        self._curve: Sequence[float] = ()

    def start(self, draft: Tree, growth: TreeGrowth, length: int, target_s: float, longest: int) -> None:
        """Begin to run ahead, in the thread, unless a step of the model is too short for that to gain anything.

        Args:
            draft: what the target verifies from now on.
            growth: how it was grown.
            length: number of tokens of the sequence.
            target_s: expected seconds of the target's pass.
            longest: number of tokens of the longest path after which another token may be drafted.
        """
        self._length, self._longest, self._ends = length, longest, time.perf_counter() + target_s
        # The cost is shared with other sequences, whose threads change it; this array stays as it is.
        self._curve = self._model.cost.curve(length, _WIDEST).tolist()
        if self._seconds(1) < _LEAST_SHARE * target_s:
            return
        self._stopped = False
        self._ran.clear()
        self._idle.acquire()
        try:
            self._thread.submit(lambda: self._work(draft, growth))
        except RuntimeError as error:
            self._idle.release()
            _log.warning("the draft model does not run ahead: %s", error)
            return
        self._started = True

    def stop(self) -> None:
        """Begin no further pass; returns at once."""
        self._stopped = True

    def settle(self, token_ids: Sequence[int]) -> PassesAhead:
        """Wait until the model is free again, after its present pass at most.

        Args:
            token_ids: the sequence with what the target has emitted.

        Raises:
            EdgeError: the model failed in the thread.
        """
        if not self._started:
            return NOTHING_AHEAD
        emitted = tuple(token_ids[self._length :])
        settled, error = self._wait(lambda path: path[: len(emitted)] == emitted[: len(path)])
        if error is not None:
            raise error
        return settled

    def end(self) -> None:
        """Wait until the model is free again and drop what was run: the answer has ended."""
        if not self._started:
            return
        error = self._wait(lambda _: False)[1]
        if isinstance(error, EdgeError):
            # The answer is complete without it, and the next one asks the model again.
            _log.warning("the draft model failed after the last token: %s", error)
        elif error is not None:
            raise error

    def _wait(self, is_kept: Callable[[Path], bool]) -> tuple[PassesAhead, BaseException | None]:
        """Wait for the end of the present pass; returns what was run, and the error of the thread."""
        started = time.perf_counter()
        self._stopped = True
        with self._idle:
            self._started = False
        waited_s = time.perf_counter() - started
        hidden_s = max(self._model.take_seconds_spent() - waited_s, 0.0)
        ran = PassesAhead(len(self._ran), sum(map(is_kept, self._ran)), hidden_s, waited_s)
        self.total |= ran
        error, self._error = self._error, None
        return ran, error

    def _work(self, draft: Tree, growth: TreeGrowth) -> None:
        try:
            self._run(draft, growth)
        except BaseException as error:  # noqa: BLE001  raised where the answer is read
            self._error = error
        finally:
            self._idle.release()

    def _run(self, draft: Tree, growth: TreeGrowth) -> None:
        model = self._model
        while (missing := model.pending) > _CATCH_UP:
            tokens = self._affordable(missing)
            if self._stopped or tokens < min(_CATCH_UP, missing):
                return
            before = model.pending
            model.catch_up(tokens)
            if model.pending == before:
                return
        outcomes, drafted = self._outcomes(draft, growth)
        heap = [(-chance, number, path) for number, (chance, path) in enumerate(outcomes)]
        heapify(heap)
        pushed = len(heap)
        while heap and not self._stopped:
            negative, _, path = heappop(heap)
            if -negative < _LEAST_CHANCE:
                return
            if len(path) > self._longest:
                continue
            if not model.has_logits(path) and not self._is_worth(-negative, self._seconds(model.width(path))):
                return
            before = model.passes
            for token, chance in zip(*model.top_tokens(path, _CHILDREN, model.temperature), strict=True):
                if (*path, token) not in drafted:
                    pushed += 1
                    heappush(heap, (negative * chance, pushed, (*path, token)))
            if model.passes > before:
                self._ran.append(path)

    def _outcomes(self, draft: Tree, growth: TreeGrowth) -> tuple[list[tuple[float, Path]], set[Path]]:
        """Likely outcomes of the verification and their probabilities; and the paths that the target verifies.

        A path has all tokens after the sequence that is known now. After every node of the draft, the outcomes are the
        candidates that are not its children, and the path itself for any other token.
        """
        tokens, parents = draft.token_ids, draft.parent_nodes
        paths: list[Path] = [()]
        grown = [0]
        for node in range(1, len(draft)):
            # Candidates are kept by node of the tree before pruning.
            child = growth.tree.child(grown[parents[node]], tokens[node])
            paths.append((*paths[parents[node]], tokens[node]))
            grown.append(-1 if child is None else child)
        drafted = set(paths)
        found: list[tuple[float, Path]] = []
        for path, place, probability in zip(paths, grown, draft.path_probs, strict=True):
            unknown = 1.0
            for token, prediction in growth.candidates.get(place, ()):
                unknown -= prediction.probability
                if (*path, token) not in drafted:
                    found.append((probability * prediction.probability, (*path, token)))
            if not self._model.has_logits(path):
                found.append((probability * max(unknown, 0.0), path))
        return found, drafted

    def _seconds(self, width: int) -> float:
        return self._curve[min(width, _WIDEST) - 1]

    def _is_worth(self, chance: float, seconds: float) -> bool:
        """Whether a pass is expected to hide more time than the next round would wait for it in vain."""
        late = max(time.perf_counter() + seconds - self._ends, 0.0)
        return chance * (seconds - late) >= (1 - chance) * late

    def _affordable(self, missing: int) -> int:
        """Number of missing tokens whose pass ends with the target's."""
        left = self._ends - time.perf_counter()
        return int(np.searchsorted(self._curve[: min(missing, _WIDEST)], left, side="right"))
