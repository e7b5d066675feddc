"""`edge-run devices`: lists what a model can run on."""

from __future__ import annotations

from rich.table import Table

from ...runtime.devices.processor import default_threads, usable_cores
from ...runtime.devices.providers import available_devices, choose_device
from ..terminal.output import SafeConsole, write_json
from .shared_options import AsJson, Debug


def devices(
    as_json: AsJson = False,
    debug: Debug = False,  # noqa: ARG001  main reads it
) -> None:
    """List the devices that --device accepts on this machine, and how many threads compute on the CPU.

    Example: edge-run devices
    """
    default = choose_device("auto")
    found = available_devices()
    if as_json:
        described = [{"name": str(d), "kind": d.kind.value, "vendor": d.vendor, "default": d == default} for d in found]
        write_json({"devices": described, "threads": {"default": default_threads(), "processors": usable_cores()}})
        return
    table = Table("device", "kind", "vendor", "", box=None, pad_edge=False)
    for device in found:
        table.add_row(str(device), device.kind.value, device.vendor or "-", "default" if device == default else "")
    console = SafeConsole()
    console.print(table)
    threads, processors = default_threads(), usable_cores()
    console.print(f"threads on the CPU: {threads} by default, at most {processors}", highlight=False)
