"""Runs operations in processes that are killed at a chosen step.

A step is an operation on files that Python announces by an audit event, or a sync to disk. A process is killed right
before the step, so that killing at every step in turn leaves every state that a kill can leave behind.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

STEPS = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "ctypes.dlsym"}
needs_kills = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks processes and kills them")


class KillingServer:
    """A process that forks others and kills them; it has no threads, and imports once what they need."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def steps(self, operation: str, root: Path, *args: Any, kill_at: int = sys.maxsize, event: str = "") -> int | None:
        """Run an operation of this module in a process of its own.

        Args:
            operation: name of the operation.
            root: folder that it writes into.
            args: further arguments of the operation.
            kill_at: number of the step at which the process is killed.
            event: the only audit event that counts as a step; empty for all of `STEPS`.

        Returns:
            Number of steps until the process ended; None if it was killed before.
        """
        print(json.dumps([operation, str(root), args, kill_at, event]), file=self._process.stdin, flush=True)
        status, steps = map(int, self._process.stdout.readline().split())
        if os.WIFSIGNALED(status):
            assert os.WTERMSIG(status) == signal.SIGKILL
            return None
        assert os.WEXITSTATUS(status) == 0
        return steps


@contextmanager
def killing_server() -> Iterator[KillingServer]:
    """Start the process."""
    with subprocess.Popen(
        [sys.executable, "-c", "from support.killed_process import serve; serve()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as process:
        try:
            yield KillingServer(process)
        finally:
            process.kill()


def serve() -> None:
    """Read operations from standard input, and write how their processes ended to standard output."""
    for line in sys.stdin:
        name, root, args, kill_at, event = json.loads(line)
        modules, operation = OPERATIONS[name]
        for module in modules:
            import_module(module)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            steps = _count_steps(root, kill_at, event)
            operation(Path(root), *args)
            os.write(writer, str(steps()).encode())
            os._exit(0)
        os.close(writer)
        _, status = os.waitpid(child, 0)
        print(status, os.read(reader, 100).decode() or 0, flush=True)
        os.close(reader)


def _count_steps(root: str, kill_at: int, only: str) -> Callable[[], int]:
    """Count the steps of this process from now on, and kill it right before one; return a function that tells them."""
    steps = 0

    def count(event: str) -> None:
        nonlocal steps
        steps += not only or event == only
        if steps == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in STEPS or (event == "open" and str(args[0]).startswith(root)):
            count(event)

    # What a killed process wrote need not be on the disk to be there.
    os.fsync = lambda descriptor: count("fsync")
    sys.addaudithook(hook)
    return lambda: steps


def replace_folder(root: Path, text: str, exchange: bool) -> None:
    """Replace the folder `out`, in one step or by renames."""
    from edgerun.models import atomic

    if not exchange:
        atomic.exchange = lambda first, second: False
    with atomic.folder_written_atomically(root / "out", lambda folder: True) as staging:
        (staging / "first").write_text(text, encoding="utf-8")
        (staging / "below").mkdir()
        (staging / "below" / "second").write_text(text, encoding="utf-8")


def write_file(root: Path, text: str) -> None:
    """Write the file `out` in two parts."""
    from edgerun.models.atomic import write_atomically

    def write(file: Any) -> None:
        for part in (text[:1], text[1:]):
            file.write(part.encode())
            file.flush()

    write_atomically(root / "out", write)


def export(root: Path, source: str, exchange: bool) -> None:
    """Export a checkpoint to the folder `out`."""
    from edgerun.edge.cli.main import main
    from edgerun.models import atomic

    if not exchange:
        atomic.exchange = lambda first, second: False
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        assert main(["export", source, str(root / "out")]) == 0


def keep_prefix(root: Path, value: int) -> None:
    """Keep the slots of 100 tokens on disk, in the cache folder `root`."""
    import numpy as np

    from edgerun.runtime.kv.arena import InPlaceArena
    from edgerun.runtime.kv.buffers import CacheTensorType
    from edgerun.runtime.kv.prefix_files import PrefixFiles

    os.environ["EDGERUN_CACHE"] = str(root)
    arena = InPlaceArena((CacheTensorType(np.dtype(np.float32), (1, 1, 0, 2), 2),) * 2, 512)
    arena.pad_to(100, value)
    files = PrefixFiles(lambda: "a model")
    files.keep(arena, np.arange(value, value + 100))
    files.wait()


OPERATIONS: dict[str, tuple[list[str], Callable[..., None]]] = {
    "replace_folder": (["edgerun.models.atomic"], replace_folder),
    "write_file": (["edgerun.models.atomic"], write_file),
    "keep_prefix": (["edgerun.runtime.kv.prefix_files"], keep_prefix),
    "export": (
        ["edgerun.edge.cli.command_line", "edgerun.edge.cli.export", "edgerun.export.pipeline", "onnxruntime", "onnx"],
        export,
    ),
}
