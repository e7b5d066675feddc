"""The float16 form of a decoder graph: activations, scales, norms and cache.

Weights stay in their file: casts of float32 constants are computed once, when ONNX Runtime loads the graph, and codes
of quantized weights are the same bytes. Logits and hidden states are returned as float32, and the caller's bias stays
float32, so that only the cache differs from the float32 form for the caller.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from ...models.onnx_file.graph_editor import CannotRewriteError, GraphEditor, onnx_node
from ...models.onnx_file.model_messages import ELEMENT_TYPES, Message, attribute_values, node
from ..graph.attention_edits import BIAS
from ..graph.attention_edits import OPERATOR as ATTENTION

_FLOAT: Final = ELEMENT_TYPES[np.dtype(np.float32)]
_HALF: Final = ELEMENT_TYPES[np.dtype(np.float16)]
_LEAST_BIAS: Final = -30_000.0
"""What a bias is limited to: far below every score, and above the least float16 even where two biases add up."""
_FIXED_TYPES: Final = ("Shape", "Size", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal", "Not", "And", "Or")
"""Operators whose outputs have a type of their own."""
_FLOAT_OUTPUT: Final = 1
"""Number of outputs of TopK that have the type of its input; the others are indices."""


def use_half_precision(editor: GraphEditor, cache: Iterable[str]) -> None:
    """Make a float32 graph compute in float16.

    Args:
        editor: the graph; a value that depends on nothing but constants, tokens and the caller's bias stays float32.
        cache: names of the inputs and outputs with the KV cache.

    Raises:
        CannotRewriteError: the cache is not float32, or an operator sets the type of its output itself.
    """
    names = set(cache)
    for value in (*editor.graph.input, *editor.graph.output):
        if value.name in names:
            if value.type.tensor_type.elem_type != _FLOAT:
                raise CannotRewriteError("the cache is not float32")
            value.type.tensor_type.elem_type = _HALF
    editor.rewrite(_Conversion(editor, names).replaced)


class _Conversion:
    """Finds out the type of each value in the order of the nodes, and inserts casts where types differ."""

    def __init__(self, editor: GraphEditor, cache: set[str]) -> None:
        self._editor = editor
        self._outputs = {each.name for each in editor.graph.output} - cache
        self._half = {each.name for each in editor.graph.input if each.name in cache}
        self._single = {
            name
            for name in (*editor.initializers, *editor.input_names)
            if name not in self._half and editor.element_type(name) == _FLOAT
        }
        self._constants = set(editor.initializers)
        self._cast: dict[str, str] = {}

    def replaced(self, each: Message) -> Iterable[Message]:
        """The node with casts before it where its inputs differ, and after it where the caller expects float32."""
        if each.op_type in _FIXED_TYPES or not self._computes_in_half(each):
            self._note_single(each)
            return [each]
        nodes = []
        for place, name in enumerate(each.input):
            if name in self._single:
                is_bias = each.op_type == ATTENTION and place == BIAS
                before, each.input[place] = self._as_half(name, limited=is_bias)
                nodes += before
        nodes.append(each)
        floats = each.output[:_FLOAT_OUTPUT] if each.op_type == "TopK" else each.output
        for place, name in enumerate(floats):
            if name in self._outputs:
                each.output[place] = f"{name}.half"
                nodes.append(node("Cast", [each.output[place]], [name], name=f"{name}.cast", to=_FLOAT))
                self._single.add(name)
            elif name:
                self._half.add(name)
        return nodes

    def _computes_in_half(self, each: Message) -> bool:
        """Whether a node's float inputs are float16, or are all weights, as in the embedding."""
        if any(name in self._half for name in each.input):
            if each.op_type == "Cast":
                raise CannotRewriteError("the graph converts activations itself")
            return True
        floats = [name for name in each.input if name in self._single]
        return bool(floats) and all(name in self._constants for name in floats)

    def _note_single(self, each: Message) -> None:
        """Record which outputs of a node that stays as it is are float32."""
        if each.op_type in _FIXED_TYPES:
            return
        is_float = any(name in self._single for name in each.input)
        if each.op_type == "Cast":
            is_float = attribute_values(each)["to"] == _FLOAT
            if each.input[0] in self._constants:
                self._constants.update(each.output)
        elif each.op_type in ("Constant", "ConstantOfShape"):
            value = attribute_values(each).get("value")
            is_float = value is None or value.data_type == _FLOAT
        if is_float:
            self._single.update(name for name in each.output if name)

    def _as_half(self, name: str, *, limited: bool) -> tuple[list[Message], str]:
        """Nodes that convert a value, and the name of what they give; no nodes where it was converted before."""
        key = f"{name}.limited" if limited else name
        if key in self._cast:
            return [], self._cast[key]
        nodes = []
        if limited:
            least = self._editor.constant("bias.least", np.array(_LEAST_BIAS, np.float32))
            nodes.append(node("Max", [name, least], [key]))
        self._cast[key] = f"{key}.half"
        return [*nodes, onnx_node("Cast", [key], self._cast[key], to=_HALF)], self._cast[key]
