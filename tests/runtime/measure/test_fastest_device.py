"""`--device auto` is the device that was measured to be fastest, and never one that is slower than the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.devices import require_webgpu, run_edge_run, run_json_script, webgpu_environment, without_software_vulkan

LOADING = """
import json, logging, os, sys
logging.basicConfig(stream=sys.stderr)
import edgerun
from edgerun.errors import DeviceError
from edgerun.models.bundle import open_bundle
from edgerun.runtime.devices.providers import choose_device, device_identity
from edgerun.runtime.measure.device_choice import FASTEST_DEVICES, FastestDevice, fastest_device_key
from pathlib import Path

class Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []
    def emit(self, record):
        self.texts.append(record.getMessage())
kept = Kept()
logging.getLogger("edgerun").addHandler(kept)
folder, stored, identity = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
key = fastest_device_key(open_bundle(folder))
FASTEST_DEVICES.file(key).unlink(missing_ok=True)
if stored:
    if identity == ["now"]:
        identity = device_identity(choose_device(stored))
    FASTEST_DEVICES.save(key, FastestDevice(stored, {stored: 0.001, "CPU": 0.002}, identity=tuple(identity)))
with edgerun.load(folder, draft=None) as engine:
    text = engine.generate("the", raw=True, max_tokens=3).text
    import onnxruntime
    providers = [device.ep_name for device in onnxruntime.get_ep_devices()]
    print(json.dumps({"device": str(engine.device), "providers": providers, "warnings": kept.texts, "text": text}))
"""


def load(folder: Path, tmp_path: Path, *arguments: str, environment: dict[str, str] | None = None) -> Any:
    chosen = webgpu_environment() if environment is None else environment
    added = {**chosen, "EDGERUN_CACHE": str(tmp_path / "cache")}
    return run_json_script(LOADING, folder, *arguments, environment=added)


@pytest.mark.parametrize("stored", ["", "CPU"])
def test_nothing_is_registered_unless_a_measurement_chose_another_device(
    tiny_bundle: Path, tmp_path: Path, stored: str
) -> None:
    require_webgpu()
    found = load(tiny_bundle, tmp_path, stored)
    assert found["device"] == "CPU"
    assert found["providers"] == ["CPUExecutionProvider"]
    assert not found["warnings"]


@pytest.mark.parametrize(
    ("identity", "environment", "problem"),
    [
        ((), without_software_vulkan, "this machine has no device 'WebGpu:0'; the CPU computes"),
        (
            ("another driver",),
            webgpu_environment,
            "it has another driver or plugin since; the CPU computes until edge-run tune measures again",
        ),
        (
            ("now",),
            lambda: {**webgpu_environment(), "VK_ICD_FILENAMES": "/nonexistent.json"},
            "WebGpu cannot start: the Vulkan driver offers no usable",
        ),
    ],
    ids=["it has gone", "another driver", "it fails to load"],
)
def test_a_measured_device_that_cannot_be_used_is_replaced_by_the_cpu(
    tiny_bundle: Path, tmp_path: Path, identity: tuple[str, ...], environment: Any, problem: str
) -> None:
    require_webgpu()
    found = load(tiny_bundle, tmp_path, "WebGpu:0", *identity, environment=environment())
    assert found["device"] == "CPU"
    assert found["text"]
    (warning,) = found["warnings"]
    assert f"WebGpu:0 was fastest for bundle, but {problem}" in warning


def test_a_slow_device_is_measured_and_not_chosen(tiny_bundle: Path, tmp_path: Path) -> None:
    """SwiftShader emulates a GPU on the CPU, and so cannot be faster than the CPU itself."""
    require_webgpu()
    environment = {**webgpu_environment(), "EDGERUN_CACHE": str(tmp_path / "cache")}
    tuned = run_edge_run("tune", tiny_bundle, "--threads", 1, "--json", environment=environment)
    assert tuned.returncode == 0, tuned.stderr
    measured = json.loads(tuned.stdout)["devices"]
    assert measured["device"] == "CPU"
    assert not measured["refused"]
    assert measured["seconds"]["WebGpu:0"] > measured["seconds"]["CPU"]
    assert json.loads(tuned.stdout)["device"] == "CPU"
    shown = run_edge_run("devices", tiny_bundle, "--json", environment=environment)
    described = json.loads(shown.stdout)
    assert [device["name"] for device in described["devices"] if device["default"]] == ["CPU"]
    assert described["model"]["choice"]["seconds"] == measured["seconds"]
    (check,) = described["model"]["checks"].values()
    assert check["plain_correct"]
    assert check["tree_correct"]
    text = run_edge_run("devices", tiny_bundle, environment=environment).stdout
    assert "bundle: --device auto means CPU\n" in text
    assert "WebGpu:0: " in text
    assert " ms a token; logits differ from the CPU's by " in text
