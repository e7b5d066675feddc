"""Saving power: who chooses it, and that it changes threads and spinning and no text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import onnxruntime as ort
import psutil
import pytest

import edgerun
from edgerun.edge.cli.main import main
from edgerun.runtime.devices import processor as power_module
from edgerun.runtime.devices.processor import Power, choose_power, on_battery, saver_threads
from edgerun.runtime.graph import device_loading


class Battery(NamedTuple):
    percent: float
    secsleft: int
    power_plugged: bool | None


def raising() -> None:
    raise OSError("no such sensor")


@pytest.fixture
def battery(monkeypatch: pytest.MonkeyPatch) -> Callable[[Battery | None], None]:
    """Sets the battery that psutil reports."""

    def set_battery(reported: Battery | None) -> None:
        monkeypatch.setattr(psutil, "sensors_battery", lambda: reported, raising=False)

    return set_battery


ON_BATTERY = Battery(80, 3600, power_plugged=False)


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        (None, Power.PERFORMANCE),
        (ON_BATTERY, Power.SAVER),
        (Battery(80, -2, power_plugged=True), Power.PERFORMANCE),
        (Battery(80, -1, power_plugged=None), Power.PERFORMANCE),
    ],
)
def test_auto_saves_on_battery(
    battery: Callable[[Battery | None], None], reported: Battery | None, expected: Power
) -> None:
    battery(reported)
    assert choose_power("auto") is expected
    assert choose_power(Power.SAVER) is Power.SAVER
    assert choose_power("performance") is Power.PERFORMANCE


def test_a_system_that_does_not_tell_is_not_on_battery(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "sensors_battery", raising, raising=False)
    assert not on_battery()
    monkeypatch.delattr(psutil, "sensors_battery")
    assert not on_battery()


@pytest.mark.parametrize(("default", "saver"), [(1, 1), (2, 1), (3, 1), (8, 4)])
def test_half_the_threads(default: int, saver: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(power_module, "default_threads", lambda: default)
    assert saver_threads() == saver


def test_the_command_shows_what_was_chosen(
    tiny_bundle: Path, battery: Callable[[Battery | None], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(*options: str) -> tuple[dict[str, Any], str]:
        assert main([str(tiny_bundle), "-p", "the other", "-n", "24", "--json", "--stats", *options]) == 0
        out, err = capsys.readouterr()
        return json.loads(out), err

    battery(None)
    plain, shown = answer("--threads", "2")
    assert (plain["threads"], plain["power"]) == (2, "performance")
    assert "power saver" not in shown
    saved, shown = answer("--power", "saver")
    assert (saved["threads"], saved["power"]) == (saver_threads(), "saver")
    assert f"{saver_threads()} thread" in shown
    assert "(power saver)" in shown
    chosen, _ = answer("--power", "saver", "--threads", "2")
    assert (chosen["threads"], chosen["power"]) == (2, "saver")
    assert plain["text"] == saved["text"] == chosen["text"]
    battery(ON_BATTERY)
    assert answer()[0]["power"] == "saver"
    assert answer("--power", "performance")[0]["power"] == "performance"
    assert main(["devices"]) == 0
    assert "--power auto: saver, on battery" in capsys.readouterr().out


@pytest.mark.parametrize("draft", [None, "auto"])
def test_threads_sleep_between_passes(draft: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ONNX Runtime is told, for the model and its draft model."""
    given: list[ort.SessionOptions] = []
    load_session = device_loading.load_session

    def loading(model: str, options: ort.SessionOptions, *rest: Any) -> ort.InferenceSession:
        given.append(options)
        return load_session(model, options, *rest)

    def sleeps(options: ort.SessionOptions) -> bool:
        try:
            return options.get_session_config_entry("session.force_spinning_stop") == "1"
        except RuntimeError:  # not set, so the default
            return False

    monkeypatch.setattr(device_loading, "load_session", loading)
    for power in (Power.SAVER, Power.PERFORMANCE):
        given.clear()
        with edgerun.load(draft=draft, power=power) as engine:
            assert engine.power is power
            engine.generate("list files", max_tokens=4)
            assert len(given) == (1 if draft is None else 2)
            assert [sleeps(options) for options in given] == [power.saves] * len(given)
