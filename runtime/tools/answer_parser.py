"""Takes an answer apart while it is written: its text, the model's reasoning, and its calls of functions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from ..text.detokenizer import beginning_at_end
from .answer_parts import AnswerParser, ReasoningTags, in_reasoning
from .call_regions import Reading
from .calls import NotACallError, OfferedTools, ToolCall, read_json, written_call
from .formats import ToolFormat

_START: Final = "<|start|>"
_CHANNEL: Final = "<|channel|>"
_MESSAGE: Final = "<|message|>"
_ENDS: Final = ("<|end|>", "<|return|>", "<|call|>")
_BODY_SIGNS: Final = (*_ENDS, _START, _CHANNEL)
_MAX_HEADER: Final = 500

_CHANNEL_NAME: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT: Final = re.compile(r"\bto=([^\s<]+)")
_HEADER_BEGINS: Final = ("assistant", "to=", _CHANNEL, _START, "<|constrain|>", _MESSAGE, *_ENDS)
"""What may come where a header is expected."""


class HarmonyParser(AnswerParser):
    """Parses answers in the harmony format of gpt-oss: messages with a channel, and calls as messages to a function.

    The channel `analysis` is reasoning; `final`, and what `commentary` says to no function, is text; a message to an
    offered function, whose body is a JSON object, is a call. Everything else is text.

    Source: OpenAI's harmony response format.

    Args:
        tools: functions that may be called.
        prompt_end: the last characters of the prompt, which ends with the beginning of a message.
        max_calls: largest number of calls, after which others are left out; None for any number.
    """

    def __init__(self, tools: OfferedTools, prompt_end: str, max_calls: int | None = None) -> None:
        super().__init__(max_calls)
        self._tools = tools
        self._prompt_end = prompt_end
        self._written: set[str] = set()
        """The parts that have text already: `text`, `reasoning`."""

    def _read(self) -> Iterator[None]:
        _, start, begun = self._prompt_end.rpartition(_START)
        header, message, body = begun.partition(_MESSAGE)
        sign: str | None = ""
        if start and message and not any(end in begun for end in _ENDS):
            sign = yield from self._read_body(header, body if _RECIPIENT.search(header) else "")
        while sign is not None:
            header, body = "", ""
            if sign not in _ENDS or (yield from self._read_between()):
                header, body = yield from self._read_header()
            sign = yield from self._read_body(header, body)

    def _read_header(self) -> Reading[tuple[str, str]]:
        """Read a header up to the sign that ends it; returns it, and the beginning of its body.

        Text that cannot be a header is an answer without messages.
        """
        while True:
            header, sign, rest = self._held.partition(_MESSAGE)
            begun = header.lstrip()
            is_header = len(header) <= _MAX_HEADER and any(
                begun.startswith(each) or each.startswith(begun) for each in _HEADER_BEGINS
            )
            if is_header and sign:
                self._held = rest
                return header, ""
            if not is_header or self._ended:
                break
            yield
        if is_header and (not begun or begun in _HEADER_BEGINS or begun.startswith(_ENDS)):
            self._held = ""
            return "", ""
        self._unparsed |= _RECIPIENT.search(header[:_MAX_HEADER]) is not None
        if not begun.startswith(_CHANNEL):
            return "", ""
        self._held = self._held.lstrip().removeprefix(_CHANNEL)  # it is text here, and would begin a header again
        return "", _CHANNEL

    def _read_body(self, header: str, body: str) -> Reading[str | None]:
        """Read a body, which may have begun, up to the sign that ends it, which is returned; None at the end."""
        recipient, channel = _RECIPIENT.search(header), _CHANNEL_NAME.search(header)
        part = "reasoning" if channel is not None and channel[1] == "analysis" else "text"
        is_new = True
        while True:
            found = [(at, sign) for sign in _BODY_SIGNS if (at := self._held.find(sign)) >= 0]
            keep = 0 if self._ended else max(beginning_at_end(self._held, sign) for sign in _BODY_SIGNS)
            at, sign = min(found, default=(len(self._held) - keep, ""))
            body += self._held[:at]
            self._held = self._held[at if sign == _CHANNEL else at + len(sign) :]
            if body and recipient is None:
                self._add(part, body, is_new=is_new)
                body, is_new = "", False
            if sign or self._ended:
                break
            yield
        if recipient is not None:
            try:
                name = recipient[1].removeprefix("functions.")
                self._add_calls([written_call(name, read_json(body or "{}"), self._tools)])
            except NotACallError:
                self._add("text", f"{header.lstrip()}{_MESSAGE}{body}", is_new=True)
                self._unparsed = True
        return sign or None

    def _add(self, part: str, text: str, *, is_new: bool) -> None:
        """Add text to a part, in which messages are joined as paragraphs."""
        if is_new and part in self._written:
            text = "\n\n" + text
        self._written.add(part)
        if part == "reasoning":
            self._reasoning += text
        else:
            self._text += text

    def _read_between(self) -> Reading[bool]:
        """Read on to the next message; returns whether it begins with a header."""
        signs = (_START, _CHANNEL, *_ENDS)
        while True:
            text = self._held.lstrip()
            sign = next((each for each in signs if text.startswith(each)), None)
            if sign is not None:
                self._held = text if sign == _CHANNEL else text[len(sign) :]
                if sign not in _ENDS:
                    return True
            elif self._ended or (text and not any(each.startswith(text) for each in signs)):
                self._held = self._held if text else ""
                return False
            else:
                yield


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
