"""Measures what a model gains from the draft in its bundle."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from operator import truediv
from pathlib import Path
from typing import Final, TypeAlias

from ...errors import InputError
from ..engine import Engine
from ..engine_loading import load
from ..graph.bound_graph import BoundGraph
from ..kv.prefix_cache import CachedSequence
from ..options import GenerateOptions
from ..result import Reply, Stats
from ..speculation.choice import Speculation
from ..speculation.drafters.interface import ModelDrafter
from ..speculation.tree import Source
from ..text.turn_markers import Markers, TokenArray, answer_start, read_markers

_PROMPT_SHARE: Final = 4
"""In a text without turns, the first one of so many tokens is the prompt."""
_WARM_UP_TOKENS: Final = 16
_MAX_TOKENS: Final = 2048
"""Total number of tokens to replay."""


@dataclass(frozen=True)
class DraftBenefit:
    """What a target model gains from its draft model."""

    agreement: float
    """Share of positions where target and draft prefer the same token."""
    tokens_per_pass: float
    """Mean number of tokens per pass of the target."""
    plain_seconds: float
    """Seconds per token without speculation."""
    speculative_seconds: float
    """Seconds per token with speculation."""


_Text: TypeAlias = tuple[list[int], int]
"""Token ids, and the index of the first one of the answer."""


def measure_draft_benefit(bundle: Path, texts: Sequence[TokenArray]) -> DraftBenefit:
    """Replay texts with draft tokens of the bundle's draft alone, and without speculation.

    Every text is decoded both ways, one right after the other, so that other load on the machine affects both alike.

    Args:
        bundle: folder of a model with a draft.
        texts: token ids of whole texts, int64 [n], each ending with what a model answered. Those beyond a total of
            2,048 tokens are left out.

    Raises:
        BundleError: there is no such model, or it is damaged.
        InputError: the bundle has no draft, or no text is long enough.
    """
    with load(bundle, learned=False) as engine:
        draft = engine.model.drafters.draft_model()
        if draft is None:
            raise InputError(f"{bundle} has no draft to measure", "export it with --draft")
        chosen = _choose_texts(engine, texts, read_markers(engine.bundle.folder))
        bound = engine.model.new_sequence().bound
        # The draft is not compared after a text's last token, whose successor is unknown.
        agreeing = sum(count_agreement(bound, draft, tokens[:-1], start - 1) for tokens, start in chosen)
        plain, speculative = _replay_all(engine, chosen, draft.source)
    # Prefill gives the first token of each text.
    plain_s, speculative_s = ([each.total_s - each.first_token_s for each in stats] for stats in (plain, speculative))
    plain_seconds = sum(plain_s) / sum(each.completion_tokens - 1 for each in plain)
    passes = sum(each.decode_passes for each in speculative)
    return DraftBenefit(
        agreement=agreeing / sum(len(tokens) - start for tokens, start in chosen),
        tokens_per_pass=sum(each.completion_tokens - 1 for each in speculative) / passes,
        plain_seconds=plain_seconds,
        # The median of the ratios of neighbours, which a change of the machine's speed in between leaves as they are.
        speculative_seconds=plain_seconds * statistics.median(map(truediv, speculative_s, plain_s)),
    )


def count_agreement(bound: BoundGraph, draft: ModelDrafter, text: Sequence[int], start: int = 0) -> int:
    """Count the tokens of a text, from index `start` on, after which target and draft prefer the same next token.

    Both read the text token by token, as in decoding.

    Args:
        bound: the target's session; its arena's contents are lost.
        draft: the draft model.
        text: token ids, at most as many as the arena can hold.
        start: index of the first token after which the two are compared.

    Raises:
        EdgeError: ONNX Runtime failed.
    """
    arena = bound.arena
    arena.rewind_to(0)
    draft.attach(arena)
    draft.reset(())
    agreeing = 0
    for index, token in enumerate(text):
        draft.append(token)
        preferred = draft.top_tokens((), 1).tokens if index >= start else ()
        logits = bound.forward((token,))[0]
        arena.commit(1)
        agreeing += preferred == (int(logits.argmax()),)
    return agreeing


def _choose_texts(engine: Engine, texts: Sequence[TokenArray], markers: Markers) -> list[_Text]:
    """Return the first texts, cut to the model's context, whose answers have at least two tokens.

    Raises:
        InputError: no text does.
    """
    found: list[_Text] = []
    left = _MAX_TOKENS
    for text in texts:
        cut = text[: min(engine.context, left)]
        start = answer_start(cut, markers) or max(1, len(cut) // _PROMPT_SHARE)
        if start + 2 <= len(cut):
            found.append((cut.tolist(), start))
            left -= len(cut)
    if not found:
        raise InputError("no text is long enough to measure a draft on", "give texts of more tokens")
    return found


def _replay_all(engine: Engine, texts: Sequence[_Text], source: Source) -> tuple[list[Stats], list[Stats]]:
    """Return the statistics of each text, replayed plainly and with the draft."""
    modes = (Speculation.OFF, Speculation.of(source))
    caches = [engine.model.new_sequence() for _ in modes]
    # The first passes allocate memory, so they are not timed.
    for mode, cache in zip(modes, caches, strict=True):
        tokens, start = texts[0]
        _replay(engine, cache, (tokens[: start + _WARM_UP_TOKENS], start), mode)
    found: list[list[Stats]] = [[], []]
    for number, text in enumerate(texts):
        for which in ((0, 1), (1, 0))[number % 2]:
            found[which].append(_replay(engine, caches[which], text, modes[which]))
    return found[0], found[1]


def _replay(engine: Engine, cache: CachedSequence, text: _Text, mode: Speculation) -> Stats:
    cache.token_ids.clear()
    tokens, start = text
    options = GenerateOptions(temperature=0.0, speculation=mode)
    return Reply.of(engine.model.replay(cache, tokens[:start], tokens[start:], options)).stats
