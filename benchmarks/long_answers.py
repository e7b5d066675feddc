"""Answers after long contexts, with drafts of the target over few of its cache slots and without."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import geometric_mean, median
from typing import Any, Final
from unittest.mock import patch

import numpy as np
from rich.console import Console
from rich.table import Table

import edgerun
from edgerun import GenerateOptions
from edgerun.runtime.decode import DecodeLimits, decode
from edgerun.runtime.measure.pass_timing import pad_cache
from edgerun.runtime.options import Request
from edgerun.runtime.sampling.sampler import Sampler, SamplingParams
from edgerun.runtime.speculation.choice import Speculation
from edgerun.runtime.speculation.drafters import sparse_cache
from edgerun.runtime.speculation.drafters.sparse_cache import SparseCacheDraft
from edgerun.runtime.speculation.replay import Recording, ReplaySampler
from edgerun.runtime.speculation.tree import Source

CLASSES: Final = {
    "own": (),
    "0": (),
    "-1": (-0.999,),
    "0.7": (0.35, 0.8, 0.97),
    "0.8": (0.5, 0.9, 0.99),
    "0.9": (0.75, 0.95, 0.99),
}
"""Equally frequent probabilities of the draft's first tokens, by about their mean; negative where they are wrong."""
_PASSAGE: Final = 32
"""Number of tokens of a passage after which the answer should go on with what followed them."""


class KnownText:
    """Replaces logits of draft passes.

    Args:
        text: token ids of the prompt and the recorded answer.
        probabilities: equally frequent ones of the draft's first token, negative for a wrong token; none to replace
            nothing.
    """

    def __init__(self, text: Sequence[int], probabilities: Sequence[float]) -> None:
        self._text: Final = text
        self._probabilities: Final = probabilities
        self._random: Final = np.random.default_rng(1).random((len(text), 2))

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Draft so."""
        logits, rehearse = SparseCacheDraft.logits, SparseCacheDraft._rehearse
        fakes: dict[str, Any] = {
            "logits": lambda model, path: self._after(model, path, logits),
            "_rehearse": lambda model: self._found(model, rehearse),
        }
        with patch.multiple(SparseCacheDraft, **fakes):
            yield

    def _found(self, model: SparseCacheDraft, rehearse: Callable[[SparseCacheDraft], int]) -> int:
        """How many of the last tokens such a draft finds."""
        found, size = rehearse(model), len(model._text)
        if not self._probabilities:
            return found
        return sum(self._drawn(place)[1] for place in range(size - sparse_cache._REHEARSED, size))

    def _drawn(self, place: int) -> tuple[float, bool]:
        """The probability of the first token at a place of the text, and whether it is right."""
        which, drawn = self._random[place]
        probability = self._probabilities[int(which * len(self._probabilities))]
        return abs(probability), bool(drawn < probability)

    def _after(
        self, model: SparseCacheDraft, path: tuple[int, ...], logits: Callable[[SparseCacheDraft, tuple[int, ...]], Any]
    ) -> Any:
        """Logits after a path, which are those of the recording unless the path has left it."""
        known = path in model._logits
        found = logits(model, path)
        place = len(model._text) + len(path)
        if found is None or known or not self._probabilities or place >= len(self._text):
            return found
        probability, right = self._drawn(place)
        found.fill(0)
        found[self._text[place] if right else (self._text[place] + 1) % 1000] = np.log(
            probability / (1 - probability) * (found.size - 1)
        )
        return found


class Answers:
    """Decodes answers after one context.

    Args:
        engine: the model.
        context: number of tokens of a prompt.
        tokens: number of tokens of an answer.
        own: whether the model answers by itself; otherwise the caches are filled with arbitrary values.
    """

    def __init__(self, engine: edgerun.Engine, context: int, tokens: int, *, own: bool) -> None:
        graph = engine.model._open_graph()
        self._drafters: Final = engine.model.drafters
        self._bound: Final = graph.bind(graph.arena(context + tokens + 64))
        self._context, self._tokens, self._own = context, tokens, own
        if not own:
            pad_cache(self._bound, context)

    def forget(self) -> None:
        """Forget what was learned about drafters."""
        self._drafters._load_resources().mixers.clear()
        self._drafters._idle.clear()

    def begin(self, prompt: Sequence[int]) -> None:
        """Read a prompt; one of arbitrary values is there."""
        if self._own:
            self._bound.arena.rewind_to(0)
            next(
                decode(self._bound, prompt, Sampler(SamplingParams(), self._bound.graph_io.vocab_size), DecodeLimits(1))
            )

    def decode(self, text: Sequence[int], mode: str) -> tuple[list[int], float, float, float, int, int]:
        """An answer and its figures.

        They are the seconds a token after the first one, tokens a pass, the part of the time that `sparse` ran, and its
        draft tokens: verified and accepted ones.
        """
        prompt, answer = list(text[: self._context]), text[self._context :]
        self._bound.arena.rewind_to(self._context - 1)
        options = GenerateOptions(
            speculation=Speculation.parse("suffix,edit" if mode == "without" else "suffix,edit,sparse")
        )
        params = SamplingParams()
        recording = None if self._own else Recording(tuple(answer))
        own = params, self._bound.graph_io.vocab_size
        chooses = Sampler(*own) if recording is None else ReplaySampler(answer, self._context, *own)
        with self._drafters.answering(
            Request(prompt, options, params, recording=recording), self._bound.arena
        ) as found:
            limits = DecodeLimits(self._tokens)
            steps = decode(self._bound, prompt, chooses, limits, None if mode == "plain" else found)
            tokens = list(next(steps).tokens)
            started, rounds, drafting, drafted, accepted = time.perf_counter(), 0, 0.0, 0, 0
            for step in steps:
                tokens += step.tokens
                rounds += 1
                if step.round is not None:
                    drafting += step.round.draft_s
                    drafted += step.round.drafted[Source.SPARSE]
                    accepted += step.round.accepted[Source.SPARSE]
            seconds = time.perf_counter() - started
        return tokens, seconds / (len(tokens) - 1), (len(tokens) - 1) / rounds, drafting / seconds, drafted, accepted


def parts(ids: Sequence[int], count: int, context: int, tokens: int, *, own: bool) -> list[list[int]]:
    """So many parts of a text, with an answer; and if the model answers by itself, as many that end in the beginning
    of an earlier passage."""
    size = context + tokens
    step = (len(ids) - size) // count
    found = [list(ids[number * step : number * step + size]) for number in range(count)]
    places = [(1 + 2 * number) * context // (2 * count) for number in range(count)] if own else ()
    return found + [
        [*text[: context - _PASSAGE], *text[place : place + _PASSAGE + tokens]]
        for text, place in zip(found, places, strict=False)
    ]


def answers(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Decode texts at every context and in every mode; rows of figures."""
    deadline, rows = time.monotonic() + 60 * arguments.minutes, []
    longest = max(arguments.contexts) + arguments.tokens + 64
    with edgerun.load(arguments.model, context=longest, draft=None, prefill="plain") as engine:
        encode = engine.model.tokenizer.encode_plain
        recordings = [encode(path.read_text(encoding="utf-8")[:600_000]) for path in arguments.text]
        own = "own" in arguments.accepted
        for context in arguments.contexts:
            found: dict[str, list[tuple[float, ...]]] = {mode: [] for mode in ("without", *arguments.accepted)}
            made = Answers(engine, context, arguments.tokens, own=own)
            texts = [
                text for ids in recordings for text in parts(ids, arguments.answers, context, arguments.tokens, own=own)
            ]
            made.begin(texts[0][:context])
            made.decode(texts[0], "without")  # measures which graph runs which pass
            for mode, text in ((mode, text) for mode in found for text in texts):
                if time.monotonic() > deadline:
                    break
                if arguments.fresh or text is texts[0]:
                    made.forget()
                made.begin(text[:context])
                tokens, plain, *_ = made.decode(text, "plain")
                known = KnownText(text, () if mode == "without" else CLASSES[mode])
                with known.replaced():
                    drafted, seconds, *counts = made.decode(text, mode)
                if drafted != tokens:
                    raise SystemExit(f"{mode} after {context} tokens: another answer than plain decoding's")
                found[mode].append((plain, seconds, *counts))
            rows += [row(context, mode, each) for mode, each in found.items() if each]
    return rows


def row(context: int, mode: str, found: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Figures of one context and mode."""
    plain, seconds, per_pass, drafting, drafted, accepted = zip(*found, strict=True)
    speeds = [one / other for one, other in zip(plain, seconds, strict=True)]
    return {
        "context": context,
        "drafts": mode,
        "plain ms": 1e3 * median(plain),
        "ms": 1e3 * median(seconds),
        "tokens a pass": median(per_pass),
        "speed": geometric_mean(speeds),
        "drafting %": 100 * median(drafting),
        "accepted": f"{sum(accepted)} of {sum(drafted)}",
        "answers": speeds,
    }


def show_answers(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table."""
    table = Table(title="speed over plain decoding: geometric mean, and each answer; draft tokens of `sparse`")
    for name in rows[0]:
        table.add_column(name, justify="right")
    for each in rows:
        cells = [f"{value:.2f}" if isinstance(value, float) else str(value) for value in each.values()]
        table.add_row(*cells[:-1], " ".join(f"{speed:.2f}" for speed in each["answers"]))
    Console(width=150).print(table)
