"""The process in which the fuzz tests run commands notices what must not happen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support import command_worker
from support.command_worker import CommandWorker, Outcome, needs_limits
from support.commands import Patch

pytestmark = needs_limits


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[CommandWorker]:
    with CommandWorker(tmp_path) as worker:
        yield worker


def test_good_and_bad_commands_are_told_apart(worker: CommandWorker, tiny_bundle: Path) -> None:
    answer = worker.run([str(tiny_bundle), "-n", "2", "--spec", "off"], b"the")
    assert (answer.code, answer.err, answer.fault) == (0, "", "")
    assert answer.out
    refused = worker.run(["--nonsense"])
    assert (refused.code, refused.fault) == (2, "")
    assert worker.run(["nothing", "-p", "a", "--debug"]).fault == "a traceback"


@pytest.mark.nightly
def test_a_process_that_hangs_or_ends_is_replaced(worker: CommandWorker, monkeypatch: Patch) -> None:
    monkeypatch.setattr(command_worker, "MAX_SECONDS", 0.001)  # no interpreter starts so fast
    assert "over 0 s" in worker.run(["--version"]).fault
    monkeypatch.undo()
    assert worker.run(["--version"]).code == 0
    worker.end_process()
    assert "the process ended with -9" in worker.run(["--version"]).fault
    assert worker.run(["--version"]).code == 0


@pytest.mark.parametrize(
    ("code", "err", "fault"),
    [
        (0, "", ""),
        (2, "edge-run: error: a\n", ""),
        (2, "edge-run: warning: b\nedge-run: error: a\n", ""),
        (2, "edge-run: error: a\nb\n", "2 lines of error"),
        (1, "a\n", "1 lines of error"),
        (99, "Traceback (most recent call last):\n", "a traceback"),
        (130, "", "exit code 130"),
        (1, "edge-run: error: not enough memory\n", "too much memory"),
    ],
)
def test_faults_are_named(code: int, err: str, fault: str) -> None:
    assert Outcome((), code, "", err).fault == fault
