"""How long a stateless conversation waits for the first token of an answer, with and without the prefix cache.

A client that keeps no state sends the whole conversation with every request. After a request of `--history` tokens, its
answer and `--new` more tokens follow. Two engines over one graph answer in turn: one keeps the KV caches of finished
sequences, the other computes every prompt anew. A third request repeats the beginning of the first one and then differs
(an edited message). The first two requests are also sent to a server, to whose client the first token comes by HTTP.
Prints times to the first token, the time of a decode pass and of reading the new tokens alone, and one JSON line.

Example: python benchmarks/prefix_cache.py --history 2000 --tokenizer DIR/tokenizers/qwen2.5
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

import edgerun
from artifacts import bundle
from checkpoints import SHAPES
from edgerun import Engine, GenerateOptions, Reply, Speculation, Stats
from edgerun.runtime.generation import CachedSequence
from server_overhead import Client, body, served


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
    options = parser.parse_args()
    model = bundle(options.work, SHAPES[options.shape], 128, options.tokenizer)
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
