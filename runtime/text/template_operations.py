"""Operators of chat templates, each within the budget.

An operator is estimated before it runs, where its result may be much larger than what it is made of, and the result is
counted.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from jinja2 import pass_context
from jinja2.runtime import Undefined

from .template_budget import Budget, BudgetContext, BudgetError

MAX_WIDTH: Final = 1000
_MAX_POWER_BITS: Final = 60
_PERCENT_FIELD: Final = re.compile(r"%(?:\([^)]*\))?[#0\- +]*([0-9*]*)(?:\.([0-9*]*))?[hlL]?(.?)", re.DOTALL)
_SCALARS: Final = (str, int, float, bool, type(None))


def to_text(budget: Budget, value: Any) -> str:
    """Return what a value prints as."""
    if type(value) is str:
        return value
    budget.reserve(budget.weigh(value))
    budget.spend(100 + 10 * budget.weigh(value))
    return budget.text(str(value))


def scalar_key(value: Any) -> Any:
    """Return a key of a dictionary; templates may only use texts and numbers, whose hashes are cheap.

    Raises:
        TypeError: the key is anything else.
    """
    if not isinstance(value, _SCALARS):
        raise TypeError(f"a {type(value).__name__} cannot be a key")
    return value


@pass_context
def output(context: BudgetContext, value: Any) -> str:
    """Return the text of a printed expression."""
    if type(value) is str:
        return context.budget.text(value)
    return to_text(context.budget, value)


@pass_context
def steps(context: BudgetContext, values: Iterable[Any], work: int, memory: int) -> Iterable[Any]:
    """Iterate for a loop whose body costs this much."""
    return context.budget.steps(values, work, memory)


@pass_context
def spend(context: BudgetContext, work: int, memory: int) -> None:
    """Count a call of a macro whose body costs this much."""
    context.budget.spend(work, memory)


@pass_context
def new_value(context: BudgetContext, value: Any) -> Any:
    """Count a list, tuple or dictionary that the template writes down."""
    return context.budget.container(value)


@pass_context
def dict_key(context: BudgetContext, key: Any) -> Any:
    """Check the key of a dictionary that the template writes down."""
    context.budget.spend(100)
    return scalar_key(key)


@pass_context
def concatenate(context: BudgetContext, *values: Any) -> str:
    """`a ~ b ~ c`."""
    budget = context.budget
    parts = [value if type(value) is str else to_text(budget, value) for value in values]
    budget.reserve(sum(map(len, parts)))
    return budget.text("".join(parts))


@pass_context
def add(context: BudgetContext, *values: Any) -> Any:
    """`a + b + c`, from left to right."""
    budget = context.budget
    size = 0
    for value in values:
        if type(value) is not str:
            break
        size += len(value)
    else:
        budget.reserve(size)
        return budget.text("".join(values))
    total = values[0]
    for value in values[1:]:
        total = _sum_of_two(budget, total, value)
    return total


def _sum_of_two(budget: Budget, left: Any, right: Any) -> Any:
    if isinstance(left, str) and isinstance(right, str):
        budget.reserve(len(left) + len(right))
        return budget.text(left + right)
    for kind in (list, tuple):
        if isinstance(left, kind) and isinstance(right, kind):
            return budget.joined(left, right)
    _require_numbers("+", left, right)
    return budget.number(left + right)


def _require_numbers(symbol: str, left: Any, right: Any) -> None:
    if isinstance(left, (int, float)) and isinstance(right, (int, float)):
        return
    for value in (left, right):
        if isinstance(value, Undefined):
            str(value + value)  # raises the error that names the value
    raise TypeError(f"{type(left).__name__} {symbol} {type(right).__name__} is not possible")


@pass_context
def subtract(context: BudgetContext, left: Any, right: Any) -> Any:
    """`a - b`."""
    _require_numbers("-", left, right)
    return context.budget.number(left - right)


@pass_context
def divide(context: BudgetContext, left: Any, right: Any) -> Any:
    """`a / b`."""
    _require_numbers("/", left, right)
    return context.budget.number(left / right)


@pass_context
def floor_divide(context: BudgetContext, left: Any, right: Any) -> Any:
    """`a // b`."""
    _require_numbers("//", left, right)
    return context.budget.number(left // right)


@pass_context
def multiply(context: BudgetContext, left: Any, right: Any) -> Any:
    """`a * b` of two numbers, or of a text or list and a whole number."""
    budget = context.budget
    if isinstance(left, int) and isinstance(right, (str, list, tuple)):
        left, right = right, left
    if isinstance(left, (str, list, tuple)) and isinstance(right, int):
        if isinstance(left, str):
            budget.reserve(len(left) * max(right, 0))
            return budget.text(left * right)
        budget.reserve(budget.weigh(left) * max(right, 0))
        budget.spend(10 * len(left) * max(right, 0), 10 * len(left) * max(right, 0))
        return budget.container(left * right)
    _require_numbers("*", left, right)
    return budget.number(left * right)


@pass_context
def power(context: BudgetContext, left: Any, right: Any) -> Any:
    """`a ** b` of small numbers."""
    _require_numbers("**", left, right)
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > 2 * _MAX_POWER_BITS:
        raise BudgetError("a whole number is too large")
    return context.budget.number(left**right)


@pass_context
def remainder(context: BudgetContext, left: Any, right: Any) -> Any:
    """`a % b` of numbers, or of a format and its values."""
    if isinstance(left, str):
        return percent_format(context.budget, left, right)
    _require_numbers("%", left, right)
    return context.budget.number(left % right)


def percent_format(budget: Budget, form: str, values: Any) -> str:
    """Fill in a format such as `%s: %d`, with widths of at most a thousand characters written as digits."""
    fields = _PERCENT_FIELD.findall(form)
    budget.spend(100 + 200 * len(fields) + 2 * len(form))
    for *widths, _ in fields:
        for width in widths:
            if "*" in width or len(width) > 4 or (width and int(width) > MAX_WIDTH):
                raise BudgetError(f"a width of {width:.10} in a format is not allowed")
    padding = sum(int(width) for *widths, _ in fields for width in widths if width)
    # The fields of a dictionary may all name the same value; those of a tuple are used once each.
    uses = len(fields) if isinstance(values, Mapping) else 1
    weight = len(form) + padding + 10 * budget.weigh(values) * uses
    budget.reserve(weight)
    budget.spend(weight)
    return budget.text(form % values)


@pass_context
def compare(context: BudgetContext, left: Any, *rest: Any) -> bool:
    """`a < b <= c`: comparisons, each with the name of the operator before its right side."""
    budget = context.budget
    for name, right in zip(rest[::2], rest[1::2], strict=True):
        if name == "in":
            result = contains(budget, right, left)
        elif name == "notin":
            result = not contains(budget, right, left)
        else:
            result = compare_two(budget, name, left, right)
        if not result:
            return result
        left = right
    return result


def compare_two(budget: Budget, name: str, left: Any, right: Any) -> Any:
    """Compare two values after counting what the comparison may cost."""
    budget.spend(100 + 10 * min(budget.weigh(left), budget.weigh(right)))
    return _COMPARISONS[name](left, right)


_COMPARISONS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "lteq": operator.le,
    "gt": operator.gt,
    "gteq": operator.ge,
}


def count_search(budget: Budget, text: str, part: str) -> None:
    """Count a search from the left, which is fast for long parts."""
    budget.spend(100 + len(text) * (1 + min(len(part), 100)))


def contains(budget: Budget, container: Any, value: Any) -> bool:
    """`value in container`."""
    if isinstance(container, str):
        if isinstance(value, str):
            count_search(budget, container, value)
        return value in container  # a TypeError if it is not text
    if isinstance(container, Mapping):
        budget.spend(100)
        return not isinstance(value, Undefined) and scalar_key(value) in container
    if isinstance(container, range):
        budget.spend(100 if isinstance(value, int) else 100 + 50 * len(container))
        return value in container
    if not isinstance(container, (list, tuple)):
        container = budget.collect(container)
    budget.spend(100 + 10 * budget.weigh(container))
    return value in container


@pass_context
def cut(context: BudgetContext, value: Any, start: Any, stop: Any, step: Any) -> Any:
    """`value[start:stop:step]`."""
    budget = context.budget
    if isinstance(value, str):
        budget.spend(100 + len(value))
        return budget.text(value[start:stop:step])
    if isinstance(value, (list, tuple)):
        budget.spend(100 + 10 * len(value), 10 * len(value))
        return budget.container(value[start:stop:step])
    return value[start:stop:step]


@pass_context
def item(context: BudgetContext, value: Any, key: Any) -> Any:
    """`value[key]`."""
    context.budget.spend(100)
    if isinstance(value, Mapping) and not isinstance(key, _SCALARS):
        # No dictionary has such a key. Templates look up the type of a value also where a schema has none.
        return context.environment.undefined(obj=value, name=type(key).__name__)
    return context.environment.getitem(value, key)
