"""Lines over standard input and output: bounded when read, whole and bounded when written."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final

from ...runtime.scheduling.request_run import Cancellation

MAX_UNREAD_BYTES: Final = 1 << 20
"""Bytes of lines that the client has not read yet, above which notifications wait; responses wait at twice as many."""
_READ_BYTES: Final = 1 << 16
STDIN: Final = 0
_STDOUT, _STDERR = 1, 2


def take_over_stdout() -> int:
    """Keep standard output for the protocol: return a descriptor of it, and let descriptor 1 mean standard error.

    What a library prints then cannot get between the lines.
    """
    sys.stdout.flush()
    own = os.dup(_STDOUT)
    try:
        os.dup2(_STDERR, _STDOUT)
    except OSError:  # standard error is closed
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, _STDOUT)
        os.close(nowhere)
    binary(own)
    return own


def binary(descriptor: int) -> None:
    """Switch off the translation of line ends that Windows does."""
    if sys.platform == "win32":
        import msvcrt  # noqa: PLC0415

        msvcrt.setmode(descriptor, os.O_BINARY)


def read_lines(descriptor: int, max_bytes: int) -> Iterator[bytes | None]:
    """The lines of a descriptor without their ends; None for one that is longer than `max_bytes`, which is skipped.

    Descriptors are read without Python's buffers: a thread that waits in one of those keeps the process from ending.
    """
    line = bytearray()
    skipping = False
    while True:
        piece = b""
        with suppress(OSError):  # closed from the other side, or never open
            piece = os.read(descriptor, _READ_BYTES)
        if not piece:
            break
        *ended, rest = piece.split(b"\n")
        for part in ended:
            yield None if skipping or len(line) + len(part) > max_bytes else bytes(line + part)
            line, skipping = bytearray(), False
        line += rest
        if skipping or len(line) > max_bytes:
            line, skipping = bytearray(), True
    if skipping or line:
        yield None if skipping else bytes(line)


class LineWriter:
    """Writes lines to a descriptor in a thread of its own; each line appears whole.

    Lines that the client has not read yet are kept up to a limit. Beyond it, whoever has a further line waits: an
    answer is not generated faster than it is read, and does not fill the memory.

    Args:
        descriptor: where to write; closed with the writer.
        on_broken: called once, in the writer's thread, when the client has closed its end.
    """

    def __init__(self, descriptor: int, on_broken: Callable[[], None]) -> None:
        self._descriptor = descriptor
        self._on_broken = on_broken
        self._changed = threading.Condition()
        self._lines: deque[bytes] = deque()
        self._bytes = 0
        """Bytes of the lines that wait, and of the one that is being written."""
        self._ending = self._closing = False
        self._broken = False
        self._thread = threading.Thread(target=self._run, name="edge-run output", daemon=True)
        self._thread.start()

    def notify(self, line: bytes, cancellation: Cancellation) -> None:
        """Write a notification; waits while the client does not read. It is dropped if the request is cancelled."""
        with cancellation.calling(self._wake), self._changed:
            self._changed.wait_for(lambda: cancellation.cancelled or self._has_room(line, MAX_UNREAD_BYTES))
            if not cancellation.cancelled:
                self._append(line)

    def respond(self, line: bytes) -> None:
        """Write a response; waits while the client does not read, but has room that notifications do not take."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_room(line, 2 * MAX_UNREAD_BYTES))
            self._append(line)

    def end(self) -> None:
        """Let nobody wait any more: what comes now are the last responses."""
        self._ending = True
        self._wake()

    def close(self, timeout_s: float) -> None:
        """Write what waits, for at most `timeout_s` seconds, and let the client see the end."""
        self._ending = self._closing = True
        self._wake()
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            with suppress(OSError):
                os.close(self._descriptor)

    def _has_room(self, line: bytes, limit: int) -> bool:
        return self._broken or self._ending or not self._bytes or self._bytes + len(line) <= limit

    def _append(self, line: bytes) -> None:
        if not self._broken:
            self._lines.append(line + b"\n")
            self._bytes += len(line) + 1
            self._changed.notify_all()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._closing)
                if not self._lines:
                    return
                line = self._lines.popleft()
            try:
                rest = memoryview(line)
                while rest:
                    rest = rest[os.write(self._descriptor, rest[:_READ_BYTES]) :]
            except OSError:
                self._broken = True
            with self._changed:
                if self._broken:
                    self._lines.clear()
                self._bytes = 0 if self._broken else self._bytes - len(line)
                self._changed.notify_all()
            if self._broken:
                self._on_broken()
                return
