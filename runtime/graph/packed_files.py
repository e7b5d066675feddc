"""Digests of packed files: of all bytes, and of samples that are read at every load.

ONNX Runtime computes with packed bytes as they are, so damage would change logits without an error. A file of several
gigabytes cannot be hashed at every load; its size and some of its pages can be compared in milliseconds.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from ...errors import BundleError
from ...models.atomic import discard_folder
from ...models.bundle import digest_file
from ...models.json_file import read_json_object

RECORD_NAME: Final = "digests.json"
"""Name of the record in a folder of packed files."""
_FORMAT: Final = 2
_PAGE: Final = 4096
_PAGES: Final = 64
"""Number of sampled pages besides the first and the last."""
_WHOLE_BELOW: Final = 8 << 20
"""Smaller files are hashed whole at every load."""
_HINT: Final = "run the command again: the model is packed anew"


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
