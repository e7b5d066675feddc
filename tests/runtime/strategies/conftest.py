"""A model of six tokens, and an engine over it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import edgerun
from support.enumeration import SixTokens


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> SixTokens:
    return SixTokens(tmp_path_factory.mktemp("six"))


@pytest.fixture(scope="module")
def six_engine(six: SixTokens) -> Iterator[edgerun.Engine]:
    with edgerun.load(six.bundle, threads=1) as engine:
        yield engine
