"""Rewrites a decoder graph for narrow passes over long contexts.

ONNX Runtime's GroupQueryAttention multiplies one query head at a time on the CPU, so the keys and values of a head are
read once for each of the query heads that share it. Here the queries of a group become rows of one head of
MultiHeadAttention, which reads every key and value once for all rows, whatever their number. The new slots are written
in place by ScatterND, into the same buffers. Scores are computed for all slots of the buffers, and those that are not
written yet are masked, so the graph suits contexts that fill their cache (docs/decisions/0063-long-contexts.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np

from ...models.onnx_file.graph_editor import MICROSOFT, CannotRewriteError, GraphEditor, attributes_of
from ...models.onnx_file.model_messages import ELEMENT_TYPES, Message, node
from ..graph.attention_edits import (
    BIAS,
    OPERATOR,
    POSITIONS,
    WINDOW,
    has_no_slots,
    head_size,
    input_at,
    rotate_outside,
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
_PREFIX: Final = "long"


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
    attentions = [each for each in editor.graph.node if each.op_type == OPERATOR]
    opset = next((each.version for each in editor.model.opset_import if not each.domain), 0)
    if not attentions or opset < _LEAST_OPSET:
        raise CannotRewriteError(f"the graph has no {OPERATOR}" if not attentions else f"its opset is {opset}")
    for each in attentions:
        _check(editor, each)
    places = _Places(editor, attentions[0])
    for each in attentions:
        if attributes_of(each).get("do_rotary") and not input_at(each, POSITIONS):
            _set_input(each, POSITIONS, places.positions())
    rotate_outside(editor)
    editor.rewrite(lambda each: _dense(editor, places, each) if each.op_type == OPERATOR else [each])
    # What the attentions share comes first: it depends on the graph's inputs alone, and on their biases.
    places.insert()
    return editor.serialized()


def _check(editor: GraphEditor, attention: Message) -> None:
    """Check that an operator does nothing that the rewritten one does not.

    Raises:
        CannotRewriteError: it does.
    """
    attributes = attributes_of(attention)
    known = {
        "softcap": 0.0,
        "smooth_softmax": (0, -1),
        WINDOW: -1,
        "k_quant_type": "NONE",
        "v_quant_type": "NONE",
        "qk_output": 0,
    }
    for name, allowed in known.items():
        value = attributes.get(name)
        if value is not None and value not in (allowed if isinstance(allowed, tuple) else (allowed,)):
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
        attention: one of its operators, whose lengths are those of all.
    """

    def __init__(self, editor: GraphEditor, attention: Message) -> None:
        self._editor: Final = editor
        self._nodes: Final[list[Message]] = []
        self._made: Final[set[str]] = set()
        self._lengths_from: Final = (
            attention.input[_TOTAL],
            attention.input[_QUERY],
            attention.input[_PAST_KEY],
        )

    def insert(self) -> None:
        """Add the nodes to the graph, in front of their first use."""
        if not self._nodes:
            return
        available = set(self._editor.input_names) | set(self._editor.initializers)
        waiting, nodes = list(self._nodes), []
        for each in list(self._editor.graph.node):
            ready = True
            while ready:
                ready = False
                for own in list(waiting):
                    if all(not name or name in available for name in own.input):
                        waiting.remove(own)
                        nodes.append(own)
                        available.update(own.output)
                        ready = True
            nodes.append(each)
            available.update(each.output)
        self._editor.rewrite(lambda _: ())
        self._editor.graph.node.extend(nodes)

    def slots(self, kv_heads: int) -> str:
        """Where ScatterND writes the new slots: int64 `[M, kv_heads, 3]`."""
        name = f"{_PREFIX}.places.{kv_heads}"
        editor = self._editor
        heads = np.zeros((1, kv_heads, 3), np.int64)
        heads[0, :, 1] = np.arange(kv_heads)
        self._add("Reshape", [self._new_slots(), editor.integers(f"{_PREFIX}.rows", -1, 1, 1)], f"{_PREFIX}.rows.slots")
        self._add(
            "Mul",
            [f"{_PREFIX}.rows.slots", editor.integers(f"{_PREFIX}.slot_axis", 0, 0, 1)],
            f"{_PREFIX}.slot_indices",
        )
        return self._add(
            "Add", [f"{_PREFIX}.slot_indices", editor.constant(f"{_PREFIX}.heads.{kv_heads}", heads)], name
        )

    def bias(self, bias: str, group: int) -> str:
        """The bias of the queries of a group: float32 `[1, 1, M * group, capacity]`.

        Args:
            bias: that of the new tokens, float32 `[1, 1, M, T]`; empty where only later slots are hidden.
            group: number of query heads that share a key and value head.
        """
        editor, name = self._editor, f"{_PREFIX}.bias.{bias}.{group}"
        capacity = self._capacity()
        hidden = editor.constant(f"{_PREFIX}.hidden", _HIDDEN)
        seen = editor.constant(f"{_PREFIX}.seen", np.array(0, np.float32))
        if bias:
            self._add("Sub", [capacity, self._total()], f"{_PREFIX}.free")
            before = editor.integers(f"{_PREFIX}.pads", *[0] * 7)
            self._add("Concat", [before, f"{_PREFIX}.free"], f"{_PREFIX}.all_pads", axis=0)
            seen = self._add("Pad", [bias, f"{_PREFIX}.all_pads"], f"{name}.padded")
        masked = self._add("Where", [self._later(), hidden, seen], f"{name}.masked")
        rows = editor.integers(f"{_PREFIX}.bias_rows", 1, 1, -1)
        self._add("Concat", [rows, capacity], f"{_PREFIX}.bias_shape", axis=0)
        # A copy for every query head of the group, one after another: rows are ordered by token, then by query head.
        copies = self._add("Concat", [masked] * group, f"{name}.copies", axis=-1)
        return self._add("Reshape", [copies, f"{_PREFIX}.bias_shape"], name)

    def positions(self) -> str:
        """Positions of consecutive tokens, which are their slots: int64 `[1, M]`."""
        row = self._editor.integers(f"{_PREFIX}.row", 1, -1)
        return self._add("Reshape", [self._new_slots(), row], f"{_PREFIX}.positions")

    def _total(self) -> str:
        """Number of slots after the pass: int64 `[1]`."""
        self._add("Cast", [self._lengths_from[0]], f"{_PREFIX}.total64", to=_INT64)
        one = self._editor.integers(f"{_PREFIX}.one", -1)
        return self._add("Reshape", [f"{_PREFIX}.total64", one], f"{_PREFIX}.total")

    def _capacity(self) -> str:
        """Number of slots of the buffers: int64 `[1]`."""
        return self._add("Shape", [self._lengths_from[2]], f"{_PREFIX}.capacity", start=2, end=3)

    def _new_slots(self) -> str:
        """The new slots: int64 `[M]`."""
        total = self._total()
        self._add("Shape", [self._lengths_from[1]], f"{_PREFIX}.width", start=1, end=2)
        self._add("Sub", [total, f"{_PREFIX}.width"], f"{_PREFIX}.base")
        return self._range(f"{_PREFIX}.base", total, f"{_PREFIX}.slots")

    def _later(self) -> str:
        """Which slots lie after a new token's own: bool `[M, capacity]`."""
        editor = self._editor
        zero = editor.integers(f"{_PREFIX}.zero", 0)
        columns = self._range(zero, self._capacity(), f"{_PREFIX}.columns")
        self._add("Reshape", [self._new_slots(), editor.integers(f"{_PREFIX}.column", -1, 1)], f"{_PREFIX}.own_slots")
        return self._add("Greater", [columns, f"{_PREFIX}.own_slots"], f"{_PREFIX}.later")

    def _range(self, start: str, stop: str, name: str) -> str:
        scalar = self._editor.constant(f"{_PREFIX}.scalar", np.zeros(0, np.int64))
        ends = []
        for which, value in (("start", start), ("stop", stop)):
            ends.append(self._add("Reshape", [value, scalar], f"{name}.{which}"))
        step = self._editor.constant(f"{_PREFIX}.step", np.array(1, np.int64))
        return self._add("Range", [*ends, step], name)

    def _add(self, operator: str, inputs: list[str], name: str, **attributes: Any) -> str:
        """Add a node once."""
        if name not in self._made:
            self._made.add(name)
            self._nodes.append(node(operator, inputs, [name], **attributes))
        return name


def _dense(editor: GraphEditor, places: _Places, attention: Message) -> Iterable[Message]:
    """The nodes that take an operator's place."""
    attributes, size = attributes_of(attention), head_size(editor, attention)
    heads, kv_heads = attributes["num_heads"], attributes["kv_num_heads"]
    group = heads // kv_heads
    output, present = attention.output[0], attention.output[1:3]
    nodes = unpacked(editor, attention)
    slot_shape = editor.integers(f"{_PREFIX}.slot.{kv_heads}.{size}", -1, kv_heads, size)
    caches = zip((_KEY, _VALUE), (_PAST_KEY, _PAST_VALUE), present, strict=True)
    for new, past, after in caches:
        nodes.append(node("Reshape", [attention.input[new], slot_shape], [f"{after}.new"]))
        nodes.append(node("ScatterND", [attention.input[past], places.slots(kv_heads), f"{after}.new"], [after]))
    query, result = attention.input[_QUERY], output
    if group > 1:
        by_head = editor.integers(f"{_PREFIX}.by_head.{kv_heads}.{group}.{size}", 1, -1, kv_heads, group, size)
        rows = editor.integers(f"{_PREFIX}.rows.{kv_heads}.{size}", 1, -1, kv_heads * size)
        nodes += _regrouped(query, by_head, rows, f"{output}.rows")
        query, result = f"{output}.rows", f"{output}.grouped"
    nodes.append(
        node(
            "MultiHeadAttention",
            [query, *present, "", "", places.bias(input_at(attention, BIAS), group)],
            [result],
            domain=MICROSOFT,
            num_heads=kv_heads,
            scale=float(attributes.get("scale") or size**-0.5),
        )
    )
    if group > 1:
        by_row = editor.integers(f"{_PREFIX}.by_row.{kv_heads}.{group}.{size}", 1, -1, group, kv_heads, size)
        flat = editor.integers(f"{_PREFIX}.flat.{heads}.{size}", 1, -1, heads * size)
        nodes += _regrouped(result, by_row, flat, output)
    return nodes


def _regrouped(value: str, apart: str, together: str, result: str) -> list[Message]:
    """Swap the two axes of heads of a value: nodes that take its channels apart, swap, and join them."""
    return [
        node("Reshape", [value, apart], [f"{result}.apart"]),
        node("Transpose", [f"{result}.apart"], [f"{result}.swapped"], perm=[0, 1, 3, 2, 4]),
        node("Reshape", [f"{result}.swapped", together], [result]),
    ]


def _set_input(of: Message, place: int, name: str) -> None:
    while len(of.input) <= place:
        of.input.append("")
    of.input[place] = name
