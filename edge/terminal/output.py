"""Everything that is printed: the only module of edge/ that writes to standard output and standard error.

Names, notes and errors come from model files and libraries, so all that is printed passes `for_terminal`. An answer
that goes to a file or a pipe is written as it is. The prompt of the chat draws through `prompt_output`, and an answer
that is drawn again while it grows through `live_view`.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Final, cast

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.segment import Segment
from rich.text import Text
from rich.theme import Theme

from ...models.user_text import for_terminal, on_one_line

if TYPE_CHECKING:  # only a chat has a prompt
    from prompt_toolkit.output import Output

_PIPE_WIDTH: Final = 110
"""Width of tables where standard output is not a terminal, at least."""
_PATIENCE_S: Final = 0.3
"""Seconds after which it is shown what the program waits for."""
_THEME: Final = Theme({"markdown.code": "bold cyan", "markdown.code_block": "none", "markdown.item.number": "bold"})
"""Styles that suit dark and light backgrounds."""
_DUMB: Final = ("dumb", "unknown")
"""Values of the environment variable TERM for terminals that understand no escape sequences."""


class SafeConsole(Console, RenderHook):
    """A rich console that shows text as it is, without markup, and control characters as replacements.

    Styles are given as arguments (`style=`), never in the text, which may come from a model file.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False, theme=_THEME)
        if not self.is_terminal:
            self.width = max(self.width, _PIPE_WIDTH)
        self.push_render_hook(self)

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Put every renderable behind the filter; the escape sequences of styles are added after it."""
        return [_Filtered(renderable) for renderable in renderables]


class _Filtered:
    """Renders another renderable with its text filtered; or its last lines, as many as the terminal has room for."""

    def __init__(self, renderable: ConsoleRenderable, *, last_lines: bool = False) -> None:
        self._renderable = renderable
        self._last_lines = last_lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        segments = console.render(self._renderable, options)
        if self._last_lines:
            lines = console.render_lines(self._renderable, options.update(height=None), pad=False)
            shown = lines[-max(console.height - 1, 1) :]
            segments = (segment for line in shown for segment in (*line, Segment.line()))
        for segment in segments:
            yield segment if segment.control else Segment(for_terminal(segment.text), segment.style)


@contextmanager
def live_view(console: SafeConsole) -> Iterator[Callable[[ConsoleRenderable], None]]:
    """What stands below everything printed, and is drawn again when it changes; it vanishes at the end of the block.

    Within the block, print to the same console only.

    Yields:
        What draws a renderable in place of what was drawn before: its last lines, if it is higher than the terminal.
    """
    from rich.live import Live  # noqa: PLC0415

    live = Live(
        console=console,
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
        vertical_overflow="visible",
    )
    live.start()
    try:
        # The hook of a console does not see what its live display shows.
        yield lambda shown: live.update(_Filtered(shown, last_lines=True), refresh=True)
    finally:
        live.update(Text(""))
        live.stop()


@contextmanager
def waiting_shown(text: str) -> Iterator[None]:
    """Show on standard error what the program waits for, if the block lasts."""
    console = SafeConsole(stderr=True)
    if not (console.is_terminal and can_draw()):
        yield
        return
    status = console.status(on_one_line(text))
    timer = threading.Timer(_PATIENCE_S, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        status.stop()


class _SafeOutput:
    """The output of prompt_toolkit with the text that it writes filtered; escape sequences it writes separately."""

    def __init__(self, output: Output) -> None:
        self._output = output

    def write(self, data: str) -> None:
        """Write text. Carriage returns move the cursor; carriage returns of the text itself arrive as `^M`."""
        self._output.write("\r".join(map(for_terminal, data.split("\r"))))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._output, name)


def prompt_output() -> Output:
    """The output that a prompt of prompt_toolkit draws through: standard output, behind the filter."""
    from prompt_toolkit.output import Output, create_output  # noqa: PLC0415

    Output.register(_SafeOutput)
    return cast(Output, _SafeOutput(create_output(sys.stdout)))


def can_draw() -> bool:
    """Whether standard input and output are a terminal on which text can be drawn again in place."""
    streams = (sys.stdin, sys.stdout)
    return all(stream is not None and stream.isatty() for stream in streams) and os.environ.get("TERM") not in _DUMB


def set_clipboard(text: str) -> None:
    """Ask the terminal to put text into the clipboard (OSC 52); terminals that do not know how ignore it."""
    sys.stdout.write(f"\x1b]52;c;{base64.b64encode(text.encode()).decode()}\x07")
    sys.stdout.flush()


def write_out(text: str) -> None:
    """Write a piece of an answer to standard output and flush it; control characters do not reach a terminal."""
    sys.stdout.write(for_terminal(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def write_reasoning(text: str) -> None:
    """Show what a model thinks before it answers: faint, on a terminal, and nowhere else."""
    if text and sys.stderr is not None and sys.stderr.isatty() and sys.stdout.isatty():
        sys.stderr.write(f"\x1b[2m{for_terminal(text)}\x1b[0m")
        sys.stderr.flush()


def write_line(line: str) -> None:
    """Write a line to standard output."""
    print(on_one_line(line))  # noqa: T201


def write_json(value: Any) -> None:
    """Write a JSON object on one line and flush it; control characters in strings are written as escapes."""
    print(_escaped(json.dumps(value, ensure_ascii=False)), flush=True)  # noqa: T201


def write_error(text: str) -> None:
    """Write lines to standard error, if the process has one."""
    if sys.stderr is not None:
        print(for_terminal(text), file=sys.stderr)  # noqa: T201


def write_warning(text: str) -> None:
    """Write a warning as one line on standard error."""
    write_error(f"edge-run: warning: {' '.join(text.split())}")


def showing_warnings() -> AbstractContextManager[None]:
    """Show what the package and its libraries log as warnings, through `write_warning`, during the block."""
    return _logged(logging.WARNING, lambda record: write_warning(record.getMessage()))


def showing_tracebacks(wanted: bool) -> AbstractContextManager[None]:
    """If wanted, show the tracebacks of errors that are logged during the block, for programs that go on after them."""

    def show(record: logging.LogRecord) -> None:
        if wanted and record.exc_info is not None and record.exc_info[1] is not None:
            write_error("".join(traceback.format_exception(record.exc_info[1])).rstrip())

    return _logged(logging.ERROR, show)


@contextmanager
def _logged(level: int, show: Callable[[logging.LogRecord], None]) -> Iterator[None]:
    """Call `show` with every record of this level or above that is logged during the block."""
    handler = logging.Handler(level)
    handler.emit = show  # type: ignore[assignment,method-assign]
    logger = logging.getLogger()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _escaped(encoded: str) -> str:
    """JSON with escapes for the characters that `for_terminal` would replace; they occur in strings only."""
    shown = for_terminal(encoded)
    if shown == encoded:
        return encoded
    pairs = zip(encoded, shown, strict=True)
    return "".join(char if char == replaced else f"\\u{ord(char):04x}" for char, replaced in pairs)
