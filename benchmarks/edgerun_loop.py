"""Greedy decoding with edge-run as a program would use it: its engine, its decode loop, its text."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import edgerun
from prompts import prompt_tokens


class EdgeRunLoop:
    """A loaded bundle and one conversation's cache; `capacity` is the longest text."""

    def __init__(self, model: Path, threads: int, capacity: int) -> None:
        self._engine = edgerun.load(model, threads=threads, context=capacity, draft=None)
        self._vocab = self._engine.graph_io.vocab_size
        self._text = self._engine.model.new_sequence()

    def prefill(self, tokens: int) -> float:
        """Seconds from `tokens` ids and an empty cache to the next token."""
        return self._answer(tokens, 1).first_token_s

    def decode(self, context: int, tokens: int) -> float:
        """Seconds for each of `tokens` greedy tokens after a prompt of `context`."""
        stats = self._answer(context, tokens + 1)
        if stats.completion_tokens != tokens + 1 or stats.decode_passes != tokens:
            raise RuntimeError(f"not plain decoding of {tokens + 1} tokens: {stats}")
        return (stats.total_s - stats.first_token_s) / tokens

    def passes(self, context: int, rows: int, times: int) -> float:
        """Seconds of a pass over `rows` tokens after a prompt of `context`, logits for all: the median of `times`."""
        bound = self._text.bound
        if bound.arena.length != context:
            self._answer(context, 1)
        new = prompt_tokens(rows, self._vocab)
        seconds = []
        for _ in range(times):
            started = time.perf_counter()
            bound.forward(new)
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds)

    def _answer(self, context: int, tokens: int) -> edgerun.Stats:
        self._text.continue_with([])  # nothing is kept of what was there before
        options = edgerun.GenerateOptions(max_tokens=tokens, temperature=0.0, speculation=edgerun.Speculation.OFF)
        *_, last = self._engine.model.answer(self._text, prompt_tokens(context, self._vocab), options)
        if last.stats is None:
            raise RuntimeError("the answer came without its account")
        return last.stats
