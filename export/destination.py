"""The destination folder of an export, and the figures of what was written."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..errors import DestinationError, InputError
from ..models.atomic import folder_written_atomically
from ..models.bundle import holds_only_bundle_files, require_text_path
from ..models.file_system import is_in_use
from .calibration.divergence import Divergence
from .check.parity import Parity
from .report.figures import ModelReport


@dataclass(frozen=True)
class ExportResult:
    """Figures of a finished export."""

    bundle: Path
    file_bytes: Mapping[str, int]
    """Size by file name, `edge.json` included."""
    bits_per_weight: float
    """As in `Manifest`."""
    seconds: float
    parity: Parity
    """The check against the reference, on random tokens."""
    bits_per_weight_read: float | None = None
    """As in `Manifest`."""
    quality: Divergence | None = None
    """Quality on the sample text; None where the report has it on other text, and where nothing was quantized."""
    notes: tuple[str, ...] = ()
    """Messages about choices that the export made itself."""
    report: ModelReport | None = None
    """Formats, quality and speed of the model; None for a data-free export."""


def require_apart(source: Path, destination: Path) -> None:
    """Refuse a destination that overlaps the source, and paths that ONNX Runtime cannot open.

    Raises:
        InputError: one folder is or contains the other, or a path is not valid text.
    """
    require_text_path(source)
    require_text_path(destination)
    here, there = Path(os.path.realpath(source)), Path(os.path.realpath(destination))
    if any(_is_same(folder, here) for folder in (there, *there.parents)) or any(
        _is_same(folder, there) for folder in here.parents
    ):
        raise InputError(f"{destination} overlaps the model {source}", "choose a folder apart from it")


@contextmanager
def bundle_written_whole(destination: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `destination` when the block ends without an error.

    Raises:
        InputError: `destination` exists and is not a bundle.
        DestinationError: the disk refused a write.
    """
    try:
        with folder_written_atomically(destination, holds_only_bundle_files) as staging:
            yield staging
    except FileExistsError as error:
        raise InputError(
            f"{destination} exists and holds files that are not part of a bundle",
            "choose another folder, or move it away",
        ) from error
    except OSError as error:
        hint = "close the programs that use it" if is_in_use(error) else "free space there"
        raise DestinationError(
            f"{destination} cannot be written: {error.strerror or error}", f"{hint}, or choose another folder"
        ) from error


def _is_same(first: Path, second: Path) -> bool:
    try:  # not by name, since some file systems ignore case
        return first.samefile(second)
    except OSError:
        return False
