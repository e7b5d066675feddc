"""Methods and functions that chat templates may call, each within the budget.

What is not listed here does not exist for a template.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from types import BuiltinMethodType, MethodType
from typing import Any, Final, NoReturn

from jinja2 import TemplateError as JinjaError
from jinja2.exceptions import SecurityError
from jinja2.runtime import LoopContext, Macro, Undefined
from jinja2.utils import Namespace

from .template_budget import Budget, BudgetContext, BudgetError
from .template_operations import MAX_WIDTH, count_search, scalar_key, to_text

_MAX_RANGE: Final = 100_000
_SPLIT_PIECE: Final = 80
"""Bytes of a short string and its place in a list."""
_FORMAT_SPEC: Final = re.compile(r"(?:.?[<>=^])?[+\- ]?[#0]*([0-9]*)[,_]?(?:\.([0-9]+))?[a-zA-Z%]?", re.DOTALL)
_STRFTIME: Final = re.compile(r"(?:[^%]|%[-#]?[a-zA-Z%]){0,200}", re.DOTALL)


class TemplateNamespace(Namespace):
    """A namespace that prints as its name alone, whatever it holds."""

    def __repr__(self) -> str:
        return "<Namespace>"


def _linear(name: str) -> Callable[..., Any]:
    method = getattr(str, name)

    def call(budget: Budget, text: str, *args: Any) -> Any:
        budget.spend(100 + 3 * len(text) + sum(map(budget.weigh, args)))
        result = method(text, *args)
        return budget.text(result) if isinstance(result, str) else result

    return call


def _strip(name: str) -> Callable[..., Any]:
    method = getattr(str, name)

    def call(budget: Budget, text: str, chars: str | None = None) -> Any:
        budget.spend(100 + len(text) * (1 if chars is None else 1 + len(chars)))
        return budget.text(method(text, chars))

    return call


def _search(name: str, *, reverse: bool = False) -> Callable[..., Any]:
    method = getattr(str, name)

    def call(budget: Budget, text: str, part: str, *bounds: Any) -> Any:
        if reverse:
            budget.spend(100 + len(text) * (1 + len(part)))
        else:
            count_search(budget, text, part)
        result = method(text, part, *bounds)
        return budget.container(result) if isinstance(result, tuple) else result

    return call


def _split(name: str, *, reverse: bool = False) -> Callable[..., Any]:
    method = getattr(str, name)

    def call(budget: Budget, text: str, sep: str | None = None, maxsplit: int = -1) -> Any:
        pieces = len(text) // 2 + 1
        if sep is not None:
            budget.spend(len(text) * (1 + len(sep)) if reverse else 0)
            count_search(budget, text, sep)
            pieces = text.count(sep) + 1
        if maxsplit >= 0:
            pieces = min(pieces, maxsplit + 1)
        budget.spend(100 + len(text) + 100 * pieces, 4 * len(text) + _SPLIT_PIECE * pieces)
        return budget.container(method(text, sep, maxsplit))

    return call


def _splitlines(budget: Budget, text: str, keepends: bool = False) -> Any:
    budget.spend(100 + len(text), (4 + _SPLIT_PIECE) * len(text))
    return budget.container(text.splitlines(keepends))


def replace(budget: Budget, text: str, old: str, new: str, count: int = -1) -> str:
    """`text.replace(old, new, count)`."""
    if not (isinstance(text, str) and isinstance(old, str) and isinstance(new, str)):
        raise TypeError("only text can be replaced, by text")
    count_search(budget, text, old)
    times = text.count(old)
    if count >= 0:
        times = min(times, count)
    budget.reserve(len(text) + times * max(len(new) - len(old), 0))
    return budget.text(text.replace(old, new, count))


def join(budget: Budget, separator: str, values: Iterable[Any]) -> str:
    """`separator.join(values)`."""
    parts = budget.collect(values)
    budget.reserve(sum(len(part) for part in parts if isinstance(part, str)) + len(separator) * len(parts))
    return budget.text(separator.join(parts))


def _str_format(budget: Budget, form: str, *args: Any, **kwargs: Any) -> str:
    """`form.format(...)` with fields that are names or numbers, and widths of at most a thousand characters."""
    budget.spend(100 + 10 * len(form))
    padding = fields = 0
    for _, field, spec, _ in string.Formatter().parse(form):
        if field is None:
            continue
        match = _FORMAT_SPEC.fullmatch(spec or "")
        if not re.fullmatch(r"\w*", field) or match is None:
            raise BudgetError(f"the format field {{{field[:40]}:{(spec or '')[:40]}}} is not allowed")
        widths = [number for number in match.groups() if number]
        if any(len(number) > 4 or int(number) > MAX_WIDTH for number in widths):
            raise BudgetError(f"a width in the format {(spec or '')[:40]} is too large")
        padding += sum(map(int, widths))
        fields += 1
    weight = len(form) + padding + 10 * fields * max(map(budget.weigh, (*args, *kwargs.values())), default=0)
    budget.reserve(weight)
    budget.spend(weight + 500 * fields)
    return budget.text(form.format(*args, **kwargs))


def _dict_get(budget: Budget, values: dict[Any, Any], key: Any, default: Any = None) -> Any:
    budget.spend(100)
    return default if isinstance(key, Undefined) else values.get(scalar_key(key), default)


def _view(name: str) -> Callable[..., Any]:
    def call(budget: Budget, values: dict[Any, Any]) -> Any:
        budget.spend(100)
        return getattr(values, name)()

    return call


def _dict_copy(budget: Budget, values: dict[Any, Any]) -> Any:
    budget.spend(100 + 50 * len(values), 120 * len(values))
    return budget.container(dict(values))


def _among(name: str) -> Callable[..., Any]:
    def call(budget: Budget, values: Any, value: Any, *bounds: int) -> Any:
        budget.spend(100 + 10 * budget.weigh(values))
        return getattr(values, name)(value, *bounds)

    return call


_SEQUENCE_METHODS: Final = {name: _among(name) for name in ("count", "index")}
METHODS: Final[dict[type, dict[str, Callable[..., Any]]]] = {
    str: {
        **{
            name: _linear(name)
            for name in (
                *("capitalize", "casefold", "lower", "swapcase", "title", "upper"),
                *("isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "islower", "isnumeric"),
                *("isspace", "istitle", "isupper", "startswith", "endswith", "removeprefix", "removesuffix"),
            )
        },
        **{name: _strip(name) for name in ("strip", "lstrip", "rstrip")},
        **{name: _search(name) for name in ("find", "index", "count", "partition")},
        **{name: _search(name, reverse=True) for name in ("rfind", "rindex", "rpartition")},
        "split": _split("split"),
        "rsplit": _split("rsplit", reverse=True),
        "splitlines": _splitlines,
        "replace": replace,
        "join": join,
        "format": _str_format,
    },
    dict: {"get": _dict_get, "copy": _dict_copy, **{name: _view(name) for name in ("items", "keys", "values")}},
    list: _SEQUENCE_METHODS,
    tuple: _SEQUENCE_METHODS,
}
"""Methods by type and name."""


def call(context: BudgetContext, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a macro, a method of a value, or a function that templates have.

    Raises:
        SecurityError: the function is none of these.
    """
    budget = context.budget
    budget.spend(500 + 20 * (len(args) + len(kwargs)), 16 * len(args) + 120 * len(kwargs))
    if type(function) is BuiltinMethodType:
        for kind, methods in METHODS.items():
            if isinstance(function.__self__, kind) and function.__name__ in methods:
                return methods[function.__name__](budget, function.__self__, *args, **kwargs)
        raise SecurityError(f"the method {type(function.__self__).__name__}.{function.__name__} is not allowed")
    if isinstance(function, (Macro, LoopContext)):
        return _call_block(context, function, args, kwargs)
    if type(function) is MethodType and isinstance(function.__self__, LoopContext):
        budget.spend(10 * sum(map(budget.weigh, args)))
        return function(*args, **kwargs)
    if isinstance(function, Undefined):
        return function()  # raises the error that names it
    for name, known in FUNCTIONS.items():
        if function is known:
            return _CALLS[name](budget, *args, **kwargs)
    raise SecurityError(f"the function {getattr(function, '__name__', type(function).__name__)} is not allowed")


def _call_block(
    context: BudgetContext, function: Macro | LoopContext, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str:
    budget = context.budget
    budget.enter_call()
    budget.spend(5000)
    if isinstance(function, LoopContext) and args:
        args = (budget.steps(args[0], context.step_cost, context.step_memory), *args[1:])
    try:
        return budget.text(function(*args, **kwargs))
    finally:
        budget.leave_call()


def _range(budget: Budget, *bounds: int) -> range:
    budget.spend(200)
    values = range(*bounds)
    if len(values) > _MAX_RANGE:
        raise BudgetError(f"a range of {len(values)} numbers is too long")
    return values


def _dict(budget: Budget, *args: Any, **kwargs: Any) -> Any:
    if args and not isinstance(args[0], Mapping):
        pairs = budget.collect(args[0])
        for pair in pairs:
            if not isinstance(pair, (list, tuple)) or len(pair) != 2:
                raise TypeError("dict takes pairs of a key and a value")
            scalar_key(pair[0])
        args = (pairs, *args[1:])
    elif args:
        budget.spend(50 * len(args[0]), 120 * len(args[0]))
    return budget.container(dict(*args, **kwargs))


def _namespace(budget: Budget, *args: Any, **kwargs: Any) -> TemplateNamespace:
    values = _dict(budget, *args, **kwargs)
    budget.spend(500, 300)
    return TemplateNamespace(values)


def _raise_exception(budget: Budget, message: Any = "") -> NoReturn:
    raise JinjaError(to_text(budget, message))


def _strftime_now(budget: Budget, date_format: str) -> str:
    if not _STRFTIME.fullmatch(date_format):
        raise BudgetError(f"the date format {date_format[:40]!r} is not allowed")
    budget.spend(1000)
    return budget.text(datetime.now().strftime(date_format))  # without a time zone: `%z` has to stay empty


_CALLS: Final[dict[str, Callable[..., Any]]] = {
    "range": _range,
    "dict": _dict,
    "namespace": _namespace,
    "raise_exception": _raise_exception,
    "strftime_now": _strftime_now,
}


class _Function:
    """A function that templates see; it acts only through `call`, with the budget."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<function {self.name}>"

    def __call__(self) -> NoReturn:
        raise SecurityError(f"{self.name} can only be called by a template")


FUNCTIONS: Final = {name: _Function(name) for name in _CALLS}
"""Functions of templates by name."""
