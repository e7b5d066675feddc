"""Shows an answer while it is generated: as it is, or as rendered Markdown."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import ExitStack
from typing import ClassVar, Final, cast

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.markdown import Heading, Markdown, MarkdownElement, TableElement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from ....models.user_text import for_terminal
from ..output import SafeConsole, live_view, write_out

_INTERVAL_S: Final = 0.08
"""Least time between two drawings of an answer."""
_SHARE: Final = 5
"""An answer that takes long to draw is drawn less often: the time in between is this many times as long."""
_CODE_THEME: Final = "ansi_dark"
"""Colours of the terminal itself, which suit its background."""


class RawView:
    """Shows an answer as it is."""

    def __init__(self) -> None:
        self._last = ""

    def write(self, text: str) -> None:
        """Show a further piece."""
        write_out(text)
        self._last = text[-1:] or self._last

    def close(self) -> None:
        """End the line, if there is one."""
        if self._last not in {"", "\n"}:
            write_out("\n")


class MarkdownView:
    """Shows an answer as rendered Markdown.

    A finished block (a paragraph, a list, a table, a code block) is printed for good; the last one is drawn again as it
    grows. So everything stays in the terminal's history, however long the answer is.
    """

    def __init__(self, console: SafeConsole) -> None:
        self._console = console
        self._open = ExitStack()
        self._draw = self._open.enter_context(live_view(console))
        self._text = ""
        """Text of the last block, which may go on."""
        self._printed = False
        self._due = 0.0
        """Time from which the answer may be drawn again."""

    def write(self, text: str) -> None:
        """Show a further piece, if the last drawing is some time ago."""
        self._text += text
        started = time.monotonic()
        if started < self._due:
            return
        finished, self._text = _split_last_block(self._text)
        self._print(finished)
        self._draw(self._spaced(self._text))
        ended = time.monotonic()
        self._due = ended + max(_INTERVAL_S, _SHARE * (ended - started))

    def close(self) -> None:
        """Print what is left."""
        self._open.close()
        self._print(self._text)

    def _print(self, text: str) -> None:
        if text.strip():
            self._console.print(self._spaced(text))
            self._printed = True

    def _spaced(self, text: str) -> Group:
        """The text, after an empty line that separates it from the blocks before it."""
        return Group(*[Text()] * self._printed, AnswerMarkdown(text))


class _LeftHeading(Heading):
    """A heading at the left edge, of which the first two levels differ from the others."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.text.justify = "left"
        self.text.stylize("bold underline" if self.tag in {"h1", "h2"} else "bold")
        yield self.text


class _WholeTable(TableElement):
    """A table whose cells show all of their text, however narrow the terminal is."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        if self.header is not None and self.header.row is not None:
            for cell in self.header.row.cells:
                table.add_column(cell.content.copy(), overflow="fold")
        if self.body is not None:
            for row in self.body.rows:
                table.add_row(*(cell.content for cell in row.cells))
        yield table


class AnswerMarkdown(Markdown):
    """Renders Markdown of an answer, without empty lines around it.

    HTML is shown as text, and the address of a link after its words. Lines have no spaces at their ends, which would
    become lines of their own when the terminal is made narrower.
    """

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "heading_open": _LeftHeading,
        "table_open": _WholeTable,
    }

    def __init__(self, text: str) -> None:
        super().__init__("", code_theme=_CODE_THEME, inline_code_theme=None, hyperlinks=False)
        self.markup = for_terminal(text)
        self.parsed = _parse(self.markup)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rendered = cast("Iterable[Segment]", super().__rich_console__(console, options))
        cropped = Segment.split_and_crop_lines(rendered, options.max_width, include_new_lines=False, pad=False)
        lines = [_without_spaces_at_end(line) for line in cropped]
        while lines and not lines[-1]:
            lines.pop()
        first = next((index for index, line in enumerate(lines) if line), 0)
        for line in lines[first:]:
            yield from line
            yield Segment.line()


def _without_spaces_at_end(line: list[Segment]) -> list[Segment]:
    kept = list(line)
    while kept and not kept[-1].text.rstrip():
        kept.pop()
    if kept:
        kept[-1] = kept[-1]._replace(text=kept[-1].text.rstrip())
    return kept


def _parse(text: str) -> list[Token]:
    return MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"]).parse(text)


def _split_last_block(text: str) -> tuple[str, str]:
    """Split Markdown before its last block, which is the only one that text to come can change."""
    starts = [token.map[0] for token in _parse(text) if token.level == 0 and token.nesting >= 0 and token.map]
    if len(starts) < 2:
        return "", text
    lines = text.split("\n")
    return "\n".join(lines[: starts[-1]]), "\n".join(lines[starts[-1] :])
