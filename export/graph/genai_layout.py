"""Rewriting an exported graph for ONNX Runtime GenAI.

GenAI passes `input_ids` [batch, sequence], an `attention_mask` of ones [batch, total] and the KV cache, and expects
`logits` [batch, sequence, vocabulary]. The lengths that GroupQueryAttention needs are computed from the mask, like
GenAI's model builder does. Positions and the causal mask are the operator's defaults. What docs/graph-contract.md
offers beyond that is lost: token trees, and logits of selected positions only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper

from ...errors import ExportError
from ...models.bundle import GRAPH_NAME, Bundle
from ...models.json_file import is_finite, is_whole
from ...models.variants import GENAI_CONFIG
from ...runtime.text.tokenizer import TextTokenizer
from ..check.contract_session import ContractSession, ModelSession, require_close
from ..check.parity import with_float_activations
from ..check.reference import TokenArray
from ..checkpoint.config import DecoderConfig
from ..checkpoint.source import Float32Array
from ..upgrade.editable import EditableGraph
from ..upgrade.graph_parts import in_place
from . import inputs_outputs
from .decoder_parts import HEAD_INPUT

_PASS_INPUTS: Final = ("input_ids", "attention_mask", "position_ids")
"""Inputs other than the KV cache."""
_TOKENS: Final = 12
_STEPS: Final = 2
_TYPES: Final = frozenset(
    ("gemma", "gemma2", "gemma3_text", "granite", "llama", "mistral", "olmo", "phi3", "qwen2", "qwen3", "smollm3")
)
"""Families that GenAI supports by their model_type; others use the type `decoder`."""
_SAMPLING_SETTINGS: Final = ("temperature", "top_k", "top_p", "repetition_penalty")


def write_genai_layout(folder: Path, config: DecoderConfig, context: int) -> None:
    """Rewrite the graph in `folder` and add genai_config.json; weights and tokenizer do not change.

    Args:
        folder: an unfinished bundle with graph, weights, config.json and tokenizer.
        config: the model's architecture.
        context: number of positions that the graph serves.

    Raises:
        ExportError: the rewritten graph computes other logits than the original.
        OSError: the disk refused a write.
    """
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, min(_TOKENS, context))
    original = onnx.load(folder / GRAPH_NAME, load_external_data=False)
    model = to_genai(original, folder, config)
    (folder / GRAPH_NAME).write_bytes(model.SerializeToString())
    settings = genai_config(folder, config, context, [value.name for value in model.graph.input])
    (folder / GENAI_CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    # Passes of different widths differ in the last bits, which rounding activations to 8 bits would amplify.
    float_original, float_rewritten = with_float_activations(original), with_float_activations(model)
    expected = ContractSession(folder, len(tokens), float_original).forward(tokens, np.arange(len(tokens)))
    logits = _logits_with_growing_cache(folder, float_rewritten, config, tokens)
    require_close(logits, expected, "the graph for GenAI differs from the one it was made of")


def _logits_with_growing_cache(
    folder: Path, model: ModelProto, config: DecoderConfig, tokens: TokenArray
) -> Float32Array:
    """Run a graph in GenAI's layout over a prompt and then single tokens; returns logits [tokens, vocabulary]."""
    session = ModelSession(model, folder)
    names, outputs = ([value.name for value in values] for values in (model.graph.input, model.graph.output))
    caches = [name for name in names if name not in _PASS_INPUTS]
    cache = dict.fromkeys(caches, np.zeros((1, config.kv_heads, 0, config.head_dim), np.float32))
    all_logits = []
    for start, stop in pairwise([0, *range(max(1, len(tokens) - _STEPS), len(tokens) + 1)]):
        values = (tokens[None, start:stop], np.ones((1, stop), np.int64), np.arange(start, stop)[None])
        feeds = {name: value for name, value in zip(_PASS_INPUTS, values, strict=True) if name in names}
        logits, *present = session.run(outputs, feeds | cache)
        cache = dict(zip(caches, present, strict=True))
        all_logits.append(logits[0])
    return np.concatenate(all_logits)


def to_genai(original: ModelProto, folder: Path, config: DecoderConfig) -> ModelProto:
    """Return a graph with GenAI's inputs and outputs.

    Positions are not selected, and the batch axis stays before the head, which MatMulNBits accepts. Gemm needs a
    matrix, so its input is flattened and its output gets the batch axis back.

    Args:
        original: a graph made by `build_graph`.
        folder: where its weights are.
        config: the model's architecture.

    Raises:
        ExportError: the graph needs an input that GenAI does not have.
    """
    graph = EditableGraph(original, folder)
    windows = {inputs_outputs.past_cache(layer)[0]: each.window for layer, each in enumerate(config.attention)}
    for node in graph.nodes:
        if node.input(1) == "logit_rows" or node.output(0) == HEAD_INPUT:
            graph.replace_uses(node.output(0), node.input(0))
        elif node.op == "Gemm":
            flat = graph.value("Reshape", [node.input(0), [-1, config.hidden_size]], name="batches.rows")
            product = graph.value("Gemm", [flat, node.input(1)], name="batches.product", transB=1)
            lead = graph.value("Shape", ["input_ids"], name="batches.lead")
            shape = graph.value("Concat", [lead, [config.vocab_size]], name="batches.shape", axis=0)
            graph.replace_value(node.output(0), graph.value("Reshape", [product, shape], name="batches.joined"))
        elif node.op == "GroupQueryAttention":  # without positions and bias, and with the operator's own window
            graph.set_inputs(node, [*node.inputs[:9], "", "", *node.inputs[11:]])
            graph.set_attribute(node, "local_window_size", windows[node.input(3)])
    tokens = graph.value("ReduceSum", ["attention_mask", [1]], name="mask.sum", keepdims=0)
    last = graph.value("Sub", [tokens, [1]], name="mask.last")
    width = graph.value("Gather", [graph.value("Shape", ["attention_mask"], name="mask.shape"), 1], name="mask.width")
    for name, length in (("seqlens_k", last), ("total_sequence_length", width)):
        graph.replace_uses(name, graph.value("Cast", [length], name=f"{length}.int32", to=TensorProto.INT32))
    declare, caches = helper.make_tensor_value_info, partial(inputs_outputs.caches, config, batch="batch_size")
    logits = declare(inputs_outputs.LOGITS, TensorProto.FLOAT, ["batch_size", "sequence_length", config.vocab_size])
    outputs = [logits, *caches(inputs_outputs.present_cache, "total_sequence_length")]
    graph.outputs = {value.name: value for value in outputs}
    graph.sweep()
    if left := [name for name in ("attention_bias", "logit_rows") if graph.consumers(name)]:
        raise ExportError(
            f"GenAI does not provide {', '.join(left)}, which this graph needs", "export it with --layout edge"
        )
    axes = {"input_ids": "sequence_length", "attention_mask": "total_sequence_length"}
    if graph.consumers("position_ids"):  # a node other than attention
        axes["position_ids"] = "sequence_length"
    inputs = [declare(name, TensorProto.INT64, ["batch_size", axis]) for name, axis in axes.items()]
    inputs += caches(inputs_outputs.past_cache, "past_sequence_length")
    graph.inputs = {value.name: value for value in inputs}
    return graph.model(in_place)


def genai_config(folder: Path, config: DecoderConfig, context: int, inputs: Sequence[str]) -> dict[str, Any]:
    """Return the settings; special tokens and sampling come from the files of the checkpoint.

    Args:
        folder: holds config.json, tokenizer.json and, where the checkpoint has them, generation_config.json and
            tokenizer_config.json.
        config: the model's architecture.
        context: number of positions that the graph serves.
        inputs: names of the graph's inputs.
    """
    bundle = Bundle(folder, folder / GRAPH_NAME, None)
    settings, generation = (
        {name: value for name, value in bundle.json_file(file).items() if value is not None}
        for file in ("config.json", "generation_config.json")
    )
    tokens = settings | generation
    pass_inputs = [name for name in inputs if not name.startswith("past_key_values.")]
    return {
        "model": {
            "type": config.family if config.family in _TYPES else "decoder",
            **_special_tokens(tokens, TextTokenizer(bundle, config.vocab_size).eos),
            "vocab_size": config.vocab_size,
            "context_length": context,
            "decoder": {
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "filename": GRAPH_NAME,
                "head_size": config.head_dim,
                "hidden_size": config.hidden_size,
                "num_attention_heads": config.heads,
                "num_hidden_layers": config.layers,
                "num_key_value_heads": config.kv_heads,
                "inputs": {
                    **{name: name for name in pass_inputs},
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": inputs_outputs.LOGITS,
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {
            "do_sample": generation.get("do_sample") is True,
            "max_length": context,
            # The graph writes new keys and values into the buffers that it is given.
            "past_present_share_buffer": True,
            **{name: generation[name] for name in _SAMPLING_SETTINGS if is_finite(generation.get(name))},
        },
    }


def _special_tokens(tokens: Mapping[str, Any], ending: Iterable[int]) -> dict[str, int | list[int]]:
    """Return special token ids by GenAI's names. GenAI reads a missing id as 0, so an end-of-text id replaces it.

    Args:
        tokens: the settings that name them.
        ending: ids that end a text, as edge-run reads them, those of the settings among them.
    """
    ends = _ids(tokens.get("eos_token_id"))
    ends += sorted(set(ending).difference(ends))
    special: dict[str, int | list[int]] = {}
    if ends:
        special["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    for name in ("bos_token_id", "pad_token_id"):
        if ids := _ids(tokens.get(name)) or ends:
            special[name] = ids[0]
    return special


def _ids(value: Any) -> list[int]:
    """Return a list of token ids from one id or a list."""
    return [int(token) for token in (value if isinstance(value, list) else [value]) if is_whole(token, 0)]
