"""`edge-run devices` and `edge-run doctor`: what models can run on, and what makes them faster."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Final

import psutil
import tokenizers
import typer
from rich.table import Table

from ...errors import EdgeError
from ...models.bundle import Bundle, open_bundle, unchecked_bundle
from ...models.find import find_model
from ...models.graph_files import find_graph
from ...models.manifest import DeviceKind
from ...models.user_folders import cache_folder
from ...models.user_text import format_bytes
from ...runtime.devices.chip import chip_features
from ...runtime.devices.device_check import DEVICE_CHECKS, DeviceCheck, device_check_key
from ...runtime.devices.hardware import seen_hardware, unused_hardware
from ...runtime.devices.packages import package_of, registered_plugins
from ...runtime.devices.processor import (
    Power,
    available_memory,
    choose_power,
    default_threads,
    saver_threads,
    usable_cores,
)
from ...runtime.devices.providers import CPU_PROVIDER, Device, available_devices, cpu_device, unusable_providers
from ...runtime.graph.device_loading import on_cpu_text
from ...runtime.graph.encoder_graph import encoder_output
from ...runtime.graph.ort import RUNTIME_VERSION
from ...runtime.graph.packed_files import lacks_prepacked
from ...runtime.graph.session import SessionConfig
from ...runtime.measure.device_choice import (
    FASTEST_DEVICES,
    THREAD_CHOICES,
    FastestDevice,
    chosen_threads,
    fastest_device_key,
    measured_device,
    thread_candidates,
    thread_choice_key,
)
from ...runtime.measure.measurement_store import describe_machine, model_key
from ...runtime.measure.pass_timing import PASS_COSTS
from ..service.model_files import describe_files
from ..terminal.output import SafeConsole, write_json, write_line
from .models import describe as described_models
from .shared_options import AsJson, takes_options

_SIMULATED = "simulated, for tests"
_INSTRUCTIONS: Final = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "amx_int8", "asimddp", "dotprod", "i8mm", "sve")
"""Instruction sets that kernels for matrices use, by their names on Linux and macOS; Windows has numbers for them."""
_MEMORY_SHARE: Final = 0.8
"""Share of the memory that a model should take at most."""


@takes_options()
def devices(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Also show what was measured for this model.", show_default="none"),
    ] = None,
    as_json: AsJson = False,
    **_given: Any,
) -> None:
    """List the devices that --device accepts on this machine, and what it takes to use those that are missing.

    With MODEL, also show how fast it was on each of them, and whether they compute what the CPU computes; edge-run tune
    and the first load on a device measure that.

    Examples: edge-run devices; edge-run devices my-model
    """
    cpu = cpu_device()
    found = available_devices()
    bundle = None if model is None else open_bundle(find_model(model, cpu.kind), kind=cpu.kind)
    default = cpu if bundle is None else measured_device(bundle)
    choice = None if bundle is None else FASTEST_DEVICES.load(fastest_device_key(bundle))
    checks = {} if bundle is None else _checks(bundle, found)
    if as_json:
        facts: dict[str, Any] = {
            "devices": [_facts(device, default) for device in found],
            "unusable": [{"package": name, "reason": reason} for name, reason in _unusable(found)],
            "unused_hardware": [
                {"kind": each.kind.value, "vendor": each.vendor, "where": each.where, "install": list(each.installs)}
                for each in unused_hardware(seen_hardware(), found)
            ],
            "threads": {"default": default_threads(), "saver": saver_threads(), "processors": usable_cores()},
            "power": choose_power(Power.AUTO).value,
        }
        if bundle is not None:
            facts["model"] = {
                "model": str(bundle.folder),
                "choice": None if choice is None else asdict(choice),
                "checks": {name: asdict(check) for name, check in checks.items()},
            }
        write_json(facts)
        return
    console = SafeConsole()
    console.print(_table(found, default))
    lines = [
        *missing_lines(found),
        f"threads on the CPU: {default_threads()} by default, {saver_threads()} with --power saver, at most "
        f"{usable_cores()}",
        f"--power auto: {'saver, on battery' if choose_power(Power.AUTO).saves else 'performance'}",
    ]
    lines += [] if bundle is None else ["", *_model_lines(bundle, choice, checks, default)]
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)


def _facts(device: Device, default: Device) -> dict[str, Any]:
    """A device as plain values."""
    return {
        "name": device.name,
        "kind": device.kind.value,
        "vendor": device.vendor,
        "provider": device.provider,
        "simulated": device.simulated,
        "version": device.plugin_version or RUNTIME_VERSION,
        "default": device == default,
    }


def _table(found: Sequence[Device], default: Device) -> Table:
    table = Table("device", "kind", "vendor", "provider", "version", "", box=None, pad_edge=False)
    for facts in (_facts(device, default) for device in found):
        notes = {"default": facts["default"], _SIMULATED: facts["simulated"]}
        cells = [facts[name] or "-" for name in ("name", "kind", "vendor", "provider", "version")]
        table.add_row(*cells, ", ".join(note for note, applies in notes.items() if applies))
    return table


def _unusable(found: Sequence[Device]) -> list[tuple[str, str]]:
    """Installed packages that bring no device here, and why."""
    listed = {device.provider for device in found}
    unusable = []
    for plugin in registered_plugins():
        package = package_of(plugin.provider)
        if plugin.error:
            unusable.append((plugin.module, f"it cannot be loaded: {plugin.error}"))
        elif plugin.provider not in listed:
            reason = "it finds no device" if package is None else package.without_device
            unusable.append((plugin.module or plugin.provider, reason))
    for provider in unusable_providers():
        package = package_of(provider)
        unusable.append((provider, "its libraries were not found" if package is None else package.without_device))
    return unusable


def missing_lines(found: Sequence[Device]) -> list[str]:
    """What is installed and not usable, and what the machine has and nothing uses."""
    lines = [f"{name} is installed, but {reason}" for name, reason in _unusable(found)]
    for hardware in unused_hardware(seen_hardware(), found):
        use = " or ".join(hardware.installs)
        advice = f"to use it: {use}" if use else "no package that edge-run knows can use it"
        lines.append(f"{hardware} ({hardware.where}) is not used; {advice}")
    return lines


def _checks(bundle: Bundle, found: Sequence[Device]) -> dict[str, DeviceCheck]:
    """Results of comparing devices with the CPU, by name of the device."""
    others = [device for device in found if device.provider != CPU_PROVIDER]
    loaded = ((device.name, DEVICE_CHECKS.load(device_check_key(bundle, SessionConfig(device)))) for device in others)
    return {name: check for name, check in loaded if check is not None}


def _model_lines(
    bundle: Bundle, choice: FastestDevice | None, checks: dict[str, DeviceCheck], default: Device
) -> list[str]:
    """What is known about a model on the devices, a line for each."""
    lines = [f"{bundle.folder.name}: --device auto means {default.name}"]
    if choice is None:
        lines[0] += ", because nothing was measured yet; edge-run tune measures it"
    seconds = {} if choice is None else choice.seconds
    refused = {} if choice is None else choice.refused
    for name in dict.fromkeys((*seconds, *checks, *refused)):
        parts = [f"{seconds[name] * 1e3:.3g} ms a token"] if name in seconds else []
        parts += _check_parts(checks[name]) if name in checks else []
        parts += [f"not timed: {refused[name]}"] if name in refused else []
        lines.append(f"{name}: {'; '.join(parts)}")
    return lines


def _check_parts(check: DeviceCheck) -> list[str]:
    """How near a device is to the CPU, in words."""
    if not check.plain_correct:
        return ["it computes this model wrongly, and is refused"]
    tree = "" if check.tree is None else f", of a token tree by {check.tree:.1g}"
    parts = [f"logits differ from the CPU's by {check.plain or 0.0:.1g} of their standard deviation{tree}"]
    if not check.tree_correct:
        parts.append("token trees cannot be used there, so drafts are chains")
    if check.on_cpu:
        parts.append(f"on the CPU: {on_cpu_text(check.on_cpu)}")
    return parts


@takes_options()
def doctor(as_json: AsJson = False, **_given: Any) -> None:
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
