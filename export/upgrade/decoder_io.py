"""Which input of a foreign decoder is what, told by how the graph uses it and not only by its name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from onnx import TensorProto

from ...errors import BundleError
from ..graph import inputs_outputs
from .edit.editable import EditableGraph, Node

TOKENS: Final = "input_ids"
MASK: Final = "attention_mask"
POSITIONS: Final = "position_ids"
LOGITS: Final = "logits"

_WHOLE: Final = (TensorProto.INT64, TensorProto.INT32)
_FLOATING: Final = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
_RUN_AS_IT_IS: Final = "run it as it is"
_LOOK_UPS: Final = ("Gather", "GatherBlockQuantized")
_PASSING_ON: Final = ("Cast", "Clip", "Reshape", "Where")
"""Operators that may stand between ids and the look-up."""
_KNOWN_DOMAINS: Final = ("", "com.microsoft", "ai.onnx.ml", "com.microsoft.nchwc")


@dataclass(frozen=True)
class CachePort:
    """One cache tensor: the graph input with past rows and the output with the new ones behind."""

    past: str
    present: str


@dataclass(frozen=True)
class Ports:
    """Inputs and outputs of a decoder, after `settle_ports`."""

    caches: tuple[CachePort, ...]
    """Of a fused graph, key and value of each layer, in layer order; else as the inputs stand."""
    logits: str


def settle_ports(graph: EditableGraph, names: Mapping[str, str] = MappingProxyType({})) -> Ports:
    """Find out what the inputs and outputs are, and give tokens, mask and positions their usual names, logits too.

    No other value has the name of an input of the contract afterwards.

    Args:
        graph: a foreign decoder.
        names: what its settings say that inputs are called, by their usual names.

    Raises:
        BundleError: this is no decoder with a cache, or one that cannot be upgraded; the message says which.
    """
    _require_known_operators(graph)
    _free_names(graph)
    for usual, name in names.items():
        if usual in (TOKENS, MASK, POSITIONS) and name in graph.inputs and usual not in graph.inputs:
            graph.rename(name, graph.fresh(usual))
    caches = _caches(graph)
    if not caches:
        raise _without_cache(graph)
    inside = {port.past for port in caches}
    _name(graph, TOKENS, [name for name in graph.inputs if name not in inside and _is_tokens(graph, name)])
    if TOKENS not in graph.inputs:
        raise BundleError(
            "the model has no input of token ids", "give the decoder of a text model, not an encoder or an image part"
        )
    others = [name for name in graph.inputs if name not in inside and name != TOKENS]
    _name(graph, POSITIONS, [name for name in others if re.search("position", name)])
    _name(graph, MASK, [name for name in others if re.search("mask", name) and name in graph.inputs])
    logits = _logits(graph, [name for name in graph.outputs if name not in {port.present for port in caches}])
    if logits != LOGITS:
        graph.rename(logits, graph.fresh(LOGITS))
    return Ports(caches, LOGITS if LOGITS in graph.outputs else logits)


def _require_known_operators(graph: EditableGraph) -> None:
    strange = sorted({node.domain for node in graph.nodes if node.domain not in _KNOWN_DOMAINS} - graph.own_domains)
    if strange:
        raise BundleError(
            f"the model uses operators of {strange[0]}, which ONNX Runtime has only with a library of its maker's",
            "export the model for CPU",
        )


def _free_names(graph: EditableGraph) -> None:
    """Call results and constants something else that have the name of an input that is still to come."""
    for name in (MASK, *(info.name for info in inputs_outputs.pass_inputs())):
        if graph.producer(name) is not None or name in graph.tensors:
            graph.rename(name, graph.fresh(f"{name}.before"))


def _without_cache(graph: EditableGraph) -> BundleError:
    if any(len(graph.shape(name) or ()) >= 3 and graph.element_type(name) in _FLOATING for name in graph.inputs):
        return BundleError(
            "the model's cache is not keys and values with the new rows behind, each an output of its own",
            _RUN_AS_IT_IS,
        )
    return BundleError(
        "the model has no key-value cache among its inputs and outputs", "export it again with a cache (with past)"
    )


def _caches(graph: EditableGraph) -> tuple[CachePort, ...]:
    """Cache inputs with their outputs (see `Ports`)."""
    fused = [node for node in graph.in_order() if node.op == "GroupQueryAttention"]
    if fused:
        return tuple(port for node in fused for port in _of_fused(graph, node))
    found: list[CachePort] = []
    for name in graph.inputs:
        ends = [
            node.output(0)
            for node in graph.consumers(name)
            if node.op == "Concat" and node.output(0) in graph.outputs and node.input(0) == name
        ]
        if ends and graph.element_type(name) in _FLOATING:
            found.append(CachePort(name, ends[0]))
    return tuple(found)


def _of_fused(graph: EditableGraph, node: Node) -> tuple[CachePort, CachePort]:
    ports = tuple(CachePort(node.input(3 + half), node.output(1 + half)) for half in (0, 1))
    for port in ports:
        if port.past not in graph.inputs or port.present not in graph.outputs:
            raise BundleError(
                f"the attention {node.name or node.output(0)} keeps its cache inside the graph", _RUN_AS_IT_IS
            )
        if graph.element_type(port.past) not in _FLOATING:
            raise BundleError("the model keeps its cache in whole numbers (quantized)", _RUN_AS_IT_IS)
        if len(graph.consumers(port.past)) != 1 and any(
            each.op == "GroupQueryAttention" and each is not node for each in graph.consumers(port.past)
        ):
            raise BundleError("two layers of the model share a cache", _RUN_AS_IT_IS)
    return ports[0], ports[1]


def _is_tokens(graph: EditableGraph, name: str) -> bool:
    """Whether an input is whole numbers by which rows of a matrix are looked up."""
    if graph.element_type(name) not in _WHOLE or re.search("position|mask|type", name):
        return False
    return look_up_by(graph, name) is not None


def look_up_by(graph: EditableGraph, ids: str) -> Node | None:
    """The operator that looks up rows of a table by an input's numbers; None if there is none."""
    waiting = [ids]
    while waiting:
        value = waiting.pop()
        for node in graph.consumers(value):
            by_row = node.attribute("gather_axis" if node.op == "GatherBlockQuantized" else "axis", 0) == 0
            if node.op in _LOOK_UPS and node.input(1) == value and by_row:
                return node
            if node.op in _PASSING_ON:
                waiting.append(node.output(0))
    return None


def _name(graph: EditableGraph, wanted: str, candidates: list[str]) -> None:
    """Call the one candidate `wanted`; where there is none, or already one of that name, do nothing."""
    if wanted in graph.inputs or not candidates:
        return
    if len(candidates) > 1:
        raise BundleError(
            f"the model has several inputs that could be {wanted}: {', '.join(candidates)}", _RUN_AS_IT_IS
        )
    graph.rename(candidates[0], graph.fresh(wanted))


def _logits(graph: EditableGraph, outputs: list[str]) -> str:
    floats = [name for name in outputs if graph.element_type(name) in _FLOATING]
    named = [name for name in floats if "logits" in name] or floats
    if len(named) != 1:
        raise BundleError(
            f"the model's outputs besides its cache are {', '.join(outputs) or 'none'}; logits are not among them",
            "export it for text generation",
        )
    return named[0]
