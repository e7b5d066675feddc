"""A chat in the terminal: reads lines, streams answers, takes commands."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Final

from rich.text import Text

from ...errors import EdgeError, InputError
from ...models.progress import ProgressDisplay
from ...runtime.engine import Engine
from ...runtime.options import GenerateOptions
from ...runtime.result import Stats
from .explain import show_rounds
from .interrupt import cancelling_on_interrupt, raising_on_interrupt
from .output import SafeConsole, stats_line, write_out

_PROMPT: Final = "> "
_CONTINUATION: Final = "\\"
_END_OF_INPUT: Final = "Ctrl-Z then Enter" if sys.platform == "win32" else "Ctrl-D"
_HELP: Final = f"""\
/help          show this list
/reset         start a new conversation
/system TEXT   start a new conversation with this system message; without TEXT, show the current one
/stats         show statistics of the last answer
/save PATH     save the conversation for you alone; continue it later with --resume PATH
/quit          leave; so does {_END_OF_INPUT}
Ctrl-C stops an answer. A line that ends in \\ continues on the next line."""


class TerminalChat:
    """Answers the lines that the user types, until the user leaves."""

    def __init__(
        self,
        engine: Engine,
        options: GenerateOptions,
        progress: ProgressDisplay,
        *,
        system: str | None,
        resume: Path | None,
        show_stats: bool,
    ) -> None:
        self._engine = engine
        self._progress = progress
        self._options = options
        self._session = engine.session(system=system, resume=resume)
        self._show_stats = show_stats
        self._console = SafeConsole(stderr=True)
        self._last: Stats | None = None
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": self._help,
            "/reset": self._reset,
            "/system": self._system,
            "/stats": self._stats,
            "/save": self._save,
        }

    def run(self) -> int:
        """Chat until `/quit` or the end of the input; returns the exit code."""
        _enable_line_editing()
        banner = Text(self._engine.bundle.folder.resolve().name, "bold")
        banner.append(f" on {self._engine.device}. /help for help, /quit to leave.", "not bold")
        self._console.print(banner)
        if self._session.messages:
            self._note(f"{len(self._session.messages)} messages in the conversation")
        with raising_on_interrupt():
            self._answer_lines()
        return 0

    def _answer_lines(self) -> None:
        while True:
            try:
                line = self._read()
            except EOFError:
                self._console.print()
                return
            except KeyboardInterrupt:
                self._console.print()
                self._note(f"to leave: /quit or {_END_OF_INPUT}")
                continue
            if line.split(" ")[0] in ("/quit", "/exit"):
                return
            if line:
                try:
                    self._handle(line)
                except EdgeError as error:
                    self._show_error(str(error))

    def _read(self) -> str:
        line = input(_PROMPT)
        while line.endswith(_CONTINUATION):
            line = line[: -len(_CONTINUATION)] + "\n" + input("  ")
        return line.strip()

    def _handle(self, line: str) -> None:
        if not line.startswith("/"):
            self._answer(line)
            return
        name, _, argument = line.partition(" ")
        command = self._commands.get(name)
        if command is None:
            self._show_error(f"unknown command {name}; /help lists the commands")
        else:
            command(argument.strip())

    def _answer(self, text: str) -> None:
        chunks = self._session.stream(text, self._options)
        with self._progress, closing(chunks), cancelling_on_interrupt(chunks.cancel) as interrupted:
            for chunk in chunks:
                write_out(chunk.text)
                if chunk.stats is not None:
                    self._last = chunk.stats
        write_out("\n")
        if interrupted():
            self._note("stopped")
        if self._options.explain and self._last is not None:
            show_rounds(self._last.rounds, self._engine.graph_io)
        if self._show_stats:
            self._stats("")

    def _help(self, _argument: str) -> None:
        self._console.print(_HELP)

    def _reset(self, _argument: str) -> None:
        self._session.reset()
        self._note("new conversation")

    def _system(self, argument: str) -> None:
        if not argument:
            self._note(f"system message: {self._session.system or 'none'}")
            return
        self._session = self._engine.session(system=argument)
        self._note("new conversation")

    def _stats(self, _argument: str) -> None:
        self._note(stats_line(self._last, self._engine) if self._last else "no answer yet")

    def _save(self, argument: str) -> None:
        if not argument:
            self._show_error("/save needs a path")
            return
        path = Path(os.path.expanduser(argument))  # unlike Path.expanduser, does not raise for an unknown user
        try:
            if not self._may_write(path):
                self._note("not saved")
                return
            self._session.save(path)
        except OSError as error:
            self._show_error(f"{path} cannot be written: {error.strerror or error}")
        else:
            self._note(f"saved; continue with --resume {shlex.quote(str(path))}")

    def _may_write(self, path: Path) -> bool:
        """Whether a conversation may be saved there; asks before a file is replaced.

        Raises:
            InputError: it cannot be saved there.
        """
        if path.is_file():
            self._note(f"{path} exists")
            try:
                return input("replace it? [y/N] ").strip().lower() in {"y", "yes"}
            except (EOFError, KeyboardInterrupt):
                self._console.print()
                return False
        if path.exists():
            raise InputError(f"{path} is {'a folder' if path.is_dir() else 'not a file'}", "name a new file")
        if not path.parent.is_dir():
            raise InputError(f"the folder {path.parent} does not exist", "make it first, or save somewhere else")
        return True

    def _note(self, text: str) -> None:
        self._console.print(text, style="dim", soft_wrap=True)

    def _show_error(self, text: str) -> None:
        self._console.print(text, style="red", soft_wrap=True)


def _enable_line_editing() -> None:
    """Enable arrow keys and line history in `input` where Python has them; nothing is written to disk."""
    if sys.platform != "win32":
        try:
            import readline  # noqa: PLC0415
        except ImportError:  # not in every build of Python
            return
        readline.set_history_length(1000)
