"""Options as fields of records, declared once, rules by name, and checks of arguments against their type hints."""

from __future__ import annotations

import dataclasses
import inspect
import numbers
import os
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, StrEnum
from functools import cache, wraps
from typing import Annotated, Any, ClassVar, Final, ParamSpec, Self, TypeVar, get_args, get_origin, get_type_hints

from ...errors import InputError
from ...models.json_file import shown

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_WORDS: Mapping[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "text",
    types.NoneType: "None",
    Callable: "a function",
}
_OPTION: Final = "option"
_Record = TypeVar("_Record")
_Function = TypeVar("_Function", bound=Callable[..., Any])


def checked_arguments(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Decorate a function so that an argument that does not have the type of its hint is an `InputError`.

    Numbers of NumPy become Python's. Arguments without a hint, and those that `**` collects, are not checked.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def checked(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        bound = signature.bind(*args, **kwargs)
        hints = _hints(function)
        for name, value in bound.arguments.items():
            if name in hints and signature.parameters[name].kind is not inspect.Parameter.VAR_KEYWORD:
                bound.arguments[name] = converted(name, value, hints[name])
        return function(*bound.args, **bound.kwargs)

    return checked


def check_fields(instance: Any) -> None:
    """Check the fields of a dataclass instance against their type hints and ranges; call it in `__post_init__`.

    Raises:
        InputError: a field has another type, or its value is out of the range of its `Option`.
    """
    hints = _hints(instance.__class__)
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        new = converted(field.name, value, hints[field.name])
        if new is not value:
            object.__setattr__(instance, field.name, new)
    check_ranges(instance)


def converted(name: str, value: Any, hint: Any) -> Any:
    """Convert a value to the type of a hint: the value itself, or a number of Python for one of NumPy.

    Raises:
        InputError: the value has another type; the error names it.
    """
    if type(value) in _options(hint):
        return value
    try:
        return _as_type(value, hint)
    except TypeError:
        raise InputError(f"{name} is {shown(value)}", f"it must be {_described_options(hint)}") from None


@cache
def _hints(owner: Any) -> dict[str, Any]:
    return get_type_hints(owner)


def _options(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type."""
    return get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _described_options(hint: Any) -> str:
    """The types of a union as an error names them: None is left out where there are others."""
    options = [option for option in _options(hint) if option is not types.NoneType]
    return " or ".join(map(_described, options or [types.NoneType]))


def _as_type(value: Any, kind: Any) -> Any:
    """Convert a value to a type, or to the first of a union that it has.

    Raises:
        TypeError: it has another.
    """
    if len(options := _options(kind)) > 1:
        for option in options:
            with suppress(TypeError):
                return _as_type(value, option)
        raise TypeError
    origin = get_origin(kind) or kind
    if origin in (int, float):
        return _as_number(value, origin)
    if origin is Sequence:
        if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
            raise TypeError
        (element,) = get_args(kind) or (Any,)
        for each in value:
            _as_type(each, element)
        return value
    if origin is Mapping:
        if not isinstance(value, Mapping):
            raise TypeError
        key, element = get_args(kind) or (Any, Any)
        return {_as_type(each, key): _as_type(item, element) for each, item in value.items()}
    fits = kind is Any or isinstance(value, origin)
    if not fits or (origin is os.PathLike and not isinstance(os.fspath(value), str)):
        raise TypeError
    return value


def _as_number(value: Any, kind: type[int] | type[float]) -> int | float:
    expected: Any = numbers.Integral if kind is int else numbers.Real
    if isinstance(value, bool) or not isinstance(value, expected):
        raise TypeError
    if isinstance(value, (int, float)):
        return value
    try:
        return kind(value)
    except (ValueError, OverflowError) as error:
        raise TypeError from error


def _described(kind: Any) -> str:
    origin = get_origin(kind) or kind
    if origin is Sequence:
        (element,) = get_args(kind) or (Any,)
        return f"a list, each item {_described_options(element)}"
    if origin is Mapping:
        key, element = get_args(kind) or (Any, Any)
        return "a mapping" + (
            f", each key {_described(key)}, each value {_described(element)}" if element is not Any else ""
        )
    if origin is os.PathLike:
        return "a path"
    if isinstance(origin, type) and issubclass(origin, Enum):
        return f"a {origin.__name__}, such as {origin.__name__}.{next(iter(origin)).name}"
    return _WORDS.get(origin) or f"a {origin.__name__}"


@dataclass(frozen=True)
class Option:
    """What is declared of an option besides its type and default."""

    help: str
    least: float | None = None
    """Smallest value; None for no limit."""
    most: float | None = None
    """Largest value; None for no limit."""
    within: str = ""
    """An interval in which a value has to be, such as `(0, 1]` with 1 and without 0, where two bounds do not say it."""
    accepts: Callable[[Any], bool] | None = None
    """Whether a value is in the range, where no interval says it."""
    range: str = ""
    """The range in words; empty for the words of the bounds."""
    choices: type[StrEnum] | None = None
    """The values that there are, for an option that is a name."""
    label: str = ""
    """What errors call the option; empty for the name of its field."""
    flags: tuple[str, ...] = ()
    """Spellings on the command line; none for the name's own."""
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
            return
        bounds = f"{self.least} or more" if self.most is None else f"between {self.least} and {self.most}"
        if self.within:
            low, high = self.within[1:-1].split(", ")
            above, below = self.within[0] == "(", self.within[-1] == ")"
            excluded = [float(low)] * above + [float(high)] * below
            fits = float(low) <= value <= float(high) and value not in excluded
            bounds = f"{'above' if above else 'at least'} {low} and {'below' if below else 'at most'} {high}"
            bounds = bounds if above or below else f"between {low} and {high}"
        elif self.accepts is not None:
            fits = self.accepts(value)
        else:
            fits = (self.least is None or value >= self.least) and (self.most is None or value <= self.most)
        if not fits:
            raise InputError(f"{self.label or name} is {value}", f"it must be {self.range or bounds}")


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


def given_of(instance: Any, names: Iterable[str]) -> list[str]:
    """Those of some options that a record has, with another value than their defaults."""
    kind = type(instance)
    return [name for name in names if (value := getattr(instance, name, None)) and value != getattr(kind, name)]


def refuse_beside(instance: Any, name: str, others: Iterable[str], hint: str = "leave one of them out") -> None:
    """Check that a record has none of some options beside an option that it has.

    Raises:
        InputError: it has.
    """
    if given := given_of(instance, others):
        raise InputError(f"{name} and {given[0]} are both given", hint)


def check_ranges(instance: Any) -> None:
    """Check the options of a record against their ranges.

    Raises:
        InputError: a value is out of range.
    """
    for name, declared in options_of(type(instance)).items():
        declared.check(name, getattr(instance, name))


class OptionRecord:
    """A dataclass of options, whose fields are checked."""

    def __post_init__(self) -> None:
        check_fields(self)

    def changed(self, changes: Mapping[str, Any]) -> Self:
        """Return a copy with some options replaced.

        Raises:
            InputError: an option is unknown, or its value is out of range.
        """
        known = {each.name for each in dataclasses.fields(self)}  # type: ignore[arg-type]
        if unknown := sorted(set(changes) - known):
            raise InputError(f"unknown option {unknown[0]!r}", f"options are: {', '.join(sorted(known))}")
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]


def documented(record: type[_Record]) -> type[_Record]:
    """Decorate a record so that its docstring, which `help` shows, explains every option."""
    lines = [f"    {name}: {declared.help}" for name, declared in options_of(record).items()]
    record.__doc__ = "\n".join([inspect.cleandoc(record.__doc__ or ""), "", "Args:", *lines])
    return record


def lists_options(record: type[Any]) -> Callable[[_Function], _Function]:
    """Decorate a function so that its signature, which editors and `help` show, has the record's options by name.

    They take the place of the parameter that `**` collects; a parameter of its own stands for the option of its name.
    """
    options = [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
        for each in dataclasses.fields(record)
    ]

    def decorated(function: _Function) -> _Function:
        signature = inspect.signature(function)
        others = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        added = [each for each in options if each.name not in signature.parameters]
        function.__signature__ = signature.replace(parameters=[*others, *added])  # type: ignore[attr-defined]
        return function

    return decorated


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
        return f"{self.name}:{','.join(map(str, self.values))}"


def _parsed(value: str) -> float | int | str:
    try:
        return int(value) if value.isdecimal() else float(value)
    except ValueError:
        return value
