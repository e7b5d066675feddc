"""All foreign layouts that edge-run opens, as tiny graphs of one model.

All are the tiny llama of `tiny_models`, so all have to give the tokens of `layout_reference`. Comments say which tools
and models use a layout; `write_layout` writes one, copied from none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.external_data_helper import set_external_data

from edgerun.export.graph.nodes import MICROSOFT
from edgerun.export.quantization.codes import nearest_rows
from edgerun.models.manifest import WeightFormat
from support.layout_graph import LayoutWriter
from support.layout_kinds import (
    CONTEXT,
    HEAD_DIM,
    HEADS,
    LAYERS,
    VOCABULARY,
    Attention,
    Cache,
    CacheType,
    Decoders,
    Embedding,
    Layout,
    LogitOutput,
    Mask,
    Positions,
    Settings,
    States,
    Weights,
)
from support.layout_reference import layout_weights
from support.layout_states import state_shapes
from support.tiny_models import CHAT_TEMPLATE, SPECIAL_TOKENS, tiny_config, tiny_tokenizer, write_json

OPTIMUM: Final = Layout()
GENAI: Final = Layout(
    attention=Attention.FUSED,
    positions=Positions.LENGTH,
    settings=Settings.GENAI,
    weights=Weights.ONE_FILE,
    open_heads=True,
    shares_buffers=True,
    operator_states=True,
    opset=21,
)
"""Layout of the model builder of ONNX Runtime GenAI: `kv_cache_dim` for the head size, `model.onnx.data`."""
COMMUNITY: Final = Layout(
    attention=Attention.FUSED,
    bias_inside=True,
    weights=Weights.ONE_FILE,
    subfolder="onnx",
    opset=21,
)
"""transformers.js: newer onnx-community repositories (Qwen3, Llama 3.2, SmolLM3), settings above the graph's folder."""

_FOUR_BITS: Final = WeightFormat(4, 32)
_GRAPHS: Final[Mapping[Decoders, tuple[str, ...]]] = {
    Decoders.ONE: ("model.onnx",),
    Decoders.MERGED: ("decoder_model_merged.onnx",),
    Decoders.TWO: ("decoder_model.onnx", "decoder_with_past_model.onnx"),
}
"""Graph files: of the first pass, if it has a graph of its own, and of later passes."""

LAYOUTS: Final[Mapping[str, Layout]] = {
    # Optimum 1.14 and later, `optimum-cli export onnx --task text-generation-with-past`.
    "optimum": OPTIMUM,
    "optimum-opset-14": replace(OPTIMUM, opset=14, fixed_batch=True),
    "optimum-opset-21": replace(OPTIMUM, opset=21, open_vocabulary=True),
    "optimum-open-heads": replace(OPTIMUM, open_heads=True),
    # Families that compute positions in the graph: bloom, older opt and gpt2 exports.
    "optimum-no-positions": replace(OPTIMUM, positions=Positions.LENGTH),
    "optimum-no-mask": replace(OPTIMUM, mask=Mask.NONE),
    # ONNX Runtime's own converters (convert_to_onnx, Olive's optimizer) use int32.
    "optimum-int32": replace(OPTIMUM, int32_ids=True),
    # Qwen2-VL and Qwen3.5 text decoders of onnx-community: rotary positions of time, height and width.
    "optimum-three-positions": replace(OPTIMUM, positions=Positions.THREE),
    # `--dtype fp16`, and model_fp16.onnx / model_q4f16.onnx of transformers.js.
    "optimum-window": replace(OPTIMUM, window=24),
    "optimum-float16": replace(OPTIMUM, cache_type=CacheType.FLOAT16, float16_logits=True),
    # Pruned heads: GenAI's `prune_lm_head`, OpenVINO's sliced logits; TensorRT-LLM style exports flatten them.
    "optimum-last-token": replace(OPTIMUM, logit_output=LogitOutput.LAST),
    "optimum-last-token-flat": replace(OPTIMUM, logit_output=LogitOutput.LAST_FLAT),
    # transformers.js conversions of 2024 and later (Llama 3.2, SmolLM2, Gemma 2).
    "optimum-last-n": replace(OPTIMUM, logit_output=LogitOutput.LAST_N),
    # Optimum before 1.14, and intel/ITREX: one graph with both branches, or two graphs.
    "optimum-merged": replace(OPTIMUM, decoders=Decoders.MERGED),
    "optimum-two-decoders": replace(OPTIMUM, decoders=Decoders.TWO),
    # torch.onnx.export traced with one new token, whose causal mask depends on the traced length: Optimum 1.7 to 1.13
    # for llama and others.
    "optimum-two-traced-at-one": replace(OPTIMUM, decoders=Decoders.TWO, mask=Mask.NOT_CAUSAL),
    "optimum-merged-traced-at-one": replace(OPTIMUM, decoders=Decoders.MERGED, mask=Mask.NOT_CAUSAL),
    # Hand-written exports for fixed pipelines (Qualcomm AI Hub, Rockchip, executorch-like): the mask is a bias.
    "optimum-bias-mask": replace(OPTIMUM, mask=Mask.BIAS),
    "optimum-bias-mask-no-positions": replace(OPTIMUM, mask=Mask.BIAS, positions=Positions.LENGTH),
    # transformers 4.53 and later with dynamo: a boolean for each pair of tokens.
    "optimum-bool-mask": replace(OPTIMUM, mask=Mask.BOOL_ATTENDED, opset=18),
    # Large weights.
    "optimum-external": replace(OPTIMUM, weights=Weights.ONE_FILE),
    "optimum-external-many": replace(OPTIMUM, weights=Weights.MANY_FILES),
    # Without a config.json, --context is required.
    "optimum-bare": replace(OPTIMUM, settings=Settings.NONE),
    # onnxruntime.transformers.models.gpt2, and the tiny-random-gpt2 models of onnxruntime-genai's tests.
    "stacked": replace(OPTIMUM, cache=Cache.STACKED),
    "stacked-genai": replace(OPTIMUM, cache=Cache.STACKED, settings=Settings.GENAI),
    # gpt_bigcode (StarCoder) by Optimum.
    "joined": replace(OPTIMUM, cache=Cache.JOINED),
    # bloom by Optimum.
    "keys-transposed": replace(OPTIMUM, cache=Cache.KEYS_TRANSPOSED, positions=Positions.LENGTH),
    # Names of QNN pipelines in GenAI (`past_keys_%d`), with and without a genai_config.json that names them.
    "numbered": replace(OPTIMUM, cache=Cache.NUMBERED),
    # genai_config.json may rename all inputs and outputs (decoder.inputs, decoder.outputs).
    "renamed-genai": replace(
        GENAI,
        positions=Positions.LENGTH,
        names={
            "input_ids": "tokens",
            "attention_mask": "seen",
            "logits": "scores",
            "past_key_values.{}.key": "cache_{}_k",
            "past_key_values.{}.value": "cache_{}_v",
            "present.{}.key": "new_cache_{}_k",
            "present.{}.value": "new_cache_{}_v",
        },
    ),
    "renamed-genai-positions": replace(
        OPTIMUM,
        settings=Settings.GENAI,
        names={"input_ids": "x", "attention_mask": "m", "position_ids": "p", "logits": "y"}
        | {"past_key_values.{}.key": "a{}", "past_key_values.{}.value": "b{}"}
        | {"present.{}.key": "c{}", "present.{}.value": "d{}"},
    ),
    # Exports made by hand: other common names, without a file that lists them.
    "renamed": replace(
        OPTIMUM,
        names={
            "past_key_values.{}.key": "past_key_{}",
            "past_key_values.{}.value": "past_value_{}",
            "present.{}.key": "present_key_{}",
            "present.{}.value": "present_value_{}",
        },
    ),
    # The model builder of ONNX Runtime GenAI.
    "genai": GENAI,
    "genai-growing": replace(GENAI, shares_buffers=False),
    "genai-hugging-face": replace(GENAI, settings=Settings.HUGGING_FACE, open_heads=False),
    "genai-float16": replace(GENAI, cache_type=CacheType.FLOAT16, float16_logits=True),
    "genai-last-token": replace(GENAI, logit_output=LogitOutput.LAST),
    "genai-positions": replace(GENAI, bias_inside=True, positions=Positions.INPUT),
    "genai-window": replace(GENAI, window=24, open_heads=False),
    "genai-window-cache": replace(GENAI, window=24, window_cache=True),
    "genai-int8-cache": replace(GENAI, cache_type=CacheType.INT8, open_heads=False),
    # NPU exports have fixed caches and the lengths as inputs.
    "genai-lengths": replace(GENAI, mask=Mask.LENGTHS),
    "genai-fixed-capacity": replace(GENAI, mask=Mask.LENGTHS, capacity=128, fixed_batch=True, open_heads=False),
    "genai-fixed-capacity-numbered": replace(
        GENAI, mask=Mask.LENGTHS, capacity=512, cache=Cache.NUMBERED, fixed_batch=True, open_heads=False
    ),
    # onnx-community.
    "community": COMMUNITY,
    "community-last-n": replace(COMMUNITY, logit_output=LogitOutput.LAST_N),
    "community-float16": replace(COMMUNITY, cache_type=CacheType.FLOAT16, float16_logits=True),
    "community-external-many": replace(COMMUNITY, weights=Weights.MANY_FILES),
    "community-unfused": replace(OPTIMUM, subfolder="onnx"),
}

_SIDES: Final = {"past": "past_key_values", "present": "present"}
"""Beginnings of the names of caches, of inputs and of outputs."""
_GENAI_STATES: Final = {
    f"{side}_{state}.{{}}": f"{side}.{{}}.{state}" for side in ("past", "present") for state in ("conv", "recurrent")
}

HYBRID_LAYOUTS: Final[Mapping[str, Layout]] = {
    # LFM2 and LFM2.5 of onnx-community and LiquidAI, which are made by a copy of GenAI's model builder.
    "community-lfm2": replace(COMMUNITY, states=States.CONVOLUTION),
    "community-lfm2-float16": replace(
        COMMUNITY, states=States.CONVOLUTION, cache_type=CacheType.FLOAT16, float16_logits=True
    ),
    # Qwen3.5 of onnx-community.
    "community-qwen3.5": replace(
        OPTIMUM,
        states=States.RECURRENT,
        positions=Positions.THREE,
        logit_output=LogitOutput.LAST_N,
        subfolder="onnx",
    ),
    "community-qwen3.5-float16": replace(
        OPTIMUM, states=States.RECURRENT, cache_type=CacheType.FLOAT16, float16_logits=True, subfolder="onnx"
    ),
    "community-qwen3.5-fused": replace(COMMUNITY, states=States.RECURRENT, logit_output=LogitOutput.LAST_N),
    # Qwen3.5 with its image encoder, and LFM2-VL: the embedding is a graph of its own.
    "community-qwen3.5-parts": replace(
        OPTIMUM,
        states=States.RECURRENT,
        positions=Positions.THREE,
        embedding=Embedding.APART,
        weights=Weights.ONE_FILE,
        subfolder="onnx",
    ),
    "community-lfm2-parts": replace(COMMUNITY, states=States.CONVOLUTION, embedding=Embedding.APART),
    # Granite 4 and other Mamba hybrids for transformers.js.
    "community-mamba": replace(
        COMMUNITY,
        states=States.RECURRENT,
        names={f"{side}_recurrent.{{}}": f"{side}_ssm.{{}}" for side in ("past", "present")},
    ),
    # Graphs for the first pass that take no states.
    "optimum-lfm2-merged": replace(OPTIMUM, states=States.CONVOLUTION, decoders=Decoders.MERGED),
    "optimum-qwen3.5-two-decoders": replace(OPTIMUM, states=States.RECURRENT, decoders=Decoders.TWO),
    "optimum-lfm2-last-token": replace(OPTIMUM, states=States.CONVOLUTION, logit_output=LogitOutput.LAST),
    # The model builder of ONNX Runtime GenAI.
    "genai-lfm2": replace(GENAI, states=States.CONVOLUTION, names=_GENAI_STATES),
    "genai-lfm2-float16": replace(
        GENAI, states=States.CONVOLUTION, names=_GENAI_STATES, cache_type=CacheType.FLOAT16, float16_logits=True
    ),
    "genai-qwen3.5": replace(GENAI, states=States.RECURRENT, names=_GENAI_STATES),
    "genai-qwen3.5-growing": replace(GENAI, states=States.RECURRENT, names=_GENAI_STATES, shares_buffers=False),
    # genai_config.json may rename states too.
    "renamed-genai-states": replace(
        GENAI,
        states=States.RECURRENT,
        names={
            f"{side}_{state}.{{}}": f"{side[:2]}_{state[0]}_{{}}"
            for side in ("past", "present")
            for state in ("conv", "recurrent")
        },
    ),
}
"""Layouts whose first layer keeps a state of fixed size in place of keys and values."""

LIMITED: Final[Mapping[str, Layout]] = {
    # Caches of a fixed size that evict slots outside the window, after which they cannot be rewound.
    "window-cache-fixed": replace(GENAI, window=24, window_cache=True, window_slots=24, shares_buffers=False),
    "window-cache-slack": replace(GENAI, window=24, window_cache=True, window_slots=64),
}
"""Layouts whose context is limited to the slots of their smallest cache."""


def write_layout(folder: Path, layout: Layout, *, seed: int = 0) -> Path:
    """Write the model in a layout, with its settings and tokenizer.

    Args:
        folder: folder of the settings, made if necessary. The graph is in it or in the layout's subfolder.
        layout: the layout.
        seed: seed of the random weights.

    Returns:
        `folder`.
    """
    graph_folder = folder / layout.subfolder
    graph_folder.mkdir(parents=True, exist_ok=True)
    writer = LayoutWriter(layout, layout_weights(layout, seed))
    *first, last = (graph_folder / name for name in _GRAPHS[layout.decoders])
    for path in first:
        _save(writer.model(cached=False), path, layout)
    if layout.embedding is Embedding.APART:
        last = last.with_name("decoder_model_merged_q4.onnx")
        _save(writer.embedding(), last.with_name("embed_tokens_q4.onnx"), layout)
        # The image encoder is not looked at.
        last.with_name("vision_encoder_q4.onnx").write_bytes(b"")
    _save(writer.model(merged=layout.decoders is Decoders.MERGED), last, layout)
    if layout.settings is Settings.HUGGING_FACE:
        write_json(folder / "config.json", tiny_config("llama", **layout.overrides))
        write_json(folder / "generation_config.json", {"eos_token_id": 0, "do_sample": False})
    elif layout.settings is Settings.GENAI:
        write_json(folder / "genai_config.json", genai_config(layout))
    tiny_tokenizer(VOCABULARY).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL_TOKENS[0]}
    write_json(folder / "tokenizer_config.json", settings | {"chat_template": CHAT_TEMPLATE})
    return folder


def quantize_products(folder: Path, *, zero_points: bool = False) -> Path:
    """Write the products of a model's graph as the 4-bit quantizers of GenAI's builder and of onnx-community do.

    They become `MatMulNBits` over blocks of 32 in float32, with weights beside the graph.

    Args:
        folder: what `write_layout` wrote, with one graph.
        zero_points: whether blocks have zero points, as in onnx-community's files.

    Returns:
        `folder`.
    """
    (path,) = folder.rglob("*.onnx")
    model = onnx.load(path)
    constants = {each.name: each for each in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type != "MatMul" or node.input[1] not in constants:
            continue
        name = node.input[1]
        weights = np.ascontiguousarray(numpy_helper.to_array(constants[name]).T)
        rounded = nearest_rows(weights, replace(_FOUR_BITS, zero_points=zero_points))
        parts = {f"{name}_Q4": rounded.packed, f"{name}_scales": rounded.scales}
        if rounded.zero_points is not None:
            parts[f"{name}_zero_points"] = rounded.zero_points
        model.graph.initializer.extend(numpy_helper.from_array(each, part) for part, each in parts.items())
        node.CopyFrom(
            helper.make_node(
                "MatMulNBits",
                [node.input[0], *parts],
                list(node.output),
                name=node.name,
                domain=MICROSOFT,
                K=weights.shape[1],
                N=weights.shape[0],
                bits=_FOUR_BITS.bits,
                block_size=_FOUR_BITS.block,
            )
        )
    used = {name for node in model.graph.node for name in node.input}
    kept = [each for each in model.graph.initializer if each.name in used]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    if all(each.domain != MICROSOFT for each in model.opset_import):
        model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
    for stale in path.parent.glob(f"{path.name}?*"):
        stale.unlink()
    onnx.save(model, path, save_as_external_data=True, location=f"{path.name}_data", size_threshold=1024)
    return folder


def genai_config(layout: Layout) -> dict[str, Any]:
    """genai_config.json as the model builder writes it, with the inputs and outputs of the layout."""
    names = {"input_ids": "input_ids", "attention_mask": "attention_mask", "position_ids": "position_ids"}
    if layout.positions is Positions.LENGTH:
        del names["position_ids"]
    if layout.mask is Mask.LENGTHS:
        del names["attention_mask"]
        names |= {"past_sequence_length": "past_seq_len", "total_sequence_length": "total_seq_len"}
    caches = {
        Cache.STACKED: {"past": "past_{}", "present": "present_{}"},
        Cache.NUMBERED: {f"{side}_{half}": f"{side}_{half}s_{{}}" for side in _SIDES for half in ("key", "value")},
    }.get(layout.cache) or {
        f"{side}_{half}": f"{stem}.{{}}.{half}" for side, stem in _SIDES.items() for half in ("key", "value")
    }

    def pattern(name: str) -> str:
        return layout.names.get(name, name).replace("{}", "%d")

    inputs = {key: pattern(name) for key, name in names.items()}
    outputs = {"logits": pattern("logits")}
    for key, name in caches.items():
        (inputs if key.startswith("past") else outputs)[f"{key}_names"] = pattern(name)
    for state in state_shapes(layout):
        kind = state.removesuffix(".{}")
        inputs[f"past_{kind}_names"] = pattern(f"past_{state}")
        outputs[f"present_{kind}_names"] = pattern(f"present_{state}")
    decoder: dict[str, Any] = {
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
        "filename": _GRAPHS[layout.decoders][-1],
        "head_size": HEAD_DIM,
        "hidden_size": HEADS * HEAD_DIM,
        "inputs": inputs,
        "outputs": outputs,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": layout.kv_heads,
    }
    if layout.window_cache and layout.window is not None:
        windows = {"window_size": layout.window, "slide_key_value_cache": False, "slide_inputs": False}
        decoder["sliding_window"] = windows | {
            "layers": [1],
            "cache_slack": (layout.window_slots or layout.window) - layout.window,
        }
    model = {"bos_token_id": 0, "context_length": CONTEXT, "decoder": decoder, "eos_token_id": 0, "pad_token_id": 0}
    search = {"do_sample": False, "max_length": CONTEXT, "past_present_share_buffer": layout.shares_buffers}
    return {
        "model": model | {"type": "llama", "vocab_size": VOCABULARY},
        "search": search | {"temperature": 1.0, "top_k": 50, "top_p": 1.0},
    }


def _save(model: onnx.ModelProto, path: Path, layout: Layout) -> None:
    if layout.weights is not Weights.INSIDE:
        # Small constants stay inside, as exporters leave them.
        large = [tensor for tensor in model.graph.initializer if len(tensor.raw_data) >= 1024]
        suffix = ".data" if layout.attention is Attention.FUSED and not layout.subfolder else "_data"
        for index, tensor in enumerate(large):
            part = f"_{index % 3}" if layout.weights is Weights.MANY_FILES and index % 3 else ""
            set_external_data(tensor, f"{path.name}{suffix}{part}")
    onnx.save(model, path)
