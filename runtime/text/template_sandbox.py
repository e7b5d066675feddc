"""The Jinja environment of chat templates: a sandbox in which everything counts against a budget.

A template is parsed by Jinja, and its syntax tree is rewritten before it is compiled: every expression that makes a new
value becomes a call of a hidden filter, whose name no template can write, and every loop counts its steps. What the
rewriting does not know is refused, so that nothing can be left out of the budget.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, cast

from jinja2 import TemplateError as JinjaError
from jinja2 import TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from . import template_operations as operations
from .template_budget import BudgetContext
from .template_filters import FILTERS, TESTS
from .template_methods import FUNCTIONS, METHODS, TemplateNamespace, call

_MAX_SOURCE: Final = 100_000
_MAX_NODES: Final = 10_000
_MAX_LITERAL: Final = 2**53
_WORK_PER_NODE: Final = 300
_BYTES_PER_CHARACTER: Final = 4
_HIDDEN: Final = "#"
"""First character of the names of hidden filters."""

_OPERATIONS: Final[dict[str, Callable[..., Any]]] = {
    "add": operations.add,
    "compare": operations.compare,
    "concatenate": operations.concatenate,
    "cut": operations.cut,
    "divide": operations.divide,
    "floor_divide": operations.floor_divide,
    "item": operations.item,
    "key": operations.dict_key,
    "multiply": operations.multiply,
    "new": operations.new_value,
    "power": operations.power,
    "remainder": operations.remainder,
    "spend": operations.spend,
    "steps": operations.steps,
    "subtract": operations.subtract,
}
_BINARY: Final[dict[type[nodes.BinExpr], str]] = {
    nodes.Add: "add",
    nodes.Div: "divide",
    nodes.FloorDiv: "floor_divide",
    nodes.Mod: "remainder",
    nodes.Mul: "multiply",
    nodes.Pow: "power",
    nodes.Sub: "subtract",
}
_UNCHANGED: Final = (
    *(nodes.Template, nodes.Output, nodes.If, nodes.FilterBlock, nodes.With),
    *(nodes.Assign, nodes.AssignBlock, nodes.ExprStmt, nodes.Break, nodes.Continue, nodes.Name, nodes.NSRef),
    *(nodes.Keyword, nodes.Operand, nodes.CondExpr, nodes.Call, nodes.Getattr, nodes.Slice),
    *(nodes.Not, nodes.Neg, nodes.Pos, nodes.And, nodes.Or),
)
"""Nodes that make no value of more than a few bytes, or whose value is counted by what they call."""


class NotAllowedError(TemplateSyntaxError):
    """A template is valid, but uses something that chat templates do not have here."""


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with the filters, tests and functions of chat templates, all within the budget."""

    context_class = BudgetContext

    def __init__(self) -> None:
        # The optimizer computes constant expressions while it compiles, where no budget is.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            cache_size=0,
            finalize=operations.output,
            extensions=[_GenerationBlock, loopcontrols],
        )
        self.filters = {**FILTERS, **{_HIDDEN + name: function for name, function in _OPERATIONS.items()}}
        self.tests = dict(TESTS)
        self.globals = dict(FUNCTIONS)

    def parse_within_limits(self, source: str) -> tuple[nodes.Template, int, int]:
        """Parse a template and rewrite its syntax tree.

        Returns:
            The tree, and the work and the memory of running every node of it once.

        Raises:
            NotAllowedError: the template uses what is not allowed.
            jinja2.TemplateError: the template is not valid, or too long.
        """
        if len(source) > _MAX_SOURCE:
            raise TemplateSyntaxError(f"it has {len(source)} characters; at most {_MAX_SOURCE} are allowed", 1)
        tree = self.parse(source)
        rewriting = _Rewriting()
        rewriting.visit(tree)
        tree.set_environment(self)
        return tree, rewriting.work, rewriting.memory

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  as in Jinja
        """Call a function of a template; the compiled code comes here for every call."""
        kwargs.pop("_loop_vars", None)
        kwargs.pop("_block_vars", None)
        assert isinstance(__context, BudgetContext)  # noqa: S101  the environment makes no others
        return call(__context, __obj, args, kwargs)

    def call_filter(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a filter that `map` names."""
        if isinstance(name, str) and name.startswith(_HIDDEN):
            raise JinjaError(f"No filter named {name!r}.")
        return super().call_filter(name, *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Read `obj.attribute`: as in Jinja, with a short way for what templates read all the time."""
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        if attribute in _SAFE_ATTRIBUTES.get(kind, ()):
            return getattr(obj, attribute)
        if kind is TemplateNamespace and not attribute.startswith("_"):
            try:
                return getattr(obj, attribute)
            except AttributeError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def wrap_str_format(self, value: Any) -> None:  # noqa: ARG002
        """`str.format` has a check of its own among the methods."""
        return


_DICT_ATTRIBUTES: Final = frozenset(dir(dict))
_LOOP_ATTRIBUTES: Final = (
    "first",
    "index",
    "index0",
    "last",
    "length",
    "nextitem",
    "previtem",
    "revindex",
    "revindex0",
)
_SAFE_ATTRIBUTES: Final = {
    **{kind: frozenset(methods) for kind, methods in METHODS.items()},
    LoopContext: frozenset(_LOOP_ATTRIBUTES),
}


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's text for training; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012  Jinja reads a plain class attribute

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Rewriting(NodeTransformer):
    """Replaces the expressions of a template that make values by calls of hidden filters."""

    def __init__(self) -> None:
        self._nodes = 0
        self._characters = 0
        self._rules: dict[type[nodes.Node], Callable[[Any], nodes.Node]] = {
            nodes.TemplateData: self._template_data,
            nodes.Const: self._const,
            nodes.For: self._for,
            nodes.Macro: self._macro,
            nodes.CallBlock: self._macro,
            nodes.Filter: self._filter,
            nodes.Test: self._test,
            nodes.List: self._literal,
            nodes.Tuple: self._literal,
            nodes.Dict: self._literal,
            nodes.Pair: self._pair,
            nodes.Concat: self._concat,
            nodes.Getitem: self._getitem,
            nodes.Compare: self._compare,
            **dict.fromkeys(_BINARY, self._binary),
        }

    @property
    def work(self) -> int:
        """Work of running every node visited so far once."""
        return _WORK_PER_NODE * self._nodes + self._characters

    @property
    def memory(self) -> int:
        """Memory of writing every text visited so far once."""
        return _BYTES_PER_CHARACTER * self._characters

    def visit(self, node: nodes.Node, *_: Any, **__: Any) -> Any:
        self._nodes += 1
        if self._nodes > _MAX_NODES:
            raise TemplateSyntaxError(f"it has more than {_MAX_NODES} expressions", node.lineno)
        rule = self._rules.get(type(node))
        return self.generic_visit(node) if rule is None else rule(node)

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        if not isinstance(node, _UNCHANGED):
            raise NotAllowedError(f"{type(node).__name__.lower()} is not allowed in a chat template", node.lineno)
        return super().generic_visit(node, *args, **kwargs)

    def _children(self, node: nodes.Node) -> None:
        super().generic_visit(node)

    def _hidden(self, name: str, node: nodes.Expr, *args: Any) -> nodes.Filter:
        return nodes.Filter(node, _HIDDEN + name, list(args), [], None, None, lineno=node.lineno)

    def _template_data(self, node: nodes.TemplateData) -> nodes.Node:
        self._characters += len(node.data)
        return node

    def _const(self, node: nodes.Const) -> nodes.Node:
        value = node.value
        if isinstance(value, (int, float)) and not -_MAX_LITERAL <= value <= _MAX_LITERAL:
            raise TemplateSyntaxError("a number in it is too large", node.lineno)
        return node

    def _for(self, node: nodes.For) -> nodes.Node:
        work, memory = self.work, self.memory
        self._children(node)
        cost = (nodes.Const(self.work - work), nodes.Const(self.memory - memory))
        node.iter = self._hidden("steps", cast(nodes.Expr, node.iter), *cost)
        return node

    def _macro(self, node: nodes.Macro | nodes.CallBlock) -> nodes.Node:
        work, memory = self.work, self.memory
        self._children(node)
        cost = self._hidden("spend", nodes.Const(self.work - work), nodes.Const(self.memory - memory))
        node.body.insert(0, nodes.ExprStmt(cost, lineno=node.lineno))
        return node

    def _filter(self, node: nodes.Filter) -> nodes.Node:
        if node.name not in FILTERS:
            raise NotAllowedError(f"the filter {node.name!r} is not allowed in a chat template", node.lineno)
        self._children(node)
        return node

    def _test(self, node: nodes.Test) -> nodes.Node:
        if node.name not in TESTS:
            raise NotAllowedError(f"the test {node.name!r} is not allowed in a chat template", node.lineno)
        self._children(node)
        return node

    def _literal(self, node: nodes.List | nodes.Tuple | nodes.Dict) -> nodes.Node:
        self._children(node)
        assigned = isinstance(node, nodes.Tuple) and node.ctx == "store"
        return node if assigned else self._hidden("new", node)

    def _pair(self, node: nodes.Pair) -> nodes.Node:
        self._children(node)
        if not isinstance(node.key, nodes.Const):
            node.key = self._hidden("key", node.key)
        return node

    def _concat(self, node: nodes.Concat) -> nodes.Node:
        self._children(node)
        return self._hidden("concatenate", *node.nodes)

    def _getitem(self, node: nodes.Getitem) -> nodes.Node:
        self._children(node)
        if isinstance(node.arg, nodes.Slice):
            bounds = (node.arg.start, node.arg.stop, node.arg.step)
            return self._hidden("cut", node.node, *(nodes.Const(None) if part is None else part for part in bounds))
        return node if isinstance(node.arg, nodes.Const) else self._hidden("item", node.node, node.arg)

    def _compare(self, node: nodes.Compare) -> nodes.Node:
        # To compare with a number or a text that is written down costs no more than it is long.
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        first = node.ops[0]
        plain = len(sides) == 2 and (
            any(isinstance(side, nodes.Const) for side in sides)
            if first.op not in ("in", "notin")
            else isinstance(first.expr, (nodes.List, nodes.Tuple))
            and all(isinstance(part, nodes.Const) for part in (node.expr, *first.expr.items))
        )
        if plain:
            node.expr = self.visit(node.expr)
            if first.op not in ("in", "notin"):
                first.expr = self.visit(first.expr)
            return node
        self._children(node)
        rest = [part for operand in node.ops for part in (nodes.Const(operand.op), operand.expr)]
        return self._hidden("compare", node.expr, *rest)

    def _binary(self, node: nodes.BinExpr) -> nodes.Node:
        name = _BINARY[type(node)]
        self._children(node)
        left = node.left
        if isinstance(node, nodes.Add) and isinstance(left, nodes.Filter) and left.name == _HIDDEN + name:
            left.args.append(node.right)  # a + b + c is one call
            return left
        return self._hidden(name, left, node.right)


@lru_cache(maxsize=1)
def template_environment() -> TemplateEnvironment:
    """Return the environment that all chat templates share."""
    return TemplateEnvironment()
