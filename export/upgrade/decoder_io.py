"""Inputs and outputs of a foreign decoder, identified by their use in the graph.

Names alone are not enough: exporters call the same input different things.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
from onnx import ModelProto, TensorProto, ValueInfoProto, helper

from ...errors import BundleError
from ..graph import inputs_outputs
from .editable import EditableGraph, Node
from .graph_parts import FLOATS, Array, Tensor, unsupported

TOKENS: Final = "input_ids"
MASK: Final = "attention_mask"
POSITIONS: Final = "position_ids"

_INTEGERS: Final = (TensorProto.INT64, TensorProto.INT32)
_GATHERS: Final = ("Gather", "GatherBlockQuantized")
_BEFORE_GATHER: Final = ("Cast", "Clip", "Reshape", "Where")
"""Operators that may stand between token ids and the embedding lookup."""
_STORED_LAYOUT: Final = ("Cast", "DequantizeLinear", "Reshape", "Transpose")
_HEADS: Final = frozenset(("MatMul", "MatMulNBits", "MatMulBnb4", "Gemm"))
_AFTER_THE_HEAD: Final = frozenset(("Add", "Cast", "Clip", "Div", "Mul", "Sub", "Tanh"))
_KNOWN_DOMAINS: Final = ("", "com.microsoft", "ai.onnx.ml", "com.microsoft.nchwc")
_CACHED_BRANCH: Final = "then_branch"
_MASKED: Final = -1e4
"""Added to the score of a masked position; representable in half precision."""


class CacheTensor(NamedTuple):
    """One cache tensor: the graph input with past slots and the output with the new slots appended."""

    past: str
    present: str
    new: str = ""
    """The new slots, if the graph appends them by a Concat."""


class PassShape(NamedTuple):
    """Number of new and cached tokens of a forward pass."""

    new: int
    past: int

    @property
    def total(self) -> int:
        """Number of cached and new tokens."""
        return self.new + self.past


def take_cached_branch(model: ModelProto) -> None:
    """Replace the `If` of a merged decoder by its branch for a filled cache; other graphs do not change.

    Optimum before 1.14 wrote merged decoders (`decoder_model_merged.onnx`), and transformers.js adopted them: an `If`
    on the input `use_cache_branch` selects a branch for an empty or a filled cache. The latter also works with an empty
    cache.

    Raises:
        BundleError: names in the branch are taken.
    """
    graph = model.graph
    producers = {name: node for node in graph.node for name in node.output}
    flags = {info.name: info for info in graph.input if info.type.tensor_type.elem_type == TensorProto.BOOL}
    for node in [node for node in graph.node if node.op_type == "If"]:
        condition = node.input[0]
        while condition in producers and producers[condition].op_type in ("Cast", "Squeeze", "Reshape"):
            condition = producers[condition].input[0]
        if condition not in flags:
            continue
        branch = next(each for each in node.attribute if each.name == _CACHED_BRANCH).g
        graph.input.remove(flags.pop(condition))
        graph.node.remove(node)
        graph.initializer.extend(branch.initializer)
        graph.node.extend(branch.node)
        renamed = {info.name: name for info, name in zip(branch.output, node.output, strict=True) if info.name != name}
        graph.node.extend(helper.make_node("Identity", [old], [new]) for old, new in renamed.items())
        names = [name for each in graph.node for name in each.output if name] + [
            each.name for each in graph.initializer
        ]
        if len(set(names)) != len(names):
            raise unsupported("names in the model's branches clash")


def input_value(info: ValueInfoProto, lengths: PassShape) -> Array:
    """Value that a graph input is fed in a pass over one sequence without padding.

    Token ids are 0, the mask is ones (or, with four dimensions, causal), positions ascend, and the cache is zeros. Of
    the dimensions of a cache without a number, the last is the length and any other one the batch.
    """
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type))
    declared = [each.dim_value for each in info.type.tensor_type.shape.dim]
    ones = [max(size, 1) for size in declared]
    if info.name == MASK:
        value: Array = np.ones((1, lengths.total))
        if len(declared) == 4:  # scores to add (floats), or whether a slot counts
            slots = np.arange(lengths.total)
            seen = slots <= slots[lengths.past :, None]
            value = (np.where(seen, 0, _MASKED) if dtype.kind == "f" else seen)[None, None]
    elif info.name == POSITIONS:
        positions = np.arange(lengths.past, lengths.total)
        value = np.broadcast_to(positions, (*([1] if len(declared) < 3 else [3, 1]), lengths.new))
    elif info.name == TOKENS:
        value = np.zeros((1, lengths.new))
    elif dtype.kind == "f" and len(declared) >= 4:
        if unnamed := [axis for axis, size in enumerate(declared) if size <= 0]:
            ones[unnamed[-1]] = lengths.past
        value = np.zeros(ones)
    elif dtype != np.bool_ and re.search("past|total", info.name):
        value = np.full(ones, lengths.total - ("past" in info.name))
    else:  # a flag, or a number of logits to keep
        value = np.full(ones, lengths.new)
    return value.astype(dtype)


def identify_io(graph: EditableGraph, names: Mapping[str, str] = MappingProxyType({})) -> tuple[CacheTensor, ...]:
    """Find out what inputs and outputs are for, and give token ids, mask, positions and logits their usual names.

    Afterwards no other value has the name of an input of the graph contract.

    Args:
        graph: a foreign decoder.
        names: names of inputs according to the model's settings, by their usual names.

    Returns:
        Cache inputs with their outputs: for a fused graph, key and value of each layer in layer order; otherwise in the
        order of the graph inputs.

    Raises:
        BundleError: the graph is not a decoder with a cache, or one that cannot be upgraded; the message says which.
    """
    unknown = sorted({node.domain for node in graph.nodes if node.domain not in _KNOWN_DOMAINS} - graph.own_domains)
    if unknown:
        raise BundleError(
            f"the model uses operators of {unknown[0]}, which ONNX Runtime has only with a vendor's library",
            "export the model for CPU",
        )
    for name in (MASK, *(info.name for info in inputs_outputs.pass_inputs())):  # of inputs that will be added
        if name not in graph.inputs:
            graph.set_aside(name)
    for usual, name in names.items():
        if usual in (TOKENS, MASK, POSITIONS) and name in graph.inputs and usual not in graph.inputs:
            graph.rename(name, graph.fresh(usual))
    attentions = [node for node in graph.in_order() if node.op == "GroupQueryAttention"]
    caches = tuple(cache for node in attentions for cache in _caches_of(graph, node)) or joined_caches(graph)
    if not caches:
        if any(len(graph.shape(name) or ()) >= 3 and graph.element_type(name) in FLOATS for name in graph.inputs):
            raise unsupported(
                "the model's cache does not consist of key and value tensors to which new slots are appended"
            )
        raise BundleError(
            "the model has no key-value cache among its inputs and outputs", "export it again with a cache (with past)"
        )
    past = {cache.past for cache in caches}
    tokens = [
        name
        for name in graph.inputs
        if name not in past and graph.element_type(name) in _INTEGERS and not re.search("position|mask|type", name)
    ]
    _rename_only(graph, TOKENS, [name for name in tokens if embedding_lookup(graph, name) is not None])
    if TOKENS not in graph.inputs:
        raise BundleError(
            "the model has no input of token ids", "give the decoder of a text model, not an encoder or an image part"
        )
    others = [name for name in graph.inputs if name not in past and name != TOKENS]
    _rename_only(graph, POSITIONS, [name for name in others if re.search("position", name)])
    _rename_only(graph, MASK, [name for name in others if re.search("mask", name) and name in graph.inputs])
    presents = {cache.present for cache in caches}
    logits = _logits(graph, [name for name in graph.outputs if name not in presents])
    graph.set_output(ValueInfoProto(name=inputs_outputs.LOGITS, type=graph.outputs[logits].type), logits)
    return caches


def embedding_lookup(graph: EditableGraph, ids: str) -> Node | None:
    """The operator that gathers rows of a table by the ids of an input; None if there is none."""
    for value, node in graph.readers(ids, lambda _, node: node.op in _BEFORE_GATHER):
        by_row = node.attribute("gather_axis" if node.op == "GatherBlockQuantized" else "axis", 0) == 0
        if node.op in _GATHERS and node.input(1) == value and by_row:
            return node
    return None


def find_lm_head(graph: EditableGraph) -> Node:
    """Find the LM head: the product that computes the logits, before scales and soft caps.

    Raises:
        BundleError: the model has no head.
    """
    name = inputs_outputs.LOGITS
    while True:
        node = graph.producer(name)
        if node is not None and node.op in _HEADS and constant_inputs(graph, node):
            return node
        if node is None or node.op not in _AFTER_THE_HEAD:
            raise unsupported("the model has no LM head: its logits are not a product of a matrix and hidden states")
        name = next((each for each in node.inputs if each and each not in graph.tensors), "")


def constant_inputs(graph: EditableGraph, node: Node) -> list[str]:
    """Inputs of a node that are constants."""
    return [name for name in node.inputs if name and stored_constant(graph, name)]


def stored_constant(graph: EditableGraph, name: str) -> Tensor | None:
    """The constant that a value is, possibly stored in another layout or type; None if it is computed."""
    return graph.tensors.get(graph.source(name, *_STORED_LAYOUT))


def joined_caches(graph: EditableGraph) -> tuple[CacheTensor, ...]:
    """Cache inputs to which a Concat appends new slots, in the order of the graph inputs."""
    return tuple(
        CacheTensor(name, node.output(0), node.input(1))
        for name in graph.inputs
        if graph.element_type(name) in FLOATS
        for node in graph.consumers(name)
        if node.op == "Concat" and node.output(0) in graph.outputs and node.input(0) == name and len(node.inputs) == 2
    )


def _caches_of(graph: EditableGraph, node: Node) -> tuple[CacheTensor, CacheTensor]:
    """Key and value cache of a GroupQueryAttention."""
    caches = tuple(CacheTensor(node.input(3 + half), node.output(1 + half)) for half in (0, 1))
    for cache in caches:
        if cache.past not in graph.inputs or cache.present not in graph.outputs:
            raise unsupported(f"the attention {node.name or node.output(0)} keeps its cache inside the graph")
        if graph.element_type(cache.past) not in FLOATS:
            raise unsupported("the model's key-value cache is quantized to integers")
        if any(each.op == node.op and each is not node for each in graph.consumers(cache.past)):
            raise unsupported("two layers of the model share a cache")
    return caches[0], caches[1]


def _rename_only(graph: EditableGraph, wanted: str, candidates: list[str]) -> None:
    """Rename the only candidate to `wanted`; do nothing if there is none or an input already has that name."""
    if wanted in graph.inputs or not candidates:
        return
    if len(candidates) > 1:
        raise unsupported(f"the model has several inputs that could be {wanted}: {', '.join(candidates)}")
    graph.rename(candidates[0], graph.fresh(wanted))


def _logits(graph: EditableGraph, outputs: list[str]) -> str:
    floats = [name for name in outputs if graph.element_type(name) in FLOATS]
    named = [name for name in floats if "logits" in name] or floats
    if len(named) != 1:
        raise BundleError(
            f"the model's outputs besides its cache are {', '.join(outputs) or 'none'}; logits are not among them",
            "export it for text generation",
        )
    return named[0]
