"""Devices other than the CPU in tests: what is at hand, and processes that run on it.

Registering a plugin changes ONNX Runtime for the rest of a process, so tests of devices run in processes of their own.
WebGPU runs on SwiftShader, a Vulkan driver in software that comes with Chromium; Qualcomm's plugin brings a simulator.
CUDA is used where onnxruntime-gpu finds it, which is on no machine of the continuous integration.
A test asks for what it needs first, for example `require_webgpu()`. Without it the test is skipped, or fails where
EDGERUN_DEVICES=1 says that everything is installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from ctypes.util import find_library
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from support.processes import EDGE_RUN

_TESTS = Path(__file__).resolve().parent.parent
_SECONDS = 600
"""A process that takes longer hangs."""
_ASK_FOR_CUDA = "from edgerun.runtime.devices.providers import choose_device; choose_device('cuda')"
_SOFTWARE_VULKAN = (
    Path("/usr/lib/chromium/vk_swiftshader_icd.json"),
    Path("/usr/lib64/chromium-browser/vk_swiftshader_icd.json"),
    Path("/opt/google/chrome/vk_swiftshader_icd.json"),
)


def require_webgpu() -> None:
    """Skip the test where WebGPU cannot run on software; fail where EDGERUN_DEVICES=1."""
    _require(_no_webgpu())


def require_gpu(name: str) -> dict[str, str]:
    """Skip the test where the GPU provider of this name cannot run; returns environment variables that it runs with."""
    if name == "webgpu":
        require_webgpu()
        return webgpu_environment()
    if missing := _no_cuda():
        pytest.skip(missing)
    return {}


def require_qnn() -> None:
    """Skip the test where Qualcomm's simulator is not installed; fail where EDGERUN_DEVICES=1."""
    _require("" if find_spec("onnxruntime_qnn") else "the package onnxruntime-qnn is not installed")


def webgpu_environment() -> dict[str, str]:
    """Environment variables with which WebGPU runs on SwiftShader."""
    driver = _software_vulkan()
    if driver is None:
        raise FileNotFoundError("there is no vk_swiftshader_icd.json")
    return {
        "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER": "1",
        "VK_ICD_FILENAMES": str(driver),
        "XDG_RUNTIME_DIR": _runtime_folder(),
    }


def require_python(variable: str) -> str:
    """The interpreter that an environment variable names; skip the test without.

    Packages in the place of onnxruntime need an environment of their own: EDGERUN_OPENVINO_PYTHON has
    onnxruntime-openvino, EDGERUN_ONNXRUNTIME_GPU_PYTHON has onnxruntime-gpu and edge-run, and no CUDA.
    """
    if not (interpreter := os.environ.get(variable)):
        pytest.skip(f"{variable} names no interpreter")
    return interpreter


def run_script(
    script: str | Path,
    *arguments: object,
    environment: Mapping[str, str] | None = None,
    interpreter: str = sys.executable,
) -> str:
    """Run a Python program in a process of its own, where `edgerun` and `support` can be imported.

    Args:
        script: the program's text, or its file.
        arguments: its arguments, in `sys.argv[1:]`.
        environment: variables that are added to this process's; None for those of WebGPU.
        interpreter: the Python that runs it; others than this one's have no `edgerun`.

    Returns:
        What it wrote to standard output. The test fails if the process does.
    """
    program = [str(script)] if isinstance(script, Path) else ["-c", script]
    finished = _run([interpreter, *program, *map(str, arguments)], environment)
    assert finished.returncode == 0, f"exit code {finished.returncode}\n{finished.stdout}\n{finished.stderr}"
    return finished.stdout


def run_json_script(
    script: str | Path,
    *arguments: object,
    environment: Mapping[str, str] | None = None,
    interpreter: str = sys.executable,
) -> Any:
    """Run a program like `run_script`, and parse the last line of its standard output as JSON."""
    output = run_script(script, *arguments, environment=environment, interpreter=interpreter)
    return json.loads(output.splitlines()[-1])


def run_edge_run(*arguments: object, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the `edge-run` command in a process of its own; arguments as those of `run_script`."""
    return _run([*EDGE_RUN, *map(str, arguments)], environment)


def without_software_vulkan() -> dict[str, str]:
    """Environment variables with which WebGPU finds no device, as on a machine without a GPU."""
    return {"ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER": "0"}


def _run(command: list[str], environment: Mapping[str, str] | None) -> subprocess.CompletedProcess[str]:
    added = webgpu_environment() if environment is None else environment
    path = os.pathsep.join(filter(None, (str(_TESTS), os.environ.get("PYTHONPATH", ""))))
    variables = {**os.environ, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8", **added}
    return subprocess.run(command, env=variables, capture_output=True, encoding="utf-8", timeout=_SECONDS, check=False)


@cache
def _no_cuda() -> str:
    """Why CUDA cannot run here; empty if it can."""
    import onnxruntime

    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        return "the package onnxruntime-gpu is not installed"
    finished = _run([sys.executable, "-c", _ASK_FOR_CUDA], {})
    return "" if finished.returncode == 0 else "onnxruntime-gpu finds no CUDA device"


@cache
def _no_webgpu() -> str:
    """Why WebGPU cannot run here; empty if it can."""
    if find_spec("onnxruntime_ep_webgpu") is None:
        return "the package onnxruntime-ep-webgpu is not installed"
    if _software_vulkan() is None:
        return "there is no software Vulkan driver (vk_swiftshader_icd.json of Chromium)"
    return "" if find_library("vulkan") else "there is no Vulkan loader (libvulkan1)"


def _software_vulkan() -> Path | None:
    named = os.environ.get("VK_ICD_FILENAMES")
    candidates = (Path(named),) if named else _SOFTWARE_VULKAN
    return next((path for path in candidates if path.is_file()), None)


@cache
def _runtime_folder() -> str:
    """A folder for the driver's sockets, which only this user may read."""
    folder = Path(tempfile.gettempdir()) / f"edgerun-runtime-{os.getuid() if hasattr(os, 'getuid') else 0}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return str(folder)


def _require(missing: str) -> None:
    if missing and os.environ.get("EDGERUN_DEVICES") == "1":
        pytest.fail(f"EDGERUN_DEVICES=1, but {missing}")
    if missing:
        pytest.skip(missing)
