"""Errors for damaged, missing or foreign files, and for weights that are NaN, of which no answer comes."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import edgerun
from edgerun import BundleError, EdgeError, Speculation, TemplateError
from edgerun.export import INT8
from support.tiny_models import write_bundle


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("generation_config.json", '{"temperature": "hot"}', "temperature is 'hot'; it must be a number"),
        ("generation_config.json", '{"top_p": 7}', "top-p is 7.0; it must be above 0"),
        ("generation_config.json", '{"top_k": Infinity}', "top_k is inf; it must be a number"),
        ("generation_config.json", '{"temperature": 1' + "0" * 400 + "}", "it must be a number"),
        ("tokenizer_config.json", '{"eos_token": 5}', "tokenizer_config.json: eos_token is 5; it must be text"),
        ("tokenizer_config.json", '{"chat_template": 5}', "chat_template in tokenizer_config.json is not text"),
        ("config.json", "[" * 100_000, "config.json"),
        ("generation_config.json", '{"eos_token_id": 300}', "eos_token_id is 300; it must be an id"),
        ("generation_config.json", "[]", "does not hold a JSON object"),
        ("generation_config.json", "{", "is not valid JSON"),
        ("tokenizer.json", "{}", "tokenizer.json cannot be read"),
        ("model.onnx", "just text", "model.onnx is not an ONNX model"),
        ("chat_template.jinja", "{% if %}", "the chat template is not valid"),
        ("chat_template.jinja", "\udcff\udcfe", "chat_template.jinja cannot be read"),
    ],
)
def test_errors_name_a_damaged_file_beside_the_graph(
    editable_bundle: Path, name: str, content: str, message: str
) -> None:
    (editable_bundle / name).write_text(content, encoding="utf-8", errors="surrogateescape")
    with pytest.raises((BundleError, TemplateError)) as caught:
        edgerun.load(editable_bundle)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_of_another_model_is_refused(editable_bundle: Path, tmp_path: Path) -> None:
    larger = write_bundle(tmp_path / "larger", vocab_size=301)
    shutil.copy(larger / "tokenizer.json", editable_bundle)
    with pytest.raises(BundleError, match="has token ids up to 300, but the model's vocabulary has 300"):
        edgerun.load(editable_bundle)


def test_an_error_names_a_path_without_a_tokenizer(tiny_bundle: Path, tmp_path: Path) -> None:
    for path, message in (
        (tmp_path / "absent", r"absent does not exist; give a tokenizer\.json, or a folder with one"),
        (tmp_path, r"holds no tokenizer\.json; give a tokenizer\.json, or a folder with one"),
        (tiny_bundle / "edge.json", r"edge\.json cannot be read: .*; give the tokenizer\.json of this model"),
    ):
        with pytest.raises(BundleError, match=message):
            edgerun.load(tiny_bundle, tokenizer=path)


@pytest.mark.skipif(sys.platform != "linux", reason="file names are text elsewhere")
def test_a_path_that_is_not_utf8_is_refused(editable_bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"m.* is not UTF-8, which ONNX Runtime cannot open; rename it"):
        edgerun.load(editable_bundle.rename(tmp_path / "m\udcff"))


def test_errors_name_missing_files(tiny_bundle: Path, editable_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("x", encoding="utf-8")
    (editable_bundle / "tokenizer.json").unlink()
    for path, message in (
        (tmp_path / "nothing", "does not exist; give an .onnx file or a model folder"),
        (tmp_path / "empty", r"holds no \.onnx file; give an .onnx file or a model folder"),
        (tiny_bundle.parent / "checkpoint", "it looks like a checkpoint: run edge-run export"),
        (tmp_path / "notes.txt", "is not an .onnx file"),
        (editable_bundle, r"holds no tokenizer\.json; put the model's tokenizer\.json beside the graph"),
    ):
        with pytest.raises(BundleError, match=message):
            edgerun.load(path)


def test_a_model_with_a_refused_chat_template_continues_plain_text(editable_bundle: Path) -> None:
    (editable_bundle / "chat_template.jinja").write_text("{{ messages[0].content | wordwrap(1) }}", encoding="utf-8")
    with edgerun.load(editable_bundle) as engine:
        assert engine.generate("a", raw=True, max_tokens=2).text
        with pytest.raises(TemplateError, match="the filter 'wordwrap' is not allowed in a chat template"):
            engine.generate("a")


def test_a_model_without_a_chat_template_only_continues_plain_text(editable_bundle: Path) -> None:
    file = editable_bundle / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    del config["chat_template"]
    file.write_text(json.dumps(config), encoding="utf-8")
    with edgerun.load(editable_bundle) as engine:
        assert engine.generate("a", raw=True, max_tokens=2).text
        with pytest.raises(TemplateError, match=r"^m has no chat template; continue plain text: --raw -p TEXT"):
            engine.generate("a")
        with pytest.raises(TemplateError, match="has no chat template"):
            engine.session()


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data", "tokenizer.json"])
def test_a_damaged_bundle_is_refused_by_its_checksums(tiny_bundle: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "m"
    shutil.copytree(tiny_bundle, folder)
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(BundleError, match="is damaged: its checksum is not the one recorded"):
        edgerun.load(folder)
    (folder / name).write_bytes(data[:-1])
    with pytest.raises(BundleError, match=r"is damaged: \d+ bytes, \d+ expected; copy the bundle again"):
        edgerun.load(folder)
    (folder / name).unlink()
    with pytest.raises(BundleError, match=r"is missing|holds no \.onnx file"):
        edgerun.load(folder)


def test_a_large_file_is_hashed_again_when_it_changes(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path, hidden_size=512, intermediate_size=2048)
    weights = bundle / "model.onnx.data"
    assert weights.stat().st_size > 8 << 20
    edgerun.load(bundle).close()
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    time.sleep(0.01)  # for file systems that keep coarse times
    weights.write_bytes(data)
    with pytest.raises(BundleError, match="is damaged"):
        edgerun.load(bundle)


def test_external_data_outside_the_bundle_is_refused(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    folder = write_bundle(tmp_path, weights=INT8)
    (folder / "edge.json").unlink()
    shutil.move(folder / "model.onnx.data", tmp_path / "elsewhere.data")
    for location in ("../elsewhere.data", str(tmp_path / "elsewhere.data")):
        model = onnx.load(folder / "model.onnx", load_external_data=False)
        for tensor in model.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = location
        (folder / "model.onnx").write_bytes(model.SerializeToString())
        with pytest.raises(BundleError, match=r"model\.onnx keeps weights in '.*', outside its folder"):
            edgerun.load(folder)


@pytest.fixture
def damaged(editable_bundle: Path) -> Path:
    weights = editable_bundle / "model.onnx.data"
    values = np.fromfile(weights, np.float32)
    values[np.isfinite(values)] = np.nan
    weights.write_bytes(values.tobytes())
    return editable_bundle


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 1.0, "top_k": 5, "seed": 1},
        {"speculation": Speculation.OFF},
        {"exact": True},
    ],
)
def test_no_answer_comes_of_weights_that_are_nan(damaged: Path, options: dict[str, object]) -> None:
    with edgerun.load(damaged) as engine:
        for _ in range(2):
            with pytest.raises(EdgeError, match="the model computes NaN logits; its weights are damaged"):
                engine.generate("the", raw=True, **options)
