"""Prepacked weights give the same logits, damage of packed files is noticed, and no problem prevents loading."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import edgerun
from edgerun.edge.cli.main import main
from edgerun.errors import BundleError
from edgerun.export import ExportRecipe, WeightFormat
from edgerun.models.bundle import open_bundle
from edgerun.models.onnx_file.model_messages import read_model
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph import packed_files
from edgerun.runtime.graph.packed_files import (
    RECORD_NAME,
    check_folder,
    prepacked_graph,
    verify_prepacked,
    write_prepacked,
    write_record,
)
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from support.tiny_models import write_bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("packed"), weights=ExportRecipe(WeightFormat(4, 32)), hidden_size=128)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGERUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_files, "_MIN_WEIGHT_BYTES", 0)
    return tmp_path / "cache" / "prepacked"


def graph_to_load(bundle: Path) -> Path:
    return prepacked_graph(open_bundle(bundle))


def test_prepacked_graph_gives_bit_identical_logits(bundle: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = 1 << 14
    monkeypatch.setattr(packed_files, "LARGE_PAGE", page)
    copy = graph_to_load(bundle)
    assert copy.parent.parent == cache
    entries = [each for tensor in read_model(copy).graph.initializer for each in tensor.external_data]
    packed = [each.value.split("|")[1].split(";") for each in entries if each.key.startswith("prepacked_")]
    large = [int(start) for start, length, _ in packed if int(length) >= page]
    assert large
    assert not any(start % page for start in large)
    logits = []
    for graph in (bundle / "model.onnx", copy):
        session = GraphSession(graph, SessionConfig(choose_device("cpu"), 1))
        bound = session.bind(session.arena(64))
        logits.append(bound.forward(list(range(20, 40))).copy())
    np.testing.assert_array_equal(*logits)


def test_prepacked_once_per_model_runtime_version_and_processor(
    bundle: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []

    def write(graph: Path, destination: Path) -> None:
        written.append(destination)
        write_prepacked(graph, destination)

    monkeypatch.setattr(packed_files, "write_prepacked", write)
    first = graph_to_load(bundle)
    assert graph_to_load(bundle) == first
    assert len(written) == 1
    with monkeypatch.context() as patch:
        patch.setattr(packed_files, "RUNTIME_BUILD", "another build")
        assert graph_to_load(bundle) != first
    monkeypatch.setattr(packed_files, "processor", lambda: "another machine")
    assert graph_to_load(bundle) != first
    assert len(written) == 3
    assert all((folder / "model.onnx").is_file() for folder in cache.iterdir())


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data", "digests.json"])
@pytest.mark.parametrize("damage", ["changed", "missing", "empty"])
def test_damaged_copy_is_removed_and_written_again(bundle: Path, cache: Path, name: str, damage: str) -> None:
    file = graph_to_load(bundle).parent / name
    if damage == "missing":
        file.unlink()
    else:
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(b"" if damage == "empty" else data)
    assert graph_to_load(bundle).parent.parent == cache
    assert verify_prepacked(open_bundle(bundle))


def test_full_disk_or_failed_packing_loads_the_original(
    bundle: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_graph: Path, destination: Path) -> None:
        destination.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(packed_files, "write_prepacked", failing)
        assert graph_to_load(bundle) == bundle / "model.onnx"
    assert list(cache.iterdir()) == []
    usage = shutil.disk_usage(bundle)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=1000))
    assert graph_to_load(bundle) == bundle / "model.onnx"


def test_least_recently_used_copies_are_removed_first(
    bundle: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_with(version: str) -> Path:
        monkeypatch.setattr(packed_files, "RUNTIME_BUILD", version)
        return graph_to_load(bundle)

    size = sum(file.stat().st_size for file in load_with("1").parent.iterdir())
    unused, used = load_with("2"), load_with("1")
    os.utime(unused.parent, (1, 1))
    os.utime(used.parent, (2, 2))
    assert load_with("1") == used
    assert used.parent.stat().st_mtime > 2
    needed = int(open_bundle(bundle).weight_bytes * packed_files._SIZE_RATIO)
    monkeypatch.setattr(packed_files, "_MAX_CACHE_BYTES", size + needed)
    latest = load_with("3")
    assert not unused.exists()
    assert used.exists()
    assert latest.exists()


def test_copies_without_a_record_are_removed(bundle: Path, cache: Path) -> None:
    for name in ("killed", "other"):
        (cache / name).mkdir(parents=True)
        (cache / name / "model.onnx.data").write_bytes(b"weights")
    (cache / "other" / "digests.json").write_text("{}", encoding="utf-8")
    copy = graph_to_load(bundle).parent
    assert sorted(cache.iterdir()) == sorted([copy, cache / "other"])


def test_verify_compares_all_bytes_of_the_copy(
    bundle: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(packed_files, "_WHOLE_BELOW", 0)
    monkeypatch.setattr(packed_files, "_PAGES", 1)
    weights = graph_to_load(bundle).with_name("model.onnx.data")
    assert verify_prepacked(open_bundle(bundle))
    data = bytearray(weights.read_bytes())
    data[5000] ^= 1
    weights.write_bytes(data)
    assert graph_to_load(bundle) == weights.with_name("model.onnx")
    assert main(["verify", str(bundle)]) == 2
    assert capsys.readouterr().err.endswith(
        f"{weights} is damaged: its checksum is not the one recorded; run the command again: the model is packed anew\n"
    )
    assert not verify_prepacked(open_bundle(bundle))
    graph_to_load(bundle)  # removes what Windows kept, because it was mapped
    assert graph_to_load(bundle) == weights.with_name("model.onnx")
    assert verify_prepacked(open_bundle(bundle))


def test_nothing_is_written_for_small_or_foreign_models_or_without_cache(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGERUN_CACHE", str(tmp_path / "cache"))
    assert graph_to_load(bundle) == bundle / "model.onnx"
    monkeypatch.setattr(packed_files, "_MIN_WEIGHT_BYTES", 0)
    with edgerun.load(bundle, cache=False) as engine:
        text = engine.generate("the", max_tokens=10).text
    foreign = tmp_path / "foreign"
    shutil.copytree(bundle, foreign)
    (foreign / "edge.json").unlink()
    edgerun.load(foreign).close()
    assert not (tmp_path / "cache").exists()
    with edgerun.load(bundle) as engine:
        assert engine.generate("the", max_tokens=10).text == text
    assert len(list((tmp_path / "cache" / "prepacked").iterdir())) == 1


SIZE = 9 << 20


@pytest.fixture(scope="module")
def content() -> bytes:
    return np.random.default_rng(0).bytes(SIZE)


@pytest.mark.parametrize("start", [0, SIZE // 3, SIZE - SIZE // 32])
def test_a_sample_notices_a_damaged_thirtysecond_anywhere(tmp_path: Path, content: bytes, start: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    write_record(tmp_path)
    check_folder(tmp_path)
    damaged = bytearray(content)
    damaged[start : start + SIZE // 32] = bytes(SIZE // 32)
    path.write_bytes(damaged)
    with pytest.raises(BundleError, match="is damaged"):
        check_folder(tmp_path)


@pytest.mark.parametrize("size", [0, 1, 5000, SIZE - 1])
def test_size_and_every_byte_of_a_small_file_are_compared(tmp_path: Path, content: bytes, size: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(content[:size])
    write_record(tmp_path)
    path.write_bytes(content[: size + 1])
    with pytest.raises(BundleError):
        check_folder(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1, "files": {}}', '{"format": 2, "files": {"a": 1}}'])
def test_a_damaged_record_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_bytes(b"1")
    write_record(tmp_path)
    check_folder(tmp_path, whole=True)
    (tmp_path / RECORD_NAME).write_text(text, encoding="utf-8")
    with pytest.raises(BundleError):
        check_folder(tmp_path)
