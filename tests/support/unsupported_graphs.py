"""Kinds of graphs that edge-run cannot decode with; `write_unsupported` writes one.

They compute next to nothing. What matters is their inputs, outputs, operators and settings, and that ONNX Runtime loads
each of them if it would load a real graph of its kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from support.layout_kinds import CONTEXT, HEAD_DIM, HEADS, LAYERS, VOCABULARY
from support.layouts import GENAI, genai_config
from support.tiny_models import SPECIAL_TOKENS, tiny_config, tiny_tokenizer, write_json

Shape = Sequence[int | str]
_TYPES: Final = {
    "float": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
    "uint8": TensorProto.UINT8,
}
_HEADS_OF_PAST: Final[Shape] = ("batch_size", 2, "past_sequence_length", HEAD_DIM)
_HEADS_OF_PRESENT: Final[Shape] = ("batch_size", 2, "total_sequence_length", HEAD_DIM)
_TEXT: Final[Mapping[str, tuple[str, Shape]]] = {
    "input_ids": ("int64", ("batch_size", "sequence_length")),
    "attention_mask": ("int64", ("batch_size", "total_sequence_length")),
}
_LOGITS: Final[Mapping[str, tuple[str, Shape]]] = {"logits": ("float", ("batch_size", "sequence_length", VOCABULARY))}


@dataclass(frozen=True)
class UnsupportedGraph:
    """A graph, described by its inputs and outputs: name to element type and shape."""

    inputs: Mapping[str, tuple[str, Shape]]
    outputs: Mapping[str, tuple[str, Shape]]
    operator: tuple[str, str] | None = None
    """Domain and name of an operator that ONNX Runtime does not have or cannot run here."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """Attributes of that operator."""
    file: str = "model.onnx"
    beside: Sequence[str] = ()
    """Names of other graphs in the folder."""
    genai: Mapping[str, Any] | None = None
    """Additional settings of the `model` section of genai_config.json; None to write config.json instead."""


def caches(past: str = "past_key_values.{}.{}", kinds: Sequence[str] = ("key", "value")) -> dict[str, Any]:
    """Cache inputs."""
    return {past.format(layer, kind): ("float", _HEADS_OF_PAST) for layer in range(LAYERS) for kind in kinds}


def presents(present: str = "present.{}.{}", kinds: Sequence[str] = ("key", "value")) -> dict[str, Any]:
    """Cache outputs."""
    return {present.format(layer, kind): ("float", _HEADS_OF_PRESENT) for layer in range(LAYERS) for kind in kinds}


def states(pattern: str, shape: Shape) -> dict[str, Any]:
    """Inputs or outputs that hold a state other than a KV cache of open length."""
    return {pattern.format(layer): ("float", shape) for layer in range(LAYERS)}


def _with_scales(values: Mapping[str, tuple[str, Shape]]) -> dict[str, Any]:
    """The caches in 8 bits, and a scale for each of their slots."""
    scales = {f"{name}_scale": ("float", shape[:3]) for name, (_, shape) in values.items()}
    return {name: ("uint8", shape) for name, (_, shape) in values.items()} | scales


def cached(inputs: Mapping[str, tuple[str, Shape]] | None = None, **settings: Any) -> UnsupportedGraph:
    """A decoder with a KV cache that also takes `inputs`: token ids and their mask if there are none."""
    return UnsupportedGraph({**(inputs or _TEXT), **caches()}, {**_LOGITS, **presents()}, **settings)


_EMBEDDED: Final[Mapping[str, tuple[str, Shape]]] = {
    "inputs_embeds": ("float", ("batch_size", "sequence_length", HEADS * HEAD_DIM)),
    "attention_mask": ("int64", ("batch_size", "total_sequence_length")),
}
_PIXELS: Final[tuple[str, Shape]] = ("float", ("batch_size", 3, 224, 224))
_BOTH_KINDS: Final = ("decoder.key", "decoder.value", "encoder.key", "encoder.value")

UNSUPPORTED: Final[Mapping[str, UnsupportedGraph]] = {
    # `optimum-cli export onnx --task text-generation`: processes the whole text again for every token.
    "no-cache": UnsupportedGraph(_TEXT, _LOGITS),
    # optimum-intel and OpenVINO model server: the state is inside, reordered by beam_idx.
    "openvino-stateful": UnsupportedGraph({**_TEXT, "beam_idx": ("int32", ("batch_size",))}, _LOGITS),
    # sentence-transformers and classifiers.
    "encoder": UnsupportedGraph(
        {**_TEXT, "token_type_ids": ("int64", ("batch_size", "sequence_length"))},
        {"last_hidden_state": ("float", ("batch_size", "sequence_length", 64))},
    ),
    # Mamba by Optimum.
    "mamba": UnsupportedGraph(
        {
            "input_ids": _TEXT["input_ids"],
            **states("past_conv_states.{}", ("batch_size", 64, 4)),
            **states("past_ssm_states.{}", ("batch_size", 64, 16)),
        },
        {
            **_LOGITS,
            **states("present_conv_states.{}", ("batch_size", 64, 4)),
            **states("present_ssm_states.{}", ("batch_size", 64, 16)),
        },
    ),
    # `paged_attention` of the GenAI model builder.
    "paged": UnsupportedGraph(
        {
            "input_ids": ("int64", ("num_tokens",)),
            "block_table": ("int32", ("batch_size", "max_num_blocks")),
            "cumulative_sequence_lengths": ("int32", ("batch_size_plus_1",)),
            "past_sequence_lengths": ("int32", ("batch_size",)),
            **dict.fromkeys(caches(), ("float", ("num_blocks", "block_size", 2, HEAD_DIM))),
        },
        {
            "logits": ("float", ("num_tokens", VOCABULARY)),
            **dict.fromkeys(presents(), ("float", ("num_blocks", "block_size", 2, HEAD_DIM))),
        },
    ),
    # vLLM-like exports.
    "paged-slots": UnsupportedGraph(
        {**_TEXT, "slot_mapping": ("int32", ("num_tokens",)), **caches("key_cache_{}", ("",))},
        {**_LOGITS, **presents("new_key_cache_{}", ("",))},
    ),
    # T5, BART, Marian by Optimum and transformers.js: the decoder alone.
    "encoder-decoder": UnsupportedGraph(
        {
            "input_ids": _TEXT["input_ids"],
            "encoder_hidden_states": ("float", ("batch_size", "encoder_sequence_length", 64)),
            "encoder_attention_mask": ("int64", ("batch_size", "encoder_sequence_length")),
            **caches(kinds=_BOTH_KINDS),
        },
        {**_LOGITS, **presents(kinds=_BOTH_KINDS)},
        file="decoder_model_merged.onnx",
        beside=("encoder_model.onnx",),
    ),
    # A with-past decoder of the same: only the names of its caches mention the encoder.
    "encoder-decoder-with-past": UnsupportedGraph(
        {"input_ids": _TEXT["input_ids"], **caches(kinds=_BOTH_KINDS)},
        {**_LOGITS, **presents(kinds=_BOTH_KINDS[:2])},
        file="decoder_with_past_model.onnx",
    ),
    # Language parts of vision models (onnx-community/Qwen2-VL-2B-Instruct, GenAI's phi-3-vision and gemma 3).
    "embeddings-in": cached(_EMBEDDED),
    "embeddings-in-parts": cached(
        _EMBEDDED, file="decoder_model_merged.onnx", beside=("embed_tokens.onnx", "vision_encoder.onnx")
    ),
    "pixels-in": cached({**_TEXT, "pixel_values": _PIXELS}),
    "genai-vision": cached(
        _EMBEDDED,
        genai={"type": "phi3v", "vision": {"filename": "vision.onnx"}, "embedding": {"filename": "embedding.onnx"}},
    ),
    # Whisper by GenAI.
    "audio-in": cached({"audio_features": ("float", ("batch_size", 80, 3000)), "input_ids": _TEXT["input_ids"]}),
    # Heads for GenAI's own speculation (`mtp.onnx`, EAGLE): they continue another model's hidden states.
    "hidden-states-in": cached({**_TEXT, "hidden_states": ("float", ("batch_size", "sequence_length", 64))}),
    # Ryzen AI hybrids (amd/*-onnx-ryzenai-hybrid).
    "custom-operator": cached(operator=("com.ryzenai", "SSMLP"), attributes={"K": 64}),
    "unknown-operator": cached(operator=("", "Frobnicate")),
    # Compiled for one device: QNN, OpenVINO and Vitis AI context binaries.
    **{
        f"compiled-{name}": cached(
            operator=("com.microsoft", "EPContext"),
            attributes={"embed_mode": 0, "ep_cache_context": file, **attributes},
        )
        for name, file, attributes in (
            ("qnn", "model_qnn.bin", {"source": "Qnn", "main_context": 1}),
            ("openvino", "model.blob", {"source": "OpenVINOExecutionProvider"}),
        )
    },
    # Stages of a QNN pipeline: 64 tokens per prefill pass, then 1.
    **{
        f"fixed-window-{width}": UnsupportedGraph(
            {
                "input_ids": ("int32", (1, width)),
                "past_seq_len": ("int32", (1, 1)),
                "total_seq_len": ("int32", (1,)),
                **states("past_keys_{}", (1, 2, 512, HEAD_DIM)),
                **states("past_values_{}", (1, 2, 512, HEAD_DIM)),
            },
            {
                "logits": ("float", (1, width, VOCABULARY)),
                **states("present_keys_{}", (1, 2, 512, HEAD_DIM)),
                **states("present_values_{}", (1, 2, 512, HEAD_DIM)),
            },
        )
        for width in (1, 64)
    },
    "genai-pipeline": UnsupportedGraph(
        _TEXT,
        _LOGITS,
        file="embeddings.onnx",
        beside=("context.onnx", "iterator.onnx", "lm_head.onnx"),
        genai={
            "type": "decoder-pipeline",
            "decoder": {
                "pipeline": [
                    {"embeddings": {"filename": "embeddings.onnx"}},
                    {"context": {"filename": "context.onnx", "run_on_token_gen": False}},
                    {"iterator": {"filename": "iterator.onnx", "run_on_prompt": False}},
                    {"lm_head": {"filename": "lm_head.onnx"}},
                ]
            },
        },
    ),
    # `int8` and `int4` caches per token of the GenAI model builder, CUDA only.
    "scales-per-token": UnsupportedGraph({**_TEXT, **_with_scales(caches())}, {**_LOGITS, **_with_scales(presents())}),
    # Compiled for a batch of several sequences.
    "batch-of-four": cached({"input_ids": ("int64", (4, "sequence_length"))}),
    # Models that are not language models.
    "image-classifier": UnsupportedGraph({"pixel_values": _PIXELS}, {"logits": ("float", ("batch_size", 1000))}),
    "no-logits": UnsupportedGraph({**_TEXT, **caches()}, presents()),
}


def write_unsupported(folder: Path, kind: UnsupportedGraph) -> Path:
    """Write a graph and the files beside it; returns `folder`, which is made if necessary."""
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(_model(kind), folder / kind.file)
    for name in kind.beside:
        onnx.save(_model(UNSUPPORTED["no-cache"]), folder / name)
    if kind.genai is None:
        write_json(folder / "config.json", tiny_config("llama", max_position_embeddings=CONTEXT))
    else:
        settings = genai_config(GENAI)
        settings["model"] |= kind.genai
        write_json(folder / "genai_config.json", settings)
    tiny_tokenizer(VOCABULARY).save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"eos_token": SPECIAL_TOKENS[0]})
    return folder


def _model(kind: UnsupportedGraph) -> onnx.ModelProto:
    """A model whose outputs are zeros of their declared types and shapes, with 1 for open dimensions."""
    inputs, outputs = (
        [helper.make_tensor_value_info(name, _TYPES[dtype], list(shape)) for name, (dtype, shape) in values.items()]
        for values in (kind.inputs, kind.outputs)
    )
    nodes, constants = [], []
    for name, (dtype, shape) in kind.outputs.items():
        zeros = np.zeros(
            [size if isinstance(size, int) else 1 for size in shape], helper.tensor_dtype_to_np_dtype(_TYPES[dtype])
        )
        constants.append(numpy_helper.from_array(zeros, f"{name}/zeros"))
        nodes.append(helper.make_node("Identity", [f"{name}/zeros"], [name], name))
    if kind.operator is not None:
        domain, operator = kind.operator
        first = next(iter(kind.inputs))
        nodes.append(
            helper.make_node(operator, [first], [f"{operator}/out"], operator, domain=domain, **kind.attributes)
        )
        onnx_shape = ["batch_size", "sequence_length"]
        outputs.append(helper.make_tensor_value_info(f"{operator}/out", _TYPES["float"], onnx_shape))
    graph = helper.make_graph(nodes, "unsupported", inputs, outputs, constants)
    opsets = [
        helper.make_opsetid("", 17),
        helper.make_opsetid("com.microsoft", 1),
        helper.make_opsetid("com.ryzenai", 1),
    ]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)
