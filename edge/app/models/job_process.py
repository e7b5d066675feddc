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
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ....errors import EdgeError
from ....models.progress import Progress
from ....runtime.scheduling.request_run import Cancellation

if TYPE_CHECKING:
    from ....export import ExportRecipe

INSTALL: Final = 'pip install "edge-run[export]"'
_PATIENCE_S: Final = 20.0
"""Seconds that a cancelled process has to remove what it wrote; the passes of large models end within them."""
_INTERRUPTED: Final = 130
_LEAST_REPORT: Final = 0.002
"""Smallest advance of a fraction that is reported: some stages report every linear of a large model."""


def run_job(kind: str, arguments: Mapping[str, Any], progress: Progress, cancellation: Cancellation) -> dict[str, Any]:
    """Do some work in a process of its own, and wait for its end.

    Args:
        kind: what to do: a name in `_WORK`.
        arguments: JSON values; see the functions in `_WORK`.
        progress: called in this thread.
        cancellation: ends the work.

    Returns:
        The result.

    Raises:
        CancelledError: it was cancelled.
        EdgeError: it failed, for a reason that the process gave or because the process ended without one.
    """
    cancellation.check()
    last_line: deque[str] = deque(maxlen=1)
    with subprocess.Popen(
        [sys.executable, "-m", "edgerun.edge.app.models.job_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
    ) as process:
        stdin, stdout, stderr = process.stdin, process.stdout, process.stderr
        assert stdin is not None and stdout is not None and stderr is not None  # noqa: PT018, S101  all three are pipes
        errors = threading.Thread(target=lambda: last_line.extend(filter(str.strip, stderr)), daemon=True)
        errors.start()

        def stop() -> None:
            """Ask the process to end by closing its standard input, and kill it if it does not."""
            with suppress(OSError):  # it has ended already
                stdin.close()
            if process.poll() is None:
                killer = threading.Timer(_PATIENCE_S, process.kill)
                killer.daemon = True
                killer.start()

        try:
            with suppress(OSError):  # it ended before; what it wrote to standard error says why
                stdin.write(json.dumps({"kind": kind, "arguments": dict(arguments)}) + "\n")
                stdin.flush()
            with cancellation.calling(stop):
                outcome = _outcome(stdout, progress)
        finally:
            stop()
            process.wait()
            errors.join()
    cancellation.check()
    if outcome is None:
        reason = last_line[0].strip() if last_line else f"its exit code is {process.returncode}"
        raise EdgeError(f"the process that did the work ended: {reason}", "it may have run out of memory")
    if "error" in outcome:
        raise EdgeError(**outcome["error"])
    return dict(outcome["result"])


def _outcome(lines: Iterable[str], progress: Progress) -> dict[str, Any] | None:
    """Read what the process writes until its result or error; None if it ends without either."""
    for line in lines:
        try:
            message = json.loads(line)
        except ValueError:
            continue  # a library printed something
        if "stage" in message:
            progress(message["stage"], message["fraction"])
        else:
            return dict(message)
    return None


def main() -> int:
    """Do the work that standard input asks for; returns the exit code."""
    # What libraries print must not come between the messages.
    messages = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    cancelled = threading.Event()
    last = ("", -1.0)

    def write(**message: Any) -> None:
        messages.write(json.dumps(message) + "\n")
        messages.flush()

    def report(stage: str, fraction: float) -> None:
        nonlocal last
        if cancelled.is_set():
            raise KeyboardInterrupt
        if stage != last[0] or fraction >= 1 or fraction - last[1] >= _LEAST_REPORT:
            last = stage, fraction
            write(stage=stage, fraction=fraction)

    # Not through sys.stdin: its lock would be held by the waiting thread when the interpreter ends.
    with open(0, "rb", buffering=0, closefd=False) as standard_input:

        def interrupt_at_end() -> None:
            """Interrupt the main thread when standard input is closed, as Ctrl-C does."""
            standard_input.read()
            cancelled.set()
            _thread.interrupt_main()

        request = json.loads(standard_input.readline())
        threading.Thread(target=interrupt_at_end, daemon=True).start()
        try:
            result = _WORK[request["kind"]](request["arguments"], report)
        except KeyboardInterrupt:
            return _INTERRUPTED
        except EdgeError as error:
            failure = error
        except ModuleNotFoundError as error:
            failure = EdgeError(f"export needs the package {error.name}", INSTALL)
        else:
            write(result=result)
            return 0
        write(error={"what": failure.what, "hint": failure.hint})
        return 1


def _frontier(arguments: Mapping[str, Any], report: Progress) -> dict[str, Any]:
    """Measure plans.

    Args:
        arguments: `source`, `work` and `calibration_tokens`, as for `_export`.
        report: receives the progress.
    """
    from ....export import measure_frontier  # noqa: PLC0415

    source, recipe = _source_and_recipe(arguments, report, weights="mixed", budget="4bpw")
    return {"plans": [asdict(plan) for plan in measure_frontier(source, recipe, report)]}


def _export(arguments: Mapping[str, Any], report: Progress) -> dict[str, Any]:
    """Export a checkpoint.

    Args:
        arguments: `source`: a path, or an id on the hub; `destination`: the folder to write; either `plan`: a plan
            file, with the `work` folder and `calibration_tokens` it was measured with, or `bits` of all weights.
        report: receives the progress.
    """
    from ....export import export_model  # noqa: PLC0415

    plan = arguments.get("plan")
    weights = {"weights": f"int{arguments.get('bits') or 4}"} if plan is None else {"plan": Path(plan)}
    source, recipe = _source_and_recipe(arguments, report, **weights)
    result = export_model(source, Path(arguments["destination"]), recipe, report, command="edge-run app")
    quality = result.report.shipped if result.report is not None else result.quality
    return {
        "bytes": sum(result.file_bytes.values()),
        "bits_per_weight_read": result.bits_per_weight_read,
        "bits_per_weight_in_file": result.bits_per_weight,
        "kl": None if quality is None else quality.mean_kl,
    }


def _source_and_recipe(arguments: Mapping[str, Any], report: Progress, **choices: Any) -> tuple[Path, ExportRecipe]:
    from ....export import ExportRecipe, find_source  # noqa: PLC0415
    from ....export.recipe import NO_DRAFT  # noqa: PLC0415
    from ....models.find import is_on_hub, path_of_user  # noqa: PLC0415
    from ....models.hub.downloaded_model import parse_hub_id  # noqa: PLC0415
    from ....models.hub.fetch import fetch_checkpoint  # noqa: PLC0415

    def downloading(name: str, done: int, total: int) -> None:
        report(f"downloading {name}", done / max(total, 1))

    named = str(arguments["source"])
    if is_on_hub(named):
        source = fetch_checkpoint(parse_hub_id(named), progress=downloading)
    else:
        source = path_of_user(named, "give a checkpoint folder")
    work = arguments.get("work")
    recipe = ExportRecipe(work=None if work is None else Path(work), draft=NO_DRAFT, **choices)
    if recipe.mixed:
        recipe = replace(recipe, calibration_tokens=arguments.get("calibration_tokens"))
    return find_source(source), recipe


def _exactness(arguments: Mapping[str, Any], report: Progress) -> dict[str, Any]:
    """Compare speculative texts with plain ones, as `edge-run verify` does.

    Args:
        arguments: `model`: path of the model; `shell`: whether the prompts are requests to the bundled model; `limit`:
            number of prompts of each category; `max_tokens`: most tokens of an answer; `load`: further arguments of
            `edgerun.load`.
        report: receives the progress.
    """
    from ....runtime.engine_loading import load  # noqa: PLC0415
    from ...bench.prompt_sets import bundled_prompts, limit_per_category  # noqa: PLC0415
    from ...bench.runner import compare_texts  # noqa: PLC0415

    conversations = limit_per_category(bundled_prompts(for_shell=bool(arguments["shell"])), int(arguments["limit"]))
    report("loading the model", 0.0)
    with load(str(arguments["model"]), **arguments["load"]) as engine:
        report("loading the model", 1.0)
        found, _ = compare_texts(engine, conversations, int(arguments["max_tokens"]), report)
        return {"report": found.to_json(), "device": str(engine.device), "prompts": len(conversations)}


_WORK: Final[Mapping[str, Callable[[Mapping[str, Any], Progress], dict[str, Any]]]] = {
    "frontier": _frontier,
    "export": _export,
    "exactness": _exactness,
}


if __name__ == "__main__":
    sys.exit(main())
