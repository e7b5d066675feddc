"""Writes a float32 checkpoint of a bundle's dequantized weights, to export them in another format.

Example: python benchmarks/bundle_checkpoint.py models/bundled/shell-helper /tmp/shell-helper

It is meant for models whose own checkpoint is not available. A new export of the checkpoint is compared with the bundle
and not with the model as it was trained, since rounding cannot be undone. Families llama and qwen2 are supported.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from safetensors.numpy import save_file

from edgerun.export.checkpoint.config import DecoderConfig, read_config
from edgerun.export.checkpoint.layout import final_norm, fused_linears, layer_layout
from edgerun.export.checkpoint.source import QuantizedRows
from edgerun.export.quantization.codes import dequantized
from edgerun.models.bundle import TOKENIZER_AND_CONFIG_FILES, Bundle, open_bundle

Tensors = dict[str, npt.NDArray[np.float32]]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("checkpoint", type=Path, help="the folder to write")
    options = parser.parse_args()
    write_checkpoint(open_bundle(options.bundle), options.checkpoint)


def write_checkpoint(bundle: Bundle, folder: Path) -> Path:
    """Write model.safetensors and the bundle's tokenizer and config files into a folder; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(read_weights(bundle, read_config(bundle.folder)), folder / "model.safetensors")
    for name in TOKENIZER_AND_CONFIG_FILES:
        if (source := bundle.file(name)) is not None:
            shutil.copyfile(source, folder / name)
    return folder


def read_weights(bundle: Bundle, config: DecoderConfig) -> Tensors:
    """Tensors by their Hugging Face names.

    Raises:
        ValueError: the bundle has no manifest, another family, or weights with zero points or offsets.
    """
    if bundle.manifest is None or bundle.manifest.architecture.family not in ("llama", "qwen2"):
        raise ValueError(f"{bundle.folder} is not a bundle of family llama or qwen2")
    if any(form.offsets or form.zero_points for form in bundle.manifest.weights.values()):
        raise ValueError(f"{bundle.folder} has weights with zero points or offsets")
    graph = onnx.load(bundle.graph).graph
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    tensors: Tensors = {}
    for linear in fused_linears(config):
        if linear.name == "head" and config.tied_head:
            continue
        form = bundle.manifest.weights[linear.name]
        if form.bits == 32:
            matrix = stored[f"{linear.name}.weight"]
            matrix = matrix if matrix.shape == linear.shape else matrix.T
        else:
            scales = stored[f"{linear.name}.scales"].reshape(linear.shape[0], -1)
            matrix = dequantized(QuantizedRows(stored[f"{linear.name}.codes"], scales), linear.columns, form)
        parts = np.split(matrix, np.cumsum(linear.rows)[:-1])
        tensors |= dict(zip(linear.weights, map(np.ascontiguousarray, parts), strict=True))
        if linear.biased:
            parts = np.split(stored[f"{linear.name}.bias"], np.cumsum(linear.rows)[:-1])
            tensors |= dict(zip(linear.biases, map(np.ascontiguousarray, parts), strict=True))
    for index in range(config.layers):
        layer = layer_layout(config, index)
        before = "layers.0.input_norm" if index == 0 else f"layers.{index - 1}.next_norm"
        for norm, name in ((layer.before_attention, before), (layer.before_mlp, f"layers.{index}.mlp_norm")):
            if norm is not None:
                tensors[norm.weight] = stored[f"{name}.weight"]
    tensors[final_norm(config).weight] = stored[f"layers.{config.layers - 1}.next_norm.weight"]
    return tensors


if __name__ == "__main__":
    main()
