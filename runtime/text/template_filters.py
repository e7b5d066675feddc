"""Filters and tests that chat templates may use, each within the budget."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from jinja2 import filters as jinja
from jinja2 import pass_context
from jinja2.tests import TESTS as JINJA_TESTS
from markupsafe import escape

from .template_budget import Budget, BudgetContext, BudgetError
from .template_methods import join, replace
from .template_operations import (
    MAX_WIDTH,
    add,
    compare_two,
    contains,
    percent_format,
    scalar_key,
    to_text,
)

_MAX_INDENT: Final = 32
_MAX_SEPARATOR: Final = 16
_MAX_PRECISION: Final = 20
_JSON_GROWTH: Final = 8
"""How often the largest value a text in preparation may be, before its real size is known."""


def _measured(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of Jinja whose time and result are proportional to its arguments."""

    @pass_context
    def call(context: BudgetContext, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = context.budget
        budget.spend(200 + 5 * sum(map(budget.weigh, (value, *args, *kwargs.values()))))
        return _counted(budget, function(value, *args, **kwargs))

    return call


def _counted(budget: Budget, result: Any) -> Any:
    if isinstance(result, str):
        return budget.text(str(result))
    if isinstance(result, (list, tuple, dict)):
        return budget.container(result)
    return budget.number(result)


def _on_text(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of Jinja that makes a text of about the size of its argument."""

    @pass_context
    def call(context: BudgetContext, value: Any, *args: Any, **kwargs: Any) -> str:
        budget = context.budget
        text = to_text(budget, value)
        budget.spend(200 + 100 * len(text))
        return budget.text(str(function(text, *args, **kwargs)))

    return call


def _path_length(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Number of steps of an attribute such as `a.b.c` among arguments, at most."""
    return sum(value.count(".") + value.count(",") for value in (*args, *kwargs.values()) if isinstance(value, str))


def _ordered(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of Jinja that compares items with each other."""

    @pass_context
    def call(context: BudgetContext, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = context.budget
        values = value if isinstance(value, Mapping) else budget.collect(value)
        budget.spend(40 * budget.weigh(values) * max(len(values).bit_length(), 1))
        budget.spend(3000 * (1 + _path_length(args, kwargs)) * len(values), 200 * len(values))
        result = function(context.environment, values, *args, **kwargs)
        return budget.collect(result) if isinstance(result, (list, Iterator)) else result

    return call


def _lazy(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of Jinja that gives a generator: here an iterator over a list that is complete."""

    @pass_context
    def call(context: BudgetContext, value: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        budget = context.budget
        source = budget.steps(value, 3000 * (1 + _path_length(args, kwargs)), 0) if value else ()
        return iter(budget.collect(function(context, source, *args, **kwargs)))

    return call


@pass_context
def _unique(context: BudgetContext, value: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
    budget = context.budget
    values = budget.collect(value)
    if not kwargs.get("attribute") and len(args) < 2:
        for part in values:
            scalar_key(part)
        budget.spend(1000 * len(values) + 5 * budget.weigh(values))
        return iter(budget.collect(jinja.do_unique(context.environment, values, *args, **kwargs)))
    raise BudgetError("unique by an attribute is not allowed")


@pass_context
def _list(context: BudgetContext, value: Any) -> list[Any]:
    return context.budget.collect(value)


@pass_context
def _items(context: BudgetContext, value: Any) -> Iterator[Any]:
    return iter(context.budget.collect(jinja.do_items(value)))


@pass_context
def _reverse(context: BudgetContext, value: Any) -> Any:
    if isinstance(value, str):
        return context.budget.text(value[::-1])
    return iter(context.budget.collect(value)[::-1])


@pass_context
def _trim(context: BudgetContext, value: Any, chars: str | None = None) -> str:
    budget = context.budget
    text = to_text(budget, value)
    budget.spend(100 + len(text) * (1 if chars is None else 1 + len(chars)))
    return budget.text(text.strip(chars))


@pass_context
def _string(context: BudgetContext, value: Any) -> str:
    return to_text(context.budget, value)


@pass_context
def _join(context: BudgetContext, value: Any, d: Any = "", attribute: str | int | None = None) -> str:
    budget = context.budget
    values = budget.collect(value)
    if attribute is not None:
        values = list(_lazy(jinja.sync_do_map)(context, values, attribute=attribute))
    return join(budget, to_text(budget, d), [to_text(budget, part) for part in values])


@pass_context
def _replace(context: BudgetContext, value: Any, old: Any, new: Any, count: int | None = None) -> str:
    budget = context.budget
    texts = [to_text(budget, part) for part in (value, old, new)]
    return replace(budget, texts[0], texts[1], texts[2], -1 if count is None else count)


@pass_context
def _format(context: BudgetContext, value: Any, *args: Any, **kwargs: Any) -> str:
    if args and kwargs:
        raise TypeError("format takes values by position or by name, not both")
    return percent_format(context.budget, to_text(context.budget, value), kwargs or args)


@pass_context
def _indent(context: BudgetContext, s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    budget = context.budget
    text = to_text(budget, s)
    size = len(width) if isinstance(width, str) else width
    if size > MAX_WIDTH:
        raise BudgetError(f"an indent of {size} is too large")
    budget.spend(20 * len(text), 80 * (text.count("\n") + 1))
    budget.reserve(len(text) + (len(text.splitlines()) + 2) * max(size, 0))
    return budget.text(str(jinja.do_indent(text, width, first, blank)))


@pass_context
def _sum(context: BudgetContext, iterable: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
    values = context.budget.collect(iterable)
    if attribute is not None:
        values = list(_lazy(jinja.sync_do_map)(context, values, attribute=attribute))
    for value in values:
        start = add(context, start, value)
    return start


@pass_context
def _round(context: BudgetContext, value: Any, precision: int = 0, method: Any = "common") -> Any:
    if abs(precision) > _MAX_PRECISION:
        raise BudgetError(f"rounding to {precision} places is not allowed")
    return context.budget.number(jinja.do_round(value, precision, method))


@pass_context
def _tojson(
    context: BudgetContext,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces Jinja's own filter, which escapes HTML; takes the options that templates give."""
    budget = context.budget
    width = len(indent) if isinstance(indent, str) else indent or 0
    if width > _MAX_INDENT:
        raise BudgetError(f"an indent of {width} is too large")
    if separators is not None:
        item_separator, key_separator = separators
        if len(item_separator) > _MAX_SEPARATOR or len(key_separator) > _MAX_SEPARATOR:
            raise BudgetError("the separators of tojson are too long")
    weight = budget.weigh(value)
    longest = weight * (7 + budget.depth(value) * width // 20)
    if longest > _JSON_GROWTH * budget.value_limit:
        budget.reserve(longest)
    budget.spend(1000 + 20 * weight + longest)
    written = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if ensure_ascii and context.mark:
        # Of an even number of backslashes before it, none belongs to the escape of the mark.
        written = re.sub(rf"(?<!\\)((?:\\\\)*)\\u{ord(context.mark):04x}", rf"\1{context.mark}", written)
    return budget.text(written)


def _truth_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """A test of Jinja that reads a text."""

    @pass_context
    def call(context: BudgetContext, value: Any, *args: Any) -> Any:
        context.budget.spend(200 + 10 * context.budget.weigh(value))
        return function(value, *args)

    return call


def _comparison(name: str) -> Callable[..., Any]:
    @pass_context
    def call(context: BudgetContext, left: Any, right: Any) -> Any:
        return compare_two(context.budget, name, left, right)

    return call


@pass_context
def _in(context: BudgetContext, value: Any, container: Any) -> bool:
    return contains(context.budget, container, value)


FILTERS: Final[dict[str, Callable[..., Any]]] = {
    **{name: _measured(jinja.FILTERS[name]) for name in ("abs", "int", "float")},
    **{name: _on_text(jinja.FILTERS[name]) for name in ("capitalize", "lower", "title", "upper")},
    "trim": _trim,
    "safe": _string,
    "string": _string,
    **{name: _on_text(escape) for name in ("e", "escape")},
    **{name: jinja.FILTERS[name] for name in ("default", "d", "length", "count", "first", "last")},
    **{name: _ordered(jinja.FILTERS[name]) for name in ("sort", "min", "max", "groupby")},
    "dictsort": _ordered(lambda _, *args, **kwargs: jinja.do_dictsort(*args, **kwargs)),
    **{
        name: _lazy(function)
        for name, function in (
            ("map", jinja.sync_do_map),
            ("select", jinja.sync_do_select),
            ("reject", jinja.sync_do_reject),
            ("selectattr", jinja.sync_do_selectattr),
            ("rejectattr", jinja.sync_do_rejectattr),
        )
    },
    "unique": _unique,
    "list": _list,
    "items": _items,
    "reverse": _reverse,
    "join": _join,
    "replace": _replace,
    "format": _format,
    "indent": _indent,
    "sum": _sum,
    "round": _round,
    "tojson": _tojson,
}
"""Filters by name."""

_JINJA_TESTS: Final[Mapping[str, Any]] = JINJA_TESTS
_COMPARISONS: Final = {
    "eq": ("eq", "equalto", "=="),
    "ne": ("ne", "!="),
    "lt": ("lt", "lessthan", "<"),
    "lteq": ("le", "<="),
    "gt": ("gt", "greaterthan", ">"),
    "gteq": ("ge", ">="),
}
TESTS: Final[dict[str, Callable[..., Any]]] = {
    **{
        name: _JINJA_TESTS[name]
        for name in (
            *("boolean", "callable", "defined", "divisibleby", "even", "false", "filter", "float", "integer"),
            *("iterable", "mapping", "none", "number", "odd", "sameas", "sequence", "string", "test", "true"),
            "undefined",
        )
    },
    **{name: _truth_of(_JINJA_TESTS[name]) for name in ("lower", "upper")},
    **{name: _comparison(operator) for operator, names in _COMPARISONS.items() for name in names},
    "in": _in,
}
"""Tests by name."""
