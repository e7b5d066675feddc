"""GroupQueryAttention whose queries and keys are rotated in front of it.

On WebGPU, the operator with `do_rotary=1` ignores its positions: a token tree, whose siblings share one, is computed
wrongly without an error. `RotaryEmbedding` in front of it takes positions everywhere. Graphs without the operator
need the rotation outside, too.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...models.onnx_file.graph_editor import MICROSOFT, CannotRewriteError, GraphEditor, attributes_of
from ...models.onnx_file.model_messages import Message, node, set_attribute
from .plain_attention import OPERATOR, POSITIONS, input_at

_QUERY, _KEY, _VALUE, _PAST_KEY = 0, 1, 2, 3
_COSINES, _SINES = 7, 8
"""Places of the operator's inputs."""


def rotate_outside(editor: GraphEditor) -> None:
    """Rotate queries and keys in front of each attention operator that takes positions, instead of in it.

    Packed queries, keys and values are split first. Operators without a positions input are left as they are,
    and so are the keys of those that read what another layer has written.

    Raises:
        CannotRewriteError: the size of a head is not known.
    """

    def replaced(each: Message) -> Iterable[Message]:
        attributes = attributes_of(each)
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
    attributes, size = attributes_of(attention), head_size(editor, attention)
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
    past = editor.shape(attention.input[_PAST_KEY])
    if len(past) == 4 and isinstance(past[3], int):
        return past[3]
    attributes = attributes_of(attention)
    heads = attributes["num_heads"] + (0 if attention.input[_KEY] else 2 * attributes["kv_num_heads"])
    projection = editor.producer(attention.input[_QUERY])
    width = 0 if projection is None else attributes_of(projection).get("N", 0)
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
