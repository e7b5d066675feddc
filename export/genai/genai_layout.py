"""The exported graph as ONNX Runtime GenAI drives it.

GenAI gives a graph `input_ids` [batch, sequence], an `attention_mask` of ones [batch, total] and the key-value buffers,
and wants `logits` [batch, sequence, vocabulary]. The lengths that GroupQueryAttention needs are counted from the mask,
as GenAI's own model builder counts them; positions and visibility are those of plain text, which the operator knows by
itself. Given up is what docs/graph-contract.md has beyond that: trees, and logits of chosen rows only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from ...errors import ExportError
from ...models.bundle import GRAPH_NAME
from ...models.variants import GENAI_CONFIG
from ..check.contract_session import ContractSession, ModelSession
from ..check.float_activations import with_float_activations
from ..check.parity import TOLERANCE
from ..check.reference import TokenArray
from ..checkpoint.config import DecoderConfig
from ..graph import inputs_outputs
from ..graph.needed_nodes import needed_nodes
from .genai_config import genai_config

Floats: TypeAlias = npt.NDArray[np.float32]

_COUNTED: Final = ("seqlens_k", "total_sequence_length")
_NOT_GIVEN: Final = frozenset(("attention_bias", "logit_rows"))
_OF_TEXT: Final = (9, 10)
"""GroupQueryAttention's positions and bias; it does as for plain text without."""
_OF_A_PASS: Final = ("input_ids", "attention_mask", "position_ids")
"""Inputs beside the cache."""
_PAST: Final = 3
_WINDOW: Final = "local_window_size"
_HEAD_ROWS: Final = "head.rows"
_TOKENS: Final = 12
_STEPS: Final = 2


def write_genai_layout(folder: Path, config: DecoderConfig, context: int) -> None:
    """Rewrite the graph in `folder` and add genai_config.json; weights and tokenizer stay as they are.

    Args:
        folder: a bundle being written: graph, weights, config.json and tokenizer.
        config: the model's numbers.
        context: positions the graph serves.

    Raises:
        ExportError: the rewritten graph does not compute what the graph did.
        OSError: the disk refused a write.
    """
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, min(_TOKENS, context))
    contracted = onnx.load(folder / GRAPH_NAME, load_external_data=False)
    model = to_genai(contracted, config)
    (folder / GRAPH_NAME).write_bytes(model.SerializeToString())
    settings = genai_config(folder, config, context, [value.name for value in model.graph.input])
    (folder / GENAI_CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    # Passes of other widths differ in the last bits, which rounding activations to 8 bits would make whole steps of.
    original, rewritten = with_float_activations(contracted), with_float_activations(model)
    expected = ContractSession(folder, config, len(tokens), original).forward(tokens, np.arange(len(tokens)))
    logits = _growing_logits(folder, rewritten, config, tokens)
    difference = float(np.abs(logits - expected).max())
    if not difference <= TOLERANCE * max(1.0, float(expected.std())):
        raise ExportError(
            f"the graph for GenAI differs by {difference:.2g} in a logit from the one it was made of",
            "this is a defect of the exporter: please report the checkpoint",
        )


def _growing_logits(folder: Path, model: ModelProto, config: DecoderConfig, tokens: TokenArray) -> Floats:
    """Logits [m, vocabulary] of a graph in GenAI's layout over a cache that grows: a prompt, then single tokens."""
    session = ModelSession(model, folder)
    names, outputs = ([port.name for port in ports] for ports in (model.graph.input, model.graph.output))
    caches = [name for name in names if name not in _OF_A_PASS]
    cache = dict.fromkeys(caches, np.zeros((1, config.kv_heads, 0, config.head_dim), np.float32))
    rows = []
    for start, stop in pairwise([0, *range(max(1, len(tokens) - _STEPS), len(tokens) + 1)]):
        given = (tokens[None, start:stop], np.ones((1, stop), np.int64), np.arange(start, stop)[None])
        feeds = {name: value for name, value in zip(_OF_A_PASS, given, strict=True) if name in names}
        logits, *present = session.run(outputs, feeds | cache)
        cache = dict(zip(caches, present, strict=True))
        rows.append(logits[0])
    return np.concatenate(rows)


def to_genai(model: ModelProto, config: DecoderConfig) -> ModelProto:
    """A graph of the contract with GenAI's inputs and outputs instead; `model` stays as it is.

    Args:
        model: as `build_graph` makes it.
        config: the model's numbers.

    Raises:
        ExportError: the graph uses an input of the contract in a way for which GenAI has none.
    """
    rewritten = ModelProto()
    rewritten.CopyFrom(model)
    graph = rewritten.graph
    nodes = [*_lengths(graph), *_every_row(graph, config)]
    windows = {inputs_outputs.past_key(layer): each.window for layer, each in enumerate(config.attention)}
    for node in nodes:
        if node.op_type == "GroupQueryAttention":
            _as_plain_text(node, windows[node.input[_PAST]])
    outputs = _outputs(config)
    nodes = needed_nodes(nodes, [value.name for value in outputs])
    used = {name for node in nodes for name in node.input}
    if left := sorted(used & _NOT_GIVEN):
        raise ExportError(
            f"GenAI has no input for what this graph does with {', '.join(left)}", "export it with --layout edge"
        )
    graph.CopyFrom(
        GraphProto(
            name=graph.name,
            node=nodes,
            initializer=[tensor for tensor in graph.initializer if tensor.name in used],
            input=_inputs(config, positions="position_ids" in used),
            output=outputs,
        )
    )
    return rewritten


def _lengths(graph: GraphProto) -> list[NodeProto]:
    """Nodes that count the contract's lengths from the mask: int32 [batch] and a scalar."""
    names = ("mask.ones", "mask.total")
    graph.initializer.extend(
        [
            numpy_helper.from_array(np.array([1], np.int64), names[0]),
            numpy_helper.from_array(np.array(1, np.int64), names[1]),
        ]
    )
    last, total = _COUNTED
    return [
        helper.make_node("ReduceSum", ["attention_mask", names[0]], ["mask.sum"], name="mask.sum", keepdims=0),
        helper.make_node("Sub", ["mask.sum", names[0]], ["mask.last"], name="mask.last"),
        helper.make_node("Cast", ["mask.last"], [last], name=last, to=TensorProto.INT32),
        helper.make_node("Shape", ["attention_mask"], ["mask.shape"], name="mask.shape"),
        helper.make_node("Gather", ["mask.shape", names[1]], ["mask.width"], name="mask.width", axis=0),
        helper.make_node("Cast", ["mask.width"], [total], name=total, to=TensorProto.INT32),
    ]


def _as_plain_text(node: NodeProto, window: int | None) -> None:
    """Leave the positions, and what each token sees, to the operator."""
    for index in _OF_TEXT:
        if index < len(node.input):
            node.input[index] = ""
    while not node.input[-1]:
        node.input.pop()
    kept = [attribute for attribute in node.attribute if attribute.name != _WINDOW]
    del node.attribute[:]
    node.attribute.extend(kept if window is None else [*kept, helper.make_attribute(_WINDOW, window)])


def _every_row(graph: GraphProto, config: DecoderConfig) -> Iterator[NodeProto]:
    """The graph's nodes, with logits [batch, sequence, vocabulary] of all rows.

    Where the contract chooses rows, whoever wants them takes all. It drops the batch in front of the head: MatMulNBits
    takes what was there before, Gemm wants a matrix and has its rows put back into batches afterwards.
    """
    instead: dict[str, str] = {}
    for node in graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = instead.get(name, name)
        chooses = node.op_type == "Gather" and node.input[1] == "logit_rows"
        if chooses or (node.op_type == "Squeeze" and node.output[0] == _HEAD_ROWS):
            instead[node.output[0]] = node.input[0]
        elif node.op_type == "Gemm" and _HEAD_ROWS in instead:
            yield from _gemm_of_batches(graph, node, config)
        else:
            yield node


def _gemm_of_batches(graph: GraphProto, node: NodeProto, config: DecoderConfig) -> list[NodeProto]:
    """A head in float32 over [batch, sequence, hidden]."""
    output = node.output[0]
    rows, product, lead, shape = (f"batches.{name}" for name in ("rows", "product", "lead", "shape"))
    sizes = {"batches.hidden": [-1, config.hidden_size], "batches.width": [config.vocab_size]}
    graph.initializer.extend(numpy_helper.from_array(np.array(size, np.int64), name) for name, size in sizes.items())
    flat = helper.make_node("Reshape", [node.input[0], "batches.hidden"], [rows], name=rows)
    node.input[0], node.output[0] = rows, product
    return [
        flat,
        node,
        helper.make_node("Shape", ["input_ids"], [lead], name=lead),
        helper.make_node("Concat", [lead, "batches.width"], [shape], name=shape, axis=0),
        helper.make_node("Reshape", [product, shape], [output], name="batches.joined"),
    ]


def _inputs(config: DecoderConfig, *, positions: bool) -> list[ValueInfoProto]:
    """GenAI's inputs; positions only where something besides the attention rotates by them."""
    texts = {"input_ids": "sequence_length", "attention_mask": "total_sequence_length"}
    if positions:
        texts["position_ids"] = "sequence_length"
    return [
        *(
            helper.make_tensor_value_info(name, TensorProto.INT64, ["batch_size", width])
            for name, width in texts.items()
        ),
        *(
            helper.make_tensor_value_info(name(layer), TensorProto.FLOAT, _cache(config, "past_sequence_length"))
            for layer in range(config.layers)
            for name in (inputs_outputs.past_key, inputs_outputs.past_value)
        ),
    ]


def _outputs(config: DecoderConfig) -> list[ValueInfoProto]:
    shape: list[str | int] = ["batch_size", "sequence_length", config.vocab_size]
    return [
        helper.make_tensor_value_info(inputs_outputs.LOGITS, TensorProto.FLOAT, shape),
        *(
            helper.make_tensor_value_info(name(layer), TensorProto.FLOAT, _cache(config, "total_sequence_length"))
            for layer in range(config.layers)
            for name in (inputs_outputs.present_key, inputs_outputs.present_value)
        ),
    ]


def _cache(config: DecoderConfig, length: str) -> list[str | int]:
    return ["batch_size", config.kv_heads, length, config.head_dim]
