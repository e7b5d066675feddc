"""Bundles of random hybrids, and graphs whose states are known after the last token of a pass alone."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from .tiny_models import write_bundle

HYBRIDS = ("lfm2", "end states", "qwen3_5_text", "granitemoehybrid")
"""Families of models with layers without attention; and LFM2 with some states known after a pass alone."""


def write_hybrid(folder: Path, kind: str, context: int) -> Path:
    """Write the bundle of a random hybrid, one of `HYBRIDS`; return its folder."""
    if kind != "end states":
        return write_bundle(folder, kind, max_position_embeddings=context)
    exported = write_bundle(folder, "lfm2", max_position_embeddings=context)
    return with_end_states(exported, folder / "edited", (0, 3)).parent


def with_end_states(bundle: Path, folder: Path, layers: Iterable[int]) -> Path:
    """Copy a bundle with convolutions, and let some of its layers return the states after the last token alone.

    The inputs and outputs of these are called `past_recurrent` and `present_recurrent`.

    Args:
        bundle: a bundle whose graph returns `present_conv.N` followed by the inputs at all tokens.
        folder: where to write the copy.
        layers: the layers to change.

    Returns:
        The graph of the copy.
    """
    shutil.copytree(bundle, folder)
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    graph = model.graph
    for layer in layers:
        past = next(value for value in graph.input if value.name == f"past_conv.{layer}")
        present = next(value for value in graph.output if value.name == f"present_conv.{layer}")
        tensor = past.type.tensor_type
        sizes = [dimension.dim_value for dimension in tensor.shape.dim]
        graph.output.remove(present)
        graph.output.append(helper.make_tensor_value_info(f"present_recurrent.{layer}", tensor.elem_type, sizes))
        for node in graph.node:
            node.input[:] = [f"past_recurrent.{layer}" if name == past.name else name for name in node.input]
        past.name = f"past_recurrent.{layer}"
        bounds = {"first": -sizes[1], "last": np.iinfo(np.int64).max, "axis": 1}
        names = {bound: f"end_state.{layer}.{bound}" for bound in bounds}
        for bound, value in bounds.items():
            graph.initializer.append(numpy_helper.from_array(np.array([value], np.int64), names[bound]))
        graph.node.append(helper.make_node("Slice", [present.name, *names.values()], [f"present_recurrent.{layer}"]))
    serialized = model.SerializeToString()
    (folder / "model.onnx").write_bytes(serialized)
    manifest = json.loads((folder / "edge.json").read_text(encoding="utf-8"))
    digest = {"bytes": len(serialized), "sha256": hashlib.sha256(serialized).hexdigest()}
    manifest["files"]["model.onnx"] = digest
    (folder / "edge.json").write_text(json.dumps(manifest), encoding="utf-8")
    return folder / "model.onnx"
