"""Measured engines in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final

_WORKER: Final = Path(__file__).with_name("worker.py")


class WorkerError(RuntimeError):
    """A worker process ended early; its message is on standard error."""


class Worker:
    """An engine in its own process; use as a context manager.

    A worker computes only during a call, so several may be alive and be measured in turn.
    """

    def __init__(
        self,
        label: str,
        engine: str,
        model: Path,
        *,
        python: str | None = None,
        environment: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> None:
        """Start the process and load `model` with `engine` (see `worker.ENGINES`); `settings` go to its constructor."""
        self.label: Final = label
        self._process = subprocess.Popen(
            [python or sys.executable, str(_WORKER)],
            env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
        )
        self.loaded: Final[dict[str, Any]] = self.call("load", engine=engine, model=str(model), **settings)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def call(self, method: str, **arguments: Any) -> Any:
        """Call a method in the worker process and return its result.

        Raises:
            WorkerError: the process has ended.
        """
        process = self._process
        assert process.stdin is not None  # noqa: S101 - for the type checker
        assert process.stdout is not None  # noqa: S101
        try:
            process.stdin.write(json.dumps({"method": method, "arguments": arguments}) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise WorkerError(f"the {self.label} worker ended with status {process.wait()}")
        return json.loads(line)

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._process.wait()
