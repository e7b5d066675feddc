"""Where the measured t(m) of a model on this machine is kept; see `measurements`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ...models.bundle import Bundle
from ..graph.bound_session import BoundSession
from ..graph.session import SessionConfig
from ..speculation.pass_cost import PassCost
from .pass_timing import measure_pass_cost
from .stored_measurements import keep_measurement, measurement_file, read_measurement

_FORM: Final = 1


def load_or_calibrate(bundle: Bundle, config: SessionConfig, bound: BoundSession) -> PassCost:
    """The t(m) kept for this model, device and machine; else measured now over `bound`'s arena, and kept.

    Raises:
        ContextError: it has to be measured and the arena is full.
        EdgeError: ONNX Runtime failed.
    """
    cost = cached(bundle, config)
    if cost is None:
        cost = measure_pass_cost(bound)
        save(cost, bundle, config)
    return cost


def cached(bundle: Bundle, config: SessionConfig) -> PassCost | None:
    """The t(m) kept for this model, device and machine, or None."""
    try:
        return PassCost.from_json(read_measurement(cost_file(bundle, config)))
    except (OSError, ValueError):
        return None


def save(cost: PassCost, bundle: Bundle, config: SessionConfig) -> Path | None:
    """Keep `cost` as it is now, refined by the passes since. Returns the file, or None where the disk refuses it."""
    return keep_measurement(cost_file(bundle, config), cost.to_json(), bundle, config)


def cost_file(bundle: Bundle, config: SessionConfig) -> Path:
    """Where the t(m) of this model on this device is kept; it may not exist.

    Raises:
        OSError: the model's file cannot be asked for its size.
    """
    return measurement_file("step-cost", _FORM, bundle, config)
