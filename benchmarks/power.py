"""Processor seconds of a token with `--power saver`, and what it costs in speed.

Ways to run one model take turns, prompt by prompt, in both orders: with the threads of `--power performance`, with as
many that sleep between passes, and with those of `--power saver`; each with and without drafting. A turn counts the
user and system seconds of this process until its threads have come to rest, apart for the prompt and for the answer.
Turns that other programs disturb are repeated. Prints medians of ratios, prompt by prompt, then one JSON line.

The bundled model answers requests greedily, and all ways must give one text. The 0.5B shape has random weights, so the
answers of recorded conversations are replayed: every pass runs, and drafters that use only the text meet a real one.

Example: python benchmarks/power.py --data DIR --tokenizer DIR/tokenizers/qwen2.5
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from rich.console import Console
from rich.table import Table

import edgerun
from artifacts import bundle
from edgerun import AnswerStream, Engine, GenerateOptions, Power, Speculation, Stats
from edgerun.edge.bench.prompt_sets import limit_per_category, read_recording
from edgerun.runtime.devices.processor import default_threads
from edgerun.runtime.measure.system_load import LoadMeter
from shapes import SHAPES
from shell_requests import shell_requests

_RECORDINGS: Final = {"mt_bench": "mt_bench_qwen2.5-7b.jsonl", "mt_redundant": "mt_redundant_qwen2.5-7b.jsonl"}
_PROMPT_TOKENS: Final = 384
"""Tokens of a conversation that are kept before the answer."""
_REST_S: Final = 0.1
"""Pause after an answer: threads that spin do so for 60 ms after their last task."""
_OBSERVED_S: Final = 0.1
"""Seconds for which the load is observed before a turn."""
_FREE: Final = 0.15
"""Processors that other programs may use during a turn."""


@dataclass(frozen=True)
class Way:
    """A way to run a model."""

    name: str
    power: Power
    threads: int | None
    speculation: Speculation


WAYS: Final = tuple(
    Way(f"{name}, {'drafts' if speculation.automatic else 'plain'}", power, threads, speculation)
    for name, power, threads in (
        ("performance", Power.PERFORMANCE, None),
        ("as many, sleeping", Power.SAVER, default_threads()),
        ("saver", Power.SAVER, None),
    )
    for speculation in (Speculation.AUTO, Speculation.OFF)
)


@dataclass(frozen=True)
class Turn:
    """What one answer took."""

    prompt_cpu_s: float
    """Processor seconds until the first text, by token of the prompt."""
    token_cpu_s: float
    """Processor seconds of the rest, by token."""
    first_s: float
    """Seconds until the first token."""
    token_s: float
    """Seconds of a token after the first."""
    others: float
    """Processors that other programs used."""
    text: str


MEASURES: Final = {
    "processor s\na token": "token_cpu_s",
    "processor s a\nprompt token": "prompt_cpu_s",
    "s a token": "token_s",
    "s to the\nfirst token": "first_s",
}

Start: TypeAlias = Callable[[Engine, GenerateOptions], AnswerStream]
"""Begins one answer."""


@dataclass(frozen=True)
class Repetitions:
    """What is measured, and how often."""

    ways: Sequence[Way]
    max_tokens: int
    attempts: int
    """How often a turn is taken at most, if other programs disturb it; the least disturbed one counts."""
    patience_s: float
    """How long a turn waits at most until other programs rest."""


def take_turn(engine: Engine, way: Way, start: Start, max_tokens: int) -> Turn:
    """Answer a prompt once."""
    options = GenerateOptions(temperature=0.0, max_tokens=max_tokens, speculation=way.speculation)
    meter = LoadMeter(engine.model.compute_threads or 0)
    times, chunks = [time.process_time()], []
    with closing(start(engine, options)) as answer:
        for chunk in answer:
            chunks.append(chunk)
            if len(times) == 1:
                times.append(time.process_time())
    time.sleep(_REST_S)
    stats = chunks[-1].stats or Stats()
    return Turn(
        (times[1] - times[0]) / stats.prompt_tokens,
        (time.process_time() - times[1]) / max(stats.decode_tokens, 1),
        stats.first_token_s,
        stats.decode_s / max(stats.decode_tokens, 1),
        meter.others() or 0.0,
        "".join(chunk.text for chunk in chunks),
    )


def wait_for_rest(patience_s: float) -> None:
    """Wait until other programs use little of the processors."""
    limit = time.monotonic() + patience_s
    while time.monotonic() < limit:
        meter = LoadMeter()
        meter.wait(_OBSERVED_S)
        if (meter.others() or 0.0) <= _FREE:
            return


def measure(
    model: Path | None, context: int | None, starts: Sequence[Start], repetitions: Repetitions, console: Console
) -> dict[str, list[Turn]]:
    """The turns of every way, in the order of `starts`."""
    ways = repetitions.ways
    found: dict[str, list[Turn]] = {way.name: [] for way in ways}
    with ExitStack() as stack:
        engines: dict[tuple[Power, int | None], Engine] = {}
        for way in ways:
            if (way.power, way.threads) not in engines:
                engines[way.power, way.threads] = stack.enter_context(
                    edgerun.load(
                        model, power=way.power, threads=way.threads, context=context, learned=False, prefix_cache=0
                    )
                )
            # The first passes allocate memory, and may measure what passes cost.
            take_turn(engines[way.power, way.threads], way, starts[0], repetitions.max_tokens)
        for number, start in enumerate(starts):
            for way in ways if number % 2 == 0 else reversed(ways):
                turns: list[Turn] = []
                while len(turns) < repetitions.attempts and (not turns or turns[-1].others > _FREE):
                    wait_for_rest(repetitions.patience_s)
                    turns.append(take_turn(engines[way.power, way.threads], way, start, repetitions.max_tokens))
                found[way.name].append(min(turns, key=lambda turn: turn.others))
            console.print(f"prompt {number + 1} of {len(starts)}", style="dim")
    return found


def summary(found: dict[str, list[Turn]], title: str) -> tuple[Table, dict[str, dict[str, list[float]]]]:
    """Medians of the first way, and medians and quartiles of the ratios of the others to it."""
    base, ratios = next(iter(found.values())), dict[str, dict[str, list[float]]]()
    table = Table("", *MEASURES, "others", title=title, title_justify="left")
    for name, turns in found.items():
        shown = []
        ratios[name] = {}
        for measure_name in MEASURES.values():
            values = [
                getattr(turn, measure_name) / getattr(first, measure_name)
                for turn, first in zip(turns, base, strict=True)
            ]
            quartiles = statistics.quantiles(values, n=4, method="inclusive")
            ratios[name][measure_name] = [round(value, 3) for value in quartiles]
            if turns is base:
                shown.append(f"{statistics.median(getattr(turn, measure_name) for turn in turns) * 1e3:.3g} ms")
            else:
                shown.append("{1:.2f} ({0:.2f}-{2:.2f})".format(*quartiles))
        table.add_row(name, *shown, f"{statistics.median(turn.others for turn in turns):.2f}")
    return table, ratios


def replays(model: Path, recording: Path, turn: int, limit: int, max_tokens: int) -> list[Start]:
    """The answers of a turn of recorded conversations."""
    with edgerun.load(model, draft=None, power=Power.PERFORMANCE) as engine:
        tokenizer = engine.tokenizer
        pairs = []
        for conversation in limit_per_category(read_recording(recording), limit):
            *earlier, last = conversation.exchanges[:turn]
            said = [text for exchange in earlier for text in (exchange.prompt, exchange.answer or "")]
            prompt = tokenizer.encode("\n".join([*said, last.prompt]), add_special_tokens=True)
            answer = tokenizer.encode(last.answer or "", add_special_tokens=False)
            pairs.append((prompt[-_PROMPT_TOKENS:], answer[:max_tokens]))

    def starting(prompt: list[int], answer: list[int]) -> Start:
        return lambda engine, options: engine.model.replay(None, prompt, answer, options)

    return [starting(prompt, answer) for prompt, answer in pairs]


def requests(limit: int) -> list[Start]:
    """Answers of the bundled model."""

    def starting(request: str) -> Start:
        return lambda engine, options: engine.stream(request, options)

    return [starting(request) for request in shell_requests(None, limit)]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("EDGERUN_DATA"), metavar="DIR")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="folder of the real tokenizer")
    parser.add_argument("--model", choices=("bundled", "qwen2.5-0.5b", "all"), default="all")
    parser.add_argument("--only", default="", metavar="NAME", help="ways whose name begins so, such as saver")
    parser.add_argument("--recording", choices=sorted(_RECORDINGS), default="mt_bench", help="(mt_bench)")
    parser.add_argument("--turn", type=int, default=1, metavar="N", help="turn of the conversations (1)")
    parser.add_argument("--limit", type=int, default=2, metavar="N", help="conversations of each category (2)")
    parser.add_argument("--requests", type=int, default=24, metavar="N", help="requests to the bundled model (24)")
    parser.add_argument("--max-tokens", type=int, default=96, metavar="N", help="maximum tokens of an answer (96)")
    parser.add_argument("--attempts", type=int, default=4, metavar="N", help="attempts at a disturbed turn (4)")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edge-run-benchmarks")
    parser.add_argument("--patience", type=float, default=5.0, metavar="S", help="wait for other programs (5 s)")
    options = parser.parse_args()
    console, progress = Console(), Console(stderr=True)
    if not console.is_terminal:
        console.width = 120
    ways = [way for way in WAYS if way.name.startswith(options.only)]
    repetitions = Repetitions(ways, options.max_tokens, options.attempts, options.patience)
    results = {}
    if options.model != "qwen2.5-0.5b":
        found = measure(None, None, requests(options.requests), repetitions, progress)
        texts = [{turn.text for turn in turns} for turns in zip(*found.values(), strict=True)]
        if different := sum(len(each) > 1 for each in texts):
            raise SystemExit(f"{different} of {len(texts)} texts depend on the way")
        table, results["bundled"] = summary(found, "bundled model")
        console.print(table)
    if options.model != "bundled":
        if options.data is None or options.tokenizer is None:
            parser.error("give --data and --tokenizer, or --model bundled")
        model = bundle(options.work, SHAPES["qwen2.5-0.5b"], 128, options.tokenizer)
        recording = options.data / "replay" / _RECORDINGS[options.recording]
        starts = replays(model, recording, options.turn, options.limit, options.max_tokens)
        found = measure(model, 2048, starts, repetitions, progress)
        table, results["qwen2.5-0.5b"] = summary(found, "0.5B shape")
        console.print(table)
    print(json.dumps({"benchmark": "power", "threads": default_threads(), "ratios": results}))


if __name__ == "__main__":
    main()
