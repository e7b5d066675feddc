"""LoRA adapters in PEFT's files, checkpoints that they are merged into, and control vectors in llama.cpp's."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

PREFIX: Final = "base_model.model."
ALL: Final = (
    r"layers\.\d+\.(self_attn|mlp|feed_forward|conv|linear_attn|mamba|shared_mlp)\.(?!.*(norm|experts|conv1d)).*"
)
"""The linears of all layers, as a pattern of module names."""
EXCLUDED: Final = ("in_proj_a", "in_proj_b", "conv.conv", "router")
"""Modules that are linears, and take no adapter."""


def write_adapter(
    folder: Path, checkpoint: Path, *, seed: int = 0, rank: int = 3, targets: str = ALL, **settings: Any
) -> Path:
    """Write a random adapter for the modules of a checkpoint whose names match `targets`, and return its folder.

    Every second module has a rank of one more.
    """
    folder.mkdir(parents=True)
    random = np.random.default_rng(seed)
    tensors: dict[str, npt.NDArray[np.float32]] = {}
    for name, value in load_file(checkpoint / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if value.ndim == 2 and re.search(targets, module) and not module.endswith(EXCLUDED):
            (rows, columns), own = value.shape, rank + len(tensors) // 2 % 2  # as with PEFT's rank_pattern
            a, b = random.standard_normal((own, columns)), random.standard_normal((rows, own))
            tensors[f"{PREFIX}{module}.lora_A.weight"] = (a / math.sqrt(columns)).astype(np.float32)
            tensors[f"{PREFIX}{module}.lora_B.weight"] = b.astype(np.float32)
    assert tensors
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2, "target_modules": [], "bias": "none", **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def merged(destination: Path, checkpoint: Path, adapter: Path) -> Path:
    """A copy of a checkpoint whose weights have the adapter added, as PEFT's merge_and_unload does; its folder."""
    shutil.copytree(checkpoint, destination)
    config = json.loads((adapter / "adapter_config.json").read_bytes())
    weights, adapters = (
        load_file(path) for path in (checkpoint / "model.safetensors", adapter / "adapter_model.safetensors")
    )
    for name, a in adapters.items():
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            alpha = config.get("alpha_pattern", {}).get(module.rpartition(".")[2], config["lora_alpha"])
            scale = alpha / (math.sqrt(len(a)) if config.get("use_rslora") else len(a))
            b = adapters[name.replace("lora_A", "lora_B")]
            weights[f"{module}.weight"] += np.float32(scale) * (b @ a)
    save_file(weights, destination / "model.safetensors")
    return destination


def write_control_vector(path: Path, directions: Mapping[int, npt.NDArray[np.float32]]) -> Path:
    """Write a control vector, by layers, as llama.cpp's cvector-generator does."""
    writer = gguf.GGUFWriter(path, "controlvector")
    writer.add_string("controlvector.model_hint", "llama")
    writer.add_uint32("controlvector.layer_count", len(directions))
    for layer, direction in directions.items():
        writer.add_tensor(f"direction.{layer}", direction)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
