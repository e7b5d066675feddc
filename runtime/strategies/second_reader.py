"""A second reader of an answer: the same model with another prompt, or another model, whose logits are compared.

The reader follows every pass over the answer with a KV cache of its own, token trees too, so that drafts stay valid: a
strategy sees its logits at every node that is verified. Where both run the same graph on the CPU, the two passes are
one shared pass (`runtime/graph/shared_passes.py`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from ...errors import InputError
from ..decode import check_prompt_fits
from ..graph.bound_graph import BoundGraph, NewTokens
from ..graph.graph_io import Floats
from ..kv.prefix_cache import CachedSequence
from ..prefill import prefill
from ..sampling.logit_stage import Logits, LogitStage

if TYPE_CHECKING:
    from ..options import GenerateOptions, Request
    from ..text.tokenizer import TextTokenizer


_DRAFT_ROOM: Final = 64
"""Slots at the end of the context that a draft may take before its tokens are accepted."""
LEAST: Final = -1e4
"""Stands for the log-probability of what cannot be, where minus infinity has no difference from itself."""


class SecondReader:
    """Reads the tokens of one answer behind a prompt of its own.

    Args:
        sequence: its cache, which may hold the beginning of its prompt.
        prompt_ids: token ids of its prompt.
        prompt_length: number of tokens of the prompt that is answered.
        cancelled: called before every pass over its prompt; True ends the answer.
    """

    def __init__(
        self,
        sequence: CachedSequence,
        prompt_ids: Sequence[int],
        prompt_length: int,
        cancelled: Callable[[], bool],
    ) -> None:
        self.sequence: Final = sequence
        self._prompt: Final = list(prompt_ids)
        self._prompt_length: Final = prompt_length
        self._cancelled: Final = cancelled
        self._base = 0
        """Length of the answered sequence before the last pass."""
        self._new = NewTokens([], np.empty(0, np.int64))
        """The tokens of the last pass."""
        self._logits: Floats = np.empty((0, 0), np.float32)

    def begin(self, new: NewTokens, tokens: Sequence[int], base: int) -> Callable[[], None]:
        """Prepare a pass over the new tokens of the answer, so that it can share that of the model; returns its end.

        Args:
            new: the tokens of the pass of the model.
            tokens: the sequence that is answered, up to the last token that was chosen.
            base: number of its committed tokens.

        Raises:
            Cancelled: `cancelled` returned True.
            ContextError: the tokens do not fit the context.
            EdgeError: ONNX Runtime failed.
        """
        shift = len(self._prompt) - self._prompt_length
        if base < self._prompt_length:
            if base + len(new.ids) == self._prompt_length:
                self._base, self._new = base, new._replace(wanted=np.array([len(new.ids) - 1]))
                self._logits = self._read_prompt()[None]
            return lambda: None
        self._follow(tokens, base, base + shift)
        positions = None if new.positions is None else np.asarray(new.positions) + shift
        finish = self.sequence.bound.begin(new._replace(positions=positions))
        self._base, self._new = base, new

        def end() -> None:
            self._logits = finish()

        return end

    def logits_after(self, tokens: Sequence[int]) -> Logits:
        """The reader's logits float32 `[V]` after the tokens of the sequence, which end in a node of the last pass."""
        node = _nodes(self._new, tokens[self._base :])[-1]
        logits: Logits = self._logits[np.flatnonzero(self._new.wanted == node)[0]]
        return logits

    def _follow(self, tokens: Sequence[int], base: int, own_base: int) -> None:
        """Commit the slots of the accepted tokens, and discard those that the model's cache has no more."""
        arena, token_ids = self.sequence.bound.arena, self.sequence.token_ids
        if arena.length < own_base:
            accepted = _nodes(self._new, tokens[self._base : base])
            if len(self._new.ids) == 1:
                arena.commit(1)
            else:
                arena.compact(arena.length, accepted)
            token_ids += tokens[self._base : base]
        arena.rewind_to(own_base)
        del token_ids[own_base:]

    def _read_prompt(self) -> Logits:
        """Read the prompt, its last token in any case; returns the logits after it."""
        sequence = self.sequence
        sequence.bound.arena.rewind_to(min(sequence.continue_with(self._prompt), len(self._prompt) - 1))
        return prefill(sequence.bound, self._prompt, self._cancelled, sequence.progress).logits


class ReaderStage(LogitStage):
    """A stage that compares the logits of the model with those of a second reader."""

    reader: SecondReader
    """Set before the first pass."""

    def scores(self, logits: Logits) -> Logits:
        """Return what `compared` makes of both logits."""
        return self.compared(logits, self.reader.logits_after(self.tokens))

    @abstractmethod
    def compared(self, logits: Logits, others: Logits) -> Logits:
        """The logits to choose from, in a new array, given the model's and the reader's, float32 `[V]` each."""


class FollowedGraph(BoundGraph):
    """A graph whose passes over an answer other readers follow.

    Args:
        bound: the graph, bound to the cache of the sequence that is answered.
        stages: have the readers, and the tokens of the sequence.
    """

    def __init__(self, bound: BoundGraph, stages: Sequence[ReaderStage]) -> None:
        self.graph_io = bound.graph_io
        self.arena = bound.arena
        self._bound: Final = bound
        self._stages: Final = stages
        for stage in stages:
            reader = stage.reader.sequence.bound
            reader.prefers_base, reader.shares_passes = bound.prefers_base, bound.shares_passes

    def prefill_width(self, preferred: int, remaining: int) -> int:
        """As of the graph itself."""
        return self._bound.prefill_width(preferred, remaining)

    def run(self, new: NewTokens) -> Floats:
        """Run a pass of the graph, and those of the readers in it or beside it."""
        base = self.arena.length
        self.arena.reserve(len(new.ids))
        ends = [stage.reader.begin(new, stage.tokens, base) for stage in self._stages]
        logits = self._bound.run(new)
        for end in ends:
            end()
        self.others, self.last_graph = self._bound.others, self._bound.last_graph
        return logits


def followed(bound: BoundGraph, stages: Sequence[LogitStage], readers: Sequence[SecondReader]) -> BoundGraph:
    """The graph with the readers that some of the stages have, in their order; itself where none has."""
    comparing = [stage for stage in stages if isinstance(stage, ReaderStage)]
    for stage, reader in zip(comparing, readers, strict=True):
        stage.reader = reader
    return FollowedGraph(bound, comparing) if comparing else bound


def with_second_prompts(request: Request, tokenizer: TextTokenizer, context: int, *, anchored: bool) -> Request:
    """The request with the prompts of the second readers that its strategies have; `anchored` if there is an anchor.

    Raises:
        ContextError: one does not fit a context of that many tokens.
        InputError: one is empty, or cannot be made of this prompt; or the answer is searched for, or has no anchor.
        TemplateError: the chat template refuses its messages.
    """
    start = () if request.start is None else request.start.token_ids
    asked = list(request.prompt_ids[: len(request.prompt_ids) - len(start)])
    readers = [each for each in request.options.strategies if each.has_reader]
    if readers and request.search is not None:
        what = f"the strategy {readers[0].name} is given, and the answer is searched for"
        raise InputError(what, "leave one of them out")
    if not anchored and (missing := [each.name for each in readers if each.reads_anchor]):
        raise InputError(f"the strategy {missing[0]} is given, and there is no anchor", "load one: --anchor MODEL")
    prompts = [[*each.second_prompt(asked, request.chat, tokenizer), *start] for each in readers]
    room = request.options.max_tokens
    for each in prompts:
        check_prompt_fits(each, context)
        if len(each) > len(request.prompt_ids):
            room = min(room or context, max(context - len(each) - _DRAFT_ROOM, 1))
    return replace(request, second_prompts=prompts, options=replace(request.options, max_tokens=room))


NewSequence: TypeAlias = Callable[[Sequence[int], "GenerateOptions"], CachedSequence]
"""Makes a sequence for a prompt, with what earlier ones have of it in its cache."""


def second_readers(
    request: Request, own: NewSequence, of_anchor: NewSequence | None, cancelled: Callable[[], bool]
) -> list[SecondReader]:
    """Begin the second readers of a request, with caches of the model itself or of its anchor."""
    readers = [each for each in request.options.strategies if each.has_reader]
    found = []
    for reader, prompt_ids in zip(readers, request.second_prompts, strict=True):
        new_sequence = of_anchor if reader.reads_anchor and of_anchor is not None else own
        sequence = new_sequence(prompt_ids, request.options)
        found.append(SecondReader(sequence, prompt_ids, len(request.prompt_ids), cancelled))
    return found


def _nodes(new: NewTokens, path: Sequence[int]) -> list[int]:
    """The nodes of a pass that have the tokens of a path, which begins with its first one."""
    if new.tree_mask is None:
        return list(range(len(path)))
    ancestors = new.tree_mask[:, -len(new.ids) :]
    for node in range(len(path) - 1, len(new.ids)):
        if new.ids[node] == path[-1]:
            nodes: list[int] = np.flatnonzero(ancestors[node]).tolist()
            if [new.ids[each] for each in nodes] == list(path):
                return nodes
    raise ValueError(f"no branch of the pass has the tokens {list(path)}")
