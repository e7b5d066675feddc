"""Processes that tests start, and their end.

Python programs begin as forks of a process that has imported the command's modules: importing them takes a second of
processor time, which is most of what a short command or the start of a server takes.
"""

from __future__ import annotations

import atexit
import gc
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import reduction
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import IO, Any

from edgerun.runtime.devices import processor
from edgerun.runtime.graph import memory
from edgerun.runtime.measure import pass_timing, system_load

_MODULES = (
    "edgerun",  # first, since ONNX Runtime is imported without telemetry after it
    "edgerun.edge.cli.main",
    "edgerun.edge.cli.app",
    "edgerun.edge.cli.chat_or_answer",
    "edgerun.edge.cli.command_line",
    "edgerun.edge.cli.rpc",
    "edgerun.edge.cli.run",
    "edgerun.edge.cli.serve",
    "edgerun.edge.app.app_service",
    "edgerun.edge.rpc.stdio_service",
    "edgerun.edge.server.asgi_app",
    "edgerun.edge.server.uvicorn_server",
    "edgerun.edge.terminal.chat.chat",
    "onnxruntime",
    "platformdirs",
    "prompt_toolkit.shortcuts",
    "pytest",  # a fork begins with the main module of the process that asks for it
    "tokenizers",
    "typer._adapters",
    "uvicorn.lifespan.on",
    "uvicorn.loops.asyncio",
    "uvicorn.loops.auto",
    "uvicorn.protocols.http.auto",
)
"""A module that is not found is left out; the process imports it when it needs it."""
_STREAMS = ("stdin", "stdout", "stderr")
_OPTIONS = {*_STREAMS, "env", "cwd", "start_new_session", "close_fds"}
"""Options of `subprocess.Popen` that do not need a new process."""

read_times = system_load.read_times
"""Reads the load of the machine, which `share_machine` hides."""


def share_machine() -> None:
    """Let the package take the other workers of the run into account.

    They disturb every measurement, which would be repeated, and threads of one pass would wait for them: engines
    compute with one thread unless a test says otherwise. `-n 0` leaves the processor to one test. Nothing waits for the
    disk either, which would be a third of the time of an export: no test cuts the power. The heap of hundreds of tests
    is not trimmed for each model that is loaded, and garbage is looked for less often.
    """
    os.fsync = lambda descriptor: None
    memory._malloc_trim = None
    gc.set_threshold(20_000, 20, 10)
    system_load.read_times = lambda: None
    pass_timing._MAX_TURNS = 10
    if "PYTEST_XDIST_WORKER" in os.environ:
        quota = processor.cpu_quota
        # Rounded down for engines, and up for tests that ask for two threads.
        processor.cpu_quota = lambda *root: quota(*root) if root else 1.5


@cache
def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_MODULES))
    return context


_text = partial(io.TextIOWrapper, encoding="utf-8")


class _Stream:
    """A descriptor that a process is sent when it begins."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __getstate__(self) -> Any:
        return reduction.DupFd(self.descriptor)

    def __setstate__(self, sent: Any) -> None:
        self.descriptor = sent.detach()


@dataclass(frozen=True)
class _Start:
    """What a process runs, and in which surroundings."""

    code: str
    arguments: list[str]
    streams: list[_Stream]
    environment: dict[str, str]
    folder: str
    session: bool

    def run(self) -> None:
        """Run the code as `python -c` does."""
        for number, stream in enumerate(self.streams):
            os.dup2(stream.descriptor, number)
            os.close(stream.descriptor)
        if self.session:
            os.setsid()
        share_machine()
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.environment)
        sys.argv = ["-c", *self.arguments]
        sys.stdin = _text(io.BufferedReader(io.FileIO(0)))
        sys.stdout = _text(io.BufferedWriter(io.FileIO(1, "w")), line_buffering=os.isatty(1))
        sys.stderr = _text(io.BufferedWriter(io.FileIO(2, "w")), line_buffering=True, errors="backslashreplace")
        try:
            exec(compile(self.code, "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102
        finally:
            atexit._run_exitfuncs()


class PreparedProcess:
    """A process with what tests use of `subprocess.Popen`.

    Args:
        command: this Python, `-c`, code and arguments.
        **options: some of those of `subprocess.Popen`.
    """

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        with ExitStack() as sent:
            pipes, streams = zip(*(self._stream(name, options.get(name), sent) for name in _STREAMS), strict=True)
            self.stdin, self.stdout, self.stderr = pipes
            start = _Start(
                command[2],
                list(command[3:]),
                streams,
                dict(options.get("env") or os.environ),
                str(options.get("cwd") or Path.cwd()),
                options.get("start_new_session", False),
            )
            self._process = _server().Process(target=start.run)
            self._process.start()
        self.pid = self._process.pid

    @staticmethod
    def _stream(name: str, wanted: Any, sent: ExitStack) -> tuple[IO[bytes] | None, _Stream]:
        """The end of a standard stream that stays here, if it is a pipe, and the one that is sent."""
        if wanted == subprocess.PIPE:
            reading, writing = os.pipe()
            theirs, ours = (reading, writing) if name == "stdin" else (writing, reading)
            sent.callback(os.close, theirs)
            return os.fdopen(ours, "wb" if name == "stdin" else "rb"), _Stream(theirs)
        if wanted == subprocess.DEVNULL:
            wanted = os.open(os.devnull, os.O_RDWR)
            sent.callback(os.close, wanted)
        elif wanted is None:
            wanted = _STREAMS.index(name)
        return None, _Stream(wanted if isinstance(wanted, int) else wanted.fileno())

    @property
    def returncode(self) -> int | None:
        """The exit code, or minus the number of the signal that ended it; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("python", timeout or 0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[bytes | None, ...]:
        """End the process's input, and read what it writes to pipes until it ends."""
        if self.stdin is not None:
            with suppress(BrokenPipeError):
                self.stdin.close()
        with ThreadPoolExecutor() as pool:
            read = [pipe and pool.submit(pipe.read) for pipe in (self.stdout, self.stderr)]
            self.wait(timeout)
            return tuple(each and each.result() for each in read)

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):  # it has ended, and the server has not said so yet
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def __enter__(self) -> PreparedProcess:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        self.wait()


EDGE_RUN = (sys.executable, "-c", "import sys; from edgerun.edge.cli.main import main; sys.exit(main())")
"""The command, as the installed script runs it."""


def ignoring_ctrl_c(command: Sequence[str]) -> list[str]:
    """The command line that runs `command` as a POSIX shell without job control runs it in the background."""
    return ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command]


@contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that is gone after the block, also when a test fails: it is killed if it still runs.

    Args:
        command: program and arguments; Python code (`-c`) finds the command's modules imported where that is possible.
        **options: those of `subprocess.Popen`.
    """
    is_code = sys.platform == "linux" and list(command[:2]) == [sys.executable, "-c"]
    start: Any = PreparedProcess if is_code and options.keys() <= _OPTIONS else subprocess.Popen
    with start(command, **options) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def started_until(
    command: Sequence[str], take: Callable[[str], bool], patience_s: float, **options: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process, and wait until it has written a line to standard error that says that it is ready.

    Args:
        command: program and arguments.
        take: called with each line, without its end, in a thread of its own until the process has ended; returns
            whether the process is ready.
        patience_s: longest time to wait.
        **options: those of `subprocess.Popen`.
    """
    with started(command, stderr=subprocess.PIPE, **options) as process:
        ready = threading.Event()

        def read() -> None:
            for line in process.stderr:
                if take(line.decode().rstrip("\r\n")):
                    ready.set()
            ready.set()

        reading = threading.Thread(target=read, daemon=True)
        reading.start()
        assert ready.wait(patience_s)
        try:
            yield process
        finally:
            process.kill()
            reading.join(patience_s)
