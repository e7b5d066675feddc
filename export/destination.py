"""The folder an export goes to: apart from its source, and written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import DestinationError, InputError
from ..models.atomic import folder_written_atomically
from ..models.bundle import holds_only_bundle_files
from ..models.text_path import require_text_path


def require_apart(source: Path, destination: Path) -> None:
    """Refuse a destination that is the source, lies in it or holds it, and paths that ONNX Runtime cannot open.

    Raises:
        InputError: it does, or one of them is such.
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
        InputError: something stands there that is not a bundle.
        DestinationError: the disk refused a write.
    """
    try:
        with folder_written_atomically(destination, holds_only_bundle_files) as staging:
            yield staging
    except FileExistsError as error:
        raise InputError(
            f"{destination} exists and is not a bundle, or not only one", "choose another folder, or move it away"
        ) from error
    except OSError as error:
        raise DestinationError(
            f"{destination} cannot be written: {error.strerror or error}", "free space there, or choose another folder"
        ) from error


def _is_same(first: Path, second: Path) -> bool:
    try:  # not by name, since some file systems do not tell capitals from small letters
        return first.samefile(second)
    except OSError:
        return False
