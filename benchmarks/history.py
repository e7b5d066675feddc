"""What a long-lived process gains from drafting from its own earlier conversations.

Recorded answers are replayed over a graph of a known model's shape (see speculation.py): the first turns of a recording
as conversations of their own, and then the second turns, which ask for variations of the first ones. Plain decoding,
speculation, and speculation with a history, which is empty at first, answer every request in turn. The pause after it
is as long as a user needs to read an answer; the history is indexed then. Two engines do this, one with and one without
a history. Prints how often the first candidate of each drafter is right, which needs no model, then speeds, then one
JSON line.

Example: python benchmarks/history.py --data DIR --tokenizer DIR/tokenizers/qwen2.5 --layers 6 --max-tokens 128

DIR/replay holds mt_redundant_qwen2.5-7b.jsonl (github.com/RazvanDu/CopySpec).
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

import edgerun
from artifacts import bundle
from edgerun.edge.bench.prompt_sets import Exchange, limit_per_category, read_recording
from edgerun.edge.bench.ratios import PLAIN, MeasuredTurn, compare_modes
from edgerun.runtime.measure.system_load import LoadMeter
from edgerun.runtime.result import Reply, Stats
from edgerun.runtime.speculation.choice import Speculation
from edgerun.runtime.speculation.drafters.history_store import HistoryDrafter, HistoryStore
from edgerun.runtime.speculation.drafters.interface import Drafter
from edgerun.runtime.speculation.drafters.suffix import SuffixDrafter
from shapes import SHAPES

_RECORDING: Final = "mt_redundant_qwen2.5-7b.jsonl"
_CATEGORIES: Final = 8
_PARTS: Final = ("originals", "variations")
_WITHOUT, _WITH = "without history", "with history"
_STORE_BYTES: Final = 64 << 20


@dataclass(frozen=True)
class Request:
    """A conversation of one turn, in token ids."""

    part: str
    prompt: list[int]
    answer: list[int]


def requests(engine: edgerun.Engine, options: argparse.Namespace) -> list[Request]:
    """The first exchanges of the recording and then the second ones, or each right after its original."""
    conversations = read_recording(options.data / "replay" / _RECORDING)
    pairs = options.conversations // 2
    chosen = limit_per_category(conversations, -(-pairs // _CATEGORIES))[:pairs]

    def request(part: str, exchange: Exchange) -> Request:
        prompt = engine.encode_chat([{"role": "user", "content": exchange.prompt}])
        answer = engine.tokenizer.encode(exchange.answer or "", add_special_tokens=False)[: options.max_tokens]
        return Request(part, prompt, answer)

    made = [[request(part, each) for part, each in zip(_PARTS, one.exchanges, strict=False)] for one in chosen]
    if options.adjacent:
        return [each for pair in made for each in pair]
    return [pair[number] for number in range(len(_PARTS)) for pair in made]


def first_candidates(asked: Sequence[Request], vocab_size: int) -> dict[str, dict[str, float]]:
    """Share of the tokens that each drafter proposes first, by part; the history is indexed after every answer."""
    right: dict[str, dict[str, int]] = {part: {} for part in _PARTS}
    with tempfile.TemporaryDirectory() as folder:
        store = HistoryStore(Path(folder) / "history", _STORE_BYTES, print)
        for request in asked:
            drafters: dict[str, Drafter] = {"suffix": SuffixDrafter(), "history": HistoryDrafter(store, vocab_size)}
            for name, drafter in drafters.items():
                drafter.reset(request.prompt)
                for token in request.answer:
                    found = drafter.candidates(drafter.state())
                    hit = bool(found) and found[0].token == token
                    right[request.part][name] = right[request.part].get(name, 0) + hit
                    drafter.append(token)
            store.append([*request.prompt, *request.answer])
            store.reindex()
    tokens = {part: sum(len(each.answer) for each in asked if each.part == part) for part in _PARTS}
    return {part: {name: count / tokens[part] for name, count in counts.items()} for part, counts in right.items()}


def measure(
    engines: Mapping[str, edgerun.Engine], asked: Sequence[Request], pause_s: float, console: Console
) -> list[MeasuredTurn]:
    """Replay every request in every mode, in changing order, with a pause after it."""
    modes = {PLAIN: Speculation.OFF, _WITHOUT: Speculation.AUTO, _WITH: Speculation.AUTO}
    turns = []
    with console.status("measuring") as status:
        for number, request in enumerate(asked):
            names = list(modes)
            start = number % len(names)
            stats: dict[str, Stats] = {}
            for name in (*names[start:], *names[:start]):
                options = edgerun.GenerateOptions(temperature=0.0, speculation=modes[name])
                replayed = engines[name].model.replay(None, request.prompt, request.answer, options)
                stats[name] = Reply.of(replayed).stats
            turns.append(MeasuredTurn(request.part, number, 1, stats))
            status.update(f"measuring: {number + 1} of {len(asked)}")
            time.sleep(pause_s)
    return turns


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("EDGERUN_DATA"), metavar="DIR")
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="DIR", help="folder of the real tokenizer")
    parser.add_argument("--conversations", type=int, default=60, metavar="N", help="(60)")
    parser.add_argument("--adjacent", action="store_true", help="ask for each variation right after its original")
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N", help="maximum tokens of an answer (256)")
    parser.add_argument("--pause", type=float, default=1.0, metavar="S", help="seconds after each answer (1)")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2.5-0.5b")
    parser.add_argument("--layers", type=int, metavar="N", help="use a shape of fewer layers")
    parser.add_argument("--block", type=int, choices=(32, 64, 128), default=128, help="weights that share a scale")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edge-run-benchmarks")
    options = parser.parse_args()
    if options.data is None:
        parser.error("give --data, or set EDGERUN_DATA")

    console, progress = Console(), Console(stderr=True)
    if not console.is_terminal:
        console.width = 130
    shape = SHAPES[options.shape]
    if options.layers is not None:
        shape = replace(shape, name=f"{shape.name}-{options.layers}-layers", layers=options.layers)
    progress.print(f"preparing {shape.name}")
    model = bundle(options.work, shape, options.block, options.tokenizer)
    options.work.mkdir(parents=True, exist_ok=True)
    # A cache of its own: the user's conversations are neither read nor written.
    with tempfile.TemporaryDirectory(dir=options.work) as cache:
        os.environ["EDGERUN_CACHE"] = cache
        with (
            edgerun.load(model, threads=options.threads, context=4096, draft=None, learned=False) as without,
            edgerun.load(model, threads=options.threads, context=4096, draft=None, learned=False, history=True) as kept,
        ):
            asked = requests(without, options)
            right = first_candidates(asked, without.graph_io.vocab_size)
            engines = {PLAIN: without, _WITHOUT: without, _WITH: kept}
            meter = LoadMeter(options.threads or 0)
            turns = measure(engines, asked, options.pause, progress)
            others = round(meter.others() or 0.0, 2)
    results = show(console, f"{shape.name}, {len(asked)} conversations", others, right, turns)
    print(
        json.dumps(
            {"benchmark": "history", "processors_used_by_others": others, "first_candidates": right, "results": results}
        )
    )


def show(
    console: Console,
    title: str,
    others: float,
    right: Mapping[str, Mapping[str, float]],
    turns: Sequence[MeasuredTurn],
) -> list[dict[str, Any]]:
    """Print how often first candidates are right, and the speeds; returns the speeds as plain values."""
    table = Table(title="share of the tokens that are a drafter's first candidate", title_justify="left")
    for name in ("", *right[_PARTS[0]]):
        table.add_column(name, justify="right" if name else "left")
    for part, shares in right.items():
        table.add_row(part, *(f"{share:.3f}" for share in shares.values()))
    console.print(table)

    compared = [replace(turn, stats={PLAIN: turn.stats[_WITHOUT], _WITH: turn.stats[_WITH]}) for turn in turns]
    table = Table(title=f"{title}, {others} processors used by others", title_justify="left")
    for name in ("", "mode", "compared with"):
        table.add_column(name)
    for name in ("decoding\nspeed", "95 % interval", "tokens\nper pass", "drafted", "accepted", "of the history"):
        table.add_column(name, justify="right")
    results: list[dict[str, Any]] = []
    for base, found in ((PLAIN, compare_modes(turns)), (_WITHOUT, compare_modes(compared))):
        for mode in found:
            results.append({"mode": mode.name, "base": base, **mode.to_json()})
            for each in mode.categories:
                interval, history = each.ratio.interval, each.stats.by_source.get("history")
                table.add_row(
                    each.name,
                    mode.name,
                    base,
                    f"{each.ratio.value:.3f}",
                    "" if interval is None else "{:.3f} to {:.3f}".format(*interval),
                    f"{each.stats.tokens_per_pass:.3f}",
                    str(each.stats.drafted),
                    str(each.stats.accepted),
                    "" if history is None else f"{history.accepted} of {history.drafted}",
                )
    console.print(table)
    return results


if __name__ == "__main__":
    main()
