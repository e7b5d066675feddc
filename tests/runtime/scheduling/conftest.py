"""Engines that generate one answer at a time, and several."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import edgerun
from edgerun import Engine


@pytest.fixture(scope="module", params=[1, 4], ids=["one at a time", "four at a time"])
def engine(tiny_bundle: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """An engine over the tiny llama."""
    with edgerun.load(tiny_bundle, threads=1, parallel=request.param) as engine:
        yield engine


@pytest.fixture(scope="module")
def single(tiny_bundle: Path) -> Iterator[Engine]:
    """An engine that generates one answer at a time."""
    with edgerun.load(tiny_bundle, threads=1, parallel=1) as engine:
        yield engine
