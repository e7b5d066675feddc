"""Setups that would silently run on the CPU, or fail with the text of a library, end with one line that says why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgerun.models.graph_variant import DeviceKind
from edgerun.runtime.devices.providers import Device, cpu_device
from edgerun.runtime.graph.device_loading import Assignments, load_on_device
from edgerun.runtime.graph.ort import session_options
from support.devices import require_qnn, require_webgpu, run_json_script, webgpu_environment, without_software_vulkan

PROGRAM = """
import json, sys
from pathlib import Path
import numpy as np
from edgerun.errors import DeviceError
from edgerun.models.graph_variant import DeviceKind
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

def tell(action):
    try:
        print(json.dumps(str(action())))
    except DeviceError as error:
        print(json.dumps(str(error)))
"""


def told(action: str, environment: dict[str, str] | None = None) -> str:
    return str(run_json_script(f"{PROGRAM}\n{action}", environment=environment))


def test_every_node_is_listed_under_its_provider() -> None:
    require_webgpu()
    assert told("tell(lambda: json.dumps(load(choose_device('gpu'))[1].by_provider))") == (
        '{"WebGpuExecutionProvider": 1}'
    )


def test_a_name_that_would_silently_run_on_the_cpu() -> None:
    require_webgpu()
    # Asking ONNX Runtime by name, without the handle of a device, gives a session on the CPU.
    named = "import warnings; warnings.simplefilter('ignore'); registered_plugins()\n"
    named += "tell(lambda: load(Device('WebGpuExecutionProvider', DeviceKind.GPU))[0].get_providers())"
    said = told(named, without_software_vulkan())
    assert said.startswith("WebGpu is not usable here, ONNX Runtime would run on the CPU instead; no Vulkan GPU driver")


def test_a_vulkan_driver_without_a_usable_adapter() -> None:
    require_webgpu()
    environment = {**webgpu_environment(), "VK_ICD_FILENAMES": "/nonexistent.json"}
    said = told("tell(lambda: load(choose_device('gpu')))", environment)
    assert said.startswith("WebGpu cannot start: the Vulkan driver offers no usable adapter; ")


def test_an_adapter_without_16_bit_floats() -> None:
    require_webgpu()
    run = """
def run():
    device = choose_device("gpu")
    session, _ = load(device, np.float16)
    ones = np.ones(4, np.float16)
    try:
        return session.run(None, {"a": ones, "b": ones})
    except ORT_ERRORS as error:
        raise device_failure(error, device, Path("model.onnx")) from error
tell(run)
"""
    assert "WebGpu cannot run model.onnx: its adapter has no 16-bit floats (f16)" in told(run)


def test_a_device_that_takes_nothing_is_refused() -> None:
    require_webgpu()
    # WebGPU has no kernel for 64-bit floats; the CPU has.
    assert "WebGpu runs none of the 1 nodes of model.onnx" in told(
        "tell(lambda: load(choose_device('gpu'), np.float64))"
    )


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


def test_nothing_is_recorded_on_the_cpu(tiny_bundle: Path) -> None:
    graph = tiny_bundle / "model.onnx"
    session, assignments = load_on_device(str(graph), session_options(), cpu_device(), graph)
    assert session.get_providers() == ["CPUExecutionProvider"]
    assert assignments == Assignments()


@pytest.mark.parametrize(
    ("on_cpu", "whole"),
    [({}, True), ({"Shape": 2, "Gather": 1}, True), ({"MatMulNBits": 1}, False), ({"Cast": 1, "QMoE": 1}, False)],
)
def test_a_device_has_the_whole_graph_if_it_runs_what_reads_weights(on_cpu: dict[str, int], whole: bool) -> None:
    assignments = Assignments({"A": 3, "CPUExecutionProvider": sum(on_cpu.values())}, on_cpu)
    assert assignments.whole is whole
    assert json.dumps(assignments.on_cpu_text()) == json.dumps(
        ", ".join(f"{count} {operator}" for operator, count in sorted(on_cpu.items()))
    )


def test_devices_are_told_apart_by_provider_and_index() -> None:
    first, second = Device("A", DeviceKind.GPU), Device("A", DeviceKind.GPU, index=1)
    assert first != second
    assert (str(second), second.name) == ("A:1", "A:1")
