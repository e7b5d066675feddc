"""Devices of plugins: found once, named with an index, and refused with a sentence where something is missing."""

from __future__ import annotations

import pytest

from edgerun.errors import DeviceError
from edgerun.models.manifest import DeviceKind
from edgerun.runtime.devices.providers import Device, choose_device, cpu_device, preferred_first
from support.devices import (
    require_python,
    require_qnn,
    require_webgpu,
    run_json_script,
    run_script,
    without_software_vulkan,
)

LISTING = """
import json
from concurrent.futures import ThreadPoolExecutor
from edgerun.runtime.devices.providers import available_devices
with ThreadPoolExecutor(8) as threads:
    *_, found = threads.map(lambda _: available_devices(), range(8))
print(json.dumps([[d.name, str(d), d.kind.value, d.simulated, d.memory, bool(d.plugin_version)] for d in found]))
"""
ASKING = """
import sys
from edgerun.errors import DeviceError
from edgerun.runtime.devices.providers import choose_device
for name in sys.argv[1:]:
    try:
        print(choose_device(name).name)
    except DeviceError as error:
        print(error)
"""
WITH_CUDA = """
from edgerun.runtime.devices.providers import unusable_providers
import onnxruntime as ort
ort.get_available_providers = lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"]
loaded = []
ort.preload_dlls = lambda: (loaded.append("preloaded"), print("Failed to load libcublas.so.13"))
print(unusable_providers(), unusable_providers(), loaded)
"""
REGISTERED_BEFORE = """
import sys
import onnxruntime as ort
import onnxruntime_ep_webgpu as plugin
ort.register_execution_provider_library(sys.argv[1], plugin.get_library_path())
"""


def test_a_provider_for_one_make_of_gpus_comes_before_webgpu_and_hardware_before_software() -> None:
    simulated = Device("QNNExecutionProvider", DeviceKind.NPU, simulated=True)
    webgpu, cuda = (Device(f"{name}ExecutionProvider", DeviceKind.GPU) for name in ("WebGpu", "CUDA"))
    npu = Device("OpenVINOExecutionProvider", DeviceKind.NPU)
    assert preferred_first([simulated, webgpu, cuda, npu, cpu_device()]) == [cpu_device(), cuda, npu, webgpu, simulated]


def test_the_cpu_registers_no_plugin() -> None:
    names = run_json_script(
        "import json, sys\n"
        "from edgerun.runtime.devices.providers import choose_device\n"
        "choose_device('auto'), choose_device('cpu')\n"
        "import onnxruntime as ort\n"
        "print(json.dumps([d.ep_name for d in ort.get_ep_devices()] + [m for m in sys.modules if '_ep_' in m]))",
        environment={"ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER": "1"},
    )
    assert names == ["CPUExecutionProvider"]


def test_webgpu_is_listed_once_also_by_many_threads() -> None:
    require_webgpu()
    devices = [device for device in run_json_script(LISTING) if device[0].startswith("WebGpu")]
    assert devices == [["WebGpu:0", "WebGpu", "gpu", True, ["webgpu", 0], True]]


def test_qualcomms_simulator_is_a_simulated_npu() -> None:
    require_qnn()
    devices = [device for device in run_json_script(LISTING, environment={}) if device[0].startswith("QNN")]
    assert devices == [["QNN:0", "QNN", "npu", True, None, True]]


@pytest.mark.parametrize("name", ["WebGpuExecutionProvider", "a name of the program's own"])
def test_a_plugin_that_the_program_registered_is_not_registered_again(name: str) -> None:
    require_webgpu()
    devices = run_json_script(REGISTERED_BEFORE + LISTING, name)
    assert [device[0] for device in devices if device[2] == "gpu"] == ["WebGpu:0"]


def test_a_plugin_without_a_device_may_have_been_registered_before() -> None:
    require_webgpu()
    devices = run_json_script(
        REGISTERED_BEFORE + LISTING, "WebGpuExecutionProvider", environment=without_software_vulkan()
    )
    assert not [device for device in devices if device[2] == "gpu"]


def test_names_of_a_device() -> None:
    require_webgpu()
    names = ("gpu", "GPU", "webgpu", "WebGpuExecutionProvider", "webgpu:0", "gpu:0")
    assert run_script(ASKING, *names).split() == ["WebGpu:0"] * len(names)


def test_a_device_that_is_not_there() -> None:
    require_webgpu()
    wanted = {
        "webgpu:1": "no device 'webgpu:1'; it has WebGpu:0",
        "webgpu:x": "the part after the colon must be a number",
        "openvino": "install its package: pip install onnxruntime-ep-openvino",
        "cuda": "install its package: pip install 'onnxruntime-gpu[cuda,cudnn]'",
        "toaster": "available: CPU, ",
    }
    for answer, said in zip(run_script(ASKING, *wanted).splitlines(), wanted.values(), strict=True):
        assert said in answer


def test_a_plugin_without_hardware() -> None:
    require_webgpu()
    answer = run_script(ASKING, "webgpu", environment=without_software_vulkan())
    assert answer.strip().startswith("this machine has no device 'webgpu'; no Vulkan GPU driver was found")


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ("cuda", "no device 'cuda'; CUDA 13 and cuDNN 9 were not found; pip install 'onnxruntime-gpu[cuda,cudnn]'"),
        ("tensorrt", "no device 'tensorrt'; available: CPU"),
    ],
)
def test_cuda_that_would_be_the_cpu(request_: str, said: str) -> None:
    answer = run_script(ASKING, request_, environment={}, interpreter=require_python("EDGERUN_ONNXRUNTIME_GPU_PYTHON"))
    assert answer.startswith(f"this machine has {said}")


def test_cuda_of_python_packages_is_loaded_once_and_silently() -> None:
    said = run_script(WITH_CUDA, environment={"CUDA_VISIBLE_DEVICES": ""})
    assert said == "['CUDAExecutionProvider'] ['CUDAExecutionProvider'] ['preloaded']\n"


def test_the_cpu_needs_no_plugin() -> None:
    assert choose_device("CPUExecutionProvider") == choose_device("cpu:0") == choose_device("auto") == cpu_device()
    assert choose_device("cpu").kind is DeviceKind.CPU
    with pytest.raises(DeviceError, match="no device 'cpu:3'"):
        choose_device("cpu:3")
