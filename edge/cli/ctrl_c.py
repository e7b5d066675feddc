"""Ctrl-C ends the process of the command with exit code 130, and nothing is printed.

By default Python raises `KeyboardInterrupt` wherever it is. While modules are imported nothing catches that, and the
initialization of an extension module may turn it into an `ImportError`. So from the start to the end of the process a
handler ends it at once, except while a command runs: a command has files to remove. From the moment where the command
has ended, Ctrl-C is ignored and the command's own exit code stands. Where the parent process ignores Ctrl-C, as a shell
without job control does for what it starts in the background, it stays ignored.
"""

from __future__ import annotations

import os
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

INTERRUPTED = 130
"""Exit code of an interrupted program."""
_TWICE_S = 1.0
"""Signals within this time are one request to end: `timeout` sends one to the process and one to its group."""


def end_on_ctrl_c() -> None:
    """Make Ctrl-C end this process at once, unless it is ignored or handled by a program around this one."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def _end(_signal: int, _frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)


def ignore_ctrl_c() -> None:
    """Ignore Ctrl-C from now on, where `end_on_ctrl_c` handles it.

    At its end Python takes away handlers that are written in Python, so that Ctrl-C would kill the process by a signal.
    """
    handler = signal.getsignal(signal.SIGINT)
    if getattr(handler, "__func__", handler) in (_end, CommandInterrupts._raise):
        signal.signal(signal.SIGINT, signal.SIG_IGN)


class CommandInterrupts:
    """Within the block, Ctrl-C raises `KeyboardInterrupt`, so that a command cleans up; a second one ends the process.

    Leaving the block after Ctrl-C raises `KeyboardInterrupt` in place of any other exception, because extension modules
    turn it into errors of their own. Behind the block Ctrl-C is ignored. Does nothing unless `end_on_ctrl_c` handles
    Ctrl-C.
    """

    def __init__(self) -> None:
        self._first: float | None = None
        self._active = False
        self._hook = sys.unraisablehook

    def __enter__(self) -> None:
        self._active = signal.getsignal(signal.SIGINT) is _end
        if self._active:
            sys.unraisablehook = self._unraisable
            signal.signal(signal.SIGINT, self._raise)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._active:
            ignore_ctrl_c()
            sys.unraisablehook = self._hook
        if self._first is not None:
            raise KeyboardInterrupt from error

    def _raise(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = now
            raise KeyboardInterrupt
        if now - self._first > _TWICE_S:
            _end(number, frame)

    def _unraisable(self, problem: sys.UnraisableHookArgs) -> None:
        """Python drops what is raised in a destructor. A dropped interrupt has to end the program all the same."""
        if self._first is None:
            self._hook(problem)
        elif problem.exc_type is KeyboardInterrupt:
            os._exit(INTERRUPTED)
