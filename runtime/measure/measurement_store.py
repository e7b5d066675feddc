"""Stores measurements as small JSON files in the cache."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeAlias, TypeVar

from ...models.atomic import write_atomically
from ...models.bundle import Bundle
from ...models.file_system import remove, remove_oldest
from ...models.json_file import parse_json_object, record_from_json
from ...models.regular_file import MAX_JSON_BYTES, read_regular
from ...models.user_folders import cache_folder, make_private
from ...version import __version__
from ..devices.chip import chip_name, running_architecture
from ..devices.processor import default_threads, machine
from ..devices.providers import device_identity
from ..graph.ort import RUNTIME_VERSION
from ..graph.session import SessionConfig
from ..kv.cache_scales import KVFormat

_MAX_FILES: Final = 200
"""Files of one kind; beyond it the oldest are deleted. Each takes a kilobyte or two."""


MeasurementT = TypeVar("MeasurementT")


MeasurementKey: TypeAlias = tuple[object, ...]
"""Everything that a measurement depends on: what was measured, and under which conditions. Each has a `repr` that
identifies it."""


def model_key(bundle: Bundle, config: SessionConfig, *more: object) -> MeasurementKey:
    """Return the key of a model on a device, with its threads, the version of ONNX Runtime, this machine and `more`."""
    threads = config.threads or default_threads()
    power = (config.power.value,) if config.power.saves else ()
    kv = () if config.kv is KVFormat.FLOAT else (f"kv {config.kv.value}",)
    device = device_identity(config.device)
    return model_id(bundle), *device, threads, RUNTIME_VERSION, machine(), *power, *kv, *more


@dataclass(frozen=True)
class MeasurementStore(Generic[MeasurementT]):
    """Stores one kind of measurement, one file for each key.

    Files that cannot be read or are damaged count as absent, so that the measurement is repeated and replaces them.
    Only their owner can read them, because some tell of conversations.
    """

    kind: str
    """Name of the folder in the cache."""
    format_version: int
    """Version of the JSON format; files of other versions are not read."""
    from_json: type[MeasurementT] | Callable[[dict[str, Any]], MeasurementT]
    """Inverse of `to_json`, which raises ValueError for anything else; or a dataclass with the fields of the file."""
    to_json: Callable[[Any], dict[str, Any]] = asdict

    def file(self, key: MeasurementKey) -> Path:
        """Return the path of the measurement's file, which may not exist."""
        digest = hashlib.sha256("\0".join(map(repr, (self.format_version, *key))).encode()).hexdigest()
        return cache_folder() / self.kind / f"{digest[:32]}.json"

    def load(self, key: MeasurementKey) -> MeasurementT | None:
        """Return the stored measurement, or None."""
        file = self.file(key)
        make_private(file.parent)
        try:
            data = parse_json_object(read_regular(file, MAX_JSON_BYTES))
            return record_from_json(self.from_json, data) if isinstance(self.from_json, type) else self.from_json(data)
        except (OSError, ValueError):
            return None

    def save(self, key: MeasurementKey, measurement: MeasurementT) -> Path | None:
        """Store a measurement. Returns its file, or None if the disk refuses it."""
        file = self.file(key)
        make_private(file.parent)
        try:
            content = json.dumps(self.to_json(measurement), indent=1).encode()
            write_atomically(file, content, private=True)
            remove_oldest(dict.fromkeys(file.parent.glob("*.json"), 1), _MAX_FILES, remove)
        except OSError:
            return None
        return file


def model_id(bundle: Bundle) -> str:
    """Return the manifest's fingerprint; without a manifest, path, size and time, to avoid reading gigabytes."""
    if bundle.manifest is not None:
        return bundle.fingerprint
    path = bundle.graph.resolve()
    try:
        status = path.stat()
    except OSError:
        return str(path)
    return f"{path}\0{status.st_size}\0{status.st_mtime_ns}"


def describe_machine() -> dict[str, str]:
    """Return names and versions that speed depends on."""
    if sys.platform == "win32":
        # The platform module asks a service of Windows that may hang.
        version = sys.getwindowsversion()
        system = f"Windows-{version.major}.{version.minor}.{version.build}"
    else:
        system = platform.platform(terse=True)
    return {
        "processor": chip_name() or running_architecture(),
        "logical cores": str(os.cpu_count() or "unknown"),
        "system": system,
        "onnxruntime": RUNTIME_VERSION,
        "edge-run": __version__,
    }
