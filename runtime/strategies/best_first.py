"""Best-first search: exactly the most probable answers of those that a document or a list of texts has.

What is open is a priority queue of beginnings. A log-probability never rises when a text goes on, so a whole answer at
the head of the queue is more probable than all that is left. The tokens are the model's own distribution's: penalties
and biases do not count.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Final, TypeAlias

from ...errors import ContextError, InputError
from ..decode import FinishReason
from ..sampling.logit_stage import Logits
from ..sampling.logprobs import PositionLogprobs
from ..structure.response_format import FormatKind
from .search import Continuation, RankingSearch, SearchRun, log_probabilities

if TYPE_CHECKING:
    from ..options import GenerateOptions
    from ..text.tokenizer import TextTokenizer

_WIDTH: Final = 8
"""Most beginnings that a pass continues: the best ones, up to the first whole answer."""
Places: TypeAlias = Sequence[int]
"""Indices of the tokens that may follow a beginning, which may occur in several places."""
Beginning: TypeAlias = tuple[float, int, Continuation, Places]
"""A beginning of an answer, or a whole one, in the order of the queue: its negative log-probability, a number that no
other has, its tokens, whose node is the one before the last of them, and what follows."""


class BestFirst(RankingSearch):
    """Finds the `wanted` most probable answers, their end included, among runs of tokens.

    Args:
        wanted: number of answers to find.
        tokens: the tokens of all texts; -1 after each text.
        starts: the places after each token that an answer may begin with.
        anywhere: whether an answer may end after each of its tokens; otherwise where its text ends.
    """

    own_probabilities = True

    def __init__(self, wanted: int, tokens: Sequence[int], starts: Mapping[int, Places], *, anywhere: bool) -> None:
        super().__init__(wanted)
        self._tokens: Final = tokens
        self._starts: Final = starts
        self._anywhere: Final = anywhere
        self._queue: Final[list[Beginning]] = []
        self._numbers: Final = count()

    def best(self, run: SearchRun) -> list[Continuation]:
        """Search: each pass continues the most probable beginnings.

        Raises:
            ContextError: the context has no room for further ones.
        """
        found: list[Continuation] = []
        queue, forest = self._queue, run.forest
        self._push(run, Continuation(), 0, run.logits, self._starts)
        while queue and len(found) < self.wanted:
            opened: list[tuple[Continuation, Places]] = []
            while queue and len(opened) < _WIDTH and queue[0][2].finish is None:
                opened.append(heappop(queue)[2:])
            if not opened:
                found.append(heappop(queue)[2])
                continue
            first = forest.size
            if forest.room < len(opened):
                raise ContextError(f"the search fills the context with {first} tokens", "give a longer --context")
            rows = forest.extend([path.node for path, _ in opened], [path.tokens[-1] for path, _ in opened])
            for node, ((path, places), row) in enumerate(zip(opened, rows, strict=True), first):
                following: defaultdict[int, list[int]] = defaultdict(list)
                for place in places:
                    following[self._tokens[place]].append(place + 1)
                self._push(run, path, node, row, following)
        return found

    def _push(
        self, run: SearchRun, path: Continuation, node: int, logits: Logits, following: Mapping[int, Places]
    ) -> None:
        """Push what follows a beginning whose last token is a node; `logits` float32 `[V]` are those after it."""
        logprobs, eos = log_probabilities(logits), run.limits.eos
        top = () if run.log_softmax is None else run.log_softmax.at(logits, 0).top
        longer = {token: places for token, places in following.items() if token >= 0}
        if len(path.tokens) + 1 >= run.most_tokens:
            longer = {}
        if eos and path.tokens and (self._anywhere or -1 in following):
            longer[max(eos, key=lambda token: float(logprobs[token]))] = ()
        for token, places in longer.items():
            logprob = float(logprobs[token])
            listed = () if run.log_softmax is None else (PositionLogprobs(token, logprob, top),)
            finish = None if places else FinishReason.STOP
            score, every = path.score + logprob, (*path.logprobs, *listed)
            whole = Continuation((*path.tokens, token), finish, logprobs=every, score=score, node=node)
            heappush(self._queue, (-score, next(self._numbers), whole, places))


def search(options: GenerateOptions, tokenizer: TextTokenizer) -> BestFirst:
    """The search that options ask for.

    Raises:
        InputError: they do not go together, or the document is empty.
    """
    wanted, given = options.response_format, options.extract
    lists = wanted is not None and wanted.kind is FormatKind.CHOICE and not wanted.after
    if (given is None) != lists or (given is not None and wanted is not None):
        raise InputError("best_first searches a list of choices, and extract a document", "give one of them")
    if lists and len(options.answer_start):
        raise InputError("best_first and answer_start are both given", "leave one of them out")
    starts: defaultdict[int, list[int]] = defaultdict(list)
    tokens: list[int] = []
    choices: list[str] = json.loads(wanted.text) if wanted is not None else []
    for text in choices if given is None else [given]:
        first, encoded = len(tokens), tokenizer.encode_plain(text)
        tokens += [*encoded, -1]
        # A word in the middle of a text often has the space before it in its token; an answer begins without.
        alone = {token: tokenizer.encode_plain(tokenizer.decode([token]).lstrip()) for token in {*encoded}}
        for place, token in enumerate(encoded[:1] if given is None else encoded, first + 1):
            starts[alone[token][0] if given is not None and len(alone[token]) == 1 else token].append(place)
    if not starts:
        raise InputError("the document to extract from is empty", "give one with text")
    return BestFirst(options.n, tokens, starts, anywhere=given is not None)
