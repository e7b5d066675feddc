"""Servers and applications that several tests use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="needs the serve extra")
pytest.importorskip("support.tiny_models", reason="needs the export extra")

from starlette.applications import Starlette

import edgerun.server
from support.serving import Served, served


@pytest.fixture(scope="session")
def tiny_app(tiny_bundle: Path) -> Starlette:
    """The application with a tiny model, in this process."""
    return edgerun.server.app(tiny_bundle, cache=False, max_body=100_000)


@pytest.fixture(scope="session")
def endless_server(endless_bundle: Path) -> Iterator[Served]:
    """A server of that model, which answers two requests at a time and lets one wait."""
    with served([endless_bundle], "--parallel", "2", "--max-waiting", "1", "--draft", "none") as server:
        yield server
