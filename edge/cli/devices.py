"""`edge-run devices`: what a model can be run on here."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ...runtime.devices.providers import available_devices, choose_device


def devices(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """List the devices that --device accepts on this machine.

    Example: edge-run devices
    """
    default = choose_device("auto")
    found = available_devices()
    if as_json:
        rows = [{"name": str(d), "kind": d.kind.value, "vendor": d.vendor, "default": d == default} for d in found]
        print(json.dumps({"devices": rows}))  # noqa: T201
        return
    table = Table("device", "kind", "vendor", "", box=None, pad_edge=False)
    for device in found:
        table.add_row(str(device), device.kind.value, device.vendor or "-", "default" if device == default else "")
    Console().print(table)
