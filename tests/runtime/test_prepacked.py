"""Weights packed for this machine: same output, and never in the way."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import edgerun
from edgerun.export import ExportRecipe, WeightFormat
from edgerun.models.bundle import open_bundle
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph import prepacked
from edgerun.runtime.graph.session import GraphSession, SessionConfig, write_prepacked
from support.tiny_models import write_bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("packed"), weights=ExportRecipe(WeightFormat(4, 32)), hidden_size=128)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGERUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(prepacked, "_MIN_WEIGHT_BYTES", 0)
    return tmp_path / "cache" / "prepacked"


def packed(bundle: Path, version: str = "1") -> Path:
    return prepacked.prepacked_graph(open_bundle(bundle), version, write_prepacked)


def test_the_twin_gives_the_same_logits_bit_by_bit(bundle: Path, cache: Path) -> None:
    twin = packed(bundle)
    assert twin.parent.parent == cache
    outputs = []
    for graph in (bundle / "model.onnx", twin):
        session = GraphSession(graph, SessionConfig(choose_device("cpu"), 1))
        bound = session.bind(session.arena(64))
        outputs.append(bound.forward(list(range(20, 40))).copy())
    np.testing.assert_array_equal(*outputs)


def test_it_is_made_once_and_per_model_version_and_processor(
    bundle: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def pack(graph: Path, destination: Path) -> None:
        made.append(destination)
        write_prepacked(graph, destination)

    opened = open_bundle(bundle)
    first = prepacked.prepacked_graph(opened, "1", pack)
    assert prepacked.prepacked_graph(opened, "1", pack) == first
    assert len(made) == 1
    assert prepacked.prepacked_graph(opened, "2", pack) != first
    monkeypatch.setattr(prepacked, "processor", lambda: "another machine")
    assert prepacked.prepacked_graph(opened, "1", pack) != first
    assert len(made) == 3
    assert all((folder / "model.onnx").is_file() for folder in cache.iterdir())


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data", "digests.json"])
@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_a_damaged_twin_is_set_aside_and_made_again(bundle: Path, cache: Path, name: str, damage: str) -> None:
    file = packed(bundle).parent / name
    if damage == "missing":
        file.unlink()
    else:
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    assert packed(bundle) == bundle / "model.onnx"
    assert list(cache.iterdir()) == []
    assert packed(bundle).parent.parent == cache


def test_a_full_disk_or_a_failed_packing_means_the_model_as_it_is(
    bundle: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_graph: Path, destination: Path) -> None:
        destination.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    assert prepacked.prepacked_graph(open_bundle(bundle), "1", failing) == bundle / "model.onnx"
    assert list(cache.iterdir()) == []
    usage = shutil.disk_usage(bundle)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=1000))
    assert packed(bundle) == bundle / "model.onnx"


def test_what_was_unused_for_longest_makes_room(bundle: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(file.stat().st_size for file in packed(bundle, "1").parent.iterdir())
    unused, used = packed(bundle, "2"), packed(bundle, "1")
    os.utime(unused.parent, (1, 1))
    os.utime(used.parent, (2, 2))
    assert packed(bundle, "1") == used
    assert used.parent.stat().st_mtime > 2
    needed = int(open_bundle(bundle).weight_bytes * prepacked._SIZE_RATIO)
    monkeypatch.setattr(prepacked, "_MAX_CACHE_BYTES", size + needed)
    latest = packed(bundle, "3")
    assert not unused.exists()
    assert used.exists()
    assert latest.exists()


def test_small_or_unsigned_models_and_no_cache_leave_no_trace(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGERUN_CACHE", str(tmp_path / "cache"))
    assert packed(bundle) == bundle / "model.onnx"
    monkeypatch.setattr(prepacked, "_MIN_WEIGHT_BYTES", 0)
    with edgerun.load(bundle, cache=False) as engine:
        plain = engine.generate("the", max_tokens=10).text
    unsigned = tmp_path / "unsigned"
    shutil.copytree(bundle, unsigned)
    (unsigned / "edge.json").unlink()
    edgerun.load(unsigned).close()
    assert not (tmp_path / "cache").exists()
    with edgerun.load(bundle) as engine:
        assert engine.generate("the", max_tokens=10).text == plain
    assert len(list((tmp_path / "cache" / "prepacked").iterdir())) == 1
