"""Long work in a process of its own: exports and exactness checks of the app.

The work computes for minutes with all processors, and must neither slow the server's event loop down nor take it along
if it runs out of memory. The process reads one JSON object from standard input and writes one a line to standard
output: reports of progress, and at the end a result or an error. It ends, removing what it has written so far, when its
standard input is closed. So closing it cancels the work, on every system, and a process whose app was killed ends too.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Final

from ....errors import EdgeError
from ...service.cancellation import Cancellation

_PATIENCE_S: Final = 20.0
"""Seconds that a cancelled process has to remove what it wrote; the passes of large models end within them."""
_KEPT_LINES: Final = 20
"""Lines of standard error that are kept for the message about a process that failed."""
_MODULE: Final = "edgerun.edge.app.models.job_worker"


class JobKind(StrEnum):
    """What a process does; `job_worker` says what each takes and returns."""

    FRONTIER = "frontier"
    EXPORT = "export"
    EXACTNESS = "exactness"


JobProgress = Callable[[str, float], None]
"""Receives the stage of the work, and the fraction of that stage that is done."""


class JobError(EdgeError):
    """The work failed, for the reason that its process gave, or without one."""


def run_job(
    kind: JobKind, arguments: Mapping[str, Any], progress: JobProgress, cancellation: Cancellation
) -> dict[str, Any]:
    """Do some work in a process of its own, and wait for its end.

    Args:
        kind: what to do.
        arguments: JSON values; see `job_worker`.
        progress: called in this thread.
        cancellation: ends the work.

    Returns:
        The result.

    Raises:
        CancelledError: it was cancelled.
        JobError: it failed, for a reason that the process gave or because the process ended without one.
    """
    cancellation.check()
    last_lines: list[str] = []
    flags = getattr(subprocess, "CREATE_NO_WINDOW", 0)
    with subprocess.Popen(  # noqa: S603  this interpreter, and a module of this package
        [sys.executable, "-m", _MODULE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        creationflags=flags,
    ) as process:
        assert process.stdin is not None  # noqa: S101  see above
        assert process.stdout is not None  # noqa: S101
        assert process.stderr is not None  # noqa: S101
        errors = threading.Thread(target=_keep_last, args=(process.stderr, last_lines), daemon=True)
        errors.start()
        try:
            _write(process, json.dumps({"kind": kind.value, "arguments": dict(arguments)}) + "\n")
            with cancellation.calling(lambda: _stop(process)):
                outcome = _outcome(process, progress)
        finally:
            _stop(process)
            process.wait()
            errors.join()
    cancellation.check()
    if outcome is None:
        reason = last_lines[-1] if last_lines else f"its exit code is {process.returncode}"
        raise JobError(f"the process that did the work ended: {reason}", "it may have run out of memory")
    if "error" in outcome:
        error = outcome["error"]
        raise JobError(str(error["what"]), str(error["hint"]))
    return dict(outcome["result"])


def _outcome(process: subprocess.Popen[str], progress: JobProgress) -> dict[str, Any] | None:
    """Read what the process writes until its result or error; None if it ends without either."""
    assert process.stdout is not None  # noqa: S101  see `run_job`
    for line in process.stdout:
        try:
            message = json.loads(line)
        except ValueError:
            continue  # a library printed something
        if "stage" in message:
            progress(str(message["stage"]), float(message["fraction"]))
        elif "result" in message or "error" in message:
            return dict(message)
    return None


def _stop(process: subprocess.Popen[str]) -> None:
    """Ask the process to end by closing its standard input, and kill it if it does not."""
    try:
        if process.stdin is not None:
            process.stdin.close()
    except OSError:  # it has ended already
        pass
    if process.poll() is None:
        killer = threading.Timer(_PATIENCE_S, process.kill)
        killer.daemon = True
        killer.start()
        threading.Thread(target=_disarm, args=(process, killer), daemon=True).start()


def _disarm(process: subprocess.Popen[str], killer: threading.Timer) -> None:
    process.wait()
    killer.cancel()


def _write(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdin is not None  # noqa: S101  see `run_job`
    try:
        process.stdin.write(text)
        process.stdin.flush()
    except OSError:
        return  # it ended before; what it wrote to standard error says why


def _keep_last(stream: Any, lines: list[str]) -> None:
    for line in stream:
        if text := line.strip():
            lines.append(text)
            del lines[:-_KEPT_LINES]
