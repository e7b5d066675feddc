"""A program on a pseudo-terminal, and the screen that a user sees."""

from __future__ import annotations

import codecs
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from support.processes import started

pty = pytest.importorskip("pty", reason="POSIX terminals")
pyte = pytest.importorskip("pyte", reason="a terminal emulator")

if sys.platform != "win32":
    import fcntl
    import struct
    import termios

_LIMIT_S = 120


class TerminalScreen:
    """A process, the keyboard and the screen of its terminal.

    Attributes:
        process: the process.
        first_modes: the modes of the terminal before the process began.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        terminal: tuple[int, int],
        first_modes: list[Any],
        columns: int,
        lines: int,
    ) -> None:
        self.process = process
        self.first_modes = first_modes
        self.output = ""
        """Everything that the program has written, escape sequences included."""
        self._master, self._slave = terminal
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._screen = pyte.HistoryScreen(columns, lines, history=10_000, ratio=0.5)
        # Programs ask the terminal where its cursor is.
        self._screen.write_process_input = self.type
        self._stream = pyte.Stream(self._screen)

    @property
    def columns(self) -> int:
        """The width of the screen."""
        return int(self._screen.columns)

    @property
    def lines(self) -> list[str]:
        """All lines from the first one on, also those that have left the screen, without spaces at their ends."""
        width = self._screen.columns
        earlier = ["".join(line[column].data for column in range(width)) for line in self._screen.history.top]
        return [line.rstrip() for line in (*earlier, *self._screen.display)]

    @property
    def text(self) -> str:
        """All lines as one text, without empty lines at the end."""
        return "\n".join(self.lines).rstrip()

    @property
    def modes(self) -> list[Any]:
        """The modes of the terminal."""
        return termios.tcgetattr(self._slave)

    def type(self, text: str) -> None:
        """Send keys."""
        os.write(self._master, text.encode())

    def paste(self, text: str) -> None:
        """Paste a text, as terminals send it if programs ask for bracketed paste: with `\\r` at the ends of lines."""
        data = ("\x1b[200~" + text.replace("\n", "\r") + "\x1b[201~").encode()
        while data:
            # The line of the terminal takes a few kilobytes at a time.
            self.read(0.01)
            data = data[os.write(self._master, data[:1000]) :]

    def resize(self, columns: int, lines: int) -> None:
        """Change the size of the terminal's window."""
        self._screen.resize(lines, columns)
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Read the output until a condition is true."""
        end = time.monotonic() + _LIMIT_S
        while not condition():
            assert time.monotonic() < end, f"not seen:\n{self.text}"
            assert self.read(0.2) or self.process.poll() is None or condition(), f"the program has ended:\n{self.text}"

    def until(self, wanted: str) -> str:
        """Read the output until a text is on the screen; returns all lines."""
        self.wait_for(lambda: wanted in self.text)
        return self.text

    @property
    def at_prompt(self) -> bool:
        """Whether there is an empty prompt of the chat on the last line but the status."""
        return re.search(r"(^|\n)>\n+[^\n]* tokens[^\n]*$", self.text) is not None

    def until_prompt(self) -> str:
        """Read the output until there is an empty prompt of the chat; returns all lines."""
        self.wait_for(lambda: self.at_prompt)
        return self.text

    def read_for(self, seconds: float) -> None:
        """Read the output for a time."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and self.read(left):
            pass

    def end(self) -> int:
        """Read until the program has ended; returns its exit code."""
        self.wait_for(lambda: self.process.poll() is not None)
        self.read(0)
        return self.process.wait()

    def read(self, seconds: float) -> bool:
        """Read what comes next; returns whether something came within a time."""
        if not select.select([self._master], [], [], seconds)[0]:
            return False
        try:
            data = os.read(self._master, 65536)
        except OSError:
            return False
        text = self._decoder.decode(data)
        self.output += text
        self._stream.feed(text)
        return bool(data)


@contextmanager
def terminal_screen(
    command: Sequence[str], *, columns: int = 80, lines: int = 24, environment: Mapping[str, str] = {}
) -> Iterator[TerminalScreen]:
    """Run Python code on a terminal of this size, an xterm; it is killed at the end of the block.

    Args:
        command: this Python, `-c`, code and arguments.
        columns: width of the terminal.
        lines: its height.
        environment: further environment variables.
    """
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    inherited = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES"}}
    variables = {**inherited, "TERM": "xterm-256color", **environment}
    first_modes = termios.tcgetattr(slave)
    program, option, code, *arguments = command
    try:
        with started(
            [program, option, _CONTROLLED + code, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            close_fds=True,
            start_new_session=True,
            env=variables,
        ) as process:
            yield TerminalScreen(process, (master, slave), first_modes, columns, lines)
    finally:
        os.close(slave)
        os.close(master)


_CONTROLLED = "import fcntl, termios\nfcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
"""Makes the terminal that of the session, so that its keys send signals."""
