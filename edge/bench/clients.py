"""Throughput and latency of one engine with several clients at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from time import perf_counter
from typing import Any, Final, TypeAlias

import numpy as np

from ...errors import ContextError
from ...models.progress import Progress
from ...runtime.engine import Engine
from ...runtime.measure.system_load import take_turns
from ...runtime.options import GenerateOptions
from ...runtime.result import Reply
from ...runtime.scheduling.turn_lock import POLL_S
from .bench_result import BenchConditions
from .prompt_sets import bundled_prompts

TURNS: Final = 3
"""How often each number of clients is measured."""
REQUESTS: Final = 2
"""Number of requests that a client makes in a turn, one after the other."""
_WARM_UP_TOKENS: Final = 16

_Run: TypeAlias = tuple[float, Sequence[float], Sequence[float]]
"""A turn with a number of clients: tokens per second of all together; and of each request the seconds to its first
token, and the mean seconds of the further ones."""

COLUMNS: Final = ("tokens_per_second", "ratio", "first_token_ms", "first_token_p95_ms", "token_ms", "token_p95_ms")
"""What is reported of a number of clients: medians over the turns (of the rate, and of its ratio to one client's in the
same turn), and medians and 95th percentiles over the requests of all turns."""


@dataclass(frozen=True)
class ClientsResult:
    """A measurement of several numbers of clients."""

    conditions: BenchConditions
    prompt_tokens: int
    """Number of tokens of every prompt."""
    speculation: str
    rows: Sequence[Mapping[str, float]]
    """`clients` and `COLUMNS`, for each number of clients."""
    others: float | None
    busy: bool
    """As in `BenchResult`."""

    def to_json(self) -> dict[str, Any]:
        """This result as plain values."""
        return {
            **self.conditions.to_json("clients", self.others, busy=self.busy),
            "prompt_tokens": self.prompt_tokens,
            "speculation": self.speculation,
            "clients": list(self.rows),
        }


def request_lengths(context: int, prompt_tokens: int | None, max_tokens: int | None) -> tuple[int, int]:
    """Numbers of tokens of every prompt and of every answer.

    Args:
        context: largest number of tokens of both together.
        prompt_tokens: the former, if it was given; else 512, or as many as fit.
        max_tokens: the latter, if it was given; else 128, or as many as fit.

    Raises:
        ContextError: they do not fit the context.
    """
    generated = max_tokens or min(128, context // 2)
    prompt = prompt_tokens or max(min(512, context - generated), 1)
    if prompt + generated > context:
        raise ContextError(
            f"prompts of {prompt} tokens and answers of {generated} do not fit the context of {context} tokens",
            "give a smaller --prompt-tokens or --max-tokens, or a longer --context",
        )
    return prompt, generated


def measure_clients(
    engine: Engine, counts: Sequence[int], prompt_tokens: int, options: GenerateOptions, progress: Progress
) -> list[dict[str, float]]:
    """Measure an engine with each number of clients, in turns.

    Args:
        engine: the model, loaded for as many answers at a time as there are clients.
        counts: numbers of clients, one client first.
        prompt_tokens: number of tokens of each prompt.
        options: options of every request.
        progress: receives the fraction of the runs that are done.
    """
    prompts = _prompts(engine, prompt_tokens)
    brief = options.changed({"max_tokens": min(_WARM_UP_TOKENS, options.max_tokens or _WARM_UP_TOKENS)})
    progress("warming up", 0.0)
    # The first passes allocate memory, and may measure what passes cost.
    _run(engine, max(counts), 1, prompts, brief)
    runs = [partial(_run, engine, count, REQUESTS, prompts, options) for count in counts]
    results, _ = take_turns(runs, engine.threads, least=TURNS, most=TURNS, progress=partial(progress, "measuring"))
    return [_row(count, measured, results[0]) for count, measured in zip(counts, results, strict=True)]


def _row(count: int, runs: Sequence[_Run], alone: Sequence[_Run]) -> dict[str, float]:
    """What is reported of a number of clients."""
    rates, first_s, token_s = zip(*runs, strict=True)
    ratios = [run[0] / one[0] for run, one in zip(runs, alone, strict=True)]
    times = [1e3 * np.percentile(np.concatenate(part), (50, 95)) for part in (first_s, token_s)]
    values = [np.median(rates), np.median(ratios), *np.concatenate(times)]
    return {"clients": count, **{name: float(f"{each:.5g}") for name, each in zip(COLUMNS, values, strict=True)}}


def _prompts(engine: Engine, tokens: int) -> Iterator[list[int]]:
    """Endless prompts of equal length: the text of edge-run's own prompts, each from another place on.

    None begins like another one, so the prefix cache does not help.
    """
    exchanges = (exchange for each in bundled_prompts(for_shell=False) for exchange in each.exchanges)
    text = np.array(engine.tokenizer.encode("\n\n".join(each.prompt for each in exchanges), add_special_tokens=False))
    for start in cycle(np.random.default_rng(0).permutation(len(text))):
        yield text.take(np.arange(start, start + tokens), mode="wrap").tolist()


def _run(engine: Engine, clients: int, requests: int, prompts: Iterator[list[int]], options: GenerateOptions) -> _Run:
    """Let every client make its requests, one after the other, each client in a thread of its own."""
    ended = threading.Event()

    def work(own: Sequence[list[int]]) -> list[tuple[int, float, float]]:
        """Number of tokens, seconds to the first one, and seconds per further one, of each request."""
        found = []
        for prompt in own:
            if not ended.is_set():
                began = perf_counter()
                stats = Reply.of(engine.answer(prompt, options)).stats
                first_s = perf_counter() - began - stats.decode_s
                found.append((stats.completion_tokens, first_s, stats.decode_s / max(stats.decode_tokens, 1)))
        return found

    with ThreadPoolExecutor(clients) as pool:
        works = [list(islice(prompts, requests)) for _ in range(clients)]
        began = perf_counter()
        futures = [pool.submit(work, each) for each in works]
        try:
            while wait(futures, POLL_S).not_done:  # short waits, because Ctrl-C does not end a long one on Windows
                pass
            seconds = perf_counter() - began
        except BaseException:
            ended.set()
            engine.cancel()
            raise
    tokens, first_s, token_s = zip(*(each for future in futures for each in future.result()), strict=True)
    return sum(tokens) / seconds, first_s, token_s
