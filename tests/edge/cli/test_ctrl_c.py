"""Ctrl-C ends the command quietly at any moment, and not at all where it is ignored."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("onnx", reason="needs the export extra")

from support.nightly import some_nightly
from support.processes import EDGE_RUN, ignoring_ctrl_c, started

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")

AT_EVENT = """
import signal, sys
from edgerun.edge.cli.main import main

event, wanted, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
del sys.argv[1:4]
seen = 0

def watch(name, arguments):
    global seen
    if event in (name, "any") and (not wanted or str(arguments[0]).endswith(wanted)):
        seen += 1
        if seen == number:
            signal.raise_signal(signal.SIGINT)

sys.addaudithook(watch)
code = main()
if number == 0:
    print(seen)
sys.exit(code)
"""
"""Runs the command, and presses Ctrl-C at an audit event: its kind, the end of its first argument, and its number."""
READY = """
import os, sys
from edgerun.edge.cli import main as program

def handled(handle=program.end_on_ctrl_c, pipe=int(sys.argv.pop(1))):
    handle()
    os.write(pipe, b"r")

program.end_on_ctrl_c = handled
sys.exit(program.main())
"""
"""Runs the command, and writes to a pipe as soon as the command handles Ctrl-C; before that, Python does."""
AT_THE_END = """
import atexit, os, signal, sys
from edgerun.edge.cli.ctrl_c import CommandInterrupts
from edgerun.edge.cli.main import main

moment = sys.argv.pop(1)

def press(kill=os.kill, process=os.getpid(), number=signal.SIGINT):
    kill(process, number)

class PressedWhenRemoved:
    __del__ = lambda self, press=press: press()

def leave(self, *error, left=CommandInterrupts.__exit__):
    if moment == "before":
        press()
    try:
        left(self, *error)
    finally:
        if moment == "after":
            press()

CommandInterrupts.__exit__ = leave
if moment == "at exit":
    atexit.register(press)
elif moment == "late at exit":
    kept = PressedWhenRemoved()
code = main()
if moment == "at the return":
    press()
sys.exit(code)
"""
"""Runs the command, and presses Ctrl-C at a moment of its end."""
REQUEST = ["-p", "find files larger than 100 MB", "-n", "8"]
BEFORE_AN_ANSWER = [
    ("open", "model.onnx"),
    ("import", "numpy"),
    ("import", "typer"),
    ("import", "onnxruntime.capi.onnxruntime_pybind11_state"),
    ("open", "tokenizer.json"),
]
DURING_AN_EXPORT = [("open", "tokenizer.json"), ("import", "edgerun.export.pipeline"), ("open", "config.json")]
STEPS = 80
"""Moments of one run at which Ctrl-C is pressed nightly."""
DELAYS_S = [0.002, 0.4, *(0.05 * step for step in range(1, 25) if step != 8)]


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=120, check=False)


@pytest.mark.parametrize("moment", some_nightly(BEFORE_AN_ANSWER, 3))
def test_ctrl_c_before_the_answer_prints_nothing_and_exits_130(moment: tuple[str, str]) -> None:
    result = run(AT_EVENT, *moment, "1", *REQUEST)
    assert (result.returncode, result.stdout, result.stderr) == (130, b"", b"")


@pytest.mark.parametrize("moment", some_nightly(DURING_AN_EXPORT, 3))
def test_ctrl_c_during_an_export_leaves_nothing(tiny_bundle: Path, tmp_path: Path, moment: tuple[str, str]) -> None:
    export = ("export", str(tiny_bundle.parent / "checkpoint"), str(tmp_path / "out"))
    result = run(AT_EVENT, *moment, "1", *export)
    assert (result.returncode, result.stdout, result.stderr, [*tmp_path.iterdir()]) == (130, b"", b"", [])


def check_ended_quietly(code: int, out: bytes, err: bytes) -> None:
    """An answer that has begun, or is complete, may be printed; nothing else."""
    assert err == b""
    assert code in ({0, 130} if out.startswith(b"find") else {130})
    assert not out or out.startswith(b"find"[: len(out.rstrip())])


@pytest.mark.parametrize(
    ("arguments", "own_code"), [(["--version"], 0), (["models", "--remove", "x"], 2), (["mistyped"], 2)]
)
@pytest.mark.parametrize("moment", ["before", "after", "at the return", "at exit", "late at exit"])
def test_ctrl_c_after_the_end_of_a_command_leaves_its_exit_code(
    arguments: list[str], own_code: int, moment: str
) -> None:
    result = run(AT_THE_END, moment, *arguments)
    interrupted = moment == "before" and arguments != ["mistyped"]  # no command begins there
    assert result.returncode == (130 if interrupted else own_code)
    assert b"Traceback" not in result.stderr
    assert b"Interrupt" not in result.stderr


@pytest.mark.nightly
def test_ctrl_c_at_any_step_ends_quietly() -> None:
    counted = run(AT_EVENT, "any", "", "0", *REQUEST)  # never
    assert (counted.returncode, counted.stderr) == (0, b"")
    steps = int(counted.stdout.split()[-1])
    assert steps > STEPS
    for number in range(1, steps, steps // STEPS):
        result = run(AT_EVENT, "any", "", str(number), *REQUEST)
        check_ended_quietly(result.returncode, result.stdout, result.stderr)


@pytest.mark.parametrize("delay", some_nightly(DELAYS_S, len(DELAYS_S)))
def test_ctrl_c_after_any_time_ends_quietly(delay: float) -> None:
    reading, writing = os.pipe()
    with started(
        [sys.executable, "-c", READY, str(writing), *REQUEST],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[writing],
    ) as process:
        os.close(writing)
        os.read(reading, 1)
        os.close(reading)
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    check_ended_quietly(process.returncode, out, err)


@pytest.mark.parametrize("ignored", [False, True])
def test_ctrl_c_keeps_the_partial_text_and_where_it_is_ignored_the_answer_goes_on(
    endless_bundle: Path, ignored: bool
) -> None:
    command = [*EDGE_RUN, str(endless_bundle), "-p", "the", "-t", "1"]
    if ignored:
        command = ignoring_ctrl_c([*command, "-n", "100"])
    with started(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=120)
    assert first
    assert rest.endswith(b"\n")
    assert (process.returncode, err) == (0 if ignored else 130, b"")


def test_little_is_imported_before_ctrl_c_is_handled() -> None:
    program = "import sys; before = set(sys.modules); import edgerun.edge.cli.main; print(*set(sys.modules) - before)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, encoding="utf-8", check=True)
    ours = {"", "telemetry", "version", "edge", "edge.cli", "edge.cli.main", "edge.cli.ctrl_c"}
    found = set(result.stdout.split()) - {f"edgerun.{name}".rstrip(".") for name in ours}
    assert found <= sys.stdlib_module_names | {"collections.abc"}
    assert not found & {"typing", "contextlib", "threading"}
