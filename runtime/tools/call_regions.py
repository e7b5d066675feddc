"""Stretches of an answer that may be calls, read piece by piece; those with JSON in them."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from .calls import NotACallError, OfferedTools, ToolCall, calls_of_json, read_json, written_call
from .json_scanner import JsonScanner

_SPACE: Final = re.compile(r"\s*")
_NAME: Final = re.compile(r"[\w.:/-]+")
_MAX_NAME: Final = 200
_BARE_CALL: Final = re.compile(r'\s*\{\s*"(?:name|type|function)"\s*:')


class RegionEnd(NamedTuple):
    """How a region ended."""

    calls: Sequence[ToolCall]
    """The calls in it; none where it is text."""
    end: int
    """Number of characters of the region's text that belong to it; the rest follows it."""
    is_plain: bool = False
    """Whether text that is not a call did not look like one either."""
    closed: bool = False
    """Whether text that is not a call ends here; otherwise it goes on up to the closing sign of the format."""


class Region(ABC):
    """A stretch of an answer that may be calls.

    Args:
        opening: the sign that it begins with, maybe with white space; empty where it has none.
        tools: functions that may be called.
        closing: the sign that it ends with; empty for none.
    """

    def __init__(self, opening: str, tools: OfferedTools, *, closing: str = "") -> None:
        self.closing: Final = closing
        self.text = opening
        """All of its text so far, and perhaps some that follows it."""
        self.at = len(opening)
        """Index of what is to be read next."""
        self.tools: Final = tools
        self._scanned = 0
        """Index up to which JSON was read."""

    def push(self, text: str) -> RegionEnd | None:
        """Add text; returns how the region ends, or None while that is open."""
        self.text += text
        try:
            return self.read(ended=False)
        except NotACallError:
            return RegionEnd((), self.at, is_plain=not self.looks_like_call(self.at))

    def finish(self) -> RegionEnd:
        """How the region ends, as no text follows."""
        try:
            end = self.read(ended=True)
        except NotACallError:
            end = None
        if end is not None:
            return end
        return RegionEnd((), len(self.text), is_plain=not self.looks_like_call(len(self.text)))

    def looks_like_call(self, _end: int) -> bool:
        """Whether the first characters up to an index, which are not a call, were meant to be one."""
        return True

    @abstractmethod
    def read(self, *, ended: bool) -> RegionEnd | None:
        """Read on in `text` from `at`; `ended` says that no more follows. None while the end is open.

        Raises:
            NotACallError: what was read up to `at` is neither a call nor the beginning of one.
        """

    def scan(self, scanner: JsonScanner, begin: int) -> bool:
        """Read on in the JSON value that begins at `begin`; returns whether it is complete.

        Raises:
            NotACallError: it is not JSON; `at` is where it goes wrong.
        """
        try:
            return scanner.push(self.text, max(self._scanned, begin))
        finally:
            self.at = begin + scanner.count
            self._scanned = self.at if scanner.ended else len(self.text)

    def skip_space(self) -> bool:
        """Skip white space; whether something follows."""
        found = _SPACE.match(self.text, self.at)
        self.at = self.at if found is None else found.end()
        return self.at < len(self.text)

    def comes_next(self, sign: str, *, ended: bool) -> bool | None:
        """Whether `sign` comes next, which is then skipped; None while that is open."""
        if self.text.startswith(sign, self.at):
            self.at += len(sign)
            return True
        return None if not ended and sign.startswith(self.text[self.at :]) else False

    def end_after(self, sign: str, end: int, *, optional: bool, ended: bool) -> int | None:
        """Where the region ends: after a sign and white space behind `end`, or there; None while that is open.

        Raises:
            NotACallError: something else comes next, and the sign is not optional.
        """
        more = self.skip_space()
        found = self.comes_next(sign, ended=ended) if more else (False if ended else None)
        if found:
            return self.at
        if found is None:
            self.at = end
        elif more and not optional:
            raise NotACallError
        return None if found is None else end

    def require(self, sign: str, *, ended: bool) -> bool:
        """Skip a sign; False while it may still come.

        Raises:
            NotACallError: something else comes next.
        """
        found = self.comes_next(sign, ended=ended)
        if found is False:
            raise NotACallError
        return bool(found)

    def name(self, *stops: str) -> str | None:
        """Read a name up to one of several signs, which is skipped; None while it is incomplete.

        Raises:
            NotACallError: something else comes before the sign.
        """
        found = _NAME.match(self.text, self.at)
        end = self.at if found is None else found.end()
        rest = self.text[end:]
        if end - self.at > _MAX_NAME or not any(stop.startswith(rest[: len(stop)]) for stop in stops):
            raise NotACallError
        stop = next((stop for stop in stops if rest.startswith(stop)), None)
        if stop is None:
            return None
        name = self.text[self.at : end]
        self.at = end + len(stop)
        return name

    def function(self, *stops: str) -> str | None:
        """Read the name of an offered function up to one of several signs; None while it is incomplete.

        Raises:
            NotACallError: something else comes next, or the function was not offered.
        """
        name = self.name(*stops)
        if name is not None and name not in self.tools:
            raise NotACallError
        return name


RegionMaker: TypeAlias = Callable[..., Region]
"""Makes a region from the arguments of `Region`."""


class JsonRegion(Region):
    """A JSON object or array with calls, up to a closing sign, to its own end, or to the end of the answer.

    Args:
        opening: as for `Region`.
        tools: functions that may be called.
        closing: the sign after the JSON; empty for none.
        optional_closing: whether the sign may be left out.
        alone: whether nothing may follow but further objects, which white space and semicolons separate. The calls are
            known at the end of the answer then.
    """

    def __init__(
        self,
        opening: str,
        tools: OfferedTools,
        *,
        closing: str = "",
        optional_closing: bool = False,
        alone: bool = False,
    ) -> None:
        super().__init__(opening, tools, closing=closing)
        self._optional = optional_closing
        self._alone = alone
        self._scanner = JsonScanner()
        self._first = self._begin = self.at
        self._values: list[Any] = []

    def read(self, *, ended: bool) -> RegionEnd | None:
        """Read on in the calls of this form."""
        while True:
            if not self._scanner.ended:
                if not self.scan(self._scanner, self._begin):
                    return None
                self._values.append(read_json(self.text[self._begin : self.at]))
            end = self.at
            if not self._alone:
                closing, optional = self.closing, self._optional
                closed = self.end_after(closing, end, optional=optional, ended=ended) if closing else end
                return None if closed is None else self._calls(closed)
            while self.skip_space() and self.text[self.at] == ";":
                self.at += 1
            if self.at == len(self.text):
                return self._calls(end) if ended else None
            self._scanner, self._begin = JsonScanner(), self.at

    def _calls(self, end: int) -> RegionEnd:
        try:
            calls = [call for value in self._values for call in calls_of_json(value, self.tools)]
        except NotACallError:
            calls = []
        if self._alone and not all(map(_is_only_a_call, self._values)):
            calls = []
        return RegionEnd(calls, end, is_plain=not self.looks_like_call(end), closed=True)

    def looks_like_call(self, end: int) -> bool:
        """Whether it has a sign or begins like a call: JSON without a sign before it is most often just JSON."""
        return bool(self.text[: self._first].strip()) or bool(_BARE_CALL.match(self.text, 0, end))


def _is_only_a_call(value: Any) -> bool:
    """Whether an object without any sign around it has what a call has, and nothing else."""
    fields = set(value) if isinstance(value, dict) else set()
    return fields <= {"type", "id", "name", "function", "parameters", "arguments"} and bool(
        fields & {"parameters", "arguments", "function"}
    )


class NamedJsonRegion(Region):
    """Mistral's newer calls: a name, perhaps `[CALL_ID]` and an identifier, `[ARGS]` and a JSON object."""

    def __init__(self, opening: str, tools: OfferedTools, *, closing: str = "") -> None:
        super().__init__(opening, tools, closing=closing)
        self._name: str | None = None
        self._id: str | None = None
        self._scanner = JsonScanner()
        self._begin = 0

    def read(self, *, ended: bool) -> RegionEnd | None:  # noqa: ARG002  the arguments end by themselves
        """Read on in the calls of this form."""
        if self._name is None:
            self._name = self.function("[ARGS]", "[CALL_ID]")
            if self._name is None:
                return None
            self._id = "" if self.text.endswith("[ARGS]", 0, self.at) else None
        if self._id is None:
            self._id = self.name("[ARGS]")
            if self._id is None:
                return None
        self._begin = self._begin or self.at
        if not self.scan(self._scanner, self._begin):
            return None
        arguments = read_json(self.text[self._begin : self.at])
        return RegionEnd([written_call(self._name, arguments, self.tools, self._id)], self.at)
