"""Weights packed for this machine's kernels, kept on disk and memory-mapped.

ONNX Runtime repacks quantized weights into private memory whenever it loads a model. A copy of the model saved with
packed weights is memory-mapped instead: it loads faster, and its pages are in the page cache, which all processes that
run the model share. The packing depends on the processor and on ONNX Runtime's version, so both are part of the cache
key, as is the model's fingerprint. Everything in this cache can be made again, so any failure falls back to the
original model.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Final

from ...errors import BundleError
from ...models.atomic import folder_written_atomically, write_atomically
from ...models.bundle import GRAPH_NAME, Bundle, digest_file, verify_file
from ...models.cache import cache_folder
from ...models.manifest import FileDigest
from ...models.onnx_file.splice import with_tensors_of
from ..devices.processor import processor
from .ort import ORT_ERRORS, RUNTIME_VERSION, error_reason, load_session, session_options

_FORMAT: Final = 1
_DIGESTS_NAME: Final = "digests.json"
_MIN_WEIGHT_BYTES: Final = 64 << 20
"""Smaller models load fast enough without."""
_SIZE_RATIO: Final = 2.5
"""Upper estimate of the size of packed and original weights together, relative to the original."""
_MAX_CACHE_BYTES: Final = 16 << 30
"""Largest size of all prepacked models together; the least recently used are removed first."""


def write_prepacked(graph: Path, destination: Path) -> None:
    """Write a copy of `graph` that also stores its weights as packed for this machine's kernels.

    Raises:
        BundleError: the file is not a model.
    """
    options = session_options()
    options.optimized_model_filepath = str(destination)
    for key, value in {
        "session.optimized_model_external_initializers_file_name": f"{destination.name}.data",
        # Shapes have to stay in the graph itself, or it cannot be checked when it is loaded.
        "session.optimized_model_external_initializers_min_size_in_bytes": "1024",
        "session.save_external_prepacked_constant_initializers": "1",
    }.items():
        options.add_session_config_entry(key, value)
    try:
        load_session(str(graph), options)
    except ORT_ERRORS as error:
        raise BundleError(f"{graph} cannot be prepacked: {error_reason(error)}") from error


def prepacked_graph(bundle: Bundle) -> Path:
    """The graph to load for a checked bundle: its prepacked copy, written now if necessary, or the original."""
    if not should_prepack(bundle):
        return bundle.graph
    key = f"{_FORMAT}\0{bundle.fingerprint}\0{RUNTIME_VERSION}\0{processor()}"
    folder = cache_folder() / "prepacked" / hashlib.sha256(key.encode()).hexdigest()[:32]
    try:
        if not folder.is_dir():
            _write(folder, bundle)
        _verify(folder)
        os.utime(folder)
    except (OSError, BundleError, ValueError, KeyError, TypeError):
        shutil.rmtree(folder, ignore_errors=True)
        return bundle.graph
    return folder / GRAPH_NAME


def should_prepack(bundle: Bundle) -> bool:
    """Whether a model is loaded from a prepacked copy: it is a bundle, and not a small one."""
    return bundle.manifest is not None and bundle.weight_bytes >= _MIN_WEIGHT_BYTES


def prepacked_draft_graph(draft: Path, target: Path) -> Path:
    """The graph to load for a draft that uses the target's own weights.

    Args:
        draft: the draft's graph, beside the target's.
        target: what `prepacked_graph` returned for the target.

    Returns:
        A copy of the draft's graph that uses the packed weights, if the target is loaded from those; else `draft`.
    """
    if target.parent == draft.parent:
        return draft
    try:
        model = with_tensors_of(draft, target)
        copy = target.with_name(f"draft-{hashlib.sha256(model).hexdigest()[:16]}.onnx")
        if not copy.is_file() or copy.read_bytes() != model:
            write_atomically(copy, model)
    except (OSError, BundleError, KeyError):
        return draft
    return copy


def _write(folder: Path, bundle: Bundle) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    needed = int(bundle.weight_bytes * _SIZE_RATIO)
    if shutil.disk_usage(folder.parent).free < 2 * needed:
        raise OSError("too little free space on the disk")
    _make_room(folder.parent, needed)
    with folder_written_atomically(folder, lambda _: True) as staging:
        write_prepacked(bundle.graph, staging / GRAPH_NAME)
        digests = {path.name: vars(digest_file(path)) for path in sorted(staging.iterdir())}
        (staging / _DIGESTS_NAME).write_text(json.dumps(digests), encoding="utf-8")


def _verify(folder: Path) -> None:
    for name, digest in json.loads((folder / _DIGESTS_NAME).read_text(encoding="utf-8")).items():
        verify_file(folder / name, FileDigest(**digest))


def _make_room(folder: Path, needed: int) -> None:
    """Remove the least recently used prepacked models until `needed` bytes fit."""
    entries = sorted((entry for entry in folder.iterdir() if entry.is_dir()), key=lambda entry: entry.stat().st_mtime)
    sizes = {entry: sum(file.stat().st_size for file in entry.iterdir()) for entry in entries}
    total = sum(sizes.values())
    for entry in entries:
        if total + needed <= _MAX_CACHE_BYTES:
            return
        shutil.rmtree(entry, ignore_errors=True)
        total -= sizes[entry]
