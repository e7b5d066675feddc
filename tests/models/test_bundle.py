"""Bundles and manifests: reading, writing, and errors of one clear line."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import edgerun.models.bundle
from edgerun import BundleError
from edgerun.models.bundle import Bundle, holds_only_bundle_files, open_bundle
from edgerun.models.find import bundled_folder, find_model
from edgerun.models.manifest import (
    VARIANT_CONTRACT,
    Architecture,
    Calibration,
    DeviceKind,
    DraftPairing,
    FileDigest,
    HeadKind,
    Manifest,
    Precision,
    VariantFile,
    WeightFormat,
)

MANIFEST = Manifest(
    architecture=Architecture("llama", 300, 64, 96, 2, 4, 2, 16, 256, True),
    weights={"layers.0.qkv": WeightFormat(4, 32), "head": WeightFormat(32)},
    bits_per_weight=5.5,
    files={"model.onnx": FileDigest(5, "ab")},
    parity={"mean_kl": 0.5},
    producer="p",
    command="c",
)
Change = Callable[[dict[str, Any]], Any]


def changed(change: Change) -> str:
    data = copy.deepcopy(json.loads(MANIFEST.to_json()))
    change(data)
    return json.dumps(data)


def put(path: str, value: object) -> Change:
    """Set one value; `/` goes into an object."""
    *parents, name = path.split("/")

    def change(data: dict[str, Any]) -> None:
        for parent in parents:
            data = data[parent]
        data[name] = value

    return change


def drop(*names: str) -> Change:
    return lambda data: [data.pop(name) for name in names]


def test_manifests_survive_json() -> None:
    assert Manifest.from_json(MANIFEST.to_json()) == MANIFEST
    assert Manifest.from_json(MANIFEST.to_json().encode()) == MANIFEST
    assert "draft" not in MANIFEST.to_json()
    own = DraftPairing(".", "d2t.npy", graph="draft.onnx", head=HeadKind.EAGLE)
    for draft in (DraftPairing("../small"), DraftPairing("draft", "d2t.npy"), DraftPairing("d", "e.npy", True), own):
        paired = dataclasses.replace(MANIFEST, draft=draft)
        assert Manifest.from_json(paired.to_json()) == paired
    assert "calibration" not in MANIFEST.to_json()
    calibrated = dataclasses.replace(MANIFEST, calibration=Calibration("a.txt", 9, 3, True), quality={"mean_kl": 0.1})
    assert Manifest.from_json(calibrated.to_json()) == calibrated


GPU_VARIANT = {"device": "gpu", "file": "model.onnx", "precision": "float32"}


def test_variants_survive_json() -> None:
    assert "variants" not in MANIFEST.to_json()
    variants = (
        VariantFile(DeviceKind.GPU, "model.onnx", Precision.FLOAT16, providers=("CUDAExecutionProvider",), plain=True),
        VariantFile(DeviceKind.NPU, "model.onnx", Precision.FLOAT16, width=4, context=512),
    )
    manifest = dataclasses.replace(MANIFEST, variants=variants)
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert json.loads(manifest.to_json())["variants"][1] == {
        "device": "npu",
        "file": "model.onnx",
        "precision": "float16",
        "width": 4,
        "context": 512,
        "contract": VARIANT_CONTRACT,
    }


@pytest.mark.parametrize("newer", [{"device": "tpu"}, {"precision": "float8"}, {"contract": VARIANT_CONTRACT + 1}])
def test_variants_of_a_newer_program_are_left_out(newer: dict[str, object]) -> None:
    manifest = Manifest.from_json(changed(put("variants", [{**GPU_VARIANT, **newer}, GPU_VARIANT])))
    assert manifest.variants == (VariantFile(DeviceKind.GPU, "model.onnx", Precision.FLOAT32),)


def test_unknown_fields_are_ignored_and_others_have_defaults() -> None:
    for change in (put("later", {"a": 1}), put("architecture/window", 5), put("weights/head/outliers", True)):
        assert Manifest.from_json(changed(change)) == MANIFEST
    manifest = Manifest.from_json(changed(drop("parity", "producer", "command")))
    assert (manifest.parity, manifest.producer, manifest.command) == ({}, "", "")


BAD: list[tuple[str | bytes, str]] = [
    ("", "it is not valid JSON: Expecting value"),
    ("[]", "it does not hold a JSON object"),
    ("[" * 100_000, "it is not valid JSON: it is nested too deeply"),
    (b"\xff\xfe", "it is not valid JSON: 'utf-8' codec"),
    ("{}", "it lacks architecture, weights, bits_per_weight, files"),
    (changed(drop("weights", "files")), "it lacks weights, files"),
    (changed(put("files", {})), "edge.json lacks files.model.onnx"),
    (changed(put("architecture", {"family": "llama", "heads": 1})), "it lacks architecture.vocab_size, architecture."),
    (changed(put("architecture", 3)), "it has architecture 3, which must be an object"),
    (changed(put("architecture/context", 1)), "context 1, which must be a whole number of at least 2"),
    (changed(put("architecture/context", "256")), "context '256', which must be a whole"),
    (changed(put("architecture/heads", 4.0)), "architecture.heads 4.0, which must be a whole"),
    (changed(put("architecture/layers", True)), "architecture.layers True, which must be a whole"),
    (changed(put("architecture/tied_head", "no")), "architecture.tied_head 'no', which must be true or false"),
    (changed(put("architecture/family", None)), "architecture.family None, which must be text"),
    (changed(put("weights", {})), "it lacks weights.head"),
    (changed(put("weights/head", {})), "it lacks weights.head.bits"),
    (changed(put("files/model.onnx", 5)), "it has files.model.onnx 5, which must be an object"),
    (changed(put("files/model.onnx/bytes", -1)), "files.model.onnx.bytes -1, which must be a whole"),
    (changed(put("bits_per_weight", float("nan"))), "bits_per_weight nan, which must be a finite number"),
    (changed(put("bits_per_weight", 10**400)), "which must be a finite number"),
    (changed(put("format", "1")), "it has format '1', which must be a whole number"),
    (changed(put("contract", 0)), "it has contract 0, which must be a whole number"),
    (changed(put("draft", {})), "it lacks draft.path"),
    (changed(put("draft", {"path": ""})), "it has draft.path '', which must be a path from the bundle's folder"),
    (changed(put("draft", {"path": "/etc"})), "it has draft.path '/etc', which must be a path from"),
    (changed(put("draft", {"path": "c:x"})), "it has draft.path 'c:x', which must be a path from"),
    (changed(put("draft", {"path": "..\\x"})), "which must be a path from the bundle's folder"),
    (changed(put("draft", {"path": "x", "d2t": "../y"})), "it has draft.d2t '../y', which must be the name of a file"),
    (changed(put("draft", {"path": "x", "d2t_offsets": 1})), "draft.d2t_offsets 1, which must be true or false"),
    (changed(put("draft", {"path": ".", "graph": "../g.onnx"})), "the name of a file in the bundle's own folder"),
    (changed(put("draft", {"path": "x", "graph": "g.onnx"})), "the name of a file in the bundle's own folder"),
    (changed(put("variants", {})), "it has variants {}, which must be a list of objects"),
    (changed(put("variants", [{"file": "x"}])), "it lacks variants.0.device, variants.0.precision"),
    (changed(put("variants", [{**GPU_VARIANT, "file": "x"}])), "has variants.0.file 'x', which files lacks"),
    (changed(put("variants", [{**GPU_VARIANT, "width": 0}])), "has variants.0.width 0, which must be a whole number"),
    (changed(put("calibration", {"origin": "a.txt"})), "it lacks calibration.tokens, calibration.held_out_tokens"),
    (changed(put("quality", {"mean_kl": "0"})), "it has quality.mean_kl '0', which must be a finite number"),
]


@pytest.mark.parametrize(("text", "message"), BAD, ids=[message[:50] for _, message in BAD])
def test_invalid_manifests_are_errors_of_one_line(tmp_path: Path, text: str | bytes, message: str) -> None:
    (tmp_path / "model.onnx").write_bytes(b"graph")
    (tmp_path / "edge.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(BundleError) as caught:
        open_bundle(tmp_path)
    assert message in str(caught.value).removeprefix(f"{tmp_path / 'edge.json'} cannot be read: ")
    assert str(caught.value).endswith("; export the model again")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{", "is not valid JSON: Expecting"),
        (b"\xff", "is not valid JSON: 'utf-8'"),
        (b"[" * 100_000, "is not valid JSON: it is nested too deeply"),
        (b"3", "does not hold a JSON object"),
    ],
)
def test_invalid_json_beside_the_graph_is_an_error(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "model.onnx").write_bytes(b"")
    (tmp_path / "config.json").write_bytes(data)
    bundle = Bundle(tmp_path, tmp_path / "model.onnx", None)
    with pytest.raises(BundleError, match=rf"config\.json {message}.*; restore it or export"):
        bundle.json_file("config.json")
    assert bundle.json_file("absent.json") == {}


@pytest.mark.parametrize("name", ["nothing", "x" * 5000, "a\0b", "nothing/" * 2000], ids=len)
def test_a_missing_model_is_an_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(BundleError, match=r"does not exist; give an \.onnx file or a model folder"):
        open_bundle(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "message"),
    [("", "the model's name is empty"), ("~no-such-user-of-this-machine/model", "does not exist.*")],
)
def test_invalid_names_are_errors(name: str, message: str) -> None:
    with pytest.raises(BundleError, match=rf"{message}; give an \.onnx file or a model folder"):
        find_model(name)


def test_names_are_paths_or_the_bundled_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert find_model("~/model") == find_model(Path("~/model")) == tmp_path / "model"
    if bundled_folder().is_dir():
        assert find_model(None) == bundled_folder()


def test_a_file_that_is_unreadable_or_not_a_graph_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes.txt").write_text("", encoding="utf-8")
    with pytest.raises(BundleError, match=r"notes\.txt is not an \.onnx file"):
        open_bundle(tmp_path / "notes.txt")
    (tmp_path / "model.onnx").write_bytes(b"graph")
    (tmp_path / "edge.json").write_text("{}", encoding="utf-8")

    def refuse(path: Path, max_bytes: int) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(edgerun.models.bundle, "read_regular", refuse)
    with pytest.raises(BundleError, match=r"edge\.json cannot be read: Permission denied; check its permissions"):
        open_bundle(tmp_path)


def test_a_folder_with_other_files_is_not_only_a_bundle(tmp_path: Path) -> None:
    for name in ("edge.json", "model.onnx", "model.onnx.data", "tokenizer.json", "chat_template.jinja"):
        (tmp_path / name).write_text("", encoding="utf-8")
        assert holds_only_bundle_files(tmp_path)
    (tmp_path / "thesis.txt").write_text("", encoding="utf-8")
    assert not holds_only_bundle_files(tmp_path)
    (tmp_path / "thesis.txt").unlink()
    for name in ("model_gpu.onnx", "model_gpu_fp16_plain.onnx", "model_npu_w4_c512.onnx", "model_npu.onnx.data"):
        (tmp_path / name).write_text("", encoding="utf-8")
        assert holds_only_bundle_files(tmp_path)
    draft = tmp_path / "draft"
    draft.mkdir()
    assert not holds_only_bundle_files(tmp_path)
    for name in ("edge.json", "d2t.npy"):
        (draft / name).write_text("", encoding="utf-8")
    assert holds_only_bundle_files(tmp_path)
    (draft / "thesis.txt").write_text("", encoding="utf-8")
    assert not holds_only_bundle_files(tmp_path)
    (draft / "thesis.txt").unlink()
    (tmp_path / "drafts").mkdir()
    assert not holds_only_bundle_files(tmp_path)
    (tmp_path / "drafts").rmdir()
    (tmp_path / "edge.json").unlink()
    assert not holds_only_bundle_files(tmp_path)
