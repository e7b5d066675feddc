"""Answers in the harmony format of gpt-oss: messages with a channel, and calls as messages to a function.

Source: OpenAI's harmony response format.
"""

from __future__ import annotations

import re
from typing import Final

from ..text.detokenizer import beginning_at_end
from .answer_parts import AnswerParser
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
        self._written: set[str] = set()
        """The parts that have text already: `text`, `reasoning`."""
        self._part = "text"
        """The part to which the body belongs; `call` for a call."""
        self._begins_part = False
        self._header = ""
        """The header of the message whose body is read."""
        self._name = ""
        """The function to call."""
        self._body = ""
        """The arguments of the call so far."""
        self._state = self._read_header
        _, sign, header = prompt_end.rpartition(_START)
        if sign and not any(end in header for end in _ENDS):
            before, message, body = header.partition(_MESSAGE)
            if message:
                self._begin_body(before)
                self._body = body if self._part == "call" else ""

    def _read_header(self, *, ended: bool) -> None:
        """Read a header up to the sign that ends it; text that cannot be one is an answer without messages."""
        header, sign, rest = self._held.partition(_MESSAGE)
        begun = header.lstrip()
        is_header = not begun or any(begun.startswith(each) or each.startswith(begun) for each in _HEADER_BEGINS)
        if is_header and len(header) <= _MAX_HEADER:
            if sign:
                self._held = rest
                self._begin_body(header)
                return
            if not ended:
                return
            if not begun or begun in _HEADER_BEGINS or begun.startswith(_ENDS):
                self._held = ""
                return
        self._begin_body("")
        if begun.startswith(_CHANNEL):  # the sign is text here, and would begin a header again
            self._add(_CHANNEL)
            self._held = begun.removeprefix(_CHANNEL)
        if _RECIPIENT.search(header[:_MAX_HEADER]):
            self._unparsed = True

    def _begin_body(self, header: str) -> None:
        self._header, self._state, self._body = header, self._read_body, ""
        channel = _CHANNEL_NAME.search(header)
        recipient = _RECIPIENT.search(header)
        if recipient is not None:
            self._name = recipient[1].removeprefix("functions.")
            self._part = "call"
        else:
            self._part = "reasoning" if channel is not None and channel[1] == "analysis" else "text"
            self._begins_part = True

    def _read_body(self, *, ended: bool) -> None:
        """Read a body up to the sign that ends it."""
        found = [(at, sign) for sign in _BODY_SIGNS if (at := self._held.find(sign)) >= 0]
        if found:
            at, sign = min(found)
            self._add(self._held[:at])
            self._held = self._held[at if sign == _CHANNEL else at + len(sign) :]
            self._end_body()
            self._state = self._read_between if sign in _ENDS else self._read_header
            return
        keep = 0 if ended else max(beginning_at_end(self._held, sign) for sign in _BODY_SIGNS)
        end = len(self._held) - keep
        self._add(self._held[:end])
        self._held = self._held[end:]
        if ended:
            self._end_body()

    def _add(self, text: str) -> None:
        if self._part == "call":
            self._body += text
        elif text:
            if self._begins_part and self._part in self._written:
                text = "\n\n" + text  # messages of one kind are joined as paragraphs
            self._begins_part = False
            self._written.add(self._part)
            if self._part == "reasoning":
                self._reasoning += text
            else:
                self._text += text

    def _end_body(self) -> None:
        if self._part != "call":
            return
        try:
            self._add_calls([written_call(self._name, read_json(self._body or "{}"), self._tools)])
        except NotACallError:
            body = f"{self._header.lstrip()}{_MESSAGE}{self._body}"
            self._part, self._begins_part = "text", True
            self._add(body)
            self._unparsed = True
        self._part, self._begins_part = "text", True

    def _read_between(self, *, ended: bool) -> None:
        """Read on to the beginning of the next message."""
        signs = (_START, _CHANNEL, *_ENDS)
        text = self._held.lstrip()
        sign = next((each for each in signs if text.startswith(each)), None)
        if sign is not None:
            self._held = text if sign == _CHANNEL else text[len(sign) :]
            self._state = self._read_between if sign in _ENDS else self._read_header
        elif ended and not text:
            self._held = ""
        elif text and (ended or not any(each.startswith(text) for each in signs)):
            self._begin_body("")
