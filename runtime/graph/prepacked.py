"""Weights packed for this machine's kernels, kept on disk and memory-mapped.

ONNX Runtime repacks quantized weights at load into private memory. Saved once per host, the packed form is mapped
instead: loading is quicker, and the pages are the page cache's, shared by every process that runs the model. The
packing is specific to the processor and to ONNX Runtime's version, so both are part of the cache's key; a model that
changed has another key too. The cache holds nothing that cannot be made again: whatever goes wrong with it, the model
is loaded as it was exported.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ...errors import BundleError
from ...models.atomic import folder_written_atomically, write_atomically
from ...models.bundle import GRAPH_NAME, Bundle, digest_file, verify_file
from ...models.cache import cache_folder
from ...models.manifest import FileDigest
from ...models.onnx_file.splice import with_tensors_of
from ..devices.processor import processor

_FORMAT: Final = 1
_DIGESTS: Final = "digests.json"
_WORTH_IT_FROM: Final = 64 << 20
"""Smaller models load in a blink as they are."""
_GROWTH: Final = 2.5
"""Packed and original weights together, over the original."""
_MOST_BYTES: Final = 16 << 30
"""What all prepacked models together may take; the ones unused for longest go first."""


def prepacked_graph(bundle: Bundle, runtime_version: str, pack: Callable[[Path, Path], None]) -> Path:
    """The graph to load for `bundle`: its prepacked twin, made now if need be, else its own.

    Args:
        bundle: a checked bundle.
        runtime_version: of ONNX Runtime.
        pack: writes the prepacked twin of a graph (first argument) to a path (second).
    """
    if not is_worth_packing(bundle):
        return bundle.graph
    key = f"{_FORMAT}\0{bundle.fingerprint}\0{runtime_version}\0{processor()}"
    folder = cache_folder() / "prepacked" / hashlib.sha256(key.encode()).hexdigest()[:32]
    try:
        if not folder.is_dir():
            _make(folder, bundle, pack)
        _check(folder)
        os.utime(folder)
    except (OSError, BundleError, ValueError, KeyError, TypeError):
        shutil.rmtree(folder, ignore_errors=True)
        return bundle.graph
    return folder / GRAPH_NAME


def is_worth_packing(bundle: Bundle) -> bool:
    """Whether a model is loaded from its prepacked twin: a bundle that is not small."""
    return bundle.manifest is not None and bundle.weight_bytes >= _WORTH_IT_FROM


def prepacked_draft(draft: Path, target: Path) -> Path:
    """The graph to load for a draft over the target's own weights: its twin over the packed ones, if those are used.

    Args:
        draft: the draft's graph, beside the target's.
        target: what `prepacked_graph` gave for the target.
    """
    if target.parent == draft.parent:
        return draft
    try:
        model = with_tensors_of(draft, target)
        twin = target.with_name(f"draft-{hashlib.sha256(model).hexdigest()[:16]}.onnx")
        if not twin.is_file() or twin.read_bytes() != model:
            write_atomically(twin, model)
    except (OSError, BundleError, KeyError):
        return draft
    return twin


def _make(folder: Path, bundle: Bundle, pack: Callable[[Path, Path], None]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    needed = int(bundle.weight_bytes * _GROWTH)
    if shutil.disk_usage(folder.parent).free < 2 * needed:
        raise OSError("too little room on the disk")
    _make_room(folder.parent, needed)
    with folder_written_atomically(folder, lambda _: True) as staging:
        pack(bundle.graph, staging / GRAPH_NAME)
        digests = {path.name: vars(digest_file(path)) for path in sorted(staging.iterdir())}
        (staging / _DIGESTS).write_text(json.dumps(digests), encoding="utf-8")


def _check(folder: Path) -> None:
    for name, digest in json.loads((folder / _DIGESTS).read_text(encoding="utf-8")).items():
        verify_file(folder / name, FileDigest(**digest))


def _make_room(folder: Path, needed: int) -> None:
    """Remove the prepacked models unused for longest until `needed` bytes fit."""
    entries = sorted((entry for entry in folder.iterdir() if entry.is_dir()), key=lambda entry: entry.stat().st_mtime)
    sizes = {entry: sum(file.stat().st_size for file in entry.iterdir()) for entry in entries}
    total = sum(sizes.values())
    for entry in entries:
        if total + needed <= _MOST_BYTES:
            return
        shutil.rmtree(entry, ignore_errors=True)
        total -= sizes[entry]
