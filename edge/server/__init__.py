"""The OpenAI-compatible HTTP server: an ASGI application, and the process that serves it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from ...errors import InputError

_EXTRA: Final = ("starlette", "uvicorn", "h11", "prometheus_client")
"""Packages of the extra `serve`."""


@contextmanager
def missing_extra(what: str = "server", extra: str = "serve") -> Iterator[None]:
    """Within the block, an import that fails for a package of the extra `serve` says how to install it.

    Args:
        what: what needs the package, for the message.
        extra: the extra to install, which contains `serve`.

    Raises:
        InputError: a package of the extra is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRA:
            raise
        raise InputError(f"the {what} needs the package {package}", f'pip install "edge-run[{extra}]"') from error
