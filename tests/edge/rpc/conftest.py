"""A model whose answers are long, and a process that tests share."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.rpc_client import RpcClient

if not all(find_spec(name) for name in ("onnx", "jsonschema")):  # packages of the dev extra
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="module")
def client(long_bundle: Path) -> Iterator[RpcClient]:
    """A process that has the model of `long_bundle` loaded; the tests of a module share it."""
    from support.rpc_client import rpc

    with rpc(str(long_bundle)) as client:
        client.text(max_tokens=1)
        yield client
        code, log = client.end()
        assert code == 0
        assert [line for line in log.splitlines() if "was ignored" not in line] == []
