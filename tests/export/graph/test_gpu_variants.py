"""`edge-run export --device gpu`: forms of the graph for GPUs in the bundle, and the graph that a GPU loads."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from edgerun.edge.cli.main import main
from edgerun.errors import BundleError, ExportError
from edgerun.export import ExportRecipe, export_model
from edgerun.export.graph.gpu_variants import write_gpu_variants
from edgerun.models.bundle import open_bundle
from edgerun.models.manifest import DeviceKind
from edgerun.models.onnx_file.wire import external_files
from edgerun.models.progress import silent
from edgerun.models.user_folders import cache_folder
from edgerun.runtime.devices.providers import Device
from edgerun.runtime.gpu_graph import rewriting
from edgerun.runtime.gpu_graph.rewriting import has_plain_form, variant_for
from edgerun.runtime.graph.session import SessionConfig
from support.layouts import LAYOUTS, write_layout
from support.tiny_models import write_bundle, write_checkpoint

FILES = ["model_gpu.onnx", "model_gpu_dml.onnx", "model_gpu_fp16.onnx", "model_gpu_fp16_plain.onnx"]
WEBGPU, CUDA, DIRECTML, OTHER = (
    SessionConfig(Device(f"{name}ExecutionProvider", DeviceKind.GPU)) for name in ("WebGpu", "CUDA", "Dml", "MIGraphX")
)
"""Devices by name only: no session is loaded on them."""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with graphs for GPUs, made by the command."""
    folder = tmp_path_factory.mktemp("gpu")
    checkpoint = write_checkpoint(folder / "checkpoint")
    assert main(["export", str(checkpoint), str(folder / "bundle"), "--block", "32", "--device", "gpu"]) == 0
    return folder / "bundle"


def test_a_bundle_has_a_graph_for_every_provider(exported: Path) -> None:
    assert sorted(path.name for path in exported.glob("model_*")) == FILES
    for name in FILES:
        assert external_files(exported / name) == ["model.onnx.data"]
        assert (exported / name).stat().st_size < 40_000
    bundle = open_bundle(exported)
    assert variant_for(bundle, WEBGPU, cache=False) == exported / "model_gpu.onnx"
    assert variant_for(bundle, CUDA, cache=False) == exported / "model_gpu_fp16.onnx"
    assert variant_for(bundle, CUDA, cache=False, plain=True) == exported / "model_gpu_fp16_plain.onnx"
    assert variant_for(bundle, DIRECTML, cache=False) == exported / "model_gpu_dml.onnx"
    assert isinstance(variant_for(bundle, OTHER, cache=False), bytes)
    assert [has_plain_form(each) for each in (WEBGPU, CUDA, DIRECTML, OTHER)] == [False, True, False, False]


def test_inspect_shows_the_graphs(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(exported), "--json"]) == 0
    variants = json.loads(capsys.readouterr().out)["variants"]
    assert {
        "device": "gpu",
        "file": "model_gpu_fp16_plain.onnx",
        "precision": "float16",
        "providers": ["CUDAExecutionProvider"],
        "plain": True,
        "contract": 1,
    } in variants
    assert main(["inspect", str(exported)]) == 0
    assert "model_gpu.onnx: GPU, float32, WebGpu" in capsys.readouterr().out


def test_a_damaged_graph_is_refused(exported: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(exported, tmp_path / "copy")
    (copy / "model_gpu.onnx").write_bytes((copy / "model_gpu.onnx").read_bytes()[:-1] + b"\0")
    with pytest.raises(BundleError, match=r"model_gpu\.onnx is damaged"):
        open_bundle(copy)


def test_models_of_other_tools_get_the_graphs_too(tmp_path: Path) -> None:
    source = write_layout(tmp_path / "source", LAYOUTS["genai"])
    result = export_model(source, tmp_path / "bundle", ExportRecipe(device="gpu"))
    assert sorted(name for name in result.file_bytes if name.startswith("model_")) == FILES


def test_a_form_that_a_model_lacks_is_named(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path, "gpt_oss", weights=ExportRecipe(device="gpu"))
    assert sorted(path.name for path in bundle.glob("model_*")) == [name for name in FILES if "dml" not in name]
    (note,) = write_gpu_variants(bundle, silent)
    assert note == "no graph was written for DmlExecutionProvider: the provider has no kernel for QMoE"


def test_a_form_that_computes_something_else_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = write_bundle(tmp_path)
    monkeypatch.setattr(rewriting, "rotate_outside", _without_rotation)
    with pytest.raises(ExportError, match=r"model_gpu\.onnx computes something else than model\.onnx: logits"):
        write_gpu_variants(bundle, silent)


def _without_rotation(editor: rewriting.GraphEditor) -> None:
    for each in editor.graph.node:
        if each.op_type == "GroupQueryAttention":
            for attribute in each.attribute:
                if attribute.name == "do_rotary":
                    attribute.i = 0
            each.input[7] = each.input[8] = each.input[9] = ""


def test_a_graph_that_was_made_at_load_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    bundle = open_bundle(write_bundle(tmp_path))
    made = variant_for(bundle, WEBGPU, cache=True)
    (cached,) = (cache_folder() / "gpu-graphs").glob("*/*.onnx")
    assert isinstance(made, bytes)
    with monkeypatch.context() as patched:
        patched.setattr(rewriting, "gpu_graph", lambda *_, **__: pytest.fail("it was made again"))
        assert variant_for(bundle, WEBGPU, cache=True) == made
    cached.write_bytes(cached.read_bytes()[:-1] + b"\0")
    assert variant_for(bundle, WEBGPU, cache=True) == made
    assert variant_for(bundle, CUDA, cache=True) != made
    assert len(list((cache_folder() / "gpu-graphs").glob("*/*.onnx"))) == 2


def test_a_graph_of_an_unknown_kind_is_used_as_it_is(tmp_path: Path) -> None:
    folder = write_layout(tmp_path, LAYOUTS["optimum"])
    bundle = open_bundle(folder)
    assert variant_for(bundle, WEBGPU, cache=False) == bundle.graph
    assert variant_for(replace(bundle, manifest=None), CUDA, cache=False) == bundle.graph
