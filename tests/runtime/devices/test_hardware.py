"""Hardware is what the system's own lists show; nothing is made up from less."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from edgerun.models.manifest import DeviceKind
from edgerun.runtime.devices.hardware import (
    Hardware,
    linux_hardware,
    seen_hardware,
    unused_hardware,
    windows_hardware,
)
from edgerun.runtime.devices.packages import Plugin, missing_device
from edgerun.runtime.devices.providers import Device, cpu_device, device_identity
from support.devices import require_webgpu, run_json_script, webgpu_environment

GPU, NPU = DeviceKind.GPU, DeviceKind.NPU


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="ascii")
    return root


@pytest.mark.parametrize(
    ("files", "seen"),
    [
        ({}, []),
        ({"sys/class/drm/card0/device/vendor": "0x10de\n"}, ["NVIDIA GPU"]),
        ({"sys/class/drm/card1/device/vendor": "0x1002\n", "sys/class/drm/card1-DP-1/status": "x"}, ["AMD GPU"]),
        ({"sys/class/drm/card0-DP-1/device/vendor": "0x1002\n"}, []),
        # The display adapter of a virtual machine.
        ({"sys/class/drm/card0/device/vendor": "0x1234\n"}, []),
        ({"sys/class/drm/card0/device/vendor": "not a number"}, []),
        ({"sys/class/drm/card0/device/uevent": "DRIVER=v3d\nOF_NAME=gpu\n"}, ["Broadcom GPU"]),
        ({"sys/class/drm/card0/device/uevent": "DRIVER=simple-framebuffer\n"}, []),
        ({"sys/class/accel/accel0/device/vendor": "0x8086\n"}, ["Intel NPU"]),
        ({"sys/class/accel/accel0/device/vendor": "0x1234\n"}, []),
        ({"dev/nvidia0": "", "dev/nvidiactl": "", "dev/nvidia-uvm": ""}, ["NVIDIA GPU"]),
        ({"dev/nvidiactl": ""}, []),
        ({"dev/nvidia0": "", "sys/class/drm/card0/device/vendor": "0x10de\n"}, ["NVIDIA GPU"]),
        (
            {"sys/class/drm/card0/device/vendor": "0x8086\n", "sys/class/accel/accel0/device/vendor": "0x8086\n"},
            ["Intel GPU", "Intel NPU"],
        ),
    ],
)
def test_what_linux_shows(tmp_path: Path, files: dict[str, str], seen: list[str]) -> None:
    assert [str(each) for each in linux_hardware(write(tmp_path, files))] == seen


@pytest.mark.parametrize(
    ("hardware_id", "kind", "seen"),
    [
        (r"pci\ven_10de&dev_2684", GPU, ["NVIDIA GPU"]),
        (r"PCI\VEN_8086&DEV_7D1D", NPU, ["Intel NPU"]),
        (r"acpi\qcom0d0a", NPU, ["Qualcomm NPU"]),
        (r"root\basicdisplay", GPU, []),
        (r"pci\ven_15ad&dev_0405", GPU, []),
    ],
)
def test_what_windows_shows(hardware_id: str, kind: DeviceKind, seen: list[str]) -> None:
    adapter = {"DriverDesc": "An adapter", "MatchingDeviceId": hardware_id, "DriverVersion": "1"}
    assert [str(each) for each in windows_hardware([adapter], kind)] == seen


def test_this_machine_shows_what_its_lists_hold() -> None:
    for hardware in seen_hardware():
        assert hardware.kind is not DeviceKind.CPU
        assert hardware.vendor


def test_packages_for_hardware() -> None:
    assert Hardware(GPU, "NVIDIA", "").installs[:2] == (
        "pip install 'edge-run[webgpu]'",
        "pip install 'onnxruntime-gpu[cuda,cudnn]'",
    )
    assert Hardware(NPU, "Intel", "").installs == ("pip install onnxruntime-ep-openvino",)
    assert Hardware(NPU, "Qualcomm", "").installs == ("pip install 'edge-run[qnn]'",)
    assert Hardware(NPU, "AMD", "").installs == ()


def test_hardware_is_unused_until_a_device_runs_on_it() -> None:
    seen = [Hardware(GPU, "NVIDIA", ""), Hardware(NPU, "Intel", "")]
    assert unused_hardware(seen, [cpu_device()]) == seen
    simulated = Device("WebGpuExecutionProvider", GPU, "", simulated=True)
    assert unused_hardware(seen, [cpu_device(), simulated]) == seen
    webgpu = Device("WebGpuExecutionProvider", GPU, "NVIDIA Corporation")
    assert unused_hardware(seen, [cpu_device(), webgpu]) == seen[1:]
    assert unused_hardware(seen, [Device("CUDAExecutionProvider", GPU)]) == seen[1:]
    assert unused_hardware(seen, [Device("WebGpuExecutionProvider", GPU, "AMD")]) == seen


@pytest.mark.parametrize(
    ("wanted", "plugins", "said"),
    [
        ("openvino", [Plugin("OpenVINOExecutionProvider", "onnxruntime_ep_openvino", "1.8")], "needs Intel hardware"),
        ("qnn", [Plugin("QNNExecutionProvider", "onnxruntime_qnn", "2.7")], "needs a Snapdragon NPU"),
        ("npu", [Plugin("OpenVINOExecutionProvider", "onnxruntime_ep_openvino", "1.8")], "needs Intel hardware"),
        ("npu", [], "no installed package finds a NPU here"),
        ("webgpu", [], "pip install 'edge-run[webgpu]'"),
        ("webgpu", [Plugin("", "onnxruntime_ep_webgpu", "0.4", "no such symbol")], "cannot be loaded: no such symbol"),
        ("coreml", [], "CoreML needs a Mac"),
        ("toaster", [], ""),
    ],
)
def test_what_is_missing(wanted: str, plugins: list[Plugin], said: str) -> None:
    found = missing_device(wanted, plugins)
    assert said in found
    assert bool(found) is bool(said)


def test_results_on_a_device_depend_on_its_plugin_and_driver(tmp_path: Path) -> None:
    require_webgpu()
    program = (
        "import json\n"
        "from edgerun.runtime.devices.providers import device_identity\n"
        "from edgerun.runtime.devices.providers import choose_device\n"
        "print(json.dumps(device_identity(choose_device('webgpu'))))"
    )
    environment = webgpu_environment()
    first = run_json_script(program)
    assert first[0] == "WebGpuExecutionProvider"
    assert version("onnxruntime-ep-webgpu") in first
    assert run_json_script(program) == first
    other_driver = tmp_path / "driver.json"
    other_driver.write_bytes(Path(environment["VK_ICD_FILENAMES"]).read_bytes())
    assert run_json_script(program, environment={**environment, "VK_ICD_FILENAMES": str(other_driver)}) != first
    assert device_identity(cpu_device()) == ("CPUExecutionProvider",)
