"""The adapters and control vectors that a model was loaded with, and the graph that takes them.

The graph runs beside the model's own, over the same weights: all passes of an answer with an adapter or a control
vector, and no others. Which ones an answer has is decided by inputs, which are bound when it begins.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from ...errors import CheckpointError, InputError
from ...models.bundle import Bundle
from ...models.find import path_of_user
from ...models.json_file import is_finite, read_json_object, shown
from ...models.safetensors_file import DOWNLOAD_AGAIN, ITEM_BYTES, SafetensorsTensor, read_safetensors
from ..arguments.load_options import LoadOptions
from ..arguments.search_options import SteeringOptions
from ..graph.bound_graph import NewTokens, Steering
from ..graph.graph_choice import STEERED, FurtherGraph
from ..graph.session import GraphSession
from .control_vectors import read_control_vector
from .steered_model import Array, Linear, SteeredModel, lora_a, lora_b

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
    except (AttributeError, re.error, OverflowError, RecursionError):
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


class SteeredGraph(FurtherGraph):
    """The graph that takes adapters and control vectors.

    Args:
        bundle: the model.
        graph: the file from which its own graph was loaded.
        options: names and files of adapters and control vectors.

    Raises:
        CheckpointError: a file is missing, damaged, or for another model.
        InputError: the model cannot have them, or a name is missing or given twice.
    """

    name = STEERED
    required = True

    def __init__(self, bundle: Bundle, graph: Path, options: LoadOptions) -> None:
        self._graph: Final = graph
        model = SteeredModel(bundle, graph)
        calibration = None if bundle.manifest is None else bundle.manifest.calibration
        if options.lora and calibration is not None and calibration.awq:
            what = f"{bundle.folder} cannot have adapters: AWQ has scaled the inputs of its linears"
            raise InputError(what, "export it without awq")
        self._adapters: Final = _named("--lora", options.lora, lambda path: read_lora(path, model.linears))
        self._controls: Final = _named(
            "--control-vector",
            options.control_vectors,
            lambda path: read_control_vector(path, model.size.layers, model.size.hidden_size),
        )
        adapted = {name for name in model.linears if any(lora_a(name) in each for each in self._adapters.values())}
        self._model: Final = model.serialized(adapted, vectors=bool(self._controls))
        self._defaults: Final = model.defaults

    def takes(self, new: NewTokens, base: int) -> bool:
        """Whether it runs a pass of an answer without an adapter or a control vector: none."""
        del new, base
        return False

    def load(self, base: GraphSession) -> GraphSession:
        """Load the graph.

        Raises:
            EdgeError: it cannot be loaded.
        """
        return base.beside(self._graph, self._model)

    def steering(self, options: SteeringOptions) -> Steering | None:
        """The adapter and the control vector of an answer; None for the model itself.

        Raises:
            InputError: the model was not loaded with them.
        """
        adapter, control, strength = options.adapter, options.control, options.control_strength
        if adapter is None and control is None:
            return None
        vectors = _find("control", control, self._controls)
        scaled = {name: np.float32(strength) * vector for name, vector in vectors.items()}
        inputs = {**self._defaults, **_find("adapter", adapter, self._adapters), **scaled}
        return Steering(adapter, control, strength, inputs)


def _named(
    option: str, given: Sequence[str], read: Callable[[Path], Mapping[str, Array]]
) -> dict[str, Mapping[str, Array]]:
    """What `read` makes of the files of an option, by their names."""
    found: dict[str, Mapping[str, Array]] = {}
    for each in given:
        name, _, path = each.partition("=")
        if not name or not path or name in found:
            raise InputError(f"{option} is {each!r:.200}", "give NAME=PATH, every name once")
        found[name] = read(path_of_user(path, f"give {option} NAME=PATH"))
    return found


def _find(option: str, name: str | None, known: Mapping[str, Mapping[str, Array]]) -> Mapping[str, Array]:
    if name is not None and name not in known:
        raise InputError(f"{option} is {name!r:.100}", f"the model was loaded with: {', '.join(known) or 'none'}")
    return {} if name is None else known[name]
