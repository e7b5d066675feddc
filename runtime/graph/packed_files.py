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
import mmap
import os
import random
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO, Final

from ...errors import BundleError
from ...models.atomic import discard_folder, folder_written_atomically
from ...models.bundle import GRAPH_NAME, Bundle, digest_file
from ...models.file_system import remove_oldest
from ...models.json_file import read_json_object
from ...models.onnx_file.model_messages import EXTERNAL, Message, read_model
from ...models.user_folders import cache_folder
from ...models.user_text import format_bytes
from ..devices.processor import available_memory, processor
from .memory import PACKED
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
LARGE_PAGE: Final = 2 << 20
_COPIED_AT_ONCE: Final = 16 << 20
_PACKED: Final = "prepacked_"
"""Beginning of the keys under which a tensor lists its packed forms: `kernel|offset;length;checksum|...` each."""
_WEIGHTS_FORMAT: Final = 3
_MIN_WEIGHT_BYTES: Final = 64 << 20
"""Smaller models load fast enough without."""
_SIZE_RATIO: Final = 3.5
"""Upper estimate of the size of packed and original weights together, relative to the original."""
_MAX_CACHE_BYTES: Final = 16 << 30
"""Largest size of all folders of one kind together; the least recently used are removed first."""


def packed_folder(kind: str, *key: object) -> Path:
    """The folder of packed files in the cache, which exists if they were written, by everything they depend on."""
    return cache_folder() / kind / hashlib.sha256("\0".join(map(str, key)).encode()).hexdigest()[:32]


def is_intact(folder: Path) -> bool:
    """Whether a folder of packed files is there and not damaged, by its samples; it counts as used then.

    A damaged one is removed, to be written again.
    """
    try:
        if folder.is_dir():
            _read_in_large_pages(folder)  # before samples are, with which small ones would come
            check_folder(folder)
            with suppress(OSError):  # a cache that may only be read
                os.utime(folder)
            return True
    except (OSError, ValueError, BundleError):  # an empty file cannot be mapped
        discard_folder(folder)
    return False


@contextmanager
def written_folder(folder: Path, needed: int, spare: int = 0) -> Iterator[Path]:
    """Yield an empty folder that becomes `folder` with a record of its files, once the block has written them.

    Args:
        folder: a folder that `packed_folder` gave; those least recently used of its kind are removed to make room.
        needed: bytes of the files.
        spare: bytes that have to stay free on the disk besides.

    Raises:
        OSError: the disk has no room.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    _make_room(folder.parent, needed)
    if (free := shutil.disk_usage(folder.parent).free) < needed + spare:
        wanted = f"{format_bytes(needed + spare)} of disk space are needed in {folder.parent}"
        raise OSError(f"{wanted}, {format_bytes(free)} are free")
    with folder_written_atomically(folder, lambda _: True) as staging:
        yield staging
        write_record(staging)


def write_record(folder: Path) -> None:
    """Write the digests of all files of a folder beside them.

    Raises:
        OSError: a file cannot be read or written.
    """
    record = folder / RECORD_NAME
    paths = [path for path in sorted(folder.iterdir()) if path != record]
    files = {path.name: {**asdict(digest_file(path)), "sample": sample_digest(path)} for path in paths}
    record.write_text(json.dumps({"format": _FORMAT, "files": files}), encoding="utf-8")


def check_folder(folder: Path, *, whole: bool = False) -> None:
    """Compare sizes and samples of a folder's files with its record, or all bytes if `whole`.

    Raises:
        BundleError: one of them differs, or the record is missing, damaged, or of another version.
        OSError: a file cannot be read.
    """
    record = folder / RECORD_NAME
    data = read_json_object(record, BundleError, _HINT)
    if data.get("format") != _FORMAT:
        raise BundleError(f"{record} was written by another version of edge-run", _HINT)
    try:
        files = data["files"].items()
        expected = {folder / name: (each["bytes"], each["sha256"], each["sample"]) for name, each in files}
    except (LookupError, TypeError, AttributeError) as error:
        raise BundleError(f"{record} is missing or damaged", _HINT) from error
    for path, (size, sha256, sample) in expected.items():
        if whole and digest_file(path).sha256 != sha256:
            raise BundleError(f"{path} is damaged: its checksum is not the one recorded", _HINT)
        if not whole and (path.stat().st_size != size or sample_digest(path) != sample):
            raise BundleError(f"{path} is damaged", _HINT)


def _read_in_large_pages(folder: Path) -> None:
    """Read the large packed weights of a folder, so that the system keeps them in pages of 2 MB where it can.

    A token takes 0.93 of the time with them, and what is dropped is soon mapped again. What is in memory already is not
    read. Other weights, of which rows are read, stay in small pages, because some systems map large ones as a whole.
    """
    models = b"".join(each.read_bytes() for each in folder.glob("*.onnx"))
    parts = [(int(start), int(size)) for start, size in PACKED.findall(models) if int(size) >= LARGE_PAGE]
    if sys.platform == "linux" and sum(size for _, size in parts) <= available_memory() // 2:
        for path in folder.glob("*.data"):
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
                pages.madvise(mmap.MADV_HUGEPAGE)
                for start, size in parts:
                    for place in range(start, min(start + size, len(pages)), LARGE_PAGE):
                        pages[place]
                        pages.madvise(mmap.MADV_DONTNEED, place, min(LARGE_PAGE, len(pages) - place))


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
        check_folder(folder, whole=True)
    except (OSError, BundleError):
        # Windows keeps files that this process maps, but without a record the next one removes them.
        with suppress(OSError):
            record.unlink()
        discard_folder(folder)
        raise
    return True


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


def _make_room(parent: Path, needed: int) -> None:
    """Remove folders without a record, and then the least recently used ones until `needed` bytes fit the cache.

    Raises:
        OSError: a folder cannot be read.
    """
    entries = [entry for entry in parent.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    kept = [entry for entry in entries if (entry / RECORD_NAME).is_file() or not discard_folder(entry)]
    sizes = {entry: sum(file.stat().st_size for file in entry.iterdir()) for entry in kept}
    remove_oldest(sizes, _MAX_CACHE_BYTES - needed, discard_folder)


def write_prepacked(graph: Path, destination: Path) -> None:
    """Write a copy of `graph` that also stores its weights as packed for this machine's kernels.

    Large ones lie at multiples of 2 MB in the data file. Only there can the system map large pages, with which a token
    takes 0.93 of the time.

    Raises:
        BundleError: the file is not a model.
        OSError: the copy cannot be written.
    """
    packed = destination.with_name("packed.onnx")
    pack(graph, packed)
    unaligned, aligned = (path.with_name(f"{path.name}.data") for path in (packed, destination))
    model = read_model(packed)
    with unaligned.open("rb") as source, aligned.open("wb") as file:
        for tensor in model.graph.initializer:
            if tensor.data_location == EXTERNAL:
                move_data(tensor, source, file)
    destination.write_bytes(model.SerializeToString())
    for path in (packed, unaligned):
        path.unlink()


def move_data(tensor: Message, source: BinaryIO, destination: BinaryIO) -> None:
    """Append the data of an external tensor to another file, packed forms of 2 MB and more at multiples of 2 MB."""

    def moved(start: int, length: int, alignment: int) -> str:
        place = destination.seek(-(-destination.tell() // alignment) * alignment)
        source.seek(start)
        for done in range(0, length, _COPIED_AT_ONCE):
            destination.write(source.read(min(_COPIED_AT_ONCE, length - done)))
        return str(place)

    entries = {each.key: each for each in tensor.external_data}
    entries["location"].value = Path(destination.name).name
    entries["offset"].value = moved(int(entries["offset"].value), int(entries["length"].value), _PAGE)
    for key, entry in entries.items():
        if key.startswith(_PACKED):
            kernel, *buffers = entry.value.split("|")
            for index, buffer in enumerate(buffers):
                start, length, checksum = buffer.split(";")
                alignment = LARGE_PAGE if int(length) >= LARGE_PAGE else _PAGE
                buffers[index] = f"{moved(int(start), int(length), alignment)};{length};{checksum}"
            entry.value = "|".join([kernel, *buffers])


def pack(graph: Path, destination: Path) -> None:
    """Let ONNX Runtime write a copy of `graph` that also stores its weights as packed for this machine's kernels.

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
        if not is_intact(folder):
            needed = int(bundle.weight_bytes * _SIZE_RATIO)
            with written_folder(folder, needed, spare=needed) as staging:
                write_prepacked(bundle.graph, staging / GRAPH_NAME)
    except (OSError, BundleError):
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


def lacks_prepacked(bundle: Bundle) -> bool:
    """Whether the next load of a model on the CPU writes its prepacked copy, which takes longer."""
    return should_prepack(bundle) and not _folder_of(bundle).is_dir()


def _folder_of(bundle: Bundle) -> Path:
    return packed_folder("prepacked", _WEIGHTS_FORMAT, bundle.fingerprint, RUNTIME_BUILD, processor())
