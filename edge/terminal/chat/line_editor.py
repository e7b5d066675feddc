"""The prompt of the chat: editing over several lines, pasted text, history, completion."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import History
from prompt_toolkit.input import create_input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.layout.processors import TabsProcessor
from prompt_toolkit.output import ColorDepth
from prompt_toolkit.styles import Style

from ....models.atomic import write_atomically
from ....models.user_folders import make_private_file, make_private_folder
from ....models.user_text import unify_line_ends
from ..interrupt import Interrupts
from ..output import prompt_output
from .prompt_reader import CONTINUATION, PROMPT, Command

_SHOWN_LINES: Final = 4
"""Largest number of lines that a pasted text shows as it is; a longer one is shown as one line."""
_SHOWN_CHARACTERS: Final = 600
_MENU_LINES: Final = 6
_STYLE: Final = Style.from_dict(
    {
        "bottom-toolbar": "noreverse ansibrightblack",
        "completion-menu": "noinherit",
        "completion-menu.completion": "noinherit",
        "completion-menu.completion.current": "noinherit reverse",
        "completion-menu.meta.completion": "noinherit ansibrightblack",
        "completion-menu.meta.completion.current": "noinherit reverse",
    }
)
_KEPT: Final = 1000
"""Number of messages that are kept."""
_MAX_BYTES: Final = 2 << 20
"""Size from which the file is written anew with the messages that are kept."""
_MAX_MESSAGE: Final = 64 << 10
"""Most characters of a message that is kept."""
_MOST: Final = 50
"""Largest number of completions that are offered."""


class LineEditor:
    """Reads messages at the prompt of a terminal that can be drawn on.

    Enter sends; Alt+Enter, Ctrl-J, and Enter after a backslash begin a new line. A long pasted text is shown as a few
    words, and sent whole.

    Args:
        interrupts: what Ctrl-C is given by.
        history: what was typed before.
        completer: completes commands.
        status: the line below the prompt, for a number of columns.
    """

    end_key: Final = "Ctrl-D"

    def __init__(
        self, interrupts: Interrupts, history: History, completer: Completer, status: Callable[[int], str]
    ) -> None:
        self._interrupts = interrupts
        self._pasted: Final[dict[str, str]] = {}
        """Long texts that were pasted, by the words that stand for them at the prompt."""
        output = prompt_output()
        terminal: dict[str, Any] = {
            "input": create_input(),
            "output": output,
            "style": _STYLE,
            "color_depth": ColorDepth.DEPTH_1_BIT if os.environ.get("NO_COLOR") else None,
        }
        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            prompt_continuation=CONTINUATION,
            multiline=True,
            history=history,
            completer=completer,
            complete_while_typing=Condition(lambda: self._session.default_buffer.text.startswith("/")),
            reserve_space_for_menu=_MENU_LINES,
            key_bindings=self._key_bindings(),
            input_processors=[TabsProcessor(char1=" ", char2=" ")],
            bottom_toolbar=lambda: status(output.get_size().columns),
            **terminal,
        )
        self._question: PromptSession[str] = PromptSession(**terminal)

    def read(self, default: str = "") -> str:
        """Read a message.

        Args:
            default: text that is there to be edited.

        Raises:
            EOFError: the input ended.
            KeyboardInterrupt: Ctrl-C was pressed.
        """
        self._pasted.clear()
        return self._run(self._session, default=default)

    def ask(self, question: str) -> str:
        """Read the answer to a question, which is not kept in the history; errors as for `read`."""
        return self._run(self._question, message=question)

    def _run(self, session: PromptSession[str], **arguments: Any) -> str:
        app = session.app

        def end_if_interrupted() -> None:
            if app.is_running and not app.is_done and self._interrupts.take():
                app.exit(exception=KeyboardInterrupt(), style="class:aborting")

        def interrupt() -> None:
            loop = app.loop
            if loop is not None:
                with suppress(RuntimeError):  # the prompt has just ended: the next one sees it
                    loop.call_soon_threadsafe(end_if_interrupted)

        with self._interrupts.calling(interrupt):
            return session.prompt(handle_sigint=False, pre_run=interrupt, **arguments)

    def _shown(self, text: str) -> str:
        """What the prompt shows for a pasted text: the text, or a few words in its place if it is long."""
        lines = len(text.removesuffix("\n").split("\n"))
        if lines <= _SHOWN_LINES and len(text) <= _SHOWN_CHARACTERS:
            return text
        amount = f"{lines} lines" if lines > 1 else f"{len(text)} characters"
        words = f"[pasted text {len(self._pasted) + 1}: {amount}]"
        self._pasted[words] = text
        return words

    def _key_bindings(self) -> KeyBindings:
        keys = KeyBindings()

        @keys.add("enter")
        def _send(event: KeyPressEvent) -> None:
            buffer = event.current_buffer
            if buffer.document.text_before_cursor.endswith("\\"):
                buffer.delete_before_cursor()
                buffer.newline(copy_margin=False)
                return
            text = buffer.text
            for words, pasted in self._pasted.items():
                text = text.replace(words, pasted, 1)
            history = buffer.history.get_strings()
            if text.strip() not in {"", "/quit", "/exit"} and text not in history[-1:]:
                buffer.history.append_string(text)
            event.app.exit(result=text, style="class:accepted")

        @keys.add("escape", "enter")
        @keys.add("c-j")
        def _new_line(event: KeyPressEvent) -> None:
            event.current_buffer.newline(copy_margin=False)

        @keys.add(Keys.BracketedPaste)
        def _paste(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text(self._shown(unify_line_ends(event.data)))

        @keys.add("backspace")
        def _erase(event: KeyPressEvent) -> None:
            before = event.current_buffer.document.text_before_cursor
            words = next((words for words in self._pasted if before.endswith(words)), "")
            event.current_buffer.delete_before_cursor(max(len(words), 1) * event.arg)

        return keys


class PromptHistory(History):
    """The messages that were typed, a JSON string a line. What cannot be read or written is left out.

    Args:
        path: the file.
        writing: whether what is typed now is kept in it.
    """

    def __init__(self, path: Path, *, writing: bool) -> None:
        super().__init__()
        self._path = path
        self._writing = writing

    def load_history_strings(self) -> Iterable[str]:
        """The messages in the file, the newest first."""
        return reversed(self._read())

    def store_string(self, string: str) -> None:
        """Add a message to the file."""
        if not self._writing or len(string) > _MAX_MESSAGE:
            return
        with suppress(OSError):
            make_private_folder(self._path.parent)
            make_private_file(self._path)
            with self._path.open("ab") as file:
                file.write(_line(string))
                size = file.tell()
            if size > _MAX_BYTES:
                kept = self._read()[-_KEPT:]
                while sum(map(len, kept)) > _MAX_BYTES // 2:
                    kept = kept[len(kept) // 2 :]
                write_atomically(self._path, b"".join(map(_line, kept)), private=True)

    def _read(self) -> list[str]:
        try:
            with self._path.open("rb") as file:
                lines = file.read(2 * _MAX_BYTES).splitlines()
        except OSError:
            return []
        found = []
        for line in lines[-_KEPT:]:
            with suppress(ValueError):
                found.append(json.loads(line))
        return [message for message in found if isinstance(message, str)]


def _line(message: str) -> bytes:
    return json.dumps(message).encode() + b"\n"


class ChatCompleter(Completer):
    """Completes the name of a command, and then its argument.

    Args:
        commands: the commands by name.
        owner: what their candidates are asked of.
    """

    def __init__(self, commands: Mapping[str, Command], owner: object) -> None:
        self._owner = owner
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
            typed = argument.lstrip()
            # Candidates that begin with what is typed, or else contain it.
            names = [each for each in chosen.candidates(self._owner) if typed.lower() in each.lower()]
            found = [each for each in names if each.lower().startswith(typed.lower())] or names
            for each in found[:_MOST]:
                yield Completion(each, -len(typed))
