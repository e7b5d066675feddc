"""How a model is run: as fast as possible, or with little processor time (docs/decisions/0045-power.md)."""

from __future__ import annotations

from enum import StrEnum

import psutil

from .processor import default_threads


class Power(StrEnum):
    """What a model's passes are to be: fast, or cheap in processor time and so in energy. The text is the same."""

    AUTO = "auto"
    """`SAVER` if the machine runs on its battery when the model is loaded, else `PERFORMANCE`."""
    PERFORMANCE = "performance"
    """One thread for each performance core. They spin while they wait for the next pass, 60 ms at most."""
    SAVER = "saver"
    """Half as many threads, which sleep between passes."""

    @property
    def saves(self) -> bool:
        """Whether processor time is saved."""
        return self is Power.SAVER


def choose_power(wanted: str) -> Power:
    """The mode to run in, `PERFORMANCE` or `SAVER`.

    Args:
        wanted: the mode that was asked for, or its name.
    """
    power = Power(wanted)
    if power is not Power.AUTO:
        return power
    return Power.SAVER if on_battery() else Power.PERFORMANCE


def on_battery() -> bool:
    """Whether this machine runs on its battery now; False where it has none, or the system does not tell."""
    try:
        battery = psutil.sensors_battery()
    except (AttributeError, OSError, RuntimeError, ValueError):  # a system without such a sensor, or a sandbox
        return False
    return battery is not None and battery.power_plugged is False


def saver_threads() -> int:
    """How many threads compute when processor time is saved."""
    return max(default_threads() // 2, 1)
