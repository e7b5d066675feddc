"""Options as fields of records: what each means, its range and its spelling, declared once."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeVar

from ...errors import InputError

_OPTION: Final = "option"
_Record = TypeVar("_Record")
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Option:
    """What is declared of an option besides its type and default."""

    help: str
    least: float | None = None
    """Smallest value; None for no limit."""
    most: float | None = None
    """Largest value; None for no limit."""
    accepts: Callable[[Any], bool] | None = None
    """Whether a value is in the range, where two bounds do not say it."""
    range: str = ""
    """The range in words; empty for the words of the bounds."""
    choices: type[StrEnum] | None = None
    """The values that there are, for an option that is a name."""
    label: str = ""
    """What errors call the option; empty for the name of its field."""
    flags: tuple[str, ...] = ()
    """Spellings on the command line; none for that of the name."""
    metavar: str | None = None
    """What help pages call the value."""
    unset: str | None = None
    """What happens where the option is not given; None if its default says so."""

    def check(self, name: str, value: Any) -> None:
        """Check that a value is in the range; None, which stands for no value, always is.

        Raises:
            InputError: it is not.
        """
        if value is None:
            return
        if self.choices is not None:
            if value not in list(self.choices):
                expected = self.range or f"one of {', '.join(self.choices)}"
                raise InputError(f"{name} is {value!r:.60}", f"it must be {expected}")
        elif not (self._is_within(value) if self.accepts is None else self.accepts(value)):
            raise InputError(f"{self.label or name} is {value}", f"it must be {self.range or self._bounds()}")

    def _is_within(self, value: Any) -> bool:
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)

    def _bounds(self) -> str:
        return f"{self.least:g} or more" if self.most is None else f"between {self.least:g} and {self.most:g}"


def option(default: Any, text: str, **declared: Any) -> Any:
    """A field of a record that is an option; `declared` are further fields of `Option`."""
    return dataclasses.field(default=default, metadata={_OPTION: Option(text, **declared)})


def same_option(record: type[Any], name: str, default: Any, **declared: Any) -> Any:
    """A field that is the option `name` of another record, with another default; `declared` differs too."""
    same = dataclasses.replace(options_of(record)[name], **declared)
    return dataclasses.field(default=default, metadata={_OPTION: same})


def options_of(record: type[Any]) -> Mapping[str, Option]:
    """The options of a record by the names of their fields."""
    return {each.name: each.metadata[_OPTION] for each in dataclasses.fields(record) if _OPTION in each.metadata}


def check_ranges(instance: Any) -> None:
    """Check the options of a record against their ranges.

    Raises:
        InputError: a value is out of range.
    """
    for name, declared in options_of(type(instance)).items():
        declared.check(name, getattr(instance, name))


def changed(instance: _Record, changes: Mapping[str, Any]) -> _Record:
    """Return a copy of a record with some options replaced.

    Raises:
        InputError: an option is unknown, or its value is out of range.
    """
    known = {each.name for each in dataclasses.fields(instance)}  # type: ignore[arg-type]
    if unknown := sorted(set(changes) - known):
        raise InputError(f"unknown option {unknown[0]!r}", f"options are: {', '.join(sorted(known))}")
    return dataclasses.replace(instance, **changes)  # type: ignore[type-var]


def documented(record: type[_Record]) -> type[_Record]:
    """Decorate a record so that its docstring, which `help` shows, explains every option."""
    lines = [f"    {name}: {declared.help}" for name, declared in options_of(record).items()]
    record.__doc__ = "\n".join([inspect.cleandoc(record.__doc__ or ""), "", "Args:", *lines])
    return record


def lists_options(record: type[Any]) -> Callable[[_Function], _Function]:
    """Decorate a function so that its signature, which editors and `help` show, has the record's options by name.

    They take the place of the parameter that `**` collects.
    """
    options = [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
        for each in dataclasses.fields(record)
    ]

    def decorated(function: _Function) -> _Function:
        signature = inspect.signature(function)
        others = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        function.__signature__ = signature.replace(parameters=[*others, *options])  # type: ignore[attr-defined]
        return function

    return decorated
