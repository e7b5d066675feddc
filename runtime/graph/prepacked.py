"""Weights packed for this machine's kernels, kept on disk and memory-mapped.

ONNX Runtime repacks quantized weights into private memory whenever it loads a model. A copy of the model saved with
packed weights is memory-mapped instead: it loads faster, and its pages are in the page cache, which all processes that
run the model share. The packing depends on the chip, its instruction sets and the builds of Python and ONNX Runtime, so
all of them are part of the cache key, as is the model's fingerprint (docs/decisions/0037-prepacked-key.md). Everything
in this cache can be made again, so any failure falls back to the original model.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Final

from ...errors import BundleError
from ...models.atomic import discard_folder, folder_written_atomically, write_atomically
from ...models.bundle import GRAPH_NAME, Bundle
from ...models.onnx_file.wire import with_tensors_of
from ...models.user_folders import cache_folder
from ..devices.processor import processor
from .ort import ORT_ERRORS, RUNTIME_BUILD, error_reason, load_session, session_options
from .packed_files import RECORD_NAME, check_samples, make_room, verify_folder, write_record

_FORMAT: Final = 2
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
    folder = _folder_of(bundle)
    try:
        if not folder.is_dir():
            _write(folder, bundle)
        check_samples(folder)
        os.utime(folder)
    except (OSError, BundleError):
        discard_folder(folder)
        return bundle.graph
    return folder / GRAPH_NAME


def verify_prepacked(bundle: Bundle) -> bool:
    """Compare all bytes of a bundle's prepacked copy with what was written; a damaged copy is not used again.

    Returns:
        Whether there is a copy.

    Raises:
        BundleError: the copy is damaged.
    """
    return should_prepack(bundle) and verify_folder(_folder_of(bundle))


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


def _folder_of(bundle: Bundle) -> Path:
    key = f"{_FORMAT}\0{bundle.fingerprint}\0{RUNTIME_BUILD}\0{processor()}"
    return cache_folder() / "prepacked" / hashlib.sha256(key.encode()).hexdigest()[:32]


def _write(folder: Path, bundle: Bundle) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    needed = int(bundle.weight_bytes * _SIZE_RATIO)
    make_room(folder.parent, needed, _MAX_CACHE_BYTES)
    if shutil.disk_usage(folder.parent).free < 2 * needed:
        raise OSError("too little free space on the disk")
    with folder_written_atomically(folder, lambda _: True) as staging:
        write_prepacked(bundle.graph, staging / GRAPH_NAME)
        write_record(staging, staging / RECORD_NAME)
