"""Rewrites a decoder graph to keep its KV cache in 8 or 4 bits.

The CPU's GroupQueryAttention quantizes new keys (after their rotation) and values itself, and reads the codes in its
products. A rewritten graph differs in the types of its cache inputs and outputs, in a few attributes, and in the
scales, which are constants in it. It is made in memory in milliseconds, over the same weights, also those packed for
this machine (docs/decisions/0060-int8-cache.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from ...errors import BundleError
from ...models.onnx_file.graph_editor import CannotRewriteError, GraphEditor
from ...models.onnx_file.model_messages import (
    ELEMENT_TYPES,
    Message,
    ModelProto,
    attribute_values,
    read_model,
    set_attribute,
    tensor,
)
from ..kv.cache_scales import CacheScales, Floats
from .attention_edits import OPERATOR, PAST_KEY, PAST_VALUE, Rotation, rotated_halves, rotation_of

_PRESENT_KEY, _PRESENT_VALUE = 1, 2
_KEY_SCALES, _VALUE_SCALES = 12, 13
_HINT: Final = "leave --kv out, or export the model with edge-run export"


def envelope(keys: Floats, rotation: Rotation | None) -> Floats:
    """Largest size of each channel over the slots at any position: the largest norm of the channel's pair.

    A rotation moves a key's size between the two channels of a pair, and a short text does not show all positions.

    Args:
        keys: rotated keys, float32 `[kv_heads, slots, head_dim]`.
        rotation: how they are rotated. An unknown one is taken for that of a whole head, which is never too small a
            size.

    Returns:
        float32 `[kv_heads, head_dim]`.
    """
    largest: Floats = np.abs(keys).max(axis=1, initial=0.0)
    _, channels, interleaved = rotation or Rotation((), 0, interleaved=False)
    first, second = rotated_halves(channels or keys.shape[-1] // 2 * 2, interleaved=interleaved)
    norms = np.hypot(keys[..., first], keys[..., second]).max(axis=1, initial=0.0)
    largest[:, first] = largest[:, second] = norms
    return largest


def key_rotations(graph: Path) -> dict[str, Rotation | None]:
    """The rotation of every key cache that a GroupQueryAttention keeps, by the name of the cache input.

    Raises:
        BundleError: the file is not an ONNX model, or has a cache that no such operator keeps, or a quantized one.
    """
    try:
        editor = GraphEditor(graph)
    except CannotRewriteError as error:
        raise BundleError(f"{graph} has no {OPERATOR}, which a quantized KV cache needs", _HINT) from error
    return {node.input[PAST_KEY]: rotation_of(editor, node) for node in _attentions(editor.model, graph)}


def with_quantized_cache(graph: Path, scales: CacheScales, serialized: bytes | None = None) -> bytes:
    """The model in `graph` with its KV cache quantized; weights in other files stay references to them.

    Args:
        graph: the model's file.
        scales: the scales of its cache.
        serialized: the model itself, if it is another one than in the file; see `joined_graph`.

    Raises:
        BundleError: the file is not an ONNX model, its cache cannot be quantized, or the scales are not of this graph.
    """
    model = read_model(graph) if serialized is None else ModelProto.FromString(serialized)
    changed: dict[str, int] = {}
    for number, node in enumerate(_attentions(model, graph)):
        pasts = [node.input[PAST_KEY], node.input[PAST_VALUE]]
        try:
            both = [scales.tensors[name] for name in pasts]
        except KeyError as error:
            raise BundleError(f"the scales of the quantized KV cache lack {error.args[0]} of {graph}", _HINT) from error
        while len(node.input) <= _VALUE_SCALES:
            node.input.append("")
        for index, kind, values in zip((_KEY_SCALES, _VALUE_SCALES), ("key", "value"), both, strict=True):
            name = f"kv_scales.{number}.{kind}"
            model.graph.initializer.append(tensor(name, values.reshape(-1)))
            node.input[index] = name
        for kind in ("k_quant_type", "v_quant_type"):
            set_attribute(node, kind, "PER_CHANNEL")
        set_attribute(node, "kv_cache_bit_width", scales.kv.bits)
        presents = node.output[_PRESENT_KEY], node.output[_PRESENT_VALUE]
        changed.update({name: each.shape[-1] for name, each in zip((*pasts, *presents), (*both, *both), strict=True)})
    for value in (*model.graph.input, *model.graph.output):
        if value.name in changed:
            value.type.tensor_type.elem_type = ELEMENT_TYPES[scales.kv.dtype]
            value.type.tensor_type.shape.dim[-1].dim_value = changed[value.name] * scales.kv.bits // 8
    changed_model: bytes = model.SerializeToString()
    return changed_model


def _attentions(model: Message, graph: Path) -> Iterator[Message]:
    """The operators that keep the cache of a model.

    Raises:
        BundleError: there is none, one keeps its cache elsewhere, or has a quantized one already.
    """
    inputs = {value.name for value in model.graph.input}
    outputs = {value.name for value in model.graph.output}
    found = [node for node in model.graph.node if node.op_type == OPERATOR]
    if not found:
        raise BundleError(f"{graph} has no {OPERATOR}, which a quantized KV cache needs", _HINT)
    written = {name for node in found for name in node.output[_PRESENT_KEY : _PRESENT_VALUE + 1]}
    for node in found:
        if written.intersection(node.input[PAST_KEY : PAST_VALUE + 1]):
            # With codes, the CPU's operator demands a cache output of its own, which would be a copy.
            raise BundleError(f"{graph} has layers that read the cache of another layer ({node.name})", _HINT)
        caches = list(node.input[PAST_KEY : PAST_VALUE + 1])
        presents = list(node.output[_PRESENT_KEY : _PRESENT_VALUE + 1])
        if len(caches) != 2 or len(presents) != 2 or not inputs.issuperset(caches) or not outputs.issuperset(presents):
            raise BundleError(f"{graph} computes with its cache before {OPERATOR} reads it ({node.name})", _HINT)
        if attribute_values(node).get("k_quant_type", "NONE") != "NONE":
            raise BundleError(f"{graph} has a quantized cache already", "leave --kv out")
    yield from found
