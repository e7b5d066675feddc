"""Tiny models that see in the layouts of other exporters, made with the onnx package alone.

The tower gives the mean colours of the four quarters of a tile, times a matrix.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from support.layout_kinds import HEAD_DIM, HEADS, VOCABULARY
from support.layouts import LAYOUTS, Embedding, Layout, Settings, genai_config, write_layout
from support.tiny_models import CHAT_TEMPLATE, tiny_tokenizer, write_json
from support.vision_models import FAMILIES, IMAGE_TOKENS

HIDDEN: Final = HEADS * HEAD_DIM
IMAGE_TOKEN: Final = VOCABULARY - len(IMAGE_TOKENS) + IMAGE_TOKENS.index("<image>")
_PARTS: Final = (
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}"
)
_FLOAT16: Final = TensorProto.FLOAT16


def tower_matrix() -> npt.NDArray[np.float32]:
    """What makes features of colours, float32 `[3, hidden]`."""
    return np.random.default_rng(5).standard_normal((3, HIDDEN)).astype(np.float32)


def write_tower(path: Path, inputs: dict[str, tuple[int, list[Any]]], kind: int = TensorProto.FLOAT) -> None:
    """Write a tower with those inputs, pixels first, by their types and shapes; its features have the type `kind`."""
    nodes = [
        helper.make_node("Reshape", [next(iter(inputs)), "tiles"], ["tiles.flat"]),
        helper.make_node("AveragePool", ["tiles.flat"], ["quarters"], kernel_shape=[16, 16], strides=[16, 16]),
        helper.make_node("Reshape", ["quarters", "channels"], ["colours"]),
        helper.make_node("Transpose", ["colours"], ["colours.last"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["colours.last", "matrix"], ["features"]),
        helper.make_node("Cast", ["features"], ["image_features"], to=kind),
    ]
    constants = {"tiles": np.array([-1, 3, 32, 32]), "channels": np.array([0, 3, -1]), "matrix": tower_matrix()}
    given = [helper.make_tensor_value_info(name, *value) for name, value in inputs.items()]
    output = helper.make_tensor_value_info("image_features", kind, ["tiles", 4, HIDDEN])
    tensors = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "tower", given, [output], tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def write_seeing_layout(folder: Path, base: str = "community", *, half: bool = False) -> Path:
    """Write a model of the family SmolVLM as onnx-community does: decoder, embedding and tower below onnx/."""
    layout: Layout = replace(LAYOUTS[base], embedding=Embedding.APART, settings=Settings.HUGGING_FACE, subfolder="onnx")
    write_layout(folder, layout)
    graphs, kind = folder / "onnx", _FLOAT16 if half else TensorProto.FLOAT
    if half:
        _take_half(graphs / "decoder_model_merged_q4.onnx", "inputs_embeds")
        _give_half(graphs / "embed_tokens_q4.onnx", "inputs_embeds")
    pixels = {"pixel_values": (TensorProto.FLOAT, ["batch", "images", 3, 32, 32])}
    mask = {"pixel_attention_mask": (TensorProto.BOOL, ["batch", "images", 32, 32])}
    write_tower(graphs / "vision_encoder_q4.onnx", pixels | mask, kind)
    config, family = json.loads((folder / "config.json").read_text(encoding="utf-8")), FAMILIES["smolvlm"]
    write_json(folder / "config.json", {"model_type": "smolvlm", "text_config": config, "image_token_id": IMAGE_TOKEN})
    write_json(folder / "preprocessor_config.json", family["images"])
    write_json(folder / "processor_config.json", family["processor"])
    tokenizer = tiny_tokenizer(VOCABULARY - len(IMAGE_TOKENS))
    tokenizer.add_special_tokens(list(IMAGE_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    template = CHAT_TEMPLATE.replace("{{ m['content'] }}", _PARTS)
    write_json(folder / "tokenizer_config.json", {"chat_template": template, "eos_token": "<|endoftext|>"})
    return folder


def write_seeing_genai(folder: Path) -> Path:
    """Write a model of the family SmolVLM as ONNX Runtime GenAI has others: its embedding takes features of images."""
    write_seeing_layout(folder.with_name(f"{folder.name}-js"), "genai")
    graphs = folder.with_name(f"{folder.name}-js") / "onnx"
    folder.mkdir()
    for path in graphs.glob("*data*"):
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "text.onnx").write_bytes((graphs / "decoder_model_merged_q4.onnx").read_bytes())
    write_tower(folder / "vision.onnx", {"pixels": (TensorProto.FLOAT, ["images", 3, 32, 32])})
    _take_features(graphs / "embed_tokens_q4.onnx", folder / "embedding.onnx")
    for name in ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json", "processor_config.json"):
        (folder / name).write_bytes((graphs.parent / name).read_bytes())
    model: dict[str, Any] = genai_config(replace(LAYOUTS["genai"], embedding=Embedding.APART))["model"]
    model |= {"type": "smolvlm", "image_token_id": IMAGE_TOKEN, "vision": {"inputs": {"pixel_values": "pixels"}}}
    model["decoder"]["filename"] = "text.onnx"
    write_json(folder / "genai_config.json", {"model": model})
    return folder


def _take_features(source: Path, target: Path) -> None:
    """Let a graph of embeddings take features in the places of image tokens, which have to be as many."""
    model = onnx.load(source, load_external_data=False)
    (output,) = model.graph.output
    ids, name = model.graph.input[0].name, output.name
    for each in model.graph.node:
        each.output[:] = [f"{name}.text" if one == name else one for one in each.output]
    model.graph.initializer.append(numpy_helper.from_array(np.array(IMAGE_TOKEN, np.int64), "image.token"))
    model.graph.node.extend(
        [
            helper.make_node("Equal", [ids, "image.token"], ["is.image"]),
            helper.make_node("NonZero", ["is.image"], ["places.first"]),
            helper.make_node("Transpose", ["places.first"], ["places"], perm=[1, 0]),
            helper.make_node("ScatterND", [f"{name}.text", "places", "image_features"], [name]),
        ]
    )
    features = helper.make_tensor_value_info("image_features", TensorProto.FLOAT, ["features", HIDDEN])
    model.graph.input.append(features)
    onnx.save(model, target)


def _take_half(path: Path, name: str) -> None:
    """Let a graph take an input as float16."""
    model = onnx.load(path, load_external_data=False)
    for each in model.graph.node:
        each.input[:] = [f"{name}.wide" if one == name else one for one in each.input]
    model.graph.node.insert(0, helper.make_node("Cast", [name], [f"{name}.wide"], to=TensorProto.FLOAT))
    next(each for each in model.graph.input if each.name == name).type.tensor_type.elem_type = _FLOAT16
    onnx.save(model, path)


def _give_half(path: Path, name: str) -> None:
    """Let a graph give an output as float16."""
    model = onnx.load(path, load_external_data=False)
    for each in model.graph.node:
        each.output[:] = [f"{name}.wide" if one == name else one for one in each.output]
    model.graph.node.append(helper.make_node("Cast", [f"{name}.wide"], [name], to=_FLOAT16))
    model.graph.output[0].type.tensor_type.elem_type = _FLOAT16
    onnx.save(model, path)
