"""Completes the commands of the chat and their arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document

from .command import Command

_MOST: Final = 50
"""Largest number of completions that are offered."""


class ChatCompleter(Completer):
    """Completes the name of a command, and then its argument.

    Args:
        commands: the commands by name.
    """

    def __init__(self, commands: Mapping[str, Command]) -> None:
        self._commands = commands
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """The completions of what stands before the cursor."""
        text = document.text_before_cursor
        if not text.startswith("/") or "\n" in document.text:
            return
        name, space, argument = text.partition(" ")
        if not space:
            for command in self._commands.values():
                if command.name.startswith(name):
                    yield Completion(command.name, -len(name), display_meta=command.summary)
        elif (chosen := self._commands.get(name)) is None:
            return
        elif chosen.takes_path:
            yield from self._paths.get_completions(Document(argument.lstrip()), complete_event)
        else:
            yield from _matching(argument.lstrip(), chosen.candidates)


def _matching(typed: str, candidates: Callable[[], Iterable[str]]) -> Iterable[Completion]:
    """The candidates that begin with what is typed, or else contain it."""
    names = list(candidates())
    lower = typed.lower()
    found = [name for name in names if name.lower().startswith(lower)] or [
        name for name in names if lower in name.lower()
    ]
    for name in found[:_MOST]:
        yield Completion(name, -len(typed))
