"""Changes of a graph: its GroupQueryAttention for consecutive tokens, or with the rotation in front; lists of nodes.

Passes of consecutive tokens need neither bias nor positions: the operator rotates by slot and hides later slots itself.
Providers have faster kernels for it then, or skip work that a bias would make necessary.

On WebGPU, the operator with `do_rotary=1` ignores its positions: a token tree, whose siblings share one, is computed
wrongly without an error. `RotaryEmbedding` in front of it takes positions everywhere. Graphs without the operator
need the rotation outside, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from ...models.onnx_file.graph_editor import MICROSOFT, CannotRewriteError, GraphEditor, onnx_node
from ...models.onnx_file.model_messages import Message, attribute_values, node, set_attribute

OPERATOR: Final = "GroupQueryAttention"
POSITIONS, BIAS = 9, 10
"""Places of the operator's inputs."""
WINDOW: Final = "local_window_size"
WINDOW_BIAS: Final = "attention_bias_"
"""What the names of biases of layers with a sliding window begin with; the size of the window follows."""
_QUERY, _KEY, _VALUE, PAST_KEY, PAST_VALUE = 0, 1, 2, 3, 4
_LAST_SLOT, _TOTAL = 5, 6
_COSINES, _SINES = 7, 8
_SINKS = 11
"""Places of the operator's inputs."""


class NodeList:
    """Nodes that take the place of one node; values are named after it.

    Args:
        name: the beginning of the names.

    Attributes:
        nodes: the nodes, in order.
    """

    def __init__(self, name: str) -> None:
        self.nodes: list[Message] = []
        self._name = name

    def add(self, operator: str, inputs: Sequence[str], output: str = "", **attributes: Any) -> str:
        """Append a node of one of ONNX's own operators; returns the name of its output."""
        output = output or f"{self._name}.{len(self.nodes)}.{operator.lower()}"
        self.nodes.append(onnx_node(operator, inputs, output, **attributes))
        return output


def serve_plain_passes(editor: GraphEditor, *, keep_computed: bool = False) -> None:
    """Take the bias and the positions from each attention operator, and give it the window that its bias had.

    Args:
        editor: the graph.
        keep_computed: whether an operator keeps both where the graph computes its bias itself, from a mask; else such
            a graph is refused.

    Raises:
        CannotRewriteError: a bias is neither the caller's nor the caller's with a window.
    """
    for each in editor.graph.node:
        if each.op_type != OPERATOR:
            continue
        if bias := input_at(each, BIAS):
            found = window_of(editor, bias)
            if found is not None:
                set_attribute(each, WINDOW, found[1])
            elif bias not in editor.input_names:
                if keep_computed:
                    continue
                raise CannotRewriteError(f"the bias {bias} is not the caller's")
            each.input[BIAS] = ""
        if input_at(each, POSITIONS):
            each.input[POSITIONS] = ""
        while not each.input[-1]:
            del each.input[-1]


def attend_from_last(editor: GraphEditor, rows: str) -> None:
    """Let attention whose output is selected by `rows` compute that of the last token alone.

    The last layer's attention is such: of the tokens before, later passes need keys and values only. An operator with
    no more query heads than key heads writes those, and another one reads them for the last token.

    Args:
        editor: a graph without positions (`serve_plain_passes`), of which nothing but the last token is wanted.
        rows: name of the input that holds its index, or none.
    """
    uses = Counter(name for each in editor.graph.node for name in each.input)
    gathers = [each for each in editor.graph.node if each.op_type == "Gather" and each.input[1] == rows]
    selections = {each.input[0]: each for each in gathers if uses[each.input[0]] == 1}
    gone = []

    def replaced(each: Message) -> Iterable[Message]:
        attributes, selection = attribute_values(each), selections.get(each.output[0])
        if each.op_type != OPERATOR or selection is None:
            return [] if each in gone else [each]
        kv_heads, size = attributes["kv_num_heads"], editor.shape(each.input[PAST_KEY])[-1]
        if attributes["num_heads"] == kv_heads or not isinstance(size, int):
            return [each]
        if input_at(each, BIAS) or any(each.input[_SINKS + 1 :]) or has_no_slots(editor, each.input[_KEY]):
            return [each]
        gone.append(selection)
        nodes, last = unpacked(editor, each), f"{each.output[0]}.last"
        query, key, value, *others = each.input
        written = [key, key, value, *others[: _SINES + 1 - PAST_KEY]]
        kept = [f"{each.output[0]}.unread", *each.output[1:3]]
        nodes.append(node(OPERATOR, written, kept, domain=MICROSOFT, **attributes | {"num_heads": kv_heads}))
        nodes.append(node("Gather", [query, editor.integers("last.token", -1)], [last], axis=1))
        nothing = editor.constant(f"no.slots.{kv_heads * size}", np.zeros((1, 0, kv_heads * size), np.float32))
        read = [last, nothing, nothing, *kept[1:], *others[2:]]
        attended = [f"{last}.attended"]  # the operator needs a token, also where none is wanted
        nodes.append(node(OPERATOR, read, attended, domain=MICROSOFT, **attributes))
        nodes.append(node("Sub", [rows, rows], [f"{last}.places"]))
        return [*nodes, node("Gather", [*attended, f"{last}.places"], selection.output, axis=1)]

    editor.rewrite(replaced)


def window_of(editor: GraphEditor, bias: str) -> tuple[str, int] | None:
    """The input and the window of a bias that is the caller's with a window; None for all others."""
    where = editor.producer(bias)
    compared = None if where is None or where.op_type != "Where" else editor.producer(where.input[0])
    # The condition is what lies too far back, or, in upgraded models, what does not.
    place = None if compared is None else {"GreaterOrEqual": 2, "Less": 1}.get(compared.op_type)
    if where is None or compared is None or place is None or where.input[place] not in editor.input_names:
        return None
    width = editor.array(compared.input[1])
    return None if width is None or width.size != 1 else (str(where.input[place]), int(width.reshape(-1)[0]))


def take_windows(editor: GraphEditor, *, from_later_slots: bool = False) -> bool:
    """Let the caller compute the bias of layers with a sliding window: an input `attention_bias_{window}` of each size.

    Args:
        editor: a graph that follows the graph contract.
        from_later_slots: whether such layers also take lengths of their own, `seqlens_k_{window}` and
            `total_sequence_length_{window}`, so that their cache may begin at a later slot (`graph_io.first_slot`).
            The dimension of its slots is then called `window_{window}`.

    Returns:
        Whether there are such layers.
    """
    inputs = {each.name: each for each in editor.graph.input}
    places = (BIAS, _LAST_SLOT, _TOTAL) if from_later_slots else (BIAS,)
    has_windows = False
    for each in editor.graph.node:
        found = window_of(editor, input_at(each, BIAS)) if each.op_type == OPERATOR else None
        if found is None:
            continue
        has_windows = True
        each.input[BIAS], window = found
        for place in places:
            name = f"{each.input[place]}_{window}"
            if name not in inputs:
                inputs[name] = editor.graph.input.add()
                inputs[name].CopyFrom(inputs[each.input[place]])
                inputs[name].name = name
            each.input[place] = name
        for past in each.input[PAST_KEY : PAST_KEY + 2] if from_later_slots else ():
            if past in inputs:  # else another layer has written them
                inputs[past].type.tensor_type.shape.dim[2].dim_param = f"window_{window}"
    return has_windows


def input_at(of: Message, place: int) -> str:
    """The name of an input; empty if it is absent."""
    return str(of.input[place]) if len(of.input) > place else ""


def rotary_before(editor: GraphEditor, name: str) -> Message | None:
    """The RotaryEmbedding that rotates a value in front of an operator; None if there is none."""
    while (producer := editor.producer(name)) is not None:
        if producer.op_type == "RotaryEmbedding":
            return producer
        if producer.op_type not in ("Reshape", "Transpose"):
            return None
        name = producer.input[0]
    return None


class Rotation(NamedTuple):
    """How an attention's keys are rotated."""

    tables: Sequence[str]
    """Names of the values with the cosines and the sines."""
    channels: int
    """Number of channels that are rotated, from the first on; 0 for the whole head."""
    interleaved: bool
    """Whether the channels of a pair are neighbours; if not, the second half of the channels follows the first."""


def rotation_of(editor: GraphEditor, attention: Message) -> Rotation | None:
    """How the keys of an attention are rotated, inside of it or by the RotaryEmbedding before it; None if unknown."""
    attributes = attribute_values(attention)
    if attributes.get("do_rotary"):
        tables = attention.input[_COSINES : _SINES + 1]
        table = editor.initializers.get(tables[0])
        return Rotation(tables, 2 * table.dims[-1] if table else 0, bool(attributes.get("rotary_interleaved")))
    rotary = rotary_before(editor, attention.input[_KEY])
    if rotary is None:
        return None
    attributes = attribute_values(rotary)
    # ONNX's own operator has the tables before the positions.
    tables = rotary.input[2:4] if rotary.domain else rotary.input[1:3]
    return Rotation(tables, int(attributes.get("rotary_embedding_dim", 0)), bool(attributes.get("interleaved")))


def rotated_halves(channels: int, *, interleaved: bool) -> tuple[slice, slice]:
    """The channels of a head that are rotated together: the first ones of all pairs, and the second ones."""
    if interleaved:
        return slice(0, channels, 2), slice(1, channels, 2)
    return slice(0, channels // 2), slice(channels // 2, channels)


def rotate_outside(editor: GraphEditor) -> None:
    """Rotate queries and keys in front of each attention operator that takes positions, instead of in it.

    Packed queries, keys and values are split first. Operators without a positions input are left as they are,
    and so are the keys of those that read what another layer has written.

    Raises:
        CannotRewriteError: the size of a head is not known.
    """

    def replaced(each: Message) -> Iterable[Message]:
        attributes = attribute_values(each)
        if each.op_type != OPERATOR or not attributes.get("do_rotary") or not input_at(each, POSITIONS):
            return [each]
        heads, kv_heads = attributes["num_heads"], attributes["kv_num_heads"]
        size = head_size(editor, each)
        nodes = unpacked(editor, each)
        for place, count in ((_QUERY, heads), (_KEY, kv_heads)):
            if has_no_slots(editor, each.input[place]):
                continue
            rotated = f"{each.input[place]}.rotated"
            nodes.append(
                node(
                    "RotaryEmbedding",
                    [each.input[place], *(each.input[other] for other in (POSITIONS, _COSINES, _SINES))],
                    [rotated],
                    domain=MICROSOFT,
                    # Some providers know no defaults, so all attributes are written out.
                    interleaved=attributes.get("rotary_interleaved", 0),
                    is_packed_batching=0,
                    num_heads=count,
                    rotary_embedding_dim=_partly_rotated(editor, each.input[_COSINES], size),
                    scale=1.0,
                )
            )
            each.input[place] = rotated
        for place in (_COSINES, _SINES, POSITIONS):
            each.input[place] = ""
        set_attribute(each, "do_rotary", 0)
        return [*nodes, each]

    editor.rewrite(replaced)


def unpacked(editor: GraphEditor, attention: Message) -> list[Message]:
    """Let an operator take queries, keys and values apart; returns the nodes that split what was packed.

    Raises:
        CannotRewriteError: the size of a head is not known.
    """
    if attention.input[_KEY]:
        return []
    attributes, size = attribute_values(attention), head_size(editor, attention)
    heads, kv_heads = attributes["num_heads"], attributes["kv_num_heads"]
    widths = editor.integers(f"widths.{heads}.{kv_heads}.{size}", heads * size, kv_heads * size, kv_heads * size)
    parts = [f"{attention.output[0]}.{part}" for part in ("query", "key", "value")]
    packed = attention.input[_QUERY]
    attention.input[_QUERY], attention.input[_KEY], attention.input[_VALUE] = parts
    return [node("Split", [packed, widths], parts, axis=-1)]


def has_no_slots(editor: GraphEditor, name: str) -> bool:
    """Whether keys or values are an empty constant: the attention reads those that another layer has written."""
    array = editor.initializers.get(name)
    return array is not None and 0 in tuple(array.dims)


def head_size(editor: GraphEditor, attention: Message) -> int:
    """Number of channels of a head, from the shape of the cache or the width of the packed projection.

    Raises:
        CannotRewriteError: neither is known.
    """
    past = editor.shape(attention.input[PAST_KEY])
    if len(past) == 4 and isinstance(past[3], int):
        return past[3]
    attributes = attribute_values(attention)
    heads = attributes["num_heads"] + (0 if attention.input[_KEY] else 2 * attributes["kv_num_heads"])
    projection = editor.producer(attention.input[_QUERY])
    width = 0 if projection is None else attribute_values(projection).get("N", 0)
    if width and width % heads == 0:
        return int(width) // int(heads)
    raise CannotRewriteError("the size of a head is open")


def _partly_rotated(editor: GraphEditor, cosines: str, size: int) -> int:
    """Number of channels that are rotated, if not all of them are; else 0, as the operator has it.

    Raises:
        CannotRewriteError: the table is not an initializer.
    """
    table = editor.initializers.get(cosines)
    if table is None:
        raise CannotRewriteError("the rotary table is computed")
    rotated = 2 * int(table.dims[1])
    return 0 if rotated == size else rotated
