"""Weights packed for this machine's kernels, kept on disk and memory-mapped, and digests of packed files.

ONNX Runtime repacks quantized weights into private memory whenever it loads a model. A copy of the model saved with
packed weights is memory-mapped instead: it loads faster, and its pages are in the page cache, which all processes that
run the model share. The packing depends on the chip, its instruction sets and the builds of Python and ONNX Runtime, so
all of them are part of the cache key, as is the model's fingerprint (docs/decisions/0037-prepacked-key.md). Everything
in this cache can be made again, so any failure falls back to the original model.

ONNX Runtime computes with packed bytes as they are, so damage would change logits without an error. A file of several
gigabytes cannot be hashed at every load; its size and some of its pages can be compared in milliseconds.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from ...errors import BundleError
from ...models.atomic import discard_folder, folder_written_atomically, write_atomically
from ...models.bundle import GRAPH_NAME, Bundle, digest_file
from ...models.json_file import read_json_object
from ...models.onnx_file.model_messages import with_tensors_of
from ...models.user_folders import cache_folder
from ..devices.processor import processor
from .ort import ORT_ERRORS, RUNTIME_BUILD, error_reason, load_session, session_options

RECORD_NAME: Final = "digests.json"
"""Name of the record in a folder of packed files."""
_FORMAT: Final = 2
_PAGE: Final = 4096
_PAGES: Final = 64
"""Number of sampled pages besides the first and the last."""
_WHOLE_BELOW: Final = 8 << 20
"""Smaller files are hashed whole at every load."""
_HINT: Final = "run the command again: the model is packed anew"
_WEIGHTS_FORMAT: Final = 2
_MIN_WEIGHT_BYTES: Final = 64 << 20
"""Smaller models load fast enough without."""
_SIZE_RATIO: Final = 2.5
"""Upper estimate of the size of packed and original weights together, relative to the original."""
_MAX_CACHE_BYTES: Final = 16 << 30
"""Largest size of all prepacked models together; the least recently used are removed first."""


@dataclass(frozen=True)
class PackedFile:
    """Size and digests of one file."""

    bytes: int
    sha256: str
    """SHA-256 (hexadecimal) of the file."""
    sample: str
    """SHA-256 (hexadecimal) of its sample."""

    @staticmethod
    def of(path: Path) -> PackedFile:
        """Compute the digests of a file."""
        digest = digest_file(path)
        return PackedFile(digest.bytes, digest.sha256, sample_digest(path))


def write_record(folder: Path, record: Path) -> None:
    """Write the digests of all files of a folder.

    Raises:
        OSError: a file cannot be read or written.
    """
    files = {path.name: asdict(PackedFile.of(path)) for path in sorted(folder.iterdir())}
    record.write_text(json.dumps({"format": _FORMAT, "files": files}), encoding="utf-8")


def read_record(record: Path) -> Mapping[str, PackedFile]:
    """Read what `write_record` wrote.

    Raises:
        BundleError: the record is missing, damaged, or of another version.
    """
    try:
        data = read_json_object(record, BundleError, _HINT)
        if data["format"] == _FORMAT:
            files = data["files"].items()
            return {name: PackedFile(each["bytes"], each["sha256"], each["sample"]) for name, each in files}
    except (OSError, LookupError, TypeError, AttributeError) as error:
        raise BundleError(f"{record} is missing or damaged", _HINT) from error
    raise BundleError(f"{record} was written by another version of edge-run", _HINT)


def check_samples(folder: Path) -> None:
    """Compare the sizes and the samples of a folder's files with its record.

    Raises:
        BundleError: one of them differs, or the record is missing or damaged.
        OSError: a file cannot be read.
    """
    for name, expected in read_record(folder / RECORD_NAME).items():
        check_sample(folder / name, expected)


def verify_folder(folder: Path) -> bool:
    """Compare all bytes of a folder's files with its record; a damaged folder is not used again.

    Returns:
        Whether there is a record.

    Raises:
        BundleError: a file is damaged.
        OSError: a file cannot be read.
    """
    record = folder / RECORD_NAME
    if not record.is_file():
        return False
    try:
        for name, expected in read_record(record).items():
            check_whole(folder / name, expected)
    except (OSError, BundleError):
        # Windows keeps files that this process maps, but without a record the next one removes them.
        with suppress(OSError):
            record.unlink()
        discard_folder(folder)
        raise
    return True


def check_sample(path: Path, expected: PackedFile) -> None:
    """Compare the size and the sample of a file.

    Raises:
        BundleError: one of them differs.
        OSError: the file cannot be read.
    """
    if path.stat().st_size != expected.bytes or sample_digest(path) != expected.sample:
        raise BundleError(f"{path} is damaged", _HINT)


def check_whole(path: Path, expected: PackedFile) -> None:
    """Compare all bytes of a file.

    Raises:
        BundleError: they differ.
        OSError: the file cannot be read.
    """
    found = digest_file(path)
    if (found.bytes, found.sha256) != (expected.bytes, expected.sha256):
        raise BundleError(f"{path} is damaged: its checksum is not the one recorded", _HINT)


def sample_digest(path: Path) -> str:
    """Hash the first and the last page of a file, and one page from each of 64 sections; a small file is hashed whole.

    The places are random, with the size as the seed.
    """
    size = path.stat().st_size
    if size < _WHOLE_BELOW:
        return digest_file(path).sha256
    places = random.Random(size)
    section = (size - _PAGE) / _PAGES
    starts = [0, *(int((number + places.random()) * section) for number in range(_PAGES)), size - _PAGE]
    sha = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        for start in starts:
            file.seek(start)
            sha.update(file.read(_PAGE))
    return sha.hexdigest()


def make_room(parent: Path, needed: int, most: int) -> None:
    """Remove folders without a record, and then the least recently used ones until `needed` bytes fit.

    Args:
        parent: a folder of folders that each have a record.
        needed: bytes that are about to be written.
        most: largest number of bytes of all folders together.

    Raises:
        OSError: a folder cannot be read.
    """
    entries = [entry for entry in parent.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    kept = [entry for entry in entries if (entry / RECORD_NAME).is_file() or not discard_folder(entry)]
    sizes = {entry: sum(file.stat().st_size for file in entry.iterdir()) for entry in kept}
    total = sum(sizes.values())
    for entry in sorted(kept, key=lambda entry: entry.stat().st_mtime):
        if total + needed <= most:
            return
        if discard_folder(entry):
            total -= sizes[entry]


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
    key = f"{_WEIGHTS_FORMAT}\0{bundle.fingerprint}\0{RUNTIME_BUILD}\0{processor()}"
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
