"""Tokens per second of a client of the server against those of `Engine.stream`, and the shares of two clients.

The server runs in this process with the engine that is also asked directly, so both have the same threads and memory.
Clients are processes of their own. Direct and served answers take turns in both orders, with the same prompt and seed.
Their times between two pieces of text are compared: the median over all answers, which a busy machine disturbs less
than the time of a whole answer; and the processor time of the event loop is counted. Two clients then ask at the same
time: their shares are the pieces that each gets while both are answered. Prints medians, and one JSON line.

Example: python benchmarks/server_overhead.py --tokenizer DIR/tokenizers/qwen2.5
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

import edgerun
from artifacts import bundle
from edgerun import Engine
from edgerun.edge.server.asgi_app import asgi_app
from edgerun.edge.server.endpoints import RequestService
from edgerun.edge.server.server_settings import ServerSettings
from edgerun.edge.server.uvicorn_server import DrainingServer, bound_socket
from edgerun.edge.service.model_pool import ModelPool
from shapes import SHAPES

_PATH: Final = "/v1/completions"
_SHARE_EVERY: Final = 4
"""Rounds after one of which two clients ask at the same time."""


@contextmanager
def served(engine: Engine, model: Path) -> Iterator[tuple[int, Callable[[], float]]]:
    """Serve an engine at a free port until the end of the block.

    Yields the port, and a function that tells the processor seconds that the event loop has used.
    """
    pool = ModelPool([str(model)], lambda _path, _progress: engine)
    listening = bound_socket("127.0.0.1", 0)
    service = RequestService(pool, ServerSettings())
    server = DrainingServer(asgi_app(service), service, 0.0)
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        clock = time.pthread_getcpuclockid(thread.ident or 0)
        yield listening.getsockname()[1], lambda: time.clock_gettime(clock)
    finally:
        server.should_exit = True
        thread.join()


class Client:
    """A process that sends requests and says when the pieces of their answers came."""

    def __init__(self, port: int) -> None:
        command = [sys.executable, __file__, "--client", str(port)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8")
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the process has no pipes")
        self._process, self._input, self._output = process, process.stdin, process.stdout

    def send(self, body: dict[str, Any]) -> None:
        """Send a request."""
        print(json.dumps(body), file=self._input, flush=True)

    def times(self) -> list[float]:
        """Times of the events of the answer, in seconds of a clock that all processes share."""
        return list(json.loads(self._output.readline()))

    def close(self) -> None:
        """End the process."""
        self._input.close()
        self._process.wait()
        self._output.close()


def run_client(port: int) -> None:
    """Send the requests on standard input, one a line, and print the times of their events."""
    for line in sys.stdin:
        connection = HTTPConnection("127.0.0.1", port)
        connection.request("POST", _PATH, line, {"Content-Type": "application/json"})
        response = connection.getresponse()
        times = []
        while event := response.readline():
            if event.startswith(b'data: {"id"'):
                times.append(time.monotonic())
            elif event.startswith((b"data: {", b"{")):
                raise RuntimeError(event.decode())
        connection.close()
        print(json.dumps(times), flush=True)


def body(prompt: list[int], seed: int, tokens: int) -> dict[str, Any]:
    """A request whose answer has exactly this many tokens. At this temperature nothing is drafted rightly."""
    return {
        "prompt": prompt,
        "seed": seed,
        "max_tokens": tokens,
        "temperature": 1.0,
        "ignore_eos": True,
        "stream": True,
    }


def direct(engine: Engine, prompt: list[int], seed: int, tokens: int) -> list[float]:
    """Times of the pieces of the same answer from the engine."""
    options = edgerun.GenerateOptions(seed=seed, max_tokens=tokens, temperature=1.0, ignore_eos=True)
    return [time.monotonic() for _ in engine.model.answer(None, prompt, options)]


def intervals(times: list[float]) -> list[float]:
    """Seconds between two pieces. The last one, which has the statistics and no token, is left out."""
    return [later - earlier for earlier, later in pairwise(times[:-1])]


def shares(clients: list[Client], bodies: list[dict[str, Any]]) -> float:
    """The smaller number of pieces by the larger one that two clients get while both are answered."""
    for client, each in zip(clients, bodies, strict=True):
        client.send(each)
    found = [client.times() for client in clients]
    begin, end = max(times[0] for times in found), min(times[-1] for times in found)
    counts = [sum(begin <= at <= end for at in times) for times in found]
    return min(counts) / max(counts)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2.5-0.5b")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--tokenizer", type=Path, help="folder with a tokenizer.json of the shape")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edge-run-benchmarks")
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client is not None:
        run_client(options.client)
        return
    if options.tokenizer is None:
        parser.error("give --tokenizer: with single bytes as tokens, random text has hardly any whole characters")
    model = bundle(options.work, SHAPES[options.shape], 128, options.tokenizer)
    limit = options.prompt + options.tokens + 8
    found: dict[str, list[float]] = {"direct": [], "served": []}
    ratios, fair, loop_s = list[float](), list[float](), list[float]()
    engine = edgerun.load(model, context=limit, learned=False, draft=None, prefix_cache=0)
    with engine, served(engine, model) as (port, loop_seconds):
        clients = [Client(port), Client(port)]
        rng = random.Random(0)
        vocabulary = engine.graph_io.vocab_size
        for number in range(options.rounds + 1):
            prompt = [rng.randrange(vocabulary // 2) for _ in range(options.prompt)]
            medians: dict[str, float] = {}
            for way in ("direct", "served") if number % 2 else ("served", "direct"):
                if way == "direct":
                    times = direct(engine, prompt, number, options.tokens)
                else:
                    before = loop_seconds()
                    clients[0].send(body(prompt, number, options.tokens))
                    times = clients[0].times()
                    loop_s.append((loop_seconds() - before) / options.tokens)
                medians[way] = statistics.median(intervals(times))
                if number:  # the first round warms up
                    found[way] += intervals(times)
            if number:
                ratios.append(medians["direct"] / medians["served"])
                if number % _SHARE_EVERY == 0:
                    seeds = (number, options.rounds + number)
                    fair.append(shares(clients, [body(prompt, seed, options.tokens) for seed in seeds]))
        for client in clients:
            client.close()
    show(options, found, ratios, fair, loop_s)


def show(
    options: argparse.Namespace,
    found: Mapping[str, list[float]],
    ratios: Sequence[float],
    fair: Sequence[float],
    loop_s: Sequence[float],
) -> None:
    """Print the figures as a table and as one JSON line."""
    result = {
        "shape": options.shape,
        "tokens": options.tokens,
        "rounds": options.rounds,
        "direct_tokens_per_second": round(1 / statistics.median(found["direct"]), 2),
        "served_tokens_per_second": round(1 / statistics.median(found["served"]), 2),
        "ratio": round(statistics.median(found["direct"]) / statistics.median(found["served"]), 4),
        "event_loop_ms_per_token": round(statistics.median(loop_s) * 1e3, 3),
        "quartiles_of_the_rounds": [round(value, 4) for value in statistics.quantiles(ratios, n=4)],
        "median_share": round(statistics.median(fair), 4),
        "lowest_share": round(min(fair), 4),
    }
    table = Table("", "value", title=f"{options.shape}, answers of {options.tokens} tokens, {options.rounds} rounds")
    for name, value in result.items():
        if name not in {"shape", "tokens", "rounds"}:
            table.add_row(name.replace("_", " "), str(value))
    Console().print(table)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
