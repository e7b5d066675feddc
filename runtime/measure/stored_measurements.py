"""Where what was measured of a model on this machine is kept from one run to the next: small JSON files in the cache.

Everything that a measurement depends on is in its file's name: the model, the device and its threads, ONNX Runtime's
version and the machine. What is there but cannot be used is measured again without a word, and written over.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ...models.atomic import write_atomically
from ...models.bundle import Bundle
from ...models.cache import cache_folder
from ...models.json_file import parse_json_object
from ..devices.processor import machine
from ..graph.session import RUNTIME_VERSION, SessionConfig

_MOST_FILES: Final = 200
"""Of a kind; the ones that were not written for longest go first. Each is a kilobyte or two."""


def measurement_file(kind: str, form: int, bundle: Bundle, config: SessionConfig) -> Path:
    """Where the measurement of this kind, written in this form, is kept for a model on a device; it may not exist.

    Raises:
        OSError: the model's file cannot be asked for its size.
    """
    parts = (form, _model_key(bundle), config.device.provider, config.threads, RUNTIME_VERSION, machine())
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()
    return cache_folder() / kind / f"{digest[:32]}.json"


def read_measurement(file: Path) -> dict[str, Any]:
    """What is kept there.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged.
    """
    return parse_json_object(file.read_bytes())


def keep_measurement(file: Path, data: Mapping[str, Any], bundle: Bundle, config: SessionConfig) -> Path | None:
    """Write `data`, and what it is of for people to read. Returns the file, or None where the disk refuses it."""
    about = {"model": bundle.folder.name, "device": str(config.device), "threads": config.threads}
    try:
        write_atomically(file, json.dumps({**about, **data}, indent=1).encode())
        for old in sorted(file.parent.glob("*.json"), key=lambda each: each.stat().st_mtime)[:-_MOST_FILES]:
            old.unlink(missing_ok=True)
    except OSError:
        return None
    return file


def _model_key(bundle: Bundle) -> str:
    """What stands for the model; without a manifest's digests, a file of gigabytes is not read to know its speed."""
    if bundle.manifest is not None:
        return bundle.fingerprint
    status = bundle.graph.stat()
    return f"{bundle.graph.resolve()}\0{status.st_size}\0{status.st_mtime_ns}"
