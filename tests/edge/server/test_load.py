"""Many clients of all kinds: every text is that of a lone request, and nothing is left behind."""

from __future__ import annotations

import gc
import random
import socket
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import edgerun
from edgerun.edge.server.server_settings import ServerSettings
from support.serving import CHAT, PATIENCE_S, Served, chat_body, raw_request, read_all, served, served_here
from support.waiting import wait_until

BUSY = {"temperature": 0, "max_tokens": 24}


class Crowd:
    """Clients of all kinds, for a while."""

    def __init__(self, server: Served, expected: dict[str, str], seconds: float) -> None:
        self.server = server
        self.expected = expected
        self.until = time.monotonic() + seconds
        self.answered = 0
        self.problems: list[str] = []

    def run(self, number: int) -> None:
        rng = random.Random(number)
        behaviours = [self._ask, self._read_slowly, self._leave, self._send_too_much, self._stay_silent]
        # One of them goes on until there was an answer, however busy the machine is.
        while time.monotonic() < self.until or (number == 0 and not self.answered):
            try:
                (behaviours[0] if number < 3 else rng.choice(behaviours))(rng)
            except Exception as error:  # noqa: BLE001  reported by the test
                self.problems.append(f"{type(error).__name__}: {error}")
                return

    def _ask(self, rng: random.Random) -> None:
        text = rng.choice(list(self.expected))
        response = self.server.request("POST", CHAT, chat_body(text, **BUSY))
        if response.status == 429:
            return
        assert response.status == 200, response.body
        assert response.json()["choices"][0]["message"]["content"] == self.expected[text]
        self.answered += 1

    def _read_slowly(self, rng: random.Random) -> None:
        with self.server.connected() as connection:
            body = chat_body(rng.choice(list(self.expected)), **BUSY, stream=True)
            connection.sendall(raw_request(CHAT, body, {"Connection": "close"}))
            response = b""
            while piece := connection.recv(200):
                response += piece
                time.sleep(0.005)
        assert response.startswith(b"HTTP/1.1 429") or b"data: [DONE]" in response

    def _leave(self, rng: random.Random) -> None:
        """Begin a request and go away after a while, at any point of it."""
        with self.server.connected() as connection:
            body = chat_body(f"go on {rng.random()}", max_tokens=2000, stream=rng.random() < 0.5)
            request = raw_request(CHAT, body)
            cut = rng.choice([len(request), len(request), rng.randrange(len(request))])
            connection.sendall(request[:cut])
            time.sleep(rng.random() * 0.05)
            if rng.random() < 0.5:
                # The connection is reset instead of closed.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")

    def _send_too_much(self, rng: random.Random) -> None:
        with self.server.connected() as connection:
            body = chat_body("word " * 200_000)
            connection.sendall(raw_request(CHAT, body, {"Connection": "close"}))
            assert b"context_length_exceeded" in read_all(connection)

    def _stay_silent(self, rng: random.Random) -> None:
        with self.server.connected() as connection:
            connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n")
            time.sleep(0.1)


@pytest.mark.parametrize("seconds", [1.5, pytest.param(60.0, marks=pytest.mark.nightly)])
def test_a_crowd_of_clients(endless_bundle: Path, seconds: float) -> None:
    texts = [f"question {number}" for number in range(6)]
    with edgerun.load(endless_bundle, draft=None, cache=False) as engine:
        expected = {text: engine.generate(chat_body(text)["messages"], **BUSY).text for text in texts}
    with served([endless_bundle], "--draft", "none", "--prefix-cache", "50MB") as server:
        process = psutil.Process(server.process.pid)
        # What is allocated once is allocated before the first look.
        run_crowd(Crowd(server, expected, min(seconds, 20.0)))
        before = usage(process)
        crowd = Crowd(server, expected, seconds)
        run_crowd(crowd)
        after = usage(process)
        assert not crowd.problems
        assert crowd.answered
        wait_until(lambda: server.load() == (0, 0), "all answers have ended")
        wait_until(lambda: usage(process)["files"] <= before["files"], "all connections are closed")
        assert after["memory"] < before["memory"] + (100 << 20)
        assert len(server.lines) == 2, server.lines
        reply = server.post(CHAT, chat_body(texts[0], **BUSY))
        assert reply["choices"][0]["message"]["content"] == expected[texts[0]]


def test_a_refused_prompt_is_released_at_once(endless_bundle: Path) -> None:
    def long_lists() -> int:
        return sum(isinstance(each, list) and len(each) > 100_000 for each in gc.get_objects())

    body = chat_body("word " * 40_000)
    with served_here(endless_bundle, ServerSettings(), draft=None) as server:
        assert server.request("POST", CHAT, body).json()["error"]["code"] == "context_length_exceeded"
        gc.collect()
        before = long_lists()
        gc.disable()
        try:
            assert server.request("POST", CHAT, body).status == 400
            wait_until(lambda: long_lists() <= before, "no reference cycle holds the tokens of the prompt")
        finally:
            gc.enable()


def run_crowd(crowd: Crowd) -> None:
    threads = [threading.Thread(target=crowd.run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S + 300)
    wait_until(lambda: crowd.server.load() == (0, 0), "all answers have ended")


def usage(process: psutil.Process) -> dict[str, Any]:
    return {
        "files": process.num_handles() if psutil.WINDOWS else process.num_fds(),
        "memory": process.memory_info().rss,
    }
