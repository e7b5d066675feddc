"""Where the measured t(m) of a model on this machine is kept from one run to the next.

Everything that t(m) depends on is in the file's name: the model, the device and its threads, ONNX Runtime's version and
the processor. What is there but cannot be used is measured again without a word, and written over.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Final

from ..models.atomic import write_atomically
from ..models.bundle import Bundle
from ..models.cache import cache_folder
from ..models.json_file import parse_json_object
from .calibration import calibrate
from .processor import machine
from .session import RUNTIME_VERSION, BoundSession, SessionConfig
from .step_cost import StepCost

_FORMAT: Final = 1
_MOST_FILES: Final = 200
"""The ones that were not written for longest go first; each is a kilobyte or two."""


def load_or_calibrate(bundle: Bundle, config: SessionConfig, bound: BoundSession) -> StepCost:
    """The t(m) kept for this model, device and machine; else measured now over `bound`'s arena, and kept.

    Raises:
        ContextError: it has to be measured and the arena is full.
        EdgeError: ONNX Runtime failed.
    """
    cost = cached(bundle, config)
    if cost is None:
        cost = calibrate(bound)
        save(cost, bundle, config)
    return cost


def cached(bundle: Bundle, config: SessionConfig) -> StepCost | None:
    """The t(m) kept for this model, device and machine, or None."""
    try:
        return StepCost.from_json(parse_json_object(cost_file(bundle, config).read_bytes()))
    except (OSError, ValueError):
        return None


def save(cost: StepCost, bundle: Bundle, config: SessionConfig) -> Path | None:
    """Keep `cost` as it is now, refined by the passes since. Returns the file, or None where the disk refuses it."""
    path = cost_file(bundle, config)
    about = {"model": bundle.folder.name, "device": str(config.device), "threads": config.threads}
    try:
        write_atomically(path, json.dumps({**about, **cost.to_json()}, indent=1).encode())
        _make_room(path.parent)
    except OSError:
        return None
    return path


def cost_file(bundle: Bundle, config: SessionConfig) -> Path:
    """Where the t(m) of this model on this device is kept; it may not exist.

    Raises:
        OSError: the model's file cannot be asked for its size.
    """
    parts = (_FORMAT, _model_key(bundle), config.device.provider, config.threads, RUNTIME_VERSION, machine())
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()
    return cache_folder() / "step-cost" / f"{digest[:32]}.json"


def _model_key(bundle: Bundle) -> str:
    """What stands for the model; without a manifest's digests, a file of gigabytes is not read to know its speed."""
    if bundle.manifest is not None:
        return bundle.fingerprint
    status = bundle.graph.stat()
    return f"{bundle.graph.resolve()}\0{status.st_size}\0{status.st_mtime_ns}"


def _make_room(folder: Path) -> None:
    files = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime)
    for file in files[:-_MOST_FILES]:
        file.unlink(missing_ok=True)
