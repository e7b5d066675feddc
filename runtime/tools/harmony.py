"""Answers in the harmony format of gpt-oss: messages with a channel, and calls as messages to a function.

Source: OpenAI's harmony response format.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from ..text.detokenizer import beginning_at_end
from .answer_parts import AnswerParser
from .call_regions import Reading
from .calls import NotACallError, OfferedTools, read_json, written_call

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
    """Parses answers in the harmony format.

    The channel `analysis` is reasoning; `final`, and what `commentary` says to no function, is text; a message to an
    offered function, whose body is a JSON object, is a call. Everything else is text.

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
