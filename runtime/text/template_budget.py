"""Limits on the time and memory that rendering a chat template takes.

Every value that a template makes counts against one `Budget`. A value weighs as many characters as it would print, with
shared parts counted as often as they appear, so that a small structure that prints as gigabytes cannot be made at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from jinja2 import TemplateRuntimeError
from jinja2.runtime import Context

MAX_CHARACTERS: Final = 8_000_000
"""Largest number of characters of a rendered prompt."""
_MAX_NESTING: Final = 100
_MAX_CALLS: Final = 50
_MAX_WHOLE_NUMBER: Final = 2**60  # below the modulus of Python's hash, so that numbers cannot be made to collide
_WORK: Final = 1_000_000_000
_WORK_PER_CHARACTER: Final = 1000
_MAX_WORK: Final = 3_000_000_000
_MEMORY: Final = 256_000_000
_MEMORY_PER_CHARACTER: Final = 64
_MAX_MEMORY: Final = 640_000_000
_SCALAR: Final = 24


class BudgetError(TemplateRuntimeError):
    """A template needs more time or memory than a prompt may take."""


class Budget:
    """What one rendering may still take.

    Work is counted in nanoseconds, roughly: 300 for a node of the template, 100 for an item, 1 for a character. Memory
    is counted in bytes that are allocated, whether they are freed again or not. Both limits grow with the size of the
    messages.
    """

    def __init__(self, inputs: Iterable[Any] = ()) -> None:
        """Start a budget for a rendering of `inputs`, which are the messages, the tools and so on."""
        self._weights: dict[int, tuple[object, int, int]] = {}
        self._work = self._memory = _MAX_WORK
        self._calls = 0
        self.value_limit = MAX_CHARACTERS
        size = sum(self.weigh(value) for value in inputs)
        self.value_limit += 2 * size
        """Largest weight of a value."""
        self._work = min(_WORK + _WORK_PER_CHARACTER * size, _MAX_WORK)
        self._memory = min(_MEMORY + _MEMORY_PER_CHARACTER * size, _MAX_MEMORY)

    def spend(self, work: int, memory: int = 0) -> None:
        """Count work and memory.

        Raises:
            BudgetError: there is not enough left.
        """
        self._work -= work
        self._memory -= memory
        if self._work < 0:
            raise BudgetError("it computes for too long")
        if self._memory < 0:
            raise BudgetError("it takes too much memory")

    def reserve(self, weight: int) -> None:
        """Check the weight of a value before it is made.

        Raises:
            BudgetError: the value would be too large.
        """
        if weight > self.value_limit:
            raise BudgetError(f"a value of {weight} characters is too long")

    def text(self, value: str) -> str:
        """Count a new string and return it."""
        size = len(value)
        self._work -= 100 + size
        self._memory -= 60 + (size if value.isascii() else 4 * size)
        if size > self.value_limit or self._work < 0 or self._memory < 0:
            self.reserve(size)
            self.spend(0)
        return value

    def number(self, value: Any) -> Any:
        """Check a computed number and return it.

        Raises:
            BudgetError: a whole number is too large.
        """
        if isinstance(value, int):
            if not -_MAX_WHOLE_NUMBER < value < _MAX_WHOLE_NUMBER:
                raise BudgetError("a whole number is too large")
        elif isinstance(value, complex):
            raise TypeError("complex numbers are not allowed")
        return value

    def container(self, value: Any) -> Any:
        """Count a new list, tuple or dictionary and return it."""
        self.reserve(self.weigh(value))
        self.spend(100, 64 + (120 if isinstance(value, dict) else 10) * len(value))
        return value

    def joined(self, left: Any, right: Any) -> Any:
        """Join two lists or two tuples without weighing their items again."""
        weight, depth = self.weigh(left) + self.weigh(right), max(self.depth(left), self.depth(right))
        self.reserve(weight)
        self.spend(100 + 2 * (len(left) + len(right)), 64 + 10 * (len(left) + len(right)))
        value = left + right
        self._weights[id(value)] = value, weight, depth
        return value

    def collect(self, values: Iterable[Any]) -> list[Any]:
        """Make a list of values, counting every one before the next is asked for."""
        items = []
        for item in values:
            self.spend(400, 80)
            items.append(item)
        self.container(items)
        return items

    def steps(self, values: Iterable[Any], work: int, memory: int) -> Iterator[Any]:
        """Iterate over values; every step counts as this much work and memory."""
        for item in values:
            self.spend(work, memory)
            yield item

    def enter_call(self) -> None:
        """Count a call of a macro or a recursive loop; `leave_call` follows.

        Raises:
            BudgetError: the calls are nested too deep.
        """
        self._calls += 1
        if self._calls > _MAX_CALLS:
            raise BudgetError(f"its calls are nested more than {_MAX_CALLS} deep")

    def leave_call(self) -> None:
        """End what `enter_call` began."""
        self._calls -= 1

    def weigh(self, value: Any) -> int:
        """Return the number of characters that a value prints as, roughly; shared parts count every time."""
        if isinstance(value, str):
            return len(value) + _SCALAR
        if isinstance(value, (list, tuple, dict)):
            return self._measure(value, 0)[1]
        if value is None or isinstance(value, (int, float)):
            return _SCALAR
        if isinstance(value, Mapping) or type(value) in _VIEWS:
            return self._measure(list(value), 0)[1]
        return _SCALAR

    def depth(self, value: Any) -> int:
        """Return how deep lists and dictionaries are nested in a value."""
        return self._measure(value, 0)[2] if isinstance(value, (list, tuple, dict)) else 0

    def _measure(self, value: Any, level: int) -> tuple[object, int, int]:
        known = self._weights.get(id(value))
        if known is not None:
            return known
        if level > _MAX_NESTING:
            raise BudgetError(f"a value is nested more than {_MAX_NESTING} deep")
        self.spend(400 + 100 * len(value), 160)
        weight, depth = _SCALAR, 0
        parts = value if not isinstance(value, dict) else (part for pair in value.items() for part in pair)
        for part in parts:
            if isinstance(part, str):
                weight += len(part) + _SCALAR
            elif isinstance(part, (list, tuple, dict)):
                _, inner, below = self._measure(part, level + 1)
                weight += inner
                depth = max(depth, below)
            else:
                weight += _SCALAR
        if depth >= _MAX_NESTING:
            raise BudgetError(f"a value is nested more than {_MAX_NESTING} deep")
        # The value is kept with its weight: its identity may not be given to another one.
        self._weights[id(value)] = value, weight, depth + 1
        return value, weight, depth + 1


class BudgetContext(Context):
    """The variables of a rendering, and its budget."""

    budget: Budget
    mark: str
    """A character to keep as it is wherever text is escaped; empty for none."""
    step_cost: int
    """Work of running every node of the template once."""
    step_memory: int
    """Memory of writing every text of the template once."""


_EMPTY: Final[dict[str, str]] = {}
_VIEWS: Final = (type(_EMPTY.keys()), type(_EMPTY.values()), type(_EMPTY.items()))
