"""Setups that would silently run on the CPU, or fail with the text of a library, end with one line that says why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from edgerun.models.manifest import DeviceKind
from edgerun.runtime.devices.providers import Device
from edgerun.runtime.graph.device_loading import on_cpu_text, runs_whole
from support.devices import (
    require_gpu,
    require_qnn,
    require_webgpu,
    run_json_script,
    webgpu_environment,
    without_software_vulkan,
)
from support.shared_data import data_path

PROGRAM = """
import json, sys, warnings
from pathlib import Path
import numpy as np
warnings.simplefilter('ignore')
from edgerun.errors import DeviceError
from edgerun.models.manifest import DeviceKind
from edgerun.models.onnx_file.model_messages import GraphProto, model, node, value_info
from edgerun.runtime.devices.providers import Device, choose_device, registered_plugins
from edgerun.runtime.graph.device_loading import device_failure, load_on_device
from edgerun.runtime.graph.ort import ORT_ERRORS, session_options

def add(dtype=np.float32, operator="Add"):
    values = [value_info(name, dtype, [4]) for name in "abc"]
    nodes = [node(operator, ["a", "b"], ["c"])]
    return model(GraphProto(name="g", node=nodes, input=values[:2], output=values[2:]), opset=21).SerializeToString()

def load(device, dtype=np.float32):
    return load_on_device(add(dtype), session_options(), device, Path("model.onnx"))

def run(device, dtype):
    session, _ = load(device, dtype)
    ones = np.ones(4, dtype)
    try:
        return session.run(None, {"a": ones, "b": ones})
    except ORT_ERRORS as error:
        raise device_failure(error, device, Path("model.onnx")) from error

def tell(action):
    try:
        print(json.dumps(str(action())))
    except DeviceError as error:
        print(json.dumps(str(error)))
"""


def told(action: str, environment: dict[str, str] | None = None) -> str:
    return str(run_json_script(f"{PROGRAM}\n{action}", environment=environment))


@pytest.mark.parametrize(
    ("action", "environment", "said"),
    [
        (
            "[load(choose_device('gpu'))[1], load(choose_device('gpu'))[0].get_providers()]",
            None,
            "[{}, ['WebGpuExecutionProvider'",
        ),
        # Asking ONNX Runtime by name, without the handle of a device, gives a session on the CPU.
        (
            "[registered_plugins(), load(Device('WebGpuExecutionProvider', DeviceKind.GPU))]",
            without_software_vulkan,
            "WebGpu is not usable here, ONNX Runtime would run on the CPU instead; no Vulkan GPU driver",
        ),
        (
            "load(choose_device('gpu'))",
            lambda: {**webgpu_environment(), "VK_ICD_FILENAMES": "/nonexistent.json"},
            "WebGpu cannot start: the Vulkan driver offers no usable adapter; ",
        ),
        # WebGPU has no kernel for 64-bit floats; the CPU has.
        ("load(choose_device('gpu'), np.float64)", None, "WebGpu runs none of the 1 nodes of model.onnx"),
        (
            "run(choose_device('gpu'), np.float16)",
            None,
            "WebGpu cannot run model.onnx: its adapter has no 16-bit floats (f16)",
        ),
    ],
    ids=["by provider", "by name", "no adapter", "no nodes", "no float16"],
)
def test_what_becomes_of_a_graph_on_webgpu(
    action: str, environment: Callable[[], dict[str, str]] | None, said: str
) -> None:
    require_webgpu()
    assert said in told(f"tell(lambda: {action})", None if environment is None else environment())


def test_an_npu_that_does_not_take_the_whole_graph_is_refused() -> None:
    require_qnn()
    said = told("tell(lambda: load(choose_device('npu'), np.float64))", {})
    assert "QNN cannot run all of model.onnx; export the model for it" in said


@pytest.mark.parametrize(("option", "is_read"), [("enableInt64", True), ("enableInt65", False)])
def test_options_of_webgpu_are_those_that_its_plugin_reads(option: str, is_read: bool) -> None:
    require_webgpu()
    # Unknown options are ignored, so a value that no option allows shows whether the name is known.
    said = told(f"""
import onnxruntime as ort
def ask():
    device, options = choose_device("gpu"), session_options()
    assert {is_read} == ({option!r} in device.provider_options)
    options.add_provider_for_devices([device.handle], {{{option!r}: "nonsense"}})
    try:
        return ort.InferenceSession(add(), options).get_providers()[0]
    except ORT_ERRORS as error:
        return "refused"
tell(ask)
""")
    assert said == ("refused" if is_read else "WebGpuExecutionProvider")


@pytest.mark.parametrize(
    ("on_cpu", "whole"),
    [({}, True), ({"Shape": 2, "Gather": 1}, True), ({"MatMulNBits": 1}, False), ({"Cast": 1, "QMoE": 1}, False)],
)
def test_a_device_has_the_whole_graph_if_it_runs_what_reads_weights(on_cpu: dict[str, int], whole: bool) -> None:
    assert runs_whole(on_cpu) is whole
    assert on_cpu_text(on_cpu) == ", ".join(f"{count} {name}" for name, count in sorted(on_cpu.items()))


def test_devices_are_told_apart_by_provider_and_index() -> None:
    first, second = Device("A", DeviceKind.GPU), Device("A", DeviceKind.GPU, index=1)
    assert first != second
    assert (str(second), second.name) == ("A:1", "A:1")


# Passes and caches on a GPU: WebGPU, over a Vulkan driver in software, and CUDA where it is

PROGRAMS = Path(__file__).resolve().parents[2] / "support" / "device_programs.py"
BEST = 64
"""Number of the best logits that the graph ranks."""
LIMITS = {"webgpu": (1e-4, 1e-3), "cuda": (0.05, 0.1)}
"""Differences of slots and of logits from the CPU's, in float32 and in float16."""


def check_rounds(bundle: Path, rounds: int, gpu: str = "webgpu") -> None:
    found = run_json_script(PROGRAMS, "compare_rounds", bundle, rounds, gpu, environment=require_gpu(gpu))
    assert found["rounds"] == rounds
    assert found["moves"] > rounds / 10
    assert found["on_cpu"] == {}
    most_of_slots, most_of_logits = LIMITS[gpu]
    assert found["slots"] < most_of_slots
    assert found["logits"] < most_of_logits
    assert found["capacities"][:3] == [16, 32, 64]
    assert found["best_equal"]
    assert found["best"] == BEST
    # Ids of 8 bytes and logits of 4, instead of the whole vocabulary.
    assert found["few_bytes"] == BEST * 12


@pytest.mark.parametrize("gpu", LIMITS)
def test_trees_leave_the_cache_of_sequential_decoding(tiny_bundle: Path, gpu: str) -> None:
    check_rounds(tiny_bundle, 50, gpu)


@pytest.mark.nightly
def test_many_trees_leave_the_cache_of_sequential_decoding(tmp_path: Path) -> None:
    tiny = pytest.importorskip("support.tiny_models", reason="needs the export extra")
    check_rounds(tiny.write_bundle(tmp_path, hidden_size=256, num_attention_heads=4, num_key_value_heads=2), 1000)


@pytest.mark.nightly
def test_trees_of_a_quantized_model_leave_the_cache_of_sequential_decoding(tmp_path: Path) -> None:
    export = pytest.importorskip("edgerun.export", reason="needs the export extra")
    source = data_path("weights/stories260K-hf")
    check_rounds(export.export_checkpoint(source, tmp_path / "bundle", export.ExportRecipe(export.INT4)).bundle, 50)
