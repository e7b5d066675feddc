"""Scores given texts: how probable they are after a prompt, and whether documents answer a query."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ..errors import BundleError, EdgeError, InputError
from ..models.find import model_name
from .decode import check_prompt_fits
from .embedding import checked_token_ids
from .kv.prefix_cache import CachedSequence
from .loaded_model import LoadedModel
from .options import GenerateOptions
from .prefill import Cancelled, prefill
from .sampling.logit_stage import Logits
from .sampling.logprobs import NO_LOGPROBS, LogSoftmax
from .scheduling.request_queue import TurnTaker
from .text.chat_template import Message

_SCORED_TOKENS: Final = 32
"""Tokens per pass of a choice: the logits of each of them are in memory, 0.6 MB for a vocabulary of 150,000."""
_JUDGE: Final = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"
"""What documents are judged by where nothing else is asked for; this and the prompt are those of Qwen3-Reranker,
https://huggingface.co/Qwen/Qwen3-Reranker-0.6B."""


@dataclass(frozen=True)
class ChoiceScore:
    """How probable a given text is after a prompt."""

    index: int
    """Its place among the texts that were given."""
    logprob: float
    """Sum of the natural logarithms of its tokens' probabilities."""
    tokens: int
    """Number of its tokens."""

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of a token, by which texts of different lengths compare."""
        return self.logprob / self.tokens


@dataclass(frozen=True)
class Relevance:
    """How relevant documents are to a query."""

    scores: npt.NDArray[np.float32]
    """float32 `[n]`, 0 to 1, one a document in the order in which they were given."""
    prompt_tokens: int
    """Number of tokens of the prompts of all documents."""
    read_tokens: int
    """Number of these tokens that were run; the others were in the KV cache."""


def _logits(
    sequence: CachedSequence, token_ids: Sequence[int], first: int, cancelled: Callable[[], bool]
) -> Iterator[Logits]:
    """Yield logits float32 `[V]` after each token from the index `first` on, valid until the next are taken."""
    bound, arena = sequence.bound, sequence.arena
    arena.rewind_to(min(sequence.continue_with(token_ids), first))
    prefill(bound, token_ids[:first], cancelled, sequence.progress)
    while arena.length < len(token_ids):
        if cancelled():
            raise Cancelled
        chunk = token_ids[arena.length : arena.length + bound.prefill_width(_SCORED_TOKENS, 1)]
        yield from bound.forward(chunk)
        arena.commit(len(chunk))


@contextmanager
def _reading(
    model: LoadedModel, token_ids: Sequence[int], cancelled: Callable[[], bool]
) -> Iterator[tuple[CachedSequence, Callable[[], bool]]]:
    """Read token sequences that begin as the given one; the prefix cache gives what it has, and keeps what was read.

    Yields a sequence that has the engine's turn, and what lets others have it before a pass.

    Raises:
        EdgeError: the caller cancelled, or the engine is closed.
    """
    queue, taker = model.queue, TurnTaker()
    with queue.turn_of(taker):
        sequence = model.continued_prefix(token_ids, GenerateOptions())
        try:
            yield sequence, lambda: queue.yield_turn(taker) or cancelled()
        except Cancelled:
            raise EdgeError("the ranking was cancelled") from None
        finally:
            queue.leave(taker)
            model.prefixes.keep(sequence.arena, sequence.token_ids)


def rank_choices(
    model: LoadedModel,
    prompt_ids: Sequence[int],
    choices: Sequence[str | Sequence[int]],
    cancelled: Callable[[], bool],
) -> tuple[ChoiceScore, ...]:
    """Score choices; see `Engine.rank`. The prompt is read once, and each further choice takes a pass or more.

    Choices that differ in their last token alone share their passes.
    """
    check_prompt_fits(prompt_ids, model.context)
    room, most = model.context - len(prompt_ids), model.graph_io.vocab_size
    encoded = checked_token_ids(choices, model.tokenizer.encode_plain, "choice", room, most)
    totals, softmax = [NO_LOGPROBS] * len(encoded), LogSoftmax(0, most)
    by_beginning = defaultdict(list)
    for index, token_ids in enumerate(encoded):
        by_beginning[tuple(token_ids[:-1])].append(index)
    with _reading(model, prompt_ids, cancelled) as (sequence, stopped):
        for beginning, members in by_beginning.items():
            logits = _logits(sequence, [*prompt_ids, *beginning], len(prompt_ids) - 1, stopped)
            for position, row in enumerate(logits):
                for index in members:
                    totals[index] = totals[index].plus([softmax.at(row, encoded[index][position]).logprob])
    scores = [ChoiceScore(index, each.total, each.tokens) for index, each in enumerate(totals)]
    return tuple(sorted(scores, key=lambda each: -each.logprob))


def score_documents(
    model: LoadedModel, query: str, documents: Sequence[str], instruction: str | None, cancelled: Callable[[], bool]
) -> Relevance:
    """Score documents; see `Engine.score`.

    The instruction and the query stand first, so that they are read once; each document takes a prefill of its own.
    """
    yes, no = (_only_token(model, word) for word in ("yes", "no"))
    options = GenerateOptions(template_variables={"enable_thinking": False})
    given = [model.chat_prompt(question(query, each, instruction), options).ids for each in documents]
    room, most = model.context, model.graph_io.input_vocab
    prompts = checked_token_ids(given, model.tokenizer.encode_plain, "the prompt of document", room, most)
    scores, read = np.empty(len(prompts), np.float32), 0
    if prompts:
        with _reading(model, prompts[0], cancelled) as (sequence, stopped):
            for index, token_ids in enumerate(prompts):
                sequence.arena.rewind_to(min(sequence.continue_with(token_ids), len(token_ids) - 1))
                read += len(token_ids) - sequence.arena.length
                logits = prefill(sequence.bound, token_ids, stopped, sequence.progress).logits
                scores[index] = probability(float(logits[yes]) - float(logits[no]))
    return Relevance(scores, sum(map(len, prompts)), read)


def question(query: str, document: str, instruction: str | None) -> list[Message]:
    """The messages that ask whether a document answers a query."""
    asked = f"<Instruct>: {instruction or _INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
    return [{"role": "system", "content": _JUDGE}, {"role": "user", "content": asked}]


def probability(logit: float) -> float:
    """The logistic function of a logit, or of the difference of two: the softmax over them.

    Raises:
        BundleError: it is not a number.
    """
    if math.isnan(logit):
        raise BundleError(
            "the model computes scores that are not numbers",
            "its weights are damaged: copy, download or export the model again",
        )
    return 1 / (1 + math.exp(min(-logit, 700.0)))


def _only_token(model: LoadedModel, word: str) -> int:
    """The token id of a word.

    Raises:
        InputError: the word has several tokens.
    """
    token_ids = model.tokenizer.encode_plain(word)
    if len(token_ids) != 1 or token_ids[0] >= model.graph_io.vocab_size:
        what = f"{model_name(model.bundle.folder)} is not a reranker: its tokenizer has no single token for {word!r}"
        raise InputError(what, "choose a reranker, such as Qwen3-Reranker")
    return token_ids[0]
