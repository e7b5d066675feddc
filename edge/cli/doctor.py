"""`edge-run doctor`: what this machine offers, what is kept on it, and what would make models faster."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import psutil
import tokenizers
from rich.table import Table

from ...errors import EdgeError
from ...models.bundle import Bundle, unchecked_bundle
from ...models.graph_files import find_graph
from ...models.graph_variant import DeviceKind
from ...models.user_folders import cache_folder
from ...models.user_text import format_bytes
from ...runtime.devices.chip import chip_features
from ...runtime.devices.processor import Power, available_memory, choose_power, default_threads
from ...runtime.devices.providers import available_devices, cpu_device
from ...runtime.graph.encoder_graph import encoder_output
from ...runtime.graph.packed_files import lacks_prepacked
from ...runtime.graph.session import SessionConfig
from ...runtime.measure.device_choice import THREAD_CHOICES, chosen_threads, thread_candidates, thread_choice_key
from ...runtime.measure.measurement_store import describe_machine, model_key
from ...runtime.measure.pass_timing import PASS_COSTS
from ..service.model_files import describe_files
from ..terminal.output import SafeConsole, write_json, write_line
from .devices import missing_lines
from .models import describe as described_models
from .shared_options import AsJson, Debug

_INSTRUCTIONS: Final = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "amx_int8", "asimddp", "dotprod", "i8mm", "sve")
"""Instruction sets that kernels for matrices use, by their names on Linux and macOS; Windows has numbers for them."""
_MEMORY_SHARE: Final = 0.8
"""Share of the memory that a model should take at most."""


def doctor(
    as_json: AsJson = False,
    debug: Debug = False,  # noqa: ARG001  main reads it
) -> None:
    """Show what this machine offers, what edge-run keeps on it, and what would make its models faster.

    Nothing is measured, loaded or downloaded, and nothing leaves the machine.

    Example: edge-run doctor
    """
    found = available_devices()
    features = {word.rpartition(".")[2].removeprefix("FEAT_").lower() for word in chip_features().split()}
    machine = {
        **describe_machine(),
        "tokenizers": tokenizers.__version__,
        "python": platform.python_version(),
        "instruction_sets": [name for name in _INSTRUCTIONS if name in features],
        "default_threads": default_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "free_memory_bytes": available_memory(),
        "devices": [str(device) for device in found],
    }
    facts: dict[str, Any] = {"machine": machine, "kept": _kept(), "advice": [*missing_lines(found), *_advice()]}
    if as_json:
        write_json(facts)
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in machine.items():
        text = ", ".join(value) or "unknown" if isinstance(value, list) else str(value)
        is_size = name.endswith("_bytes")
        table.add_row(name.removesuffix("_bytes").replace("_", " "), format_bytes(int(text)) if is_size else text)
    for what, kept in facts["kept"].items():
        table.add_row(what, f"{kept['number']}, {format_bytes(kept['bytes'])}, in {kept['folder']}")
    SafeConsole().print(table)
    for line in facts["advice"]:
        write_line(f"- {line}")


def _kept() -> dict[str, dict[str, Any]]:
    """How much edge-run keeps on the disk, and where: models, and each folder of the cache; all but conversations."""
    models = described_models()
    sizes = [model["bytes"] for model in models["models"]]
    kept = {"models": {"number": len(sizes), "bytes": sum(sizes), "folder": models["folder"]}}
    for folder in sorted(cache_folder().glob("*/")):
        sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
        kept[folder.name] = {"number": len(sizes), "bytes": sum(sizes), "folder": str(folder)}
    return kept


def _advice() -> Iterator[str]:
    """What about the machine and its models would make these faster, and which ones do not fit."""
    if choose_power(Power.AUTO).saves:
        yield "this machine runs on its battery, so half of the threads compute: --power performance uses all"
    models = [model for model in described_models()["models"] if not model["unfinished"]]
    if len(models) < 2:
        yield "there is no model to chat with: edge-run pull onnx-community/Qwen2.5-0.5B-Instruct"
    names: dict[str, list[str]] = {}
    for model in models:
        try:
            graph, _, folder = find_graph(Path(model["path"]), None, DeviceKind.CPU)
            lines = list(_model_advice(unchecked_bundle(graph, folder)))
        except (EdgeError, OSError) as error:
            lines = [f"cannot be read: {error}"]
        for line in lines:
            names.setdefault(line, []).append(f"{model['id']}:{model['variant']}".rstrip(":"))
    yield from (f"{', '.join(of)}: {line}" for line, of in names.items())


def _model_advice(bundle: Bundle) -> Iterator[str]:
    """What would make a model faster.

    Raises:
        EdgeError: a file of the model is damaged.
        OSError: it cannot be read.
    """
    files, total = describe_files(bundle), psutil.virtual_memory().total
    weights, each, context = files["weight_bytes"], files["cache_bytes_per_token"] or 0, files["context"] or 0
    if weights + context * each > total:
        fitting = max(int((_MEMORY_SHARE * total - weights) / max(each, 1)), 0)
        needed = f"{format_bytes(weights)}, and {format_bytes(context * each)} with a full context of {context} tokens"
        fits = f"--context {fitting} fits, and --kv int8 takes a quarter for each token"
        yield f"it takes {needed}: {fits if fitting else 'this machine has too little memory for it'}"
    if lacks_prepacked(bundle):
        yield "its weights are not packed for this machine yet, so that its first load takes longer"
    if encoder_output(bundle) is not None:
        return
    config = SessionConfig(cpu_device())
    key = model_key(bundle, replace(config, threads=chosen_threads(bundle, config)))
    is_chosen = len(thread_candidates()) == 1 or THREAD_CHOICES.load(thread_choice_key(bundle, config)) is not None
    if not (is_chosen and PASS_COSTS.load(key)):
        yield "edge-run tune MODEL finds the fastest threads, what drafts cost, and whether an int8 graph helps"
