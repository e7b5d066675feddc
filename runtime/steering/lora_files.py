"""Reads LoRA adapters of the PEFT library, and fits them to the fused linears of a graph."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from ...errors import CheckpointError
from ...models.json_file import is_finite, read_json_object, shown
from ...models.safetensors_file import DOWNLOAD_AGAIN, ITEM_BYTES, SafetensorsTensor, read_safetensors
from .steered_model import Array, Linear, lora_a, lora_b

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
_MATRIX: Final = re.compile(r"\.lora_[AB]\.weight$")
_MODULE: Final = re.compile(r".*\blayers\.(\d+)\.(.+)")
_WHOLE: Final = -1
"""In place of the number of a part, the whole linear."""
_ATTENTION: Final = {"q_proj": ("qkv", 0), "k_proj": ("qkv", 1), "v_proj": ("qkv", 2), "qkv_proj": ("qkv", _WHOLE)}
_FEED_FORWARD: Final = {"gate_proj": ("gate_up", 0), "up_proj": ("gate_up", 1), "down_proj": ("down", _WHOLE)}
_MODULES: Final[Mapping[str, tuple[str, int]]] = {
    **{f"self_attn.{name}": found for name, found in _ATTENTION.items()},
    **dict.fromkeys(("self_attn.o_proj", "self_attn.out_proj"), ("o", _WHOLE)),
    **{f"mlp.{name}": found for name, found in _FEED_FORWARD.items()},
    "mlp.gate_up_proj": ("gate_up", _WHOLE),
    **{f"mlp.shared_expert.{name}": (f"shared_{linear}", part) for name, (linear, part) in _FEED_FORWARD.items()},
    "feed_forward.w1": ("gate_up", 0),
    "feed_forward.w3": ("gate_up", 1),
    "feed_forward.w2": ("down", _WHOLE),
    "shared_mlp.input_linear": ("gate_up", _WHOLE),
    "shared_mlp.output_linear": ("down", _WHOLE),
    "conv.in_proj": ("conv_in", _WHOLE),
    "conv.out_proj": ("conv_out", _WHOLE),
    "linear_attn.in_proj_qkv": ("delta_in", 0),
    "linear_attn.in_proj_z": ("delta_in", 1),
    "linear_attn.in_proj_qkvz": ("delta_in", _WHOLE),
    "linear_attn.out_proj": ("delta_out", _WHOLE),
    "mamba.in_proj": ("mamba_in", _WHOLE),
    "mamba.out_proj": ("mamba_out", _WHOLE),
}
"""The linear of the graph, and the part of it, that computes a module of transformers."""
_NONE: Final = ("", 0)
_UNSUPPORTED: Final = (
    "use_dora",
    "fan_in_fan_out",
    "lora_bias",
    "use_qalora",
    "alora_invocation_tokens",
    "megatron_config",
)
"""Settings under which an adapter is computed in another way."""


def read_lora(folder: Path, linears: Mapping[str, Linear]) -> dict[str, Array]:
    """Read an adapter that PEFT has saved.

    Args:
        folder: the folder with adapter_config.json and adapter_model.safetensors.
        linears: the linears of the graph.

    Returns:
        The inputs of the graph that it sets. Its matrices are those of the checkpoint, x A B scaled by alpha / rank, or
        by alpha / sqrt(rank) with rslora (Hu et al. 2021; Kalajdzievski 2023).

    Raises:
        CheckpointError: a file is missing or damaged, or the adapter is of another kind or for another model.
    """
    config = read_json_object(folder / CONFIG, CheckpointError, "give the folder of a LoRA adapter that PEFT has saved")
    _check_config(folder, config)
    tensors = read_safetensors(folder / WEIGHTS)
    if not tensors:
        raise CheckpointError(f"{folder / WEIGHTS} has no tensors", DOWNLOAD_AGAIN)
    adapters: dict[str, list[tuple[Array, Array, int]]] = defaultdict(list)
    for module in dict.fromkeys(_MATRIX.sub("", name) for name in tensors):
        found = _MODULE.fullmatch(module)
        kind, part = _MODULES.get(found[2], _NONE) if found is not None else _NONE
        name = "" if found is None else f"layers.{found[1]}.{kind}"
        if name not in linears or part >= len(linears[name].widths):
            hint = "adapters may change the linears of attention and of dense feed-forwards: give one for this model"
            raise CheckpointError(f"{folder / WEIGHTS} has {module!r:.200}, and the model has no such linear", hint)
        columns, widths = linears[name]
        start, rows = (0, sum(widths)) if part == _WHOLE else (sum(widths[:part]), widths[part])
        a, b = (_matrix(folder, tensors, f"{module}.lora_{which}.weight") for which in "AB")
        if a.shape[1] != columns or b.shape != (rows, len(a)):
            what = f"{folder / WEIGHTS} has {module!r:.200} with {a.shape[1]} inputs and {len(b)} outputs"
            raise CheckpointError(f"{what}, and the model has {columns} and {rows}", "give an adapter for this model")
        adapters[name].append((a, b * np.float32(_scale(folder, config, module, len(a))), start))
    return _inputs(adapters, linears)


def _check_config(folder: Path, config: Mapping[str, Any]) -> None:
    other = [f"{name} {shown(config[name])}" for name in _UNSUPPORTED if config.get(name)]
    if config.get("peft_type") != "LORA":
        other.insert(0, f"peft_type {shown(config.get('peft_type'))}")
    if config.get("bias", "none") != "none":
        other.append(f"bias {shown(config['bias'])}")
    if other:
        raise CheckpointError(f"{folder / CONFIG} has {other[0]}", "edge-run knows plain LoRA adapters: merge this one")


def _matrix(folder: Path, tensors: Mapping[str, SafetensorsTensor], name: str) -> Array:
    found = tensors.get(name)
    if found is None or found.dtype not in ITEM_BYTES or len(found.shape) != 2 or 0 in found.shape:
        raise CheckpointError(f"{folder / WEIGHTS} has no matrix {name!r:.200}", DOWNLOAD_AGAIN)
    return found.items(name, 0, math.prod(found.shape)).reshape(found.shape)


def _scale(folder: Path, config: Mapping[str, Any], module: str, rank: int) -> float:
    """The factor of a module's adapter; the keys of a pattern are regular expressions for the ends of module names."""
    alpha: Any = config.get("lora_alpha")
    try:
        for key, value in (config.get("alpha_pattern") or {}).items():
            if re.match(rf"(.*\.)?({key})$", module):
                alpha = value
                break
    except (AttributeError, re.error):
        alpha = config["alpha_pattern"]
    if not is_finite(alpha):
        raise CheckpointError(f"{folder / CONFIG} has lora_alpha {shown(alpha)}", "it must be a number")
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _inputs(
    adapters: Mapping[str, Sequence[tuple[Array, Array, int]]], linears: Mapping[str, Linear]
) -> dict[str, Array]:
    """The inputs for the adapters of modules, each with its first output: side by side in A, in blocks of B."""
    shapes: dict[str, tuple[int, int]] = {}
    for name in (name for name in linears if name in adapters):
        (columns, widths), rank = linears[name], sum(len(a) for a, _, _ in adapters[name])
        shapes |= {lora_a(name): (columns, rank), lora_b(name): (rank, sum(widths))}
    # In one buffer, in the order in which a pass reads them, matrices are read in a sixth less time than apart.
    ends = np.cumsum([rows * columns for rows, columns in shapes.values()]).tolist()
    parts = np.split(np.zeros(ends[-1], np.float32), ends[:-1])
    inputs = {name: part.reshape(shape) for part, (name, shape) in zip(parts, shapes.items(), strict=True)}
    for name, modules in adapters.items():
        first = 0
        for a, b, start in modules:
            last = first + len(a)
            inputs[lora_a(name)][:, first:last] = a.T
            inputs[lora_b(name)][first:last, start : start + len(b)] = b.T
            first = last
    return inputs
