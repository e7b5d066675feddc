"""How long a stateless conversation waits for the first token of an answer, with and without the prefix cache.

A client that keeps no state sends the whole conversation with every request. After a request of `--history` tokens, its
answer and `--new` more tokens follow. Two engines over one graph answer in turn: one keeps the KV caches of finished
sequences, the other computes every prompt anew. A third request repeats the beginning of the first one and then differs
(an edited message). The first two requests are also sent to a server, to whose client the first token comes by HTTP.
Prints times to the first token, the time of a decode pass and of reading the new tokens alone, and one JSON line.

With `--disk`, fresh processes answer prompts of `--history` tokens and `--new` more, in turn with those tokens kept on
disk and without; the time is that from the request to the first token in a process that has loaded the model. With
`--padded` too, the slots on disk are arbitrary, and no process computes the prompt, which takes long at long contexts.

Example: python benchmarks/prefix_cache.py --history 2000 --tokenizer DIR/tokenizers/qwen2.5
         python benchmarks/prefix_cache.py --disk --history 4096
         python benchmarks/prefix_cache.py --disk --padded --history 130000
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

import edgerun
from artifacts import bundle, with_context
from edgerun import Engine, GenerateOptions, Reply, Speculation, Stats
from edgerun.models.user_folders import cache_folder
from edgerun.runtime.kv.prefix_cache import CachedSequence
from server_overhead import Client, body, served
from shapes import SHAPES


def answer(engine: Engine, prompt: list[int], tokens: list[int], sequence: CachedSequence | None = None) -> Stats:
    """Give these tokens as the answer to a prompt, at the cost of generating them by plain decoding."""
    options = GenerateOptions(speculation=Speculation.OFF, temperature=0.0)
    return Reply.of(engine.model.replay(sequence, prompt, tokens, options)).stats


def measure(engine: Engine, rng: random.Random, options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds to the first token of three requests of a new conversation, of a decode pass, and of a session."""

    def tokens(count: int) -> list[int]:
        return [rng.randrange(engine.graph_io.vocab_size) for _ in range(count)]

    history, said, new = tokens(options.history), tokens(options.answer), tokens(options.new)
    first = answer(engine, history, said)
    second = answer(engine, [*history, *said, *new], said)
    edited = answer(engine, [*history[: options.history // 2], *new], said)
    sequence = engine.model.new_sequence()
    answer(engine, history, said, sequence)
    session = answer(engine, [*history, *said, *new], said, sequence)
    return {
        "first": first.first_token_s * 1e3,
        "second": second.first_token_s * 1e3,
        "second reused": second.reused_tokens,
        "edited": edited.first_token_s * 1e3,
        "second of a session": session.first_token_s * 1e3,
        "decode pass": second.decode_s / max(second.decode_tokens, 1) * 1e3,
    }


def measure_served(engine: Engine, client: Client, rng: random.Random, options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds to the first event of two requests of a new conversation, at the client of a server."""
    history = [rng.randrange(engine.graph_io.vocab_size // 2) for _ in range(options.history)]
    new = [rng.randrange(engine.graph_io.vocab_size // 2) for _ in range(options.new)]
    waits = []
    for prompt in (history, [*history, *new]):
        started = time.monotonic()
        client.send(body(prompt, 0, options.answer))
        waits.append((client.times()[0] - started) * 1e3)
    return {"first, served": waits[0], "second, served": waits[1]}


def answer_once(model: Path, kind: str, options: argparse.Namespace) -> dict[str, float]:
    """Answer one prompt in this process, which is fresh: `kept` and `computed`, or `keep` the prefix for later."""
    rng = random.Random(0)
    started = time.monotonic()
    disk = 0 if kind == "computed" else 64 << 30
    with edgerun.load(model, context=options.history + 4 * options.new, prefix_disk=disk) as engine:
        loaded_s = time.monotonic() - started
        history = [rng.randrange(engine.graph_io.vocab_size) for _ in range(options.history)]
        new = [rng.randrange(engine.graph_io.vocab_size) for _ in range(options.new)]
        if kind == "pad":
            arena = engine.model.new_arena()
            arena.pad_to(options.history, 0.01)
            arena.plain_length = options.history
            engine.model.prefixes.keep(arena, history, options.history)
            started = time.monotonic()
            engine.model.prefixes.wait()
            return {"writing": (time.monotonic() - started) * 1e3}
        settings = GenerateOptions(
            max_tokens=1, speculation=Speculation.OFF, ignore_eos=True, keep_prefix=kind == "keep"
        )
        stats = Reply.of(engine.model.answer(None, history if kind == "keep" else [*history, *new], settings)).stats
        resident, closing = psutil.Process().memory_info().rss, time.monotonic()
    return {
        "load": loaded_s * 1e3,
        "first token": stats.first_token_s * 1e3,
        "closing": (time.monotonic() - closing) * 1e3,
        "reused": stats.reused_tokens,
        "MiB": resident / 2**20,
    }


def measure_disk(model: Path, options: argparse.Namespace) -> None:
    """Let fresh processes answer in turn, with the prefix on disk and without, and print the medians."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "prepacked").symlink_to(cache_folder() / "prepacked")
        environment = {**os.environ, "EDGERUN_CACHE": folder}

        def run(kind: str) -> dict[str, float]:
            command = [sys.executable, __file__, "--child", kind, str(model), *sys.argv[1:]]
            printed = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
            found: dict[str, float] = json.loads(printed)
            return found

        first = run("pad" if options.padded else "keep")
        run("kept")  # measures which graph runs the pass over the new tokens, once for a model
        kinds = ("kept",) if options.padded else ("kept", "computed")
        runs = [[run(kind) for kind in kinds] for _ in range(options.rounds)]
    medians = {
        name: {key: round(statistics.median(each[key] for each in found), 1) for key in found[0]}
        for name, found in zip(kinds, zip(*runs, strict=True), strict=True)
    }
    print(json.dumps({"shape": options.shape, "history": options.history, "keep": first, **medians}))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2.5-0.5b")
    parser.add_argument("--history", type=int, default=2000, help="tokens of the first request")
    parser.add_argument("--new", type=int, default=30, help="tokens that the second request adds to the answer")
    parser.add_argument("--answer", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokenizer", type=Path, help="folder with a tokenizer.json of the shape")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edge-run-benchmarks")
    parser.add_argument("--disk", action="store_true", help="measure prefixes on disk")
    parser.add_argument("--padded", action="store_true", help="with --disk: arbitrary slots, not those of a prompt")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(answer_once(Path(options.child[1]), options.child[0], options)))
        return
    shape = with_context(SHAPES[options.shape], options.history + 4 * options.new)
    model = bundle(options.work, shape, 128, options.tokenizer)
    if options.disk:
        measure_disk(model, options)
        return
    limit = options.history + 4 * options.answer + 2 * options.new
    runs: dict[str, list[dict[str, float]]] = {"with": [], "without": []}
    with (
        edgerun.load(model, context=limit, learned=False) as cached,
        edgerun.load(model, context=limit, learned=False, prefix_cache=0) as fresh,
    ):
        engines = {"with": cached, "without": fresh}
        for number in range(options.rounds):
            for name in sorted(engines, reverse=bool(number % 2)):
                runs[name].append(measure(engines[name], random.Random(number), options))
        for name, engine in engines.items():
            with served(engine, model) as (port, _):
                client = Client(port)
                for number, found in enumerate(runs[name]):
                    found.update(measure_served(engine, client, random.Random(options.rounds + number), options))
                client.close()
    medians = {
        name: {key: round(statistics.median(run[key] for run in found), 2) for key in found[0]}
        for name, found in runs.items()
    }
    table = Table("ms", *medians, title=f"first token, {options.shape}, history of {options.history} tokens")
    for key in medians["with"]:
        table.add_row(key, *(f"{medians[name][key]:.1f}" for name in medians))
    Console().print(table)
    print(json.dumps({"shape": options.shape, "history": options.history, "new": options.new, **medians}))


if __name__ == "__main__":
    main()
