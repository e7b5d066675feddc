"""`edge-run devices`: lists what a model can run on."""

from __future__ import annotations

from rich.table import Table

from ...runtime.devices.power import Power, choose_power, saver_threads
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
        threads_facts = {"default": default_threads(), "saver": saver_threads(), "processors": usable_cores()}
        write_json({"devices": described, "threads": threads_facts, "power": choose_power(Power.AUTO).value})
        return
    table = Table("device", "kind", "vendor", "", box=None, pad_edge=False)
    for device in found:
        table.add_row(str(device), device.kind.value, device.vendor or "-", "default" if device == default else "")
    console = SafeConsole()
    console.print(table)
    threads, processors = default_threads(), usable_cores()
    saves = choose_power(Power.AUTO).saves
    console.print(
        f"threads on the CPU: {threads} by default, {saver_threads()} with --power saver, at most {processors}",
        highlight=False,
    )
    console.print(f"--power auto: {'saver, on battery' if saves else 'performance'}", highlight=False)
