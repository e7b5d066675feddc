"""Checks arguments of the public API against their type hints."""

from __future__ import annotations

import dataclasses
import inspect
import numbers
import os
import types
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from ...errors import InputError
from ...models.json_file import shown
from .option_fields import check_ranges

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_WORDS: Mapping[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "text",
    types.NoneType: "None",
}


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
    if type(value) in _classes(hint):
        return value
    for option in _options(hint):
        if _fits(value, option):
            return _as_type(value, option)
    raise InputError(f"{name} is {shown(value)}", f"it must be {' or '.join(map(_described, _named(hint)))}")


@cache
def _hints(owner: Any) -> dict[str, Any]:
    return get_type_hints(owner)


def _options(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


@cache
def _classes(hint: Any) -> frozenset[Any]:
    """The types of a hint whose direct instances need no further check."""
    return frozenset(option for option in _options(hint) if isinstance(option, type) and get_origin(option) is None)


def _named(hint: Any) -> list[Any]:
    """The types that an error names: None is left out where there are others."""
    options = [option for option in _options(hint) if option is not types.NoneType]
    return options or [types.NoneType]


def _as_type(value: Any, kind: Any) -> Any:
    """Convert a value to one type.

    Raises:
        TypeError: it has another.
    """
    origin = get_origin(kind) or kind
    if kind is Any:
        return value
    if origin in (int, float):
        return _as_number(value, origin)
    if origin is Sequence:
        if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
            raise TypeError
        (element,) = get_args(kind) or (Any,)
        for each in value:
            if not any(_fits(each, option) for option in _options(element)):
                raise TypeError
        return value
    if origin is Mapping:
        if not isinstance(value, Mapping):
            raise TypeError
        key, element = get_args(kind) or (Any, Any)
        return {_as_type(each, key): _as_type(item, element) for each, item in value.items()}
    if _is_callback(origin):
        if not callable(value):
            raise TypeError
        return value
    if not isinstance(value, origin) or (origin is os.PathLike and not isinstance(os.fspath(value), str)):
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


def _fits(value: Any, kind: Any) -> bool:
    try:
        _as_type(value, kind)
    except TypeError:
        return False
    return True


def _is_callback(kind: Any) -> bool:
    """Whether a type is a protocol of functions, against which `isinstance` cannot check."""
    return getattr(kind, "_is_protocol", False) and "__call__" in vars(kind)


def _described(kind: Any) -> str:
    origin = get_origin(kind) or kind
    if origin is Sequence:
        (element,) = get_args(kind) or (Any,)
        return f"a list, each item {' or '.join(map(_described, _named(element)))}"
    if origin is Mapping:
        key, element = get_args(kind) or (Any, Any)
        return "a mapping" + (
            f", each key {_described(key)}, each value {_described(element)}" if element is not Any else ""
        )
    if origin is os.PathLike:
        return "a path"
    if _is_callback(origin):
        return "a function"
    if isinstance(origin, type) and issubclass(origin, Enum):
        return f"a {origin.__name__}, such as {origin.__name__}.{next(iter(origin)).name}"
    return _WORDS.get(origin) or f"a {origin.__name__}"
