"""Apps that several tests use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="needs the app extra")
pytest.importorskip("support.tiny_models", reason="needs the export extra")

from support.app_server import RunningApp, running_app
from support.tiny_models import write_endless_bundle


@pytest.fixture(scope="session")
def endless_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a context of 30,000 tokens that never ends an answer by itself."""
    return write_endless_bundle(tmp_path_factory.mktemp("endless"))


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory, tiny_bundle: Path) -> Iterator[RunningApp]:
    """An app with a tiny model."""
    with running_app(tmp_path_factory.mktemp("home"), tiny_bundle, "--draft", "none") as app:
        yield app
