"""What the chat reads: commands, lines on terminals that cannot be drawn on, and keys between prompts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from ..interrupt import Interrupts
from ..output import can_draw, write_error

PROMPT: Final = "> "
CONTINUATION: Final = "  "


@dataclass(frozen=True)
class Command:
    """A command of the chat, made by `command`."""

    name: str
    argument: str
    """What its argument is called; empty if it takes none."""
    candidates: Callable[[Any], Iterable[str]]
    """What its argument may be, for completion."""
    takes_path: bool
    run: Callable[[Any, str], None]
    """The method of the commands that does it."""

    @property
    def summary(self) -> str:
        """What it does: the docstring of its method, in the middle of a sentence."""
        text = (self.run.__doc__ or "").partition("\n")[0].rstrip(".")
        return text[:1].lower() + text[1:]


def command(
    name: str,
    argument: str = "",
    candidates: Callable[[Any], Iterable[str]] = lambda _: (),
    *,
    takes_path: bool = False,
) -> Callable[[Callable[[Any, str], None]], Command]:
    """Make a method a command of the chat."""
    return partial(Command, name, argument, candidates, takes_path)


@contextmanager
def keys_kept_for_the_prompt() -> Iterator[None]:
    """Between prompts that draw, do not echo keys; the next prompt reads them. Ctrl-C still interrupts.

    Does nothing where the terminal has no such modes, or its prompts are plain.
    """
    if sys.platform != "win32" and can_draw():
        import termios  # noqa: PLC0415

        before = termios.tcgetattr(sys.stdin)
        mode = termios.tcgetattr(sys.stdin)
        mode[0] &= ~termios.ICRNL  # so that Enter arrives at the prompt as it was typed
        mode[3] &= ~(termios.ECHO | termios.ICANON)
        mode[3] |= termios.NOFLSH  # so that Ctrl-C drops neither keys nor what is being shown
        termios.tcsetattr(sys.stdin, termios.TCSANOW, mode)
        try:
            yield
        finally:
            termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
    else:
        yield


class PlainReader:
    """Reads lines with `input`; one that ends in a backslash continues in the next."""

    end_key: Final = "Ctrl-Z then Enter" if sys.platform == "win32" else "Ctrl-D"
    """The key that ends the input, for messages."""

    def __init__(self, interrupts: Interrupts) -> None:
        self._interrupts = interrupts
        if sys.platform != "win32":
            # Arrow keys and line history in `input`, not in every build of Python; nothing is written to disk.
            with suppress(ImportError):
                import readline  # noqa: PLC0415

                readline.set_history_length(1000)

    def read(self, default: str = "") -> str:  # noqa: ARG002  a plain line cannot be given text to edit
        """Read a message.

        Raises:
            EOFError: the input ended.
            KeyboardInterrupt: Ctrl-C was pressed.
        """
        line = self.ask(PROMPT)
        while line.endswith("\\"):
            line = line.removesuffix("\\") + "\n" + self.ask(CONTINUATION)
        return line

    def ask(self, question: str) -> str:
        """Read the answer to a question, or a line after another prompt; errors as for `read`."""
        try:
            with self._interrupts.raising():
                return input(question)
        except (EOFError, KeyboardInterrupt):
            write_error("")  # the cursor is still behind the prompt
            raise
