"""The example that hosts the server in Ray Serve, with a local Ray."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import httpx
import openai
import pytest

import edgerun
from support.processes import started
from support.serving import PATIENCE_S
from support.waiting import wait_until

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "ray_serve.py"
PYTHON = os.environ.get("EDGERUN_RAY_PYTHON") or (sys.executable if find_spec("ray") else None)
"""An interpreter that has the extra `ray`."""
QUESTION = {"role": "user", "content": "the other thing"}

pytestmark = pytest.mark.skipif(PYTHON is None, reason="needs the ray extra, or EDGERUN_RAY_PYTHON")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def ray_serving(model: Path, replicas: int) -> Iterator[tuple[str, Path]]:
    """Run the example; gives its address and the folder of Ray's logs."""
    port = free_port()
    options = ("--threads=1", "--parallel=3", f"--min-replicas={replicas}", f"--replicas={replicas}")
    command = [str(PYTHON), str(EXAMPLE), str(model), f"--port={port}", *options]
    # Paths of Ray's sockets have to be short.
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        # Ray keeps a token in the home folder.
        environment = {**os.environ, "RAY_TMPDIR": folder, "HOME": folder, "USERPROFILE": folder}
        with (
            open(Path(folder, "output"), "wb") as output,
            started(command, stdout=output, stderr=subprocess.STDOUT, env=environment) as process,
        ):
            log = Path(folder, "output")
            wait_until(lambda: process.poll() is not None or b"is ready at" in log.read_bytes(), str(log))
            assert process.poll() is None, log.read_text(encoding="utf-8")
            try:
                yield f"http://127.0.0.1:{port}", Path(folder, "ray", "session_latest", "logs")
            finally:
                # Ray ends its own processes when the example ends.
                process.terminate()
                process.wait(PATIENCE_S)


def metric(address: str, name: str, session: str) -> float:
    """A metric of the replica that answers the requests of a session."""
    text = httpx.get(f"{address}/metrics", headers={"x-session-id": session}).text
    return sum(map(float, re.findall(rf"^edgerun_{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)))


def test_ray_serve_answers_like_the_engine_keeps_conversations_at_replicas_and_reports_to_nobody(
    endless_bundle: Path,
) -> None:
    with edgerun.load(endless_bundle, threads=1) as engine:
        expected = engine.generate([QUESTION], max_tokens=20).text
    with ray_serving(endless_bundle, 2) as (address, logs):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        (model,) = client.models.list()

        def ask() -> str | None:
            reply = client.chat.completions.create(
                model=model.id, messages=[QUESTION], max_completion_tokens=20, logprobs=True
            )
            listed = reply.choices[0].logprobs
            assert len(listed.content or []) == reply.usage.completion_tokens == 20
            return reply.choices[0].message.content

        with ThreadPoolExecutor(4) as clients:
            assert {future.result() for future in [clients.submit(ask) for _ in range(8)]} == {expected}
        stream = client.chat.completions.create(
            model=model.id, messages=[QUESTION], max_completion_tokens=20, stream=True
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == expected
        endless = client.with_options(default_headers={"x-session-id": "endless"}).chat.completions.create(
            model=model.id, messages=[QUESTION], stream=True
        )
        next(iter(endless))
        assert metric(address, "requests_running", "endless") == 1
        endless.close()
        wait_until(lambda: not metric(address, "requests_running", "endless"), "the answer goes on without its client")
        for session in ("one", "two", "three", "four"):
            before = [metric(address, name, session) for name in ("answers_total", "prefix_cache_hits_total")]
            messages = [{"role": "user", "content": f"conversation {session}"}]
            for _ in range(3):
                reply = client.chat.completions.create(
                    model=model.id, messages=messages, max_completion_tokens=5, extra_headers={"x-session-id": session}
                )
                messages += [reply.choices[0].message.model_dump(include={"role", "content"}), QUESTION]
            assert metric(address, "answers_total", session) == before[0] + 3, "one replica answered all"
            assert metric(address, "prefix_cache_hits_total", session) >= before[1] + 2
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="another", messages=[QUESTION])
        assert "Usage reporting is disabled" in (logs / "dashboard.log").read_text(encoding="utf-8")
