"""Paths that ONNX Runtime can be told: it takes them as text."""

from __future__ import annotations

from pathlib import Path

from ..errors import BundleError


def require_text_path(path: Path) -> None:
    """Check that a path is text, as those of Linux need not be.

    Raises:
        BundleError: it has bytes that are none.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise BundleError(f"the path {path} is not UTF-8, which ONNX Runtime cannot open", "rename it") from error
