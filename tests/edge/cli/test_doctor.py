"""The command `doctor`: what it says of the machine, of what is kept, and of what would be faster."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from edgerun.edge.cli import devices as command
from edgerun.models.bundle import open_bundle
from edgerun.models.find import record_export
from edgerun.runtime.devices.providers import cpu_device
from edgerun.runtime.graph.session import SessionConfig
from edgerun.runtime.measure.device_choice import (
    THREAD_CHOICES,
    ThreadChoice,
    chosen_threads,
    thread_choice_key,
)
from edgerun.runtime.measure.measurement_store import model_key
from edgerun.runtime.measure.pass_timing import PASS_COSTS
from edgerun.runtime.speculation.pass_cost import PassCost
from support.commands import Capture, Patch, fails, json_of, output_of
from support.encoders import write_encoder
from support.forbidden_network import network_can_be_forbidden, without_network
from support.processes import EDGE_RUN
from support.tiny_models import write_json

TUNE = "edge-run tune MODEL finds the fastest threads, what drafts cost, and whether an int8 graph helps"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, cache: Path, monkeypatch: Patch) -> Path:
    """The folder of data, where only the bundled model is on this machine."""
    for name in ("EDGERUN_HOME", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    return tmp_path / "home"


def advice(capsys: Capture, about: str) -> list[str]:
    """The advice that names a model, or all that has these words."""
    return [line for line in json_of(capsys, "doctor", "--json")["advice"] if about in line]


def test_it_says_what_is_there_and_what_is_kept(capsys: Capture, cache: Path) -> None:
    (cache / "prefixes" / "model").mkdir(parents=True)
    (cache / "prefixes" / "model" / "one.kv").write_bytes(b"12345")
    facts = json_of(capsys, "doctor", "--json")
    machine, kept = facts["machine"], facts["kept"]
    assert set(machine) >= {"edge-run", "onnxruntime", "tokenizers", "python", "processor"}
    assert len(machine["devices"]) == len(json_of(capsys, "devices", "--json")["devices"])
    assert 0 < machine["free_memory_bytes"] < machine["memory_bytes"]
    assert kept["models"]["number"] == 1
    assert kept["prefixes"] == {"folder": str(cache / "prefixes"), "number": 1, "bytes": 5}
    assert any(line.startswith("there is no model to chat with: edge-run pull ") for line in facts["advice"])
    shown = output_of(capsys, "doctor")
    assert "1, 5 bytes, in " in shown
    assert all(f"\n- {line}\n" in shown for line in facts["advice"])


def test_a_model_that_was_measured_needs_no_advice(tiny_bundle: Path, capsys: Capture) -> None:
    record_export(tiny_bundle)
    assert [line.endswith(TUNE) for line in advice(capsys, tiny_bundle.name)] == [True]
    bundle, config = open_bundle(tiny_bundle), SessionConfig(cpu_device())
    THREAD_CHOICES.save(thread_choice_key(bundle, config), ThreadChoice(1, {1: 0.1, 2: 0.2}))
    PASS_COSTS.save(
        model_key(bundle, replace(config, threads=chosen_threads(bundle, config))), PassCost({256: {1: 0.01}})
    )
    assert advice(capsys, tiny_bundle.name) == []


def test_a_context_that_does_not_fit_the_memory_and_a_damaged_model_are_named(
    tiny_bundle: Path, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    long, damaged = (Path(shutil.copytree(tiny_bundle, tmp_path / name)) for name in ("long", "damaged"))
    manifest = json.loads((long / "edge.json").read_text(encoding="utf-8"))
    manifest["architecture"]["context"] = 1 << 40
    write_json(long / "edge.json", manifest)
    (damaged / "edge.json").write_text("{", encoding="utf-8")
    record_export(long)
    record_export(damaged)
    (fits,) = advice(capsys, "--context")
    assert fits.startswith("long: it takes ")
    memory = SimpleNamespace(total=1, available=1)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    assert advice(capsys, "--context") == []
    assert any(line.startswith("long: it takes ") for line in advice(capsys, "too little memory"))
    (unreadable,) = advice(capsys, "damaged")
    assert unreadable.startswith("damaged: cannot be read: ")


def test_an_encoder_is_not_to_be_tuned(tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    encoder = write_encoder(tmp_path)
    assert "is an encoder" in fails(capsys, "tune", encoder)
    model = {"id": "org/encoder", "variant": "", "bytes": 1, "unfinished": False, "path": str(encoder)}
    monkeypatch.setattr(command, "described_models", lambda: {"folder": str(tmp_path), "models": [model]})
    assert advice(capsys, "org/encoder") == []


def test_what_a_battery_means_is_said(monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setattr(psutil, "sensors_battery", lambda: SimpleNamespace(power_plugged=True), raising=False)
    assert advice(capsys, "battery") == []
    monkeypatch.setattr(psutil, "sensors_battery", lambda: SimpleNamespace(power_plugged=False), raising=False)
    assert len(advice(capsys, "battery")) == 1


def test_instruction_sets_are_named_where_the_system_does(monkeypatch: Patch, capsys: Capture) -> None:
    for features, names in (
        ("3dnow avx2 avx512_vnni fpu", ["avx2", "avx512_vnni"]),
        ("hw.optional.arm.FEAT_I8MM hw.optional.avx2_0", ["i8mm"]),
        ("10000000000", []),
    ):
        monkeypatch.setattr(command, "chip_features", lambda features=features: features)
        assert json_of(capsys, "doctor", "--json")["machine"]["instruction_sets"] == names


@pytest.mark.skipif(not network_can_be_forbidden(), reason="needs a kernel that forbids sockets")
def test_it_opens_no_network(tiny_bundle: Path) -> None:
    record_export(tiny_bundle)
    run = without_network(*EDGE_RUN, "doctor", "--json")
    done = subprocess.run(run, env=dict(os.environ), capture_output=True, encoding="utf-8", check=True)
    assert json.loads(done.stdout)["advice"]
