"""Rewrites a decoder graph for narrow passes over long contexts.

ONNX Runtime's GroupQueryAttention multiplies one query head at a time on the CPU, so the keys and values of a head are
read once for each of the query heads that share it. Here the queries of a group become rows of one head of
MultiHeadAttention, which reads every key and value once for all rows, whatever their number. The new slots are written
in place by ScatterND, into the same buffers. Scores are computed for all slots of the buffers, and those that are not
written yet are masked, so the graph suits contexts that fill their cache (docs/decisions/0063-long-contexts.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any, Final

import numpy as np

from ...models.onnx_file.graph_editor import MICROSOFT, CannotRewriteError, GraphEditor
from ...models.onnx_file.model_messages import ELEMENT_TYPES, Message, attribute_values, node
from ..graph.attention_edits import (
    BIAS,
    OPERATOR,
    POSITIONS,
    WINDOW,
    WINDOW_BIAS,
    has_no_slots,
    head_size,
    input_at,
    rotate_outside,
    take_windows,
    unpacked,
)

_QUERY, _KEY, _VALUE, _PAST_KEY, _PAST_VALUE, _TOTAL = 0, 1, 2, 3, 4, 6
"""Places of the operator's inputs."""
_FLOAT: Final = ELEMENT_TYPES[np.dtype(np.float32)]
_INT64: Final = ELEMENT_TYPES[np.dtype(np.int64)]
_HIDDEN: Final = np.array(np.finfo(np.float32).min)
"""Score of a slot that a token must not see."""
_LEAST_OPSET: Final = 15
"""First version of ONNX's operators in which Shape returns a part of the dimensions."""


def long_context_graph(graph: Path) -> bytes:
    """The decoder graph in a file with attention for long contexts.

    Args:
        graph: the model file, which extends its cache in place; the result refers to the same weights, relative to its
            folder, and has the same inputs and outputs.

    Raises:
        BundleError: the file is not an ONNX model.
        CannotRewriteError: the graph has attention that cannot be expressed so.
    """
    editor = GraphEditor(graph)
    take_windows(editor, from_later_slots=True)
    return dense_graph(editor)


def dense_graph(editor: GraphEditor, *, causal: bool = True) -> bytes:
    """`long_context_graph` of a graph that is being edited; where it is not `causal`, the caller's bias alone says
    which of the new tokens a new token attends to."""
    attentions = [each for each in editor.graph.node if _reads_all(each)]
    if not attentions or editor.opset < _LEAST_OPSET:
        raise CannotRewriteError(
            f"the graph has no {OPERATOR} over all slots" if not attentions else f"its opset is {editor.opset}"
        )
    for each in attentions:
        _check(editor, each)
    places = _Places(editor, attentions[0], causal=causal)
    for each in attentions:
        if attribute_values(each).get("do_rotary") and not input_at(each, POSITIONS):
            each.input.extend([""] * (POSITIONS + 1 - len(each.input)))
            each.input[POSITIONS] = places.positions()
    rotate_outside(editor)
    editor.rewrite(lambda each: _dense(editor, places, each) if _reads_all(each) else [each])
    places.insert()
    return editor.serialized()


def _reads_all(each: Message) -> bool:
    """Whether a node is attention to all slots, not to those of a sliding window (`take_windows`)."""
    return each.op_type == OPERATOR and not input_at(each, BIAS).startswith(WINDOW_BIAS)


def _check(editor: GraphEditor, attention: Message) -> None:
    """Check that an operator does nothing that the rewritten one does not.

    Raises:
        CannotRewriteError: it does.
    """
    attributes = attribute_values(attention)
    known = {
        "causal": 1,
        "softcap": 0,
        "smooth_softmax": 0,
        WINDOW: -1,
        "k_quant_type": "NONE",
        "v_quant_type": "NONE",
        "qk_output": 0,
    }
    for name, allowed in known.items():
        value = attributes.get(name, allowed)
        if value != allowed and (name, value) != ("smooth_softmax", -1):
            raise CannotRewriteError(f"its attention has {name} {value}")
    if any(attention.input[place] for place in range(BIAS + 1, len(attention.input))):
        raise CannotRewriteError("its attention has sinks, norms or scales")
    if has_no_slots(editor, attention.input[_KEY]):
        raise CannotRewriteError("its attention reads the cache of another layer")
    ends = {*editor.input_names, *(each.name for each in editor.graph.output)}
    caches = [*attention.input[_PAST_KEY : _PAST_VALUE + 1], *attention.output[1:3]]
    if len(caches) != 4 or not ends.issuperset(caches) or not input_at(attention, _TOTAL):
        raise CannotRewriteError("it computes its cache in several steps")
    if any(editor.element_type(name) != _FLOAT for name in caches[:2]):
        raise CannotRewriteError("its cache is not of float32")
    if len(attention.output) > 3 and attention.output[3]:
        raise CannotRewriteError("its attention returns scores")


class _Places:
    """Values that all attentions of a pass share: slots, positions, and who must not see what.

    Args:
        editor: the graph.
        attention: one of its operators, whose lengths are the same in all.
        causal: whether later slots are hidden, the new ones too.
    """

    def __init__(self, editor: GraphEditor, attention: Message, *, causal: bool) -> None:
        self._causal: Final = causal
        self._editor: Final = editor
        self._nodes: Final[dict[tuple[Any, ...], Message]] = {}
        """The nodes that compute them, by operator, inputs and attributes."""
        self._query: Final = attention.input[_QUERY]
        self._past: Final = attention.input[_PAST_KEY]
        self._total_input: Final = attention.input[_TOTAL]

    def insert(self) -> None:
        """Add the nodes to the graph, and sort all nodes by what they depend on."""
        nodes = [*self._nodes.values(), *self._editor.graph.node]
        producers = {name: index for index, each in enumerate(nodes) for name in each.output if name}
        inputs = {
            index: [producers[name] for name in each.input if name in producers] for index, each in enumerate(nodes)
        }
        self._editor.rewrite(lambda _: ())
        self._editor.graph.node.extend(nodes[index] for index in TopologicalSorter(inputs).static_order())

    def integers(self, *values: int) -> str:
        """A constant vector of int64."""
        return self._editor.integers(f"long.{'.'.join(map(str, values))}", *values)

    def slots(self, kv_heads: int) -> str:
        """Where ScatterND writes the new slots: int64 `[1, M, kv_heads, 3]`."""
        heads = np.zeros((1, 1, kv_heads, 3), np.int64)
        heads[..., 1] = np.arange(kv_heads)
        rows = self._add("Reshape", [self._new_slots(), self.integers(1, -1, 1, 1)])
        indices = self._add("Mul", [rows, self.integers(0, 0, 1)])
        return self._add("Add", [indices, self._editor.constant(f"long.heads.{kv_heads}", heads)])

    def by_head(self, kv_heads: int, group: int, size: int) -> str:
        """The shape of the new queries by head. It has their number, so each text of a shared pass has one of its own:
        what follows has other rows than tokens."""
        width = self._add("Shape", [self._query], start=1, end=2)
        return self._add("Concat", [self.integers(1), width, self.integers(kv_heads, group, size)], axis=0)

    def bias(self, bias: str, group: int) -> str:
        """The bias of the queries of a group: float32 `[1, 1, M * group, capacity]`.

        Args:
            bias: the bias of the new tokens, float32 `[1, 1, M, T]`; empty where only later slots are hidden.
            group: number of query heads that share a key and value head.
        """
        capacity = self._capacity()
        hidden = self._editor.constant("long.hidden", _HIDDEN)
        seen = self._editor.constant("long.seen", np.array(0, np.float32))
        if bias:
            free = self._add("Sub", [capacity, self._total()])
            seen = self._add("Pad", [bias, self._add("Concat", [self.integers(*[0] * 7), free], axis=0)])
        columns = self._range(self.integers(0), capacity)
        if self._causal:
            later = self._add("Greater", [columns, self._add("Reshape", [self._new_slots(), self.integers(-1, 1)])])
        else:
            later = self._add("GreaterOrEqual", [columns, self._total()])
        masked = self._add("Where", [later, hidden, seen])
        shape = self._add("Concat", [self.integers(1, 1, -1), capacity], axis=0)
        # A copy for every query head of the group, one after another: rows are ordered by token, then by query head.
        return self._add("Reshape", [self._add("Concat", [masked] * group, axis=-1), shape])

    def positions(self) -> str:
        """Positions of consecutive tokens, which are their slots: int64 `[1, M]`."""
        return self._add("Reshape", [self._new_slots(), self.integers(1, -1)])

    def _total(self) -> str:
        """Number of slots after the pass: int64 `[1]`."""
        return self._add("Reshape", [self._add("Cast", [self._total_input], to=_INT64), self.integers(-1)])

    def _capacity(self) -> str:
        """Number of slots of the buffers: int64 `[1]`."""
        return self._add("Shape", [self._past], start=2, end=3)

    def _new_slots(self) -> str:
        """The new slots: int64 `[M]`."""
        width = self._add("Shape", [self._query], start=1, end=2)
        return self._range(self._add("Sub", [self._total(), width]), self._total())

    def _range(self, start: str, stop: str) -> str:
        scalar = self._editor.constant("long.scalar", np.zeros(0, np.int64))
        step = self._editor.constant("long.step", np.array(1, np.int64))
        return self._add("Range", [*(self._add("Reshape", [end, scalar]) for end in (start, stop)), step])

    def _add(self, operator: str, inputs: list[str], **attributes: Any) -> str:
        """Add a node, once for the same inputs and attributes; returns the name of its output."""
        key = (operator, *inputs, *attributes.items())
        if key not in self._nodes:
            self._nodes[key] = node(operator, inputs, [f"long.value.{len(self._nodes)}"], **attributes)
        return str(self._nodes[key].output[0])


def _dense(editor: GraphEditor, places: _Places, attention: Message) -> Iterable[Message]:
    """The nodes that take an operator's place."""
    attributes, size = attribute_values(attention), head_size(editor, attention)
    heads, kv_heads = attributes["num_heads"], attributes["kv_num_heads"]
    group = heads // kv_heads
    output, present = attention.output[0], attention.output[1:3]
    nodes = unpacked(editor, attention)
    caches = zip((_KEY, _VALUE), (_PAST_KEY, _PAST_VALUE), present, strict=True)
    for new, past, after in caches:
        nodes.append(node("Reshape", [attention.input[new], places.integers(1, -1, kv_heads, size)], [f"{after}.new"]))
        nodes.append(node("ScatterND", [attention.input[past], places.slots(kv_heads), f"{after}.new"], [after]))
    query, result = attention.input[_QUERY], output
    if group > 1:
        by_head, rows = places.by_head(kv_heads, group, size), places.integers(1, -1, kv_heads * size)
        nodes += _regrouped(query, by_head, rows, f"{output}.rows")
        query, result = f"{output}.rows", f"{output}.grouped"
    bias = places.bias(input_at(attention, BIAS), group)
    scale = float(attributes.get("scale") or size**-0.5)
    inputs = [query, *present, "", "", bias]
    nodes.append(node("MultiHeadAttention", inputs, [result], domain=MICROSOFT, num_heads=kv_heads, scale=scale))
    if group > 1:
        by_row, flat = places.integers(1, -1, group, kv_heads, size), places.integers(1, -1, heads * size)
        nodes += _regrouped(result, by_row, flat, output)
    return nodes


def _regrouped(value: str, apart: str, together: str, result: str) -> list[Message]:
    """Swap the two axes of heads of a value: nodes that take its channels apart, swap, and join them."""
    return [
        node("Reshape", [value, apart], [f"{result}.apart"]),
        node("Transpose", [f"{result}.apart"], [f"{result}.swapped"], perm=[0, 1, 3, 2, 4]),
        node("Reshape", [f"{result}.swapped", together], [result]),
    ]
