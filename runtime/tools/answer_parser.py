"""Takes an answer apart while it is written: its text, the model's reasoning, and its calls of functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ..text.detokenizer import beginning_at_end
from .answer_parts import AnswerParser, ReasoningTags, in_reasoning
from .calls import NotACallError, OfferedTools, ToolCall
from .formats import ToolFormat
from .harmony import HarmonyParser

_SPACE: Final = " \t\r\n"


class TaggedParser(AnswerParser):
    """Parses answers in which signs stand around reasoning and calls.

    Reasoning stands at the beginning of an answer. White space around it, and before and between calls, belongs to no
    part. A call is reported when it is complete: what turns out not to be one is text, from its first sign to its
    closing one, or to the end of the answer where the format has none. Text is held back as long as it may be the
    beginning of a sign.

    Args:
        tool_format: how calls are written; None to look for none.
        tools: functions that may be called.
        tags: what stands around reasoning; None to look for none.
        in_reasoning: whether the prompt ended with the opening tag.
        max_calls: largest number of calls, after which others are left out; None for any number.
    """

    def __init__(
        self,
        tool_format: ToolFormat | None,
        tools: OfferedTools,
        tags: ReasoningTags | None = None,
        *,
        in_reasoning: bool = False,
        max_calls: int | None = None,
    ) -> None:
        super().__init__(max_calls)
        self._format = tool_format if tools else None
        self._tools = tools
        self._tags = tags
        self._in_reasoning = in_reasoning
        self._gap = ""
        """White space before the first of the calls that were read last."""
        self._has_text = False

    def _read(self) -> Iterator[None]:
        if self._tags is not None:
            opening, closing = self._tags
            while not self._in_reasoning and not self._ended and _is_beginning(self._held.lstrip(_SPACE), opening):
                yield
            if not self._in_reasoning and (begun := self._held.lstrip(_SPACE)).startswith(opening):
                self._in_reasoning, self._held = True, begun.removeprefix(opening)
            if self._in_reasoning:
                yield from self._read_reasoning(closing)
        signs = () if self._format is None else self._format.openings
        is_bare = self._format is not None and self._format.is_bare
        at_start = True
        while True:
            text = self._held
            found = [(at, -len(sign), sign) for sign in signs if (at := text.find(sign)) >= 0]
            if is_bare and at_start and (stripped := text.lstrip(_SPACE)).startswith("{"):
                found = [(len(text) - len(stripped), 0, "")]
            if found:
                at, _, sign = min(found)
                shown, at_start = text[:at].rstrip(_SPACE), False
                self._add_text(shown)
                self._held = text[at + len(sign) :]
                yield from self._read_calls(sign, text[len(shown) : at])
                continue
            shown = text
            if not self._ended and (signs or at_start):
                shown = _without_beginnings(text, signs)
            if self._ended or shown.strip(_SPACE):
                at_start = False
                self._add_text(shown)
                self._held = text[len(shown) :]
            if self._ended:
                return
            yield

    def _read_reasoning(self, closing: str) -> Iterator[None]:
        """Read reasoning up to its closing tag."""
        yield from self._skip_space()
        while True:
            before, tag, after = self._held.partition(closing)
            if tag or self._ended:
                self._reasoning += before.rstrip(_SPACE)
                self._held = after
                break
            shown = _without_beginnings(before, (closing,))
            self._reasoning += shown
            self._held = before[len(shown) :]
            yield
        yield from self._skip_space()

    def _add_text(self, text: str) -> None:
        """Add text; the white space before calls is between the texts before and after them."""
        if text and self._gap:
            text = self._gap + text if self._has_text else text
            self._gap = ""
        self._has_text |= bool(text)
        self._text += text

    def _read_calls(self, sign: str, space: str) -> Iterator[None]:
        """Read what may be calls, behind the sign that they begin with and the white space before that."""
        assert self._format is not None  # noqa: S101  without a format there are no signs
        while self._format.otherwise is not None and not self._ended and not self._held.strip():
            yield
        region, reading = self._format.read(sign, self._tools, self._held)
        calls, end, closed = list[ToolCall](), -1, False
        while end < 0:
            try:
                next(reading)
            except StopIteration as read:
                (calls, end), closed = read.value, True
            except NotACallError:
                end = len(region.text) if region.ended else region.at
            else:
                if region.ended:
                    end = len(region.text)
                elif self._ended:
                    region.ended = True
                else:
                    self._held = ""
                    yield
                    region.text += self._held
        self._held = region.text[end:]
        if calls:
            self._add_calls(calls)
            self._gap = self._gap or space
            yield from self._skip_space()
            return
        self._add_text(space + region.text[:end])
        self._unparsed |= region.looks_like_call(end)
        if not closed:
            yield from self._read_unparsed(self._format.closing)

    def _read_unparsed(self, closing: str) -> Iterator[None]:
        """Read what is not a call, up to its closing sign."""
        while not closing or (at := self._held.find(closing)) < 0:
            end = len(self._held) - (beginning_at_end(self._held, closing) if closing and not self._ended else 0)
            self._text, self._held = self._text + self._held[:end], self._held[end:]
            if self._ended:
                return
            yield
        end = at + len(closing)
        self._text, self._held = self._text + self._held[:end], self._held[end:]

    def _skip_space(self) -> Iterator[None]:
        """Leave out the white space that comes next."""
        while not (rest := self._held.lstrip(_SPACE)) and not self._ended:
            self._held = ""
            yield
        self._held = rest


def _is_beginning(text: str, sign: str) -> bool:
    """Whether a text is the beginning of a sign, and not all of it."""
    return sign.startswith(text) and text != sign


def _without_beginnings(text: str, signs: Sequence[str]) -> str:
    """The text without what may be the beginning of a sign at its end, and without white space before that."""
    keep = max((beginning_at_end(text, sign) for sign in signs), default=0)
    return text[: len(text) - keep].rstrip(_SPACE)


def answer_parser(
    tool_format: ToolFormat | None,
    tools: OfferedTools,
    tags: ReasoningTags | None,
    prompt_end: str,
    *,
    max_calls: int | None = None,
) -> AnswerParser | None:
    """A parser for one answer; None where it has no parts.

    Args:
        tool_format: how the model writes calls; None to look for none.
        tools: functions that may be called.
        tags: what stands around the model's reasoning; None to look for none.
        prompt_end: the last characters of the prompt, with its special tokens.
        max_calls: largest number of calls, after which others are left out; None for any number.
    """
    if tool_format is not None and tool_format.is_harmony:
        return HarmonyParser(tools, prompt_end, max_calls)
    if tags is None and (tool_format is None or not tools):
        return None
    return TaggedParser(tool_format, tools, tags, in_reasoning=in_reasoning(tags, prompt_end), max_calls=max_calls)
