"""Rewrites a decoder graph to multiply with 8-bit integers, for wide passes of consecutive tokens.

Every product with quantized weights (MatMulNBits) whose inputs are all tokens of the pass becomes

    step = max(|x|) / limit        for each token
    y    = step * (round(x / step) @ integers * scales)

with one scale for each output. Inputs that several products share are quantized once. The two halves of a fused
product are computed apart, so that no Split copies them, and where one of them is multiplied with the input of the next
product (gated feed-forwards), its steps are multiplied with that product's instead of with thousands of channels.
Products of the tokens in `logit_rows` alone, the LM head among them, stay as they are: they are as narrow as in a
plain pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from ...models.onnx_file.graph_editor import CannotRewriteError, GraphEditor
from ...models.onnx_file.model_messages import Message, attribute_values
from ..graph.attention_edits import OPERATOR as ATTENTION
from ..graph.attention_edits import NodeList
from .integer_weights import OPERATOR, BlockMatrix, Floats, IntegerRange, quantized_product

SELECTED: Final = "logit_rows"
TOWER_ATTENTION: Final = "MultiHeadAttention"
"""Attention of vision towers, without a cache."""
_OLDEST_OPSET: Final = 13
"""Version of ONNX's operators since which QuantizeLinear takes a scale for each token."""
_AXES_AS_INPUT: Final = 18
"""Version since which ReduceMax and ReduceMin take axes as an input."""


@dataclass
class Product:
    """One product of the rewritten graph: a whole matrix, or some of its rows."""

    name: str
    """Name of its output, and of its tensors."""
    inputs: str
    """Name of its inputs."""
    matrix: BlockMatrix
    rows: slice
    source: str
    """Name of the output of the MatMulNBits that it is a part of."""
    column_factors: Floats | None = None
    """What the weights of each input are multiplied with."""
    row_factors: Floats | None = None
    """What the weights of each output are multiplied with."""
    keeps_step: bool = field(default=True)
    """Whether the output is multiplied with the steps of its inputs; if not, whoever uses it does that."""


@dataclass(frozen=True)
class Int8Products:
    """The products of a graph that are computed with integers."""

    products: tuple[Product, ...]
    splits: frozenset[str]
    """Names of the fused outputs whose Split is not needed any more."""
    extra_steps: dict[str, str]
    """By the name of some inputs: inputs of the product by whose steps they are still to be multiplied."""

    @property
    def weights(self) -> int:
        """Number of weights."""
        return sum((each.rows.stop - each.rows.start) * each.matrix.columns for each in self.products)

    @property
    def input_names(self) -> list[str]:
        """Names of the different inputs, in order."""
        return list(dict.fromkeys(each.inputs for each in self.products))


def find_products(editor: GraphEditor, kept: frozenset[str] = frozenset()) -> Int8Products:
    """Find the products of a graph that integers can compute.

    Args:
        editor: the graph.
        kept: names of the outputs of products that are to stay as they are.

    Raises:
        CannotRewriteError: there is none, or the graph has no attention that keeps a cache in place, or a tower's.
    """
    nodes = list(editor.graph.node)
    attentions = {ATTENTION, TOWER_ATTENTION}
    if all(each.op_type not in attentions for each in nodes):
        raise CannotRewriteError(f"its graph has no {ATTENTION}")
    if editor.opset < _OLDEST_OPSET:
        raise CannotRewriteError(f"its graph uses version {editor.opset} of ONNX's operators")
    consumers: dict[str, list[Message]] = defaultdict(list)
    for each in nodes:
        for name in each.input:
            consumers[name].append(each)
    results = {each.name for each in editor.graph.output}
    narrow = _depending_on(SELECTED, nodes)
    products: list[Product] = []
    splits = set()
    for each in nodes:
        if each.op_type != OPERATOR or each.input[0] in narrow or each.output[0] in kept:
            continue
        if not _leads_to(each.output[0], consumers, {*attentions, OPERATOR}):
            continue  # the LM head
        try:
            matrix = BlockMatrix.of(editor, each)
        except CannotRewriteError:
            continue
        output = each.output[0]
        widths = _split_widths(editor, consumers[output], matrix) if output not in results else None
        if widths is None:
            products.append(Product(output, each.input[0], matrix, slice(0, matrix.rows), output))
            continue
        splits.add(output)
        starts = np.cumsum([0, *widths]).tolist()
        for name, start, stop in zip(consumers[output][0].output, starts, starts[1:], strict=False):
            products.append(Product(name, each.input[0], matrix, slice(start, stop), output))
    if not products:
        raise CannotRewriteError(f"its graph has no products of quantized weights ({OPERATOR} in float32)")
    return Int8Products(tuple(products), frozenset(splits), _defer_steps(editor, products, consumers, results))


def use_integers(editor: GraphEditor, found: Int8Products, limits: IntegerRange) -> None:
    """Replace products by products of integers.

    Their weights are the initializers `{name}.int8`, int8 `[inputs, outputs]`, and `{name}.int8.scales`, float32
    `[outputs]`, which the caller adds.
    """
    editor.rewrite(_Rewriting(editor, found, limits).replaced)
    editor.declare_microsoft()


class _Rewriting:
    def __init__(self, editor: GraphEditor, found: Int8Products, limits: IntegerRange) -> None:
        self._editor = editor
        self._found = found
        self._axes_as_input = editor.opset >= _AXES_AS_INPUT
        self._products = {each.name: each for each in found.products}
        self._steps: dict[str, str] = {}
        """Steps `[tokens, 1]` of quantized inputs, by name."""
        self._one = editor.constant("one", np.array(1, np.float32))
        self._zero = editor.constant("zero", np.array(limits.activation, np.uint8))
        self._inverse_limit = editor.constant("inverse.limit", np.array(1 / limits.activation, np.float32))
        self._fill = np.array([limits.activation], np.uint8)

    def replaced(self, each: Message) -> Iterable[Message]:
        """The nodes that take the place of a node."""
        if each.op_type == "Split" and each.input[0] in self._found.splits:
            return []
        if each.op_type != OPERATOR:
            return [each]
        names = list(each.output[:1])
        if each.output[0] in self._found.splits:
            (split,) = (user for user in self._editor.graph.node if each.output[0] in user.input)
            names = list(split.output)
        products = [self._products[name] for name in names if name in self._products]
        if not products:
            return [each]
        nodes = self._quantized(each.input[0])
        for product in products:
            nodes += self._computed(product)
        return nodes

    def _quantized(self, inputs: str) -> list[Message]:
        """Nodes that quantize the inputs of products, unless they are quantized already."""
        if inputs in self._steps:
            return []
        code = NodeList(f"{inputs}.int8.step")
        reduced, attributes = [inputs], dict[str, Any](keepdims=0)
        if self._axes_as_input:
            reduced.append(self._editor.integers("all.but.tokens", 0, 2))
        else:
            attributes["axes"] = [0, 2]
        high = code.add("ReduceMax", reduced, **attributes)
        low = code.add("ReduceMin", reduced, **attributes)
        largest = code.add("Max", [high, code.add("Neg", [low])])
        step = code.add("Mul", [largest, self._inverse_limit])
        zeros = code.add("ConstantOfShape", [code.add("Shape", [step])], value=self._fill)
        # A token of zeros has a step of 0 and any codes: their product is multiplied with 0.
        code.add("QuantizeLinear", [inputs, step, zeros], _codes(inputs), axis=1)
        column = code.add("Unsqueeze", [step, self._editor.integers("last.axis", 1)])
        if extra := self._found.extra_steps.get(inputs):
            column = code.add("Mul", [column, self._steps[extra]])
        self._steps[inputs] = column
        return code.nodes

    def _computed(self, product: Product) -> list[Message]:
        code = NodeList(f"{product.name}.int8.step")
        bias = product.matrix.bias
        raw = product.name if not product.keeps_step else f"{product.name}.int8.raw"
        names = [_codes(product.inputs), f"{product.name}.int8", self._one, f"{product.name}.int8.scales", self._zero]
        code.nodes.append(quantized_product(names, raw))
        if product.keeps_step:
            step = self._steps[product.inputs]
            scaled = code.add("Mul", [raw, step], "" if bias is not None else product.name)
            if bias is not None:
                added = self._editor.constant(f"{product.name}.int8.bias", np.array(bias[product.rows]))
                code.add("Add", [scaled, added], product.name)
        return code.nodes


def _codes(inputs: str) -> str:
    return f"{inputs}.int8.codes"


def _depending_on(name: str, nodes: Iterable[Message]) -> set[str]:
    """A value, and the values that depend on it."""
    found = {name}
    for each in nodes:
        if not found.isdisjoint(each.input):
            found.update(each.output)
    return found


def _leads_to(name: str, consumers: dict[str, list[Message]], operators: set[str]) -> bool:
    """Whether a value is needed by one of some operators."""
    seen = {name}
    waiting = [name]
    while waiting:
        for each in consumers[waiting.pop()]:
            if each.op_type in operators:
                return True
            new = set(each.output) - seen
            seen |= new
            waiting += new
    return False


def _split_widths(editor: GraphEditor, users: Sequence[Message], matrix: BlockMatrix) -> list[int] | None:
    """The widths of the parts of a fused product; None unless all it feeds is a Split into known parts."""
    if len(users) != 1 or users[0].op_type != "Split" or attribute_values(users[0]).get("axis", 0) not in (-1, 2):
        return None
    split = users[0]
    stored = editor.array(split.input[1]) if len(split.input) > 1 else None
    if stored is not None:
        widths = [int(each) for each in stored]
    elif len(split.input) < 2 and matrix.rows % len(split.output) == 0:
        widths = [matrix.rows // len(split.output)] * len(split.output)
    else:
        return None
    fits = sum(widths) == matrix.rows and len(widths) == len(split.output) and all(split.output)
    return widths if fits and not attribute_values(split).get("split") else None


def _defer_steps(
    editor: GraphEditor, products: Sequence[Product], consumers: dict[str, list[Message]], results: set[str]
) -> dict[str, str]:
    """Find inputs that are a product's output times something, and leave that product's steps to the next product.

    Inputs are divided by the largest value of each token in any case, so multiplying them with a step first would only
    cost time.
    """
    by_name = {each.name: each for each in products}
    deferred = {}
    for inputs in dict.fromkeys(each.inputs for each in products):
        producer = editor.producer(inputs)
        users = consumers[inputs]
        if producer is None or producer.op_type != "Mul" or inputs in results:
            continue
        # Products are whole, or split into parts.
        outputs = [each.output[0] for each in users if each.op_type == OPERATOR]
        parts = [{name, *(part for user in consumers[name] for part in user.output)} for name in outputs]
        if len(parts) < len(users) or any(each.isdisjoint(by_name) for each in parts):
            continue
        for name in producer.input:
            found = by_name.get(name)
            if found and found.matrix.bias is None and len(consumers[name]) == 1 and name not in results:
                found.keeps_step = False
                deferred[inputs] = found.inputs
                break
    return deferred
