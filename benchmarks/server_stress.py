"""A server under load: clients that read slowly, leave, send too much, or never finish what they began.

Starts `edge-run serve` in a process of its own and asks every prompt alone first. Then several clients at a time send
requests of all kinds for some minutes. Every answer that was read to its end has to be the text that the same request
got alone; every refusal has to be the expected one; and memory, descriptors and threads of the server have to stay.
Ends with exit code 1 where one of that does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from statistics import median
from typing import IO, Any, Final

import httpx
import psutil

HALF_OPEN: Final = 24
"""Largest number of connections that are left open at a time."""
SAMPLE_S: Final = 2.0
PREFIX_CACHE: Final = "64MiB"
"""KV caches of earlier answers: so few that they are full soon, and memory that goes on growing is something else."""
PARTS: Final = 5
"""Parts of the time whose medians are compared: caches fill up in the first one."""


@dataclass
class Load:
    """What all clients share."""

    base: str
    expected: dict[int, list[str]]
    """Texts of the choices, by request."""
    rng: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    half_open: list[asyncio.StreamWriter] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    """Further fields of every request."""

    def url(self, path: str) -> str:
        """The address of a path."""
        return f"{self.base}{path}"


def request_body(number: int) -> dict[str, Any]:
    """The request with this number; some are greedy, some sampled, some ask for several choices."""
    words = ("files", "folders", "logs", "images", "archives", "users", "processes", "ports")
    history = [
        {"role": "user", "content": f"list all {words[number % 8]}"},
        {"role": "assistant", "content": "ls -la"},
    ]
    body: dict[str, Any] = {
        "messages": [
            *(history if number % 3 else []),
            {"role": "user", "content": f"find {words[(number // 8) % 8]} larger than {number} MB"},
        ],
        "max_tokens": 24 + 8 * (number % 4),
        "temperature": 0,
    }
    if number % 4 == 1:
        body |= {"temperature": 0.8, "seed": number}
    if number % 8 == 5:
        body["n"] = 2
    return body


def texts_of(completion: dict[str, Any]) -> list[str]:
    """The texts of a chat completion's choices."""
    return [choice["message"]["content"] for choice in sorted(completion["choices"], key=lambda each: each["index"])]


async def ask(client: httpx.AsyncClient, load: Load, number: int) -> None:
    """Ask for a whole answer."""
    response = await client.post(load.url("/v1/chat/completions"), json={**request_body(number), **load.extra})
    check(load, number, response.status_code, response.text)


def check(load: Load, number: int, status: int, text: str) -> None:
    """Compare a whole answer with what the request got alone; a full queue may refuse it."""
    if status == 429:
        load.counts["refused: the queue is full"] += 1
    elif status != 200:
        load.problems.append(f"request {number}: status {status}: {text[:200]}")
    elif texts_of(json.loads(text)) != load.expected[number]:
        load.problems.append(f"request {number}: {texts_of(json.loads(text))} instead of {load.expected[number]}")
    else:
        load.counts["whole answers"] += 1


async def stream(client: httpx.AsyncClient, load: Load, number: int, pause_s: float, leave_after: int | None) -> None:
    """Read a streamed answer, with a pause after every event, and perhaps leave in its middle."""
    texts: dict[int, str] = {}
    body = {**request_body(number), **load.extra, "stream": True}
    events, done = 0, False
    async with client.stream("POST", load.url("/v1/chat/completions"), json=body) as response:
        if response.status_code != 200:
            text = (await response.aread()).decode()
            check(load, number, response.status_code, text)
            return
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            done = line == "data: [DONE]"
            if done:
                break
            for choice in json.loads(line[6:])["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + (choice["delta"].get("content") or "")
            events += 1
            if leave_after is not None and events > leave_after:
                load.counts["left in the middle"] += 1
                return
            if pause_s:
                await asyncio.sleep(pause_s)
    found = [texts[index] for index in sorted(texts)]
    if not done:
        load.problems.append(f"request {number}: the stream ended after {events} events without its end")
    elif found != load.expected[number]:
        load.problems.append(f"request {number}: streamed {found} instead of {load.expected[number]}")
    else:
        load.counts["slow readers" if pause_s else "streamed answers"] += 1


async def leave_before(load: Load, number: int) -> None:
    """Send a request and close the connection before there can be an answer."""
    writer = await begun(load, json.dumps(request_body(number)).encode())
    await asyncio.sleep(load.rng.random() * 0.05)
    writer.close()
    load.counts["left before the answer"] += 1


async def send_long_prompt(client: httpx.AsyncClient, load: Load) -> None:
    """Send a prompt of 1 MB, which no context holds."""
    body = {"messages": [{"role": "user", "content": "word " * 200_000}]}
    response = await client.post(load.url("/v1/chat/completions"), json=body)
    expect(load, "prompt of 1 MB", response.status_code, response.text, 400, "context_length_exceeded")


async def announce_1_gb(load: Load) -> None:
    """Announce a body of 1 GB."""
    writer, reader = await connection(load)
    writer.write(head(load, 1 << 30))
    await writer.drain()
    answer = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    expect(load, "body of 1 GB", int(answer.split()[1]), answer.decode(), 413, "request_too_large")


async def leave_half_open(load: Load) -> None:
    """Send a part of a request and leave the connection open; close an older one where there are many."""
    writer, _ = await connection(load)
    whole = head(load, 100) + b'{"messages": [{"role":'
    writer.write(whole[: load.rng.randrange(1, len(whole))])
    await writer.drain()
    load.half_open.append(writer)
    load.counts["half-open connections"] += 1
    if len(load.half_open) > HALF_OPEN:
        load.half_open.pop(0).close()


def expect(load: Load, what: str, status: int, text: str, wanted: int, code: str) -> None:
    """Check a refusal."""
    if status != wanted or code not in text:
        load.problems.append(f"{what}: status {status} instead of {wanted} {code}: {text[:200]}")
    else:
        load.counts[f"refused: {what}"] += 1


async def connection(load: Load) -> tuple[asyncio.StreamWriter, asyncio.StreamReader]:
    """Connect to the server."""
    host, port = load.base.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    return writer, reader


def head(load: Load, length: int) -> bytes:
    """The headers of a request for a chat completion with a body of this length."""
    host = load.base.removeprefix("http://")
    return (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        f"content-length: {length}\r\n\r\n"
    ).encode()


async def begun(load: Load, body: bytes) -> asyncio.StreamWriter:
    """Connect and send a whole request."""
    writer, _ = await connection(load)
    writer.write(head(load, len(body)) + body)
    await writer.drain()
    return writer


async def send_any(client: httpx.AsyncClient, load: Load, number: int) -> None:
    """Send a request, of the kind that chance decides."""
    rng = load.rng
    actions: list[tuple[int, Callable[[], Awaitable[None]]]] = [
        (6, lambda: ask(client, load, number)),
        (6, lambda: stream(client, load, number, 0, None)),
        (3, lambda: stream(client, load, number, 0.05 + 0.2 * rng.random(), None)),
        (3, lambda: stream(client, load, number, 0, rng.randrange(6))),
        (2, lambda: leave_before(load, number)),
        (1, lambda: send_long_prompt(client, load)),
        (1, lambda: announce_1_gb(load)),
        (1, lambda: leave_half_open(load)),
    ]
    (action,) = rng.choices([each for _, each in actions], [weight for weight, _ in actions])
    await action()


async def work(load: Load, until: float) -> None:
    """Send requests of all kinds until a time, like one client."""
    async with httpx.AsyncClient(timeout=120) as client:
        while time.monotonic() < until:
            number = load.rng.randrange(len(load.expected))
            try:
                await send_any(client, load, number)
            except (httpx.HTTPError, OSError, TimeoutError, IndexError, ValueError) as error:
                load.problems.append(f"request {number}: {type(error).__name__}: {error}")


async def watch(process: psutil.Process, until: float) -> list[tuple[float, float, float]]:
    """Sample resident MiB, descriptors and threads of the server until a time."""
    samples: list[tuple[float, float, float]] = []
    while time.monotonic() < until:
        samples.append((process.memory_info().rss / (1 << 20), descriptors(process), process.num_threads()))
        await asyncio.sleep(SAMPLE_S)
    return samples


def descriptors(process: psutil.Process) -> int:
    """Number of open files and connections of a process."""
    if sys.platform == "win32":
        return process.num_handles()
    return process.num_fds()


async def run(options: argparse.Namespace, base: str, process: psutil.Process) -> int:
    """Load the server; returns the exit code."""
    load = Load(base, {}, random.Random(options.seed), extra={"exact": True} if options.exact else {})
    async with httpx.AsyncClient(timeout=120) as client:
        for number in range(options.requests):
            body = {**request_body(number), **load.extra}
            response = await client.post(load.url("/v1/chat/completions"), json=body)
            load.expected[number] = texts_of(response.raise_for_status().json())
        until = time.monotonic() + options.seconds
        watching = asyncio.create_task(watch(process, until))
        await asyncio.gather(*(work(load, until) for _ in range(options.clients)))
        samples = await watching
        for writer in load.half_open:
            writer.close()
        await settle(client, load)
    medians: dict[str, list[float]] = {"resident MiB": [], "descriptors": [], "threads": []}
    for part in range(PARTS):
        within = samples[part * len(samples) // PARTS : (part + 1) * len(samples) // PARTS]
        for name, sampled in zip(medians, zip(*within, strict=True), strict=True):
            medians[name].append(round(median(sampled), 1))
    for name, values in medians.items():
        print(f"{name:14} median of each {100 // PARTS} % of the time: {', '.join(f'{value:g}' for value in values)}")
    for name, count in sorted(load.counts.items()):
        print(f"{count:8} {name}")
    for problem in load.problems[:20]:
        print(f"problem: {problem}")
    print(
        json.dumps(
            {
                "seconds": options.seconds,
                "counts": dict(load.counts),
                "medians": medians,
                "problems": len(load.problems),
            }
        )
    )
    return 1 if load.problems else 0


async def settle(client: httpx.AsyncClient, load: Load) -> None:
    """Wait until no request runs any more; a problem if that takes longer than a minute."""
    for _ in range(600):
        text = (await client.get(load.url("/metrics"))).text
        busy = re.findall(r"^edgerun_requests_(?:running|waiting)(?:\{[^}]*\})? ([0-9.]+)$", text, re.MULTILINE)
        if busy and not any(float(value) for value in busy):
            return
        await asyncio.sleep(0.1)
    load.problems.append(f"requests still run after a minute: {busy}")


def main() -> int:
    """Start a server, load it, and end it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="the model; the bundled one when left out")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=64, help="number of different requests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--exact",
        action="store_true",
        help="ask for exact answers; others depend in near ties on what was asked before",
    )
    options = parser.parse_args()
    command = [sys.executable, "-c", "from edgerun.edge.cli.main import main; raise SystemExit(main())", "serve"]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        server = subprocess.Popen(
            [*command, "--port", "0", "--prefix-cache", PREFIX_CACHE, *([options.model] if options.model else [])],
            stderr=log,
            encoding="utf-8",
        )
        try:
            return asyncio.run(run(options, address(server, log), psutil.Process(server.pid)))
        finally:
            server.terminate()
            server.wait(60)
            log.seek(0)
            print(log.read(), file=sys.stderr)


def address(server: subprocess.Popen[str], log: IO[str]) -> str:
    """Wait until a server says its address."""
    while server.poll() is None:
        log.seek(0)
        if found := re.search(r"at (http://[^/ ]+)/v1", log.read()):
            return found[1]
        time.sleep(0.05)
    raise SystemExit("the server did not start")


if __name__ == "__main__":
    sys.exit(main())
