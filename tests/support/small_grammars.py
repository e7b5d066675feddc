"""Grammars over a vocabulary of six tokens, and the exact distribution of the texts that follow them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Final

import numpy as np

from edgerun.runtime.sampling.sampler import Sampler, SamplingParams
from edgerun.runtime.scheduling.work_thread import WorkThread
from edgerun.runtime.structure.grammar_state import GrammarMatcher, GrammarState
from support.emulated_graph import Floats, Text

V: Final = 6
EOS: Final = 0
PIECES: Final = (b"<end>", b"a", b"b", b"c", b"ab", b"ca")
GRAMMARS: Final = {
    "letters": r"start: /(a|b){1,2}c?/",
    "forced": r'start: "abc" /a|b/ "cab"',
    "words": r'start: ("ab" | "ca" | "b") ("c" | "aa")?',
}


class _Tokens:
    """The vocabulary as llguidance reads it."""

    eos_token_id = EOS
    bos_token_id = None
    special_token_ids = (EOS,)
    tokens = PIECES

    def __call__(self, text: bytes | str) -> list[int]:
        data = text if isinstance(text, bytes) else text.encode()
        ids: list[int] = []
        while data:
            # Texts that no token can write are cut off, as by tokenizers without bytes.
            token = max((i for i in range(1, V) if data.startswith(PIECES[i])), key=lambda i: len(PIECES[i]), default=0)
            if not token:
                break
            ids.append(token)
            data = data[len(PIECES[token]) :]
        return ids


@cache
def _tokenizer():
    import llguidance

    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Tokens()), n_vocab=V)


@cache
def compiled(grammar: str):
    """llguidance's matcher of a grammar in Lark, to be copied."""
    import llguidance

    matcher = llguidance.LLMatcher(_tokenizer(), llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def started(grammar: str, thread: WorkThread | None = None) -> GrammarState:
    """The state of a grammar in Lark at its beginning; without a thread, masks are computed at once."""
    submit: Callable[[Callable[[], None]], None] = (lambda work: work()) if thread is None else thread.submit
    return GrammarState(GrammarMatcher(compiled(grammar).deep_copy, "grammar"), V, frozenset({EOS}), submit)


def enumerated(
    grammar: str, logits_after: Callable[[Text], Floats], prompt: Text, params: SamplingParams, length: int
) -> dict[Text, float]:
    """The probability of every answer of up to `length` tokens, the end included, by enumeration."""
    found: dict[Text, float] = {}

    def follow(answer: Text, weight: float) -> Iterator[tuple[Text, float]]:
        state = started(grammar)
        if answer:
            state.observe(answer)
        if (answer and answer[-1] == EOS) or len(answer) == length:
            yield answer, weight
            return
        sampler = Sampler(params, V, state)
        ids, probs = sampler.probabilities(logits_after((*prompt, *answer)))
        for token, probability in zip(ids.tolist(), probs.tolist(), strict=True):
            if probability > 0:
                yield from follow((*answer, token), weight * probability)

    for answer, weight in follow((), 1.0):
        trimmed = answer[:-1] if answer[-1] == EOS else answer
        found[trimmed] = found.get(trimmed, 0.0) + weight
    return found


def text_of(answer: Sequence[int]) -> str:
    """The text of some tokens."""
    return b"".join(PIECES[token] for token in answer).decode()


@cache
def toy_logits(text: Text) -> Floats:
    """Random logits that depend on the whole text."""
    return np.random.default_rng([11, *text]).normal(0, 1.5, V).astype(np.float32)
