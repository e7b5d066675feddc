"""Which number of threads is fastest: comparing them, remembering the choice, and using it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import edgerun
from edgerun.models.bundle import open_bundle
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph.session import SessionConfig
from edgerun.runtime.measure import bundle_timing, device_choice, system_load
from edgerun.runtime.measure.bundle_timing import choose_threads
from edgerun.runtime.measure.device_choice import chosen_threads, thread_candidates
from edgerun.runtime.measure.system_load import LoadMeter

CONFIG = SessionConfig(choose_device("cpu"))


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """An idle machine of six performance cores and two others."""
    monkeypatch.setattr(device_choice, "default_threads", lambda: 6)
    monkeypatch.setattr(device_choice, "usable_physical_cores", lambda: 8)
    monkeypatch.setattr(device_choice, "usable_cores", lambda: 8)
    monkeypatch.setattr(LoadMeter, "is_busy", property(lambda _: False))


def passes_take(monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float]) -> None:
    """Let passes take so long by number of threads, without loading anything."""
    monkeypatch.setattr(bundle_timing, "_open", lambda _bundle, config: config.threads)
    monkeypatch.setattr(bundle_timing, "_turn_s", lambda threads, _widths: seconds[threads])


def test_the_default_all_cores_and_half_the_default_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert thread_candidates() == [6, 8, 3]
    monkeypatch.setattr(device_choice, "usable_physical_cores", lambda: 1)
    monkeypatch.setattr(device_choice, "default_threads", lambda: 1)
    assert thread_candidates() == [1]


@pytest.mark.parametrize(
    ("seconds", "threads"),
    [
        ({6: 1.0, 8: 1.3, 3: 1.1}, 6),
        ({6: 1.0, 8: 0.97, 3: 0.96}, 6),  # not worth it
        ({6: 1.0, 8: 1.3, 3: 0.7}, 3),
        ({6: 1.0, 8: 0.8, 3: 0.7}, 3),
        ({6: 1.0, 8: 0.8, 3: 0.79}, 8),
    ],
)
def test_the_fastest_is_chosen_if_it_gains_enough(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float], threads: int
) -> None:
    bundle = open_bundle(tiny_bundle)
    passes_take(monkeypatch, seconds)
    choice = choose_threads(bundle, CONFIG)
    assert (choice.threads, choice.seconds) == (threads, seconds)
    assert chosen_threads(bundle, CONFIG) == (0 if threads == 6 else threads), "0 leaves the default to ONNX Runtime"


def test_a_busy_machine_chooses_nothing(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoadMeter, "is_busy", property(lambda _: True))
    passes_take(monkeypatch, {6: 1.0, 8: 1.3, 3: 0.5})
    assert choose_threads(open_bundle(tiny_bundle), CONFIG).busy
    assert chosen_threads(open_bundle(tiny_bundle), CONFIG) == 0


def test_one_core_needs_no_comparison(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle_timing, "thread_candidates", lambda: [1])
    monkeypatch.setattr(bundle_timing, "open_graph", lambda *_, **__: pytest.fail("the model was loaded"))
    choice = choose_threads(open_bundle(tiny_bundle), CONFIG)
    assert (choice.threads, choice.seconds, choice.busy) == (1, {}, False)


def test_a_choice_holds_for_one_model_and_one_machine(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = open_bundle(tiny_bundle)
    passes_take(monkeypatch, {6: 1.0, 8: 0.5, 3: 1.0})
    choose_threads(bundle, CONFIG)
    assert chosen_threads(bundle, CONFIG) == 8
    assert chosen_threads(replace(bundle, manifest=None), CONFIG) == 0
    monkeypatch.setattr(device_choice, "usable_cores", lambda: 7)
    assert chosen_threads(bundle, CONFIG) == 0, "fewer processors may be used now"


def test_load_uses_the_choice_unless_threads_are_given(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("default_threads", "usable_physical_cores", "usable_cores"):
        monkeypatch.setattr(device_choice, name, lambda: 2)
    monkeypatch.setattr(system_load, "_SECONDS_BUDGET", 0.0)
    monkeypatch.setattr(bundle_timing, "_WORTH", 1e9)  # whatever this machine measures
    choice = choose_threads(open_bundle(tiny_bundle), CONFIG)
    assert set(choice.seconds) == {2, 1}
    assert all(value > 0 for value in choice.seconds.values())
    with edgerun.load(tiny_bundle) as engine:
        assert engine.model.compute_threads == engine.threads == 1
        assert engine.generate("the", raw=True, max_tokens=2).stats.completion_tokens == 2
    with edgerun.load(tiny_bundle, cache=False) as engine:
        assert engine.threads == 0
