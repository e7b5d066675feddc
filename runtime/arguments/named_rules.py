"""Rules by name with their numbers, such as `local-leap:0.9,4,0.75`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self, get_args, get_type_hints

from ...errors import InputError
from .argument_types import Option, converted

Share = Annotated[float, Option("", least=0, most=1)]
Amount = Annotated[float, Option("", least=0)]
Count = Annotated[int, Option("", least=1)]


@dataclass(frozen=True)
class NamedRule:
    """A function of a table, and the values that are written behind its name, as in `local-leap:0.9,4,0.75`.

    The function takes what it decides about, then the values, whose annotations have their types and ranges.
    """

    name: str
    values: tuple[Any, ...]
    option: ClassVar[str]
    """Name of the option whose value it is."""
    table: ClassVar[Mapping[str, Callable[..., Any]]]
    """The functions by name."""
    hint: ClassVar[str]
    """What else to give."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a name and its values, of which those with a default may be left out from the last one on.

        Raises:
            InputError: the text is something else, or a value is out of range.
        """
        name, _, written = text.partition(":")
        given = [_parsed(each) for each in written.split(",")] if written else []
        try:
            function = cls.table[name]
            bound = inspect.signature(function).bind(None, *given)
        except (KeyError, TypeError):
            raise InputError(f"{cls.option} is {text!r:.60}", cls.hint) from None
        bound.apply_defaults()
        hints, values = get_type_hints(function, include_extras=True), []
        for letter, value in list(bound.arguments.items())[1:]:
            label, (kind, *ranges) = f"{cls.option}: {name} {letter.upper()}", get_args(hints[letter]) or (str,)
            values.append(converted(label, value, kind))
            for each in ranges:
                each.check(label, value)
        return cls(name, tuple(values))

    def apply(self, found: Any) -> Any:
        """What the function says about something."""
        return self.table[self.name](found, *self.values)

    def __str__(self) -> str:
        return f"{self.name}:{','.join(f'{value:g}' for value in self.values)}"


def _parsed(value: str) -> float | int | str:
    try:
        return int(value) if value.isdecimal() else float(value)
    except ValueError:
        return value
