"""The Jinja environment of chat templates: a sandbox in which everything counts against a budget.

It is Jinja's immutable sandbox with lists of the filters, tests, methods and functions that templates may use. Jinja
hands operators and calls to the environment; comparisons, slices, `~`, lists and loops are turned into calls of it
before a template is compiled. What these lists do not name is refused, so that nothing can be left out of the budget.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import lru_cache
from types import BuiltinMethodType, MethodType
from typing import Any, Final, NoReturn

from jinja2 import TemplateError as JinjaError
from jinja2 import TemplateSyntaxError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.tests import TESTS
from jinja2.utils import Namespace

from .template_budget import Budget, BudgetError, Rewriting, percent_cost, search_cost

_MAX_SOURCE: Final = 100_000
_SCALARS: Final = (str, int, float, bool, type(None))
_STRFTIME: Final = re.compile(r"(?:[^%]|%[-#]?[a-zA-Z%]){0,200}", re.DOTALL)

_FREE_FILTERS: Final = ("default", "d", "length", "count", "first", "last")
"""Filters that read a value without walking through it."""
_FILTERS: Final = (
    *("abs", "int", "float", "round", "capitalize", "lower", "title", "upper", "trim", "safe", "string", "e", "escape"),
    *("sort", "min", "max", "groupby", "dictsort", "map", "select", "reject", "selectattr", "rejectattr", "unique"),
    *("list", "items", "reverse", "join", "replace", "format", "indent", "sum"),
)
_TESTS: Final = (
    *("boolean", "callable", "defined", "divisibleby", "even", "false", "filter", "float", "integer", "iterable"),
    *("mapping", "none", "number", "odd", "sameas", "sequence", "string", "test", "true", "undefined"),
)
_METHODS: Final[Mapping[type, frozenset[str]]] = {
    str: frozenset(
        (
            *("capitalize", "casefold", "lower", "swapcase", "title", "upper", "strip", "lstrip", "rstrip"),
            *("isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "islower", "isnumeric", "isspace", "istitle"),
            *("isupper", "startswith", "endswith", "removeprefix", "removesuffix", "find", "index", "count"),
            *("rfind", "rindex", "partition", "rpartition", "split", "rsplit", "splitlines", "replace", "join"),
            "format",
        )
    ),
    dict: frozenset(("get", "copy", "items", "keys", "values")),
    list: frozenset(("count", "index")),
    tuple: frozenset(("count", "index")),
}
_COMPARISONS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    **dict.fromkeys(("eq", "equalto", "=="), operator.eq),
    **dict.fromkeys(("ne", "!="), operator.ne),
    **dict.fromkeys(("lt", "lessthan", "<"), operator.lt),
    **dict.fromkeys(("lteq", "le", "<="), operator.le),
    **dict.fromkeys(("gt", "greaterthan", ">"), operator.gt),
    **dict.fromkeys(("gteq", "ge", ">="), operator.ge),
}


class BudgetContext(Context):
    """The variables of a rendering, and its budget."""

    budget: Budget
    mark: str
    """A character to keep as it is wherever text is escaped; empty for none."""


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with the filters, tests and functions of chat templates, all within the budget."""

    context_class = BudgetContext
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        # The optimizer computes constant expressions while it compiles, where no budget is.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            cache_size=0,
            finalize=_text_of,
            extensions=[_GenerationBlock, loopcontrols],
        )
        self.filters = {name: self.filters[name] for name in _FREE_FILTERS}
        self.filters.update({name: _within_budget(name) for name in _FILTERS}, tojson=_tojson)
        self.tests = {name: TESTS[name] for name in _TESTS}
        self.tests.update({name: _comparison(name) for name in (*_COMPARISONS, "in")})
        self.tests.update({name: _within_budget(name, test=True) for name in ("lower", "upper")})
        self.globals = dict(_FUNCTIONS)

    def parse_within_limits(self, source: str) -> tuple[nodes.Template, dict[str, int]]:
        """Parse a template and rewrite its syntax tree.

        Returns:
            The tree, and the costs of bodies for `Budget`.

        Raises:
            NotAllowedError: the template uses what is not allowed.
            jinja2.TemplateError: the template is not valid, or too long.
        """
        if len(source) > _MAX_SOURCE:
            raise TemplateSyntaxError(f"it has {len(source)} characters; at most {_MAX_SOURCE} are allowed", 1)
        rewriting = Rewriting(self)
        tree = rewriting.visit(self.parse(source))
        tree.set_environment(self)
        rewriting.body_costs[""] = rewriting.cost
        return tree, rewriting.body_costs

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute `left + right` and so on; a format's result, a product and a power are estimated first.

        Raises:
            BudgetError: the result would be too large.
        """
        budget = _budget(context)
        if operator == "*" and isinstance(left, int):
            left, right = right, left
        if operator == "%" and isinstance(left, str):
            budget.spend(percent_cost(budget, left, right))
        elif isinstance(left, (str, list, tuple)):
            size = len(left) if isinstance(left, str) else budget.weigh(left)
            if isinstance(right, int):
                budget.reserve(size * max(right, 0))
                budget.spend(100 + 50 * len(left) * max(right, 0))
            elif type(right) is type(left):
                budget.reserve(size + len(right))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > 120:
            raise BudgetError("a whole number is too large")
        result = super().call_binop(context, operator, left, right)
        if not isinstance(result, (str, list, tuple, int, float)):
            raise TypeError(f"{type(left).__name__} {operator} {type(right).__name__} is not possible")
        return budget.made(result)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  as in Jinja
        """Call a macro, a method of a value, or a function that templates have.

        Raises:
            SecurityError: the function is none of these.
        """
        budget = _budget(__context)
        owner = getattr(__obj, "__self__", None) if type(__obj) in (BuiltinMethodType, MethodType) else None
        if owner is __self:
            return __obj(__context, *args)
        if isinstance(__obj, (Macro, Undefined)):
            budget.spend_body(getattr(__obj, "name", ""))
            return budget.made(super().call(__context, __obj, *args, **kwargs))
        kwargs.pop("_loop_vars", None)
        kwargs.pop("_block_vars", None)
        if __obj in _FUNCTIONS.values():
            return budget.run(__obj.__name__, lambda *a, **k: __obj(__context, *a, **k), *args, **kwargs)
        name = getattr(__obj, "__name__", type(__obj).__name__)
        for kind, methods in _METHODS.items():
            if isinstance(owner, kind) and name in methods:
                cost = "str.format" if name == "format" else name
                return budget.run(cost, lambda _, *a, **k: __obj(*a, **k), owner, *args, **kwargs)
        if isinstance(owner, LoopContext):
            return budget.run(name, __obj, *args, **kwargs)
        of = f"method {type(owner).__name__}." if owner is not None else "function "
        raise SecurityError(f"the {of}{name} is not allowed")

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Read `obj[argument]`; a mapping has no keys but texts and numbers, whose hashes are cheap."""
        if isinstance(obj, Mapping) and not isinstance(argument, _SCALARS):
            return self.undefined(obj=obj, name=type(argument).__name__)
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> None:
        """`str.format` has a check of its own in the budget."""

    def steps(self, context: BudgetContext, values: Iterable[Any], cost: int) -> Iterable[Any]:
        """Iterate for a loop whose body costs this much."""
        return context.budget.steps(values, cost)

    def new(self, context: BudgetContext, value: Any) -> Any:
        """Count a list, tuple or dictionary that the template writes down."""
        if isinstance(value, dict):
            for key in value:
                _require_scalar(key)
        return context.budget.made(value)

    def concatenate(self, context: BudgetContext, *values: Any) -> str:
        """`a ~ b ~ c`."""
        budget = context.budget
        parts = [value if type(value) is str else budget.text(value) for value in values]
        budget.reserve(sum(map(len, parts)))
        return budget.text("".join(parts))

    def cut(self, context: BudgetContext, value: Any, start: Any, stop: Any, step: Any) -> Any:
        """`value[start:stop:step]`."""
        size = len(value) if isinstance(value, (str, list, tuple)) else 0
        context.budget.spend(100 + (10 if isinstance(value, str) else 50) * size)
        return context.budget.made(value[start:stop:step])

    def compare(self, context: BudgetContext, left: Any, *rest: Any) -> Any:
        """`a < b <= c`: comparisons, each with the name of the operator before its right side."""
        result: Any = True
        for name, right in zip(rest[::2], rest[1::2], strict=True):
            if not (result := _compare(context.budget, name, left, right)):
                break
            left = right
        return result


def _budget(context: Context) -> Budget:
    assert isinstance(context, BudgetContext)  # noqa: S101  the environment makes no others
    return context.budget


def _require_scalar(key: Any) -> None:
    if not isinstance(key, _SCALARS):
        raise TypeError(f"a {type(key).__name__} cannot be a key")


def _compare(budget: Budget, name: str, left: Any, right: Any) -> Any:
    """Compare two values after counting what the comparison may cost."""
    if name not in ("in", "notin"):
        budget.spend(100 + 10 * min(budget.weigh(left), budget.weigh(right)))
        return _COMPARISONS[name](left, right)
    if isinstance(right, str):
        budget.spend(100 + search_cost(right, left))
    elif isinstance(right, Mapping):
        if not isinstance(left, Undefined):
            _require_scalar(left)
    else:
        budget.spend(100 + 10 * budget.weigh(right) + (50 * len(right) if isinstance(right, range) else 0))
    return (left in right) == (name == "in")


def _comparison(name: str) -> Callable[..., Any]:
    @pass_context
    def call(context: BudgetContext, left: Any, right: Any) -> Any:
        return _compare(context.budget, name, left, right)

    return call


_JINJA: Final = ImmutableSandboxedEnvironment()


def _within_budget(name: str, *, test: bool = False) -> Callable[..., Any]:
    """Jinja's own filter or test of this name, within the budget."""

    @pass_context
    def call(context: BudgetContext, *args: Any, **kwargs: Any) -> Any:
        def function(value: Any, *rest: Any, **named: Any) -> Any:
            return (_JINJA.call_test if test else _JINJA.call_filter)(name, value, rest, named, context=context)

        return context.budget.run(name, function, *args, **kwargs)

    return call


@pass_context
def _text_of(context: BudgetContext, value: Any) -> str:
    """Return the text of a printed expression."""
    return context.budget.text(value)


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
    options = {"ensure_ascii": ensure_ascii, "indent": indent, "separators": separators, "sort_keys": sort_keys}
    if separators is not None:
        context.budget.spend(context.budget.weigh(value) * sum(map(len, separators)))
    written = str(context.budget.run("tojson", json.dumps, value, **options))
    if ensure_ascii and context.mark:
        # Of an even number of backslashes before it, none belongs to the escape of the mark.
        written = re.sub(rf"(?<!\\)((?:\\\\)*)\\u{ord(context.mark):04x}", rf"\1{context.mark}", written)
    return written


class TemplateNamespace(Namespace):
    """A namespace that prints as its name alone, whatever it holds."""

    def __repr__(self) -> str:
        return "<Namespace>"


def _dict(_: Context, *args: Any, **kwargs: Any) -> dict[Any, Any]:
    made = dict(*args, **kwargs)
    for key in made:
        _require_scalar(key)
    return made


def _namespace(context: BudgetContext, *args: Any, **kwargs: Any) -> TemplateNamespace:
    return TemplateNamespace(context.budget.made(_dict(context, *args, **kwargs)))


def _range(_: Context, *bounds: int) -> range:
    return safe_range(*bounds)


def _raise_exception(_: Context, message: Any = "") -> NoReturn:
    raise JinjaError(str(message))


def _strftime_now(_: Context, date_format: str) -> str:
    if not _STRFTIME.fullmatch(date_format):
        raise BudgetError(f"the date format {date_format[:40]!r} is not allowed")
    return datetime.now().strftime(date_format)  # without a time zone: `%z` has to stay empty


_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "dict": _dict,
    "namespace": _namespace,
    "raise_exception": _raise_exception,
    "range": _range,
    "strftime_now": _strftime_now,
}


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's text for training; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012  Jinja reads a plain class attribute

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=1)
def template_environment() -> TemplateEnvironment:
    """Return the environment that all chat templates share."""
    return TemplateEnvironment()
