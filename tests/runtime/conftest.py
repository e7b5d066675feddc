"""Tiny models of several families and weight formats, each exported once, and an engine over one of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

import edgerun
from support.adversarial_drafters import NEARLY_FREE, FixedCost


@pytest.fixture(scope="session")
def tiny_bundle_of(tmp_path_factory: pytest.TempPathFactory, tiny_bundle: Path) -> Callable[[str, str], Path]:
    """The bundle of a family (llama, qwen2, qwen3) and a weight format (fp32, int8, int4): 300 tokens, context 256."""
    from edgerun.export import FP32, INT4, INT8
    from support.tiny_models import write_bundle

    formats = {"fp32": FP32, "int8": INT8, "int4": INT4}

    @cache
    def bundle_of(family: str, weights: str) -> Path:
        if (family, weights) == ("llama", "fp32"):
            return tiny_bundle
        return write_bundle(tmp_path_factory.mktemp("tiny"), family, weights=formats[weights], seed=1)

    return bundle_of


@pytest.fixture(scope="module")
def engine(tiny_bundle: Path) -> Iterator[edgerun.Engine]:
    """An engine over the tiny llama, shared by the tests of a module."""
    with edgerun.load(tiny_bundle, threads=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def eager_engine(tiny_bundle: Path) -> Iterator[edgerun.Engine]:
    """An engine over the tiny llama in which nearly every draft token pays."""
    with edgerun.load(tiny_bundle, threads=1, cache=False) as engine:
        engine.model.drafters._pass_cost = FixedCost(NEARLY_FREE)
        yield engine


@pytest.fixture
def editable_bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A copy of the tiny llama without its manifest, so that files can be changed."""
    folder = Path(shutil.copytree(tiny_bundle, tmp_path / "m"))
    (folder / "edge.json").unlink()
    return folder
