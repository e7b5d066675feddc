"""Limits on the time and memory that rendering a chat template takes.

Every value that a template makes counts against one `Budget`. A value weighs as many characters as it would print, with
shared parts counted as often as they appear, so that a small structure that prints as gigabytes cannot be made at all.
A call is charged before it runs, for the largest result that arguments of these sizes may have. Templates are rewritten
so that what Jinja would compute by itself is a call too.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, cast

from jinja2 import Environment, TemplateRuntimeError, TemplateSyntaxError, nodes
from jinja2.visitor import NodeTransformer

MAX_CHARACTERS: Final = 8_000_000
"""Largest number of characters of a rendered prompt."""
_MAX_WHOLE_NUMBER: Final = 2**60
"""Whole numbers stay below the modulus of Python's hash, so that numbers cannot be made to collide."""
_MAX_NESTING: Final = 100
_COST: Final = 1_200_000_000
_COST_PER_CHARACTER: Final = 1200
_MAX_COST: Final = 3_200_000_000
_SCALAR: Final = 24
_ITEM: Final = 720
"""Cost of taking an item from an iterator and listing it."""
_LONGEST_SEARCH: Final = 100
"""A search from the left is fast for parts that are longer than this."""
_MAX_NODES: Final = 10_000
_MAX_LITERAL: Final = 2**53
_COST_PER_NODE: Final = 300
_ALLOWED_NODES: Final = (
    *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.If, nodes.For, nodes.Macro, nodes.CallBlock),
    *(nodes.FilterBlock, nodes.With, nodes.Assign, nodes.AssignBlock, nodes.ExprStmt, nodes.Break, nodes.Continue),
    *(nodes.Name, nodes.NSRef, nodes.Const, nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair, nodes.Keyword),
    *(nodes.Operand, nodes.Compare, nodes.CondExpr, nodes.Call, nodes.Filter, nodes.Test, nodes.Getattr),
    *(nodes.Getitem, nodes.Slice, nodes.Concat, nodes.Not, nodes.Neg, nodes.Pos, nodes.And, nodes.Or),
    *(nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod, nodes.Pow),
)


class BudgetError(TemplateRuntimeError):
    """A template needs more time or memory than a prompt may take."""


class NotAllowedError(TemplateSyntaxError):
    """A template is valid, but uses something that chat templates do not have here."""


class Budget:
    """What one rendering may still take.

    Costs are counted in nanoseconds, roughly: 300 for a node of the template, 100 for an item, 1 for a character, and 4
    for each byte that is allocated, whether it is freed again or not. The limit grows with the size of the messages.
    """

    def __init__(self, inputs: Iterable[Any], body_costs: Mapping[str, int]) -> None:
        """Start a budget for a rendering.

        Args:
            inputs: the messages, the tools and so on.
            body_costs: cost of the body of each macro by name, and of the whole template under the empty name.
        """
        self._weights: dict[int, tuple[object, int, int]] = {}
        self._left = _MAX_COST
        self._value_limit = MAX_CHARACTERS
        size = sum(self.weigh(value) for value in inputs)
        self._value_limit += 2 * size
        self._left = min(_COST + _COST_PER_CHARACTER * size, _MAX_COST)
        self._body_costs: Final = body_costs
        self.spend_body("")

    def spend(self, cost: int) -> None:
        """Count a cost.

        Raises:
            BudgetError: there is not enough left.
        """
        self._left -= cost
        if self._left < 0:
            raise BudgetError("it computes for too long")

    def spend_body(self, macro: str) -> None:
        """Count what running the body of a macro costs once; an unknown macro costs as much as the whole template."""
        self.spend(self._body_costs.get(macro, self._body_costs[""]))

    def reserve(self, weight: int) -> None:
        """Check the weight of a value before it is made.

        Raises:
            BudgetError: the value would be too large.
        """
        if weight > self._value_limit:
            raise BudgetError(f"a value of {weight} characters is too long")

    def made(self, value: Any) -> Any:
        """Count a value that the template has made and return it; an iterator becomes a list.

        Raises:
            BudgetError: the value is too large.
        """
        if isinstance(value, str):
            size = len(value)
            self.reserve(size)
            self.spend(340 + size * (5 if value.isascii() else 17))
            return value if type(value) is str else str(value)
        if isinstance(value, Iterator):
            value = list(self.steps(value, _ITEM))
        if isinstance(value, (list, tuple, dict)):
            self.reserve(self.weigh(value))
            self.spend(356 + (480 if isinstance(value, dict) else 40) * len(value))
        elif isinstance(value, int) and not -_MAX_WHOLE_NUMBER < value < _MAX_WHOLE_NUMBER:
            raise BudgetError("a whole number is too large")
        return value

    def text(self, value: Any) -> str:
        """Return what a value prints as, and count it."""
        if type(value) is not str:
            weight = self.weigh(value)
            self.reserve(weight)
            self.spend(100 + 10 * weight)
            value = str(value)
        return str(self.made(value))

    def steps(self, values: Iterable[Any], cost: int) -> Iterator[Any]:
        """Iterate over values, each step at this cost."""
        for item in values:
            self.spend(cost)
            yield item

    def run(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a filter, a method or a function of this name within the budget."""
        cost: Callable[..., int] = _COSTS.get(name, _product)
        self.spend(cost(self, *args, **kwargs) + 500)
        return self.made(function(*args, **kwargs))

    def weigh(self, value: Any) -> int:
        """Return the number of characters that a value prints as, roughly; shared parts count every time."""
        if isinstance(value, str):
            return len(value) + _SCALAR
        if isinstance(value, (list, tuple, dict)):
            return self._measure(value, 0)[1]
        if isinstance(value, Mapping) or type(value) in _VIEWS:
            return self._measure(list(value), 0)[1]
        return _SCALAR

    def _measure(self, value: Any, level: int) -> tuple[object, int, int]:
        known = self._weights.get(id(value))
        if known is not None:
            return known
        if level > _MAX_NESTING:
            raise BudgetError(f"a value is nested more than {_MAX_NESTING} deep")
        self.spend(1040 + 100 * len(value))
        weight, depth = _SCALAR, 0
        parts = value if not isinstance(value, dict) else (part for pair in value.items() for part in pair)
        for part in parts:
            if isinstance(part, (list, tuple, dict)):
                _, inner, below = self._measure(part, level + 1)
                weight += inner
                depth = max(depth, below)
            else:
                weight += _SCALAR + (len(part) if isinstance(part, str) else 0)
        if depth >= _MAX_NESTING:
            raise BudgetError(f"a value is nested more than {_MAX_NESTING} deep")
        # The value is kept with its weight: its identity may not be given to another one.
        self._weights[id(value)] = value, weight, depth + 1
        return self._weights[id(value)]


_VIEWS: Final = tuple(type(view) for view in ({}.keys(), {}.values(), {}.items()))  # type: ignore[var-annotated]


def _magnitude(budget: Budget, value: Any) -> int:
    """Size of an argument: characters of a text, the amount of a number, the weight of a list."""
    if isinstance(value, str):
        return len(value)
    return int(min(abs(value), _MAX_COST)) if isinstance(value, (int, float)) else budget.weigh(value)


def _product(budget: Budget, *args: Any, **kwargs: Any) -> int:
    """The largest cost and result of any function here: the first argument's size times the size of the others."""
    first, *rest = (_magnitude(budget, value) for value in (*args, *kwargs.values())) if args or kwargs else (0,)
    return 5 * (1 + first) * (1 + sum(rest))


def _length(values: Any, otherwise: int = 0) -> int:
    return len(values) if hasattr(values, "__len__") else otherwise


def search_cost(text: str, part: Any) -> int:
    """Cost of looking for a part of a text from the left."""
    return len(text) * (1 + min(len(part) if isinstance(part, str) else 1, _LONGEST_SEARCH))


def _replace(budget: Budget, text: Any, old: Any, new: Any, *_: Any, **__: Any) -> int:
    text, old, new = (budget.text(part) for part in (text, old, new))
    budget.reserve(len(text) + text.count(old) * max(len(new) - len(old), 0))
    return search_cost(text, old)


def percent_cost(budget: Budget, form: Any, *args: Any, **kwargs: Any) -> int:
    """Cost of filling in a format such as `%s: %d`, whose widths have at most three digits."""
    form = budget.text(form)
    if (field := _WIDE_PERCENT.search(form)) is not None:
        raise BudgetError(f"a width of {field[2]:.10} in a format is not allowed")
    return _filled(budget, form, *args, **kwargs)


def _format_cost(budget: Budget, form: str, *args: Any, **kwargs: Any) -> int:
    """Cost of `form.format(...)`, with fields that are names or numbers, and widths of at most three digits."""
    for _, field, spec, _ in string.Formatter().parse(form):
        if field is not None and (not re.fullmatch(r"\w*", field) or re.search(r"\d{4}|\{", spec or "")):
            raise BudgetError(f"the format field {{{field[:40]}:{(spec or '')[:40]}}} is not allowed")
    return _filled(budget, form, *args, **kwargs)


def _filled(budget: Budget, form: str, *args: Any, **kwargs: Any) -> int:
    """Cost of a format whose fields may all name the largest value, or be padded to the largest width."""
    fields = form.count("%") + form.count("{")
    weight = len(form) + fields * (1000 + 10 * sum(map(budget.weigh, (*args, *kwargs.values()))))
    budget.reserve(weight)
    return weight


_WIDE_PERCENT: Final = re.compile(r"%(\([^)]*\))?[^a-zA-Z%]*?(\*|\d{4,})", re.DOTALL)
_COSTS: Final[dict[str, Callable[..., int]]] = {
    **dict.fromkeys(("get", "items", "keys", "values"), lambda *_, **__: 100),
    # Each item is looked at once, however large it is, and listed.
    **dict.fromkeys(
        ("copy", "dict", "list", "namespace", "reverse"), lambda _, values=(), *__, **___: 100 + _ITEM * _length(values)
    ),
    # Items are compared with each other, maybe by an attribute such as `a.b.c`.
    **dict.fromkeys(
        ("dictsort", "groupby", "max", "min", "sort", "unique"), lambda *args, **named: 200 * _product(*args, **named)
    ),
    # Every piece is made and listed.
    **dict.fromkeys(
        ("rsplit", "split"),
        lambda _, text, sep=None, *__, **___: (
            search_cost(text, sep) + 16 * len(text) + 420 * (text.count(sep) if sep else len(text) // 2)
        ),
    ),
    "splitlines": lambda _, text, *__: 340 * len(text),
    "str.format": _format_cost,
    "format": percent_cost,
    "replace": _replace,
    # Lists are copied with every list that is added to them.
    "sum": lambda budget, values, *args, **named: _product(budget, values, _length(values, 1), *args, **named),
    "tojson": lambda budget, value, _=False, indent=None, *__, **___: (
        30 * budget.weigh(value) * (1 + (_magnitude(budget, indent) if indent else 0))
    ),
}
"""What a call may cost, by the name of the function; any other costs the product of the sizes of its arguments."""


class Rewriting(NodeTransformer):
    """Turns what Jinja would compute by itself into calls of the environment, and adds up what bodies cost.

    Args:
        environment: the sandbox; other filters and tests than its own are not allowed.
    """

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._nodes = self._characters = 0
        self.body_costs: dict[str, int] = {}
        """Cost of running the body of each macro once."""

    @property
    def cost(self) -> int:
        """Cost of running every node visited so far once."""
        return _COST_PER_NODE * self._nodes + 17 * self._characters

    def visit(self, node: nodes.Node, *_: Any, **__: Any) -> Any:
        """Return what takes the place of a node."""
        self._nodes += 1
        if self._nodes > _MAX_NODES:
            raise TemplateSyntaxError(f"it has more than {_MAX_NODES} expressions", node.lineno)
        self._check(node)
        before = self.cost
        self.generic_visit(node)
        cost = self.cost - before
        match node:
            case nodes.For():
                node.iter = self._call("steps", cast(nodes.Expr, node.iter), nodes.Const(cost))
            case nodes.Macro() | nodes.CallBlock():
                name = node.name if isinstance(node, nodes.Macro) else "caller"
                self.body_costs[name] = max(self.body_costs.get(name, 0), cost)
            case nodes.List() | nodes.Tuple(ctx="load") | nodes.Dict():
                return self._call("new", node)
            case nodes.Concat():
                return self._call("concatenate", *node.nodes)
            case nodes.Compare():
                parts = (part for operand in node.ops for part in (nodes.Const(operand.op), operand.expr))
                return self._call("compare", node.expr, *parts)
            case nodes.Getitem(arg=nodes.Slice() as bounds):
                parts = (part or nodes.Const(None) for part in (bounds.start, bounds.stop, bounds.step))
                return self._call("cut", node.node, *parts)
        return node

    def _check(self, node: nodes.Node) -> None:
        refused = ""
        match node:
            case nodes.TemplateData():
                self._characters += len(node.data)
            case nodes.Const(value=int() | float() as number):
                if not -_MAX_LITERAL <= number <= _MAX_LITERAL:
                    raise TemplateSyntaxError("a number in it is too large", node.lineno)
            case nodes.Filter(name=name) if name not in self._environment.filters:
                refused = f"the filter {name!r}"
            case nodes.Test(name=name) if name not in self._environment.tests:
                refused = f"the test {name!r}"
            case nodes.For(recursive=True):
                refused = "a recursive loop"
            case _ if not isinstance(node, _ALLOWED_NODES):
                refused = type(node).__name__.lower()
        if refused:
            raise NotAllowedError(f"{refused} is not allowed in a chat template", node.lineno)

    def _call(self, name: str, first: nodes.Expr, *rest: nodes.Expr) -> nodes.Call:
        function = nodes.EnvironmentAttribute(name, lineno=first.lineno)
        return nodes.Call(function, [first, *rest], [], None, None, lineno=first.lineno)
