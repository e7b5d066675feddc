"""Takes an answer apart while it is written: its text, the model's reasoning, and its calls of functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ..text.detokenizer import beginning_at_end
from .answer_parts import AnswerParser, ReasoningTags, in_reasoning
from .call_regions import Region
from .calls import OfferedTools
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
        self._state = self._reason if tags is not None and in_reasoning else self._read_text
        self._region: Region | None = None
        self._sign = ""
        """The sign with which the region begins."""
        self._space = self._gap = ""
        """White space before the region, and before the first of the calls that were read last."""
        self._has_text = False
        self._at_start = True
        """Whether there was nothing but white space and reasoning so far."""
        self._may_reason = tags is not None and not in_reasoning
        self._after_sign = in_reasoning
        """Whether white space that comes next belongs to no part."""

    def _reason(self, *, ended: bool) -> None:
        """Read reasoning up to its closing tag."""
        assert self._tags is not None  # noqa: S101  nothing else leads here
        self._skip_space()
        before, tag, self._held = self._held.partition(self._tags.closing)
        if tag:
            self._reasoning += before.rstrip(_SPACE)
            self._state, self._after_sign = self._read_text, True
            return
        shown = before.rstrip(_SPACE) if ended else _without_beginnings(before, (self._tags.closing,))
        self._reasoning += shown
        self._held = "" if ended else before[len(shown) :]

    def _read_text(self, *, ended: bool) -> None:
        """Read text up to the next sign."""
        self._skip_space()
        text = self._held
        if self._at_start and (stripped := text.lstrip(_SPACE)):
            tags = self._tags
            if self._may_reason and tags is not None:
                if stripped.startswith(tags.opening):
                    self._held = stripped[len(tags.opening) :]
                    self._state, self._after_sign, self._may_reason = self._reason, True, False
                    return
                if tags.opening.startswith(stripped) and not ended:
                    return
            if self._format is not None and self._format.is_bare and stripped[0] == "{":
                self._begin_region("", text, len(text) - len(stripped))
                return
        signs = () if self._format is None else self._format.openings
        found = [(at, -len(sign), sign) for sign in signs if (at := text.find(sign)) >= 0]
        if found:
            at, _, sign = min(found)
            self._begin_region(sign, text, at)
            return
        shown = text if ended else _without_beginnings(text, signs) if signs or self._at_start else text
        if shown.strip(_SPACE):
            self._at_start = False
        elif not ended:
            return
        self._add_text(shown)
        self._held = text[len(shown) :]

    def _add_text(self, text: str) -> None:
        """Add text; the white space before calls is between the texts before and after them."""
        if text and self._gap:
            text = self._gap + text if self._has_text else text
            self._gap = ""
        self._has_text |= bool(text)
        self._text += text

    def _begin_region(self, sign: str, text: str, at: int) -> None:
        """Begin to read what may be a call, at `text[at]`, where `sign` stands."""
        assert self._format is not None  # noqa: S101  without a format there are no signs
        before = text[:at]
        shown = before.rstrip(_SPACE)
        self._add_text(shown)
        self._space = before[len(shown) :]
        self._at_start = False
        self._sign, self._held = sign, text[at + len(sign) :]
        self._state = self._read_region

    def _read_region(self, *, ended: bool) -> None:
        """Read what may be a call."""
        assert self._format is not None  # noqa: S101  nothing else leads here
        text, region = self._held, self._region
        if region is None:
            if self._format.otherwise is not None and not ended and not text.strip():
                return
            region = self._region = self._format.region(self._sign, self._tools, text)
            text = text[len(region.text) - len(self._sign) :]
        self._held = ""
        end = region.push(text)
        if end is None and ended:
            end = region.finish()
        if end is None:
            return
        self._held = region.text[end.end :]
        self._region = None
        if end.calls:
            self._add_calls(end.calls)
            self._gap = self._gap or self._space
            self._state, self._after_sign = self._read_text, True
            return
        self._add_text(self._space + region.text[: end.end])
        if not end.is_plain:
            self._unparsed = True
        self._state = self._read_text if end.closed else self._read_unparsed

    def _read_unparsed(self, *, ended: bool) -> None:
        """Read what is not a call, up to its closing sign."""
        closing = "" if self._format is None else self._format.closing
        at = self._held.find(closing) if closing else -1
        if at >= 0:
            end = at + len(closing)
            self._state = self._read_text
        else:
            end = len(self._held) - (0 if ended or not closing else beginning_at_end(self._held, closing))
        self._text += self._held[:end]
        self._held = self._held[end:]

    def _skip_space(self) -> None:
        if self._after_sign:
            self._held = self._held.lstrip(_SPACE)
            self._after_sign = not self._held


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
