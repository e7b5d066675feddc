"""A model whose answers are long, and a process that tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("onnx", reason="needs the export extra")
pytest.importorskip("jsonschema", reason="needs the dev extra")

from support.rpc_client import RpcClient, rpc
from support.tiny_models import write_bundle


@pytest.fixture(scope="session")
def long_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a context of 4096 tokens."""
    return write_bundle(tmp_path_factory.mktemp("long"), max_position_embeddings=4096)


@pytest.fixture(scope="module")
def client(long_bundle: Path) -> Iterator[RpcClient]:
    """A process that has the model of `long_bundle` loaded; the tests of a module share it."""
    with rpc(str(long_bundle)) as client:
        client.text(max_tokens=1)
        yield client
        assert client.end() == (0, "")
