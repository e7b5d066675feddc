"""Long work in a process of its own (this module): exports and exactness checks of the app.

The work computes for minutes with all processors, and must neither slow the server's event loop down nor take it along
if it runs out of memory. The process reads one JSON object from standard input and writes one a line to standard
output: reports of progress, and at the end a result or an error. It ends as with Ctrl-C, removing what it has written
so far, when its standard input is closed. So closing it cancels the work, on every system, and a process whose app was
killed ends too.
"""

from __future__ import annotations

import _thread
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ....errors import EdgeError, InputError
from ....runtime.scheduling.request_run import Cancellation

if TYPE_CHECKING:
    from ....export import ExportRequest

_PATIENCE_S: Final = 20.0
"""Seconds that a cancelled process has to remove what it wrote; the passes of large models end within them."""
_KEPT_LINES: Final = 20
"""Lines of standard error that are kept for the message about a process that failed."""
_MODULE: Final = "edgerun.edge.app.models.job_process"
JobProgress = Callable[[str, float], None]
"""Receives the stage of the work, and the fraction of that stage that is done."""
_INTERRUPTED: Final = 130
_INSTALL: Final = 'pip install "edge-run[export]"'
_LEAST_REPORT: Final = 0.002
"""Smallest advance of a fraction that is reported: some stages report every linear of a large model."""
_cancelled = threading.Event()


class JobKind(StrEnum):
    """What a process does; the functions in `_WORK` say what each takes and returns."""

    FRONTIER = "frontier"
    EXPORT = "export"
    EXACTNESS = "exactness"


class JobError(EdgeError):
    """The work failed, for the reason that its process gave, or without one."""


def run_job(
    kind: JobKind, arguments: Mapping[str, Any], progress: JobProgress, cancellation: Cancellation
) -> dict[str, Any]:
    """Do some work in a process of its own, and wait for its end.

    Args:
        kind: what to do.
        arguments: JSON values; see the functions in `_WORK`.
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


def main() -> int:
    """Do the work that standard input asks for; returns the exit code."""
    # What libraries print must not come between the messages.
    messages = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def write(**message: Any) -> None:
        messages.write(json.dumps(message) + "\n")
        messages.flush()

    # Not through sys.stdin: its lock would be held by the waiting thread when the interpreter ends.
    with open(0, "rb", buffering=0, closefd=False) as standard_input:
        request = json.loads(_first_line(standard_input.read))
        threading.Thread(target=_interrupt_at_end, args=(standard_input.read,), daemon=True).start()
        try:
            result = _WORK[JobKind(request["kind"])](request["arguments"], _Report(write))
        except KeyboardInterrupt:
            return _INTERRUPTED
        except EdgeError as error:
            write(error={"what": error.what, "hint": error.hint})
            return 1
        write(result=result)
        return 0


def _first_line(read: Callable[[int], bytes]) -> bytes:
    line = b""
    while not line.endswith(b"\n") and (piece := read(1)):
        line += piece
    return line


def _interrupt_at_end(read: Callable[[int], bytes]) -> None:
    """Interrupt the main thread when standard input is closed, as Ctrl-C does."""
    while read(1):
        pass
    _cancelled.set()
    _thread.interrupt_main()


class _Report:
    """A `Progress` that writes messages, fewer than it receives."""

    def __init__(self, write: Callable[..., None]) -> None:
        self._write = write
        self._last = ("", -1.0)

    def __call__(self, stage: str, fraction: float) -> None:
        if _cancelled.is_set():
            raise KeyboardInterrupt
        last_stage, last_fraction = self._last
        if stage != last_stage or fraction >= 1 or fraction - last_fraction >= _LEAST_REPORT:
            self._last = stage, fraction
            self._write(stage=stage, fraction=fraction)

    def bytes_of(self, name: str, done: int, total: int) -> None:
        """Report a download."""
        self(f"downloading {name}", done / max(total, 1))


def _frontier(arguments: Mapping[str, Any], report: _Report) -> dict[str, Any]:
    """Measure plans.

    Args:
        arguments: `source`, `work` and `calibration_tokens`, as for `_export`.
        report: receives the progress.
    """
    _require_export_packages()
    from ....export import measure_frontier  # noqa: PLC0415

    request = _request(arguments, report, weights="mixed", budget="4bpw")
    return {"plans": [asdict(plan) for plan in measure_frontier(request, report)]}


def _export(arguments: Mapping[str, Any], report: _Report) -> dict[str, Any]:
    """Export a checkpoint.

    Args:
        arguments: `source`: a path, or an id on the hub; `destination`: the folder to write; either `plan`: a plan
            file, with the `work` folder and `calibration_tokens` it was measured with, or `bits` of all weights.
        report: receives the progress.
    """
    _require_export_packages()
    from ....export import export_model  # noqa: PLC0415

    plan = arguments.get("plan")
    weights = {"weights": f"int{arguments.get('bits') or 4}"} if plan is None else {"plan": Path(plan)}
    result = export_model(_request(arguments, report, **weights), report)
    quality = result.report.shipped if result.report is not None else result.quality
    return {
        "folder": str(result.bundle),
        "bytes": sum(result.file_bytes.values()),
        "bits_per_weight_read": result.bits_per_weight_read,
        "bits_per_weight_in_file": result.bits_per_weight,
        "seconds": result.seconds,
        "kl": None if quality is None else quality.mean_kl,
        "top1_agreement": None if quality is None else quality.top1_agreement,
    }


def _request(arguments: Mapping[str, Any], report: _Report, **choices: Any) -> ExportRequest:
    from ....export import ExportRecipe, ExportRequest, find_source  # noqa: PLC0415
    from ....export.recipe import NO_DRAFT  # noqa: PLC0415
    from ....models.find import is_on_hub, path_of_user  # noqa: PLC0415
    from ....models.hub.downloaded_model import parse_hub_id  # noqa: PLC0415
    from ....models.hub.fetch import fetch_checkpoint  # noqa: PLC0415

    named = str(arguments["source"])
    if is_on_hub(named):
        source = fetch_checkpoint(parse_hub_id(named), progress=report.bytes_of)
    else:
        source = path_of_user(named, "give a checkpoint folder")
    work = arguments.get("work")
    recipe = ExportRecipe(work=None if work is None else Path(work), draft=NO_DRAFT, **choices)
    if recipe.mixed:
        recipe = replace(recipe, calibration_tokens=arguments.get("calibration_tokens"))
    destination = Path(arguments.get("destination") or "unused")
    return ExportRequest(find_source(source), destination, recipe, "edge-run app")


def _require_export_packages() -> None:
    """Check that the extra packages of the exporter are installed.

    Raises:
        InputError: one is missing; the hint has the command that installs them.
    """
    try:
        from ....export import pipeline  # noqa: F401, PLC0415
    except ModuleNotFoundError as error:
        raise InputError(f"export needs the package {error.name}", _INSTALL) from error


def _exactness(arguments: Mapping[str, Any], report: _Report) -> dict[str, Any]:
    """Compare speculative texts with plain ones, as `edge-run verify` does.

    Args:
        arguments: `model`: path of the model; `shell`: whether the prompts are requests to the bundled model; `limit`:
            number of prompts of each category; `max_tokens`: most tokens of an answer; `load`: further arguments of
            `edgerun.load`.
        report: receives the progress.
    """
    from ....runtime.engine_loading import load  # noqa: PLC0415
    from ....runtime.measure.comparison import Comparison  # noqa: PLC0415
    from ...bench.prompt_sets import bundled_prompts, limit_per_category  # noqa: PLC0415
    from ...bench.runner import BenchSettings, PromptEncoder  # noqa: PLC0415

    max_tokens = int(arguments["max_tokens"])
    conversations = limit_per_category(bundled_prompts(for_shell=bool(arguments["shell"])), int(arguments["limit"]))
    report("loading the model", 0.0)
    with load(str(arguments["model"]), **arguments.get("load", {})) as engine:
        report("loading the model", 1.0)
        encoder = PromptEncoder(engine, BenchSettings(max_tokens))
        prompts = [encoder.encode((), each.exchanges[0]).prompt for each in conversations]
        found = Comparison(engine, max_tokens).report(prompts, lambda fraction: report("comparing texts", fraction))
        engine.drafters.store_exactness_report(found)
        return {"report": found.to_json(), "device": str(engine.device), "prompts": len(prompts)}


_WORK: Final[Mapping[JobKind, Callable[[Mapping[str, Any], _Report], dict[str, Any]]]] = {
    JobKind.FRONTIER: _frontier,
    JobKind.EXPORT: _export,
    JobKind.EXACTNESS: _exactness,
}


if __name__ == "__main__":
    sys.exit(main())
