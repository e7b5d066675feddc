"""Searches: strategies that compare several continuations of a prompt, in the place of the decode loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple

import numpy as np

from ...errors import InputError
from ..decode import DecodeLimits, FinishReason, Step, begin_answer
from ..graph.bound_graph import BoundGraph, NewTokens
from ..graph.graph_io import Floats
from ..prefill import Cancelled, prefill
from ..sampling.logit_stage import Logits
from ..sampling.logprobs import LogSoftmax, PositionLogprobs
from ..sampling.sampler import Sampler, require_finite
from ..sampling.token_mask import DeadEndError, TokenConstraint
from ..speculation.rounds import OriginKind, TokenOrigin


class Forest:
    """Continuations of a text that is in the cache, whose nodes have the slots behind it; node 0 is its last token.

    Nodes of equal depth share a position, and each attends to its ancestors alone, as in the verification of a draft;
    here the nodes are committed, and the mask of a pass reaches back to all of them.

    Args:
        bound: the graph, which supports trees; its arena has the slots of the text, at least one.
        cancelled: called before every pass; True ends the search.

    Attributes:
        base: slot of node 0. The slots up to it belong to the text.
        passes: number of passes so far.
    """

    def __init__(self, bound: BoundGraph, cancelled: Callable[[], bool]) -> None:
        self._bound: Final = bound
        self._cancelled: Final = cancelled
        self.passes = 0
        self._begin(bound.arena.length - 1)

    def _begin(self, base: int) -> None:
        self.base = base
        self._depths = np.zeros(1, np.int64)
        self._ancestors = np.ones((1, 1), np.bool_)
        """bool `[n, n]`: whether node j is node i or an ancestor of it."""

    @property
    def size(self) -> int:
        """Number of nodes."""
        return len(self._depths)

    @property
    def room(self) -> int:
        """Number of nodes for which the context still has slots."""
        return self._bound.arena.limit - self._bound.arena.length

    def extend(self, parents: Sequence[int], tokens: Sequence[int]) -> Floats:
        """Add a node behind each of some nodes, in one pass; the new nodes are numbered behind the others.

        Returns:
            Logits float32 `[n, V]` after each new node, valid until the next pass.

        Raises:
            Cancelled: the caller cancelled.
            ContextError: the context has no slots for them.
        """
        if self._cancelled():
            raise Cancelled
        new = len(tokens)
        depths = self._depths[list(parents)] + 1
        mask = np.hstack([self._ancestors[list(parents)], np.eye(new, dtype=np.bool_)])
        # A chain needs no mask, which most graphs run faster.
        tree_mask = None if new == 1 and mask.all() else mask
        logits = self._bound.forward(tokens, positions=self.base + depths, tree_mask=tree_mask)
        self._bound.arena.commit(new)
        self.passes += 1
        self._depths = np.concatenate([self._depths, depths])
        self._ancestors = np.vstack([np.pad(self._ancestors, ((0, 0), (0, new))), mask])
        return logits

    def states(self) -> Floats:
        """Hidden states float32 `[n, d]` of the text and of the nodes, in a new array; the arena must keep them."""
        arena = self._bound.arena
        if arena.features is None:
            raise ValueError("the cache was made without hidden states")
        return arena.features.read(0, arena.length).copy()

    def keep(self, nodes: Sequence[int]) -> list[int]:
        """Drop all nodes but some and their ancestors, and free their slots; returns the new numbers of `nodes`."""
        alive = np.flatnonzero(self._ancestors[list(nodes)].any(axis=0))
        if alive.size < len(self._depths):
            arena = self._bound.arena
            arena.rewind_to(self.base)
            arena.compact(self.base, alive.tolist())
            self._depths = self._depths[alive]
            self._ancestors = self._ancestors[np.ix_(alive, alive)]
        return [int(index) for index in np.searchsorted(alive, nodes)]

    def settle(self, node: int) -> None:
        """Make the path to a node part of the text, and drop all others; it is node 0 from now on."""
        self.keep([node])
        self._begin(self.base + len(self._depths) - 1)


class Continuation(NamedTuple):
    """One continuation of the prompt."""

    tokens: tuple[int, ...] = ()
    """Its tokens, an end-of-sequence token included."""
    finish: FinishReason | None = None
    """Why it ended; None if it goes on."""
    closed: bool = False
    """Whether it stops without an end-of-sequence token, because nothing else could follow."""
    logprobs: tuple[PositionLogprobs, ...] = ()
    """Log-probabilities at the position of each token, if they were asked for."""
    score: float = 0.0
    """What a search compares; the log-probability of the tokens unless it says otherwise."""
    node: int = 0
    """The node of the forest that it goes on from."""

    def step(self, passes: int) -> Step:
        """The step of an answer that has these tokens after a number of passes."""
        tokens = self.tokens[:-1] if self.finish is FinishReason.STOP and not self.closed else self.tokens
        origins = (TokenOrigin(OriginKind.DECODED),) * len(tokens) if self.logprobs else ()
        return Step(tokens, self.finish, passes, logprobs=self.logprobs, origins=origins, closed=self.closed)


@dataclass(frozen=True)
class SearchRun:
    """What a search works with. A path has the tokens behind those that the sampler has observed."""

    forest: Forest
    logits: Logits
    """Logits float32 `[V]` after the prompt."""
    sampler: Sampler
    limits: DecodeLimits
    most_tokens: int
    """Largest number of tokens of the answer."""
    constraint: TokenConstraint | None
    log_softmax: LogSoftmax | None
    """Computes log-probabilities; None if they were not asked for."""

    def scores(self, path: Sequence[int], logits: Logits) -> Logits:
        """Log-probabilities float32 `[V]` of the tokens after a path, valid until the next call.

        They are changed as `Sampler.scores` changes logits: -infinity for tokens that may not come, and for all
        where none may after a path.

        Raises:
            DeadEndError: the path is empty, and no token may come.
        """
        with self.sampler.rollback():
            self.sampler.observe(path)
            try:
                return self.sampler.scores(log_probabilities(logits))
            except DeadEndError:
                if not path:
                    raise
                return np.full_like(logits, -np.inf)

    def extended(self, path: Continuation, token: int, logits: Logits, width: int = 1) -> Continuation:
        """A path and one more token, which was chosen by these logits; it ends where no `width` slots are left."""
        finish, closed = FinishReason.STOP if token in self.limits.eos else None, False
        if finish is None and self.constraint is not None:
            with self.sampler.rollback():
                self.sampler.observe(path.tokens)
                closed = self.constraint.ends_with(token)
        if finish is None and (len(path.tokens) + 1 >= self.most_tokens or self.forest.room < width):
            finish = FinishReason.LENGTH
        listed = () if self.log_softmax is None else (self.log_softmax.at(logits, token),)
        finish = FinishReason.STOP if closed else finish
        return path._replace(
            tokens=(*path.tokens, token), finish=finish, closed=closed, logprobs=(*path.logprobs, *listed)
        )


def log_probabilities(logits: Logits) -> Logits:
    """Natural logarithms of the model's own probabilities, float32 `[V]`; sums are float64.

    Raises:
        EdgeError: some logits are NaN, or the largest is infinite.
    """
    largest = logits.max()
    require_finite(float(largest))
    shifted = logits - largest
    logprobs: Logits = shifted - np.float32(np.log(np.exp(shifted).sum(dtype=np.float64)))
    return logprobs


class Search(ABC):
    """A strategy that compares several continuations of a prompt."""

    reads_states: ClassVar[bool] = False
    """Whether it reads hidden states, those of the prompt too; see `Forest.states`."""

    @abstractmethod
    def steps(self, run: SearchRun) -> Iterator[Step]:
        """Search, and yield the steps of the answer as soon as they are certain.

        Raises:
            Cancelled: the caller cancelled.
        """


class RankingSearch(Search):
    """A search that finds the best answers; of others, each answer is a search with its own seed.

    Args:
        wanted: number of answers to find.

    Attributes:
        own_probabilities: whether it compares the model's own probabilities, which no option changes.
        found: the answers that were found and not given yet, the best first.
    """

    own_probabilities = False

    def __init__(self, wanted: int) -> None:
        self.found: list[Continuation] = []
        self.wanted: Final = wanted

    @abstractmethod
    def best(self, run: SearchRun) -> list[Continuation]:
        """The best continuations, the best first."""

    def steps(self, run: SearchRun) -> Iterator[Step]:
        """Search, and yield the step of the best answer.

        Raises:
            InputError: there are fewer answers than wanted.
        """
        self.found = self.best(run)
        if len(self.found) < self.wanted:
            what = f"n is {self.wanted}, and {len(self.found)} answers are possible"
            raise InputError(what, "give a smaller n, or allow other or longer answers: max_tokens, --context")
        run.forest.settle(0)  # others may copy the slots of the text from here on
        yield self.found.pop(0).step(run.forest.passes)


class _WithStates(BoundGraph):
    """A graph whose passes compute the logits of all tokens, since it gives the hidden states of these alone."""

    def __init__(self, bound: BoundGraph) -> None:
        self.graph_io, self.arena, self._bound = bound.graph_io, bound.arena, bound

    def run(self, new: NewTokens) -> Floats:
        return self._bound.run(new._replace(wanted=np.arange(len(new.ids))))[new.wanted]


def search_steps(
    search: Search,
    bound: BoundGraph,
    prompt_ids: Sequence[int],
    sampler: Sampler,
    limits: DecodeLimits,
    log_softmax: LogSoftmax | None,
    constraint: TokenConstraint | None,
    *,
    answer_length: int = 0,
) -> Generator[Step, None, None]:
    """Prefill `prompt_ids` and search for a continuation; arguments, steps and errors as for `decode`.

    The cache has slots of the answer's text alone afterwards.
    """
    if isinstance(search, RankingSearch) and search.found:  # by the search for an answer before
        yield search.found.pop(0).step(0)
        return
    arena = bound.arena
    most_tokens = begin_answer(bound, prompt_ids, answer_length, sampler, limits)
    forest = None
    try:
        reader = _WithStates(bound) if search.reads_states else bound
        logits, passes, readers = prefill(reader, prompt_ids, limits.cancelled, limits.progress)
        yield Step((), target_passes=passes, prompt_readers=readers)
        forest = Forest(bound, limits.cancelled)
        yield from search.steps(SearchRun(forest, logits.copy(), sampler, limits, most_tokens, constraint, log_softmax))
    except Cancelled:
        yield Step((), FinishReason.CANCELLED, target_passes=0)
    finally:
        arena.rewind_to(min(arena.length, len(prompt_ids) if forest is None else forest.base + 1))
