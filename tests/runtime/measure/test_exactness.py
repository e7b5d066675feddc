"""Width noise, comparing speculative with plain text, the exactness report."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgerun
from edgerun.models.bundle import open_bundle
from edgerun.models.json_file import record_from_json
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph.bound_graph import NewTokens
from edgerun.runtime.graph.bound_session import BoundSession
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from edgerun.runtime.measure import exactness
from edgerun.runtime.measure.comparison import Answer, Comparison
from edgerun.runtime.measure.exactness import (
    EXACTNESS_REPORTS,
    WIDTHS,
    ComparisonCounts,
    Counterexample,
    ExactnessReport,
    WidthNoise,
    measure_exactness,
    measure_width_noise,
)
from edgerun.runtime.measure.measurement_store import model_key
from edgerun.runtime.result import DraftCounts
from edgerun.runtime.sampling.sampler import Sampler, SamplingParams

CONFIG = SessionConfig(choose_device("cpu"), 1)
TEXTS = [np.random.default_rng(seed).integers(5, 300, 60).tolist() for seed in range(3)]
NOISE = WidthNoise({1: 0.0, 2: 0.1, 16: 0.2}, trees=0.25, perturbed=0.3, leak=0.0, spread=4.0, positions=96)
COUNTS = ComparisonCounts(
    texts=9, identical=7, near_ties=2, widest_near_tie=0.125, drafts=DraftCounts(300, 120), recomputed=40
)
FOUND = Counterexample("greedy", "oracle tree", 3, 0, 17, 5, 9, 1.5)
FULL = ExactnessReport(NOISE, COUNTS, COUNTS, COUNTS, COUNTS, FOUND)


pytestmark = pytest.mark.usefixtures("cache")


def bind(bundle: Path, limit: int = 256) -> BoundSession:
    session = GraphSession(bundle / "model.onnx", CONFIG)
    return session.bind(session.arena(limit))


@pytest.mark.parametrize("model", [("llama", "fp32"), ("qwen3", "int8"), ("qwen2", "int4")], ids="-".join)
def test_noise_is_small_and_positions_do_not_leak(
    model: tuple[str, str], tiny_bundle_of: Callable[[str, str], Path]
) -> None:
    noise = measure_width_noise(bind(tiny_bundle_of(*model)), TEXTS)
    assert list(noise.chains) == list(WIDTHS)
    assert noise.chains[1] == 0
    assert noise.leak == 0
    assert noise.sound
    assert not noise.identical
    assert noise.positions == 90
    if model[1] == "fp32":
        assert 0 < noise.epsilon < 1e-3
    else:
        # A perturbed cache makes some rounding fall the other way, whatever the widths do.
        assert noise.perturbed > 1e-3
        assert noise.epsilon >= 2 * noise.perturbed


def test_noise_is_measured_in_any_context(tiny_bundle: Path) -> None:
    for limit in (12, 16, 33):
        assert measure_width_noise(bind(tiny_bundle, limit), TEXTS[:1]).positions <= limit
    with pytest.raises(ValueError, match="at least two tokens"):
        measure_width_noise(bind(tiny_bundle), [[5]])


def test_a_graph_whose_positions_leak_is_not_sound(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the mask were ignored: every position of a pass depends on the others' tokens."""
    run = BoundSession.run

    def leaking(self: BoundSession, new: NewTokens) -> Any:
        logits = run(self, new)
        return logits + np.float32(0.01) * np.float32(sum(new.ids) % 97) if len(new.ids) > 1 else logits

    monkeypatch.setattr(BoundSession, "run", leaking)
    noise = measure_width_noise(bind(tiny_bundle), TEXTS)
    assert noise.leak > 0
    assert not noise.sound
    assert not ExactnessReport(noise).passed


def test_noise_that_is_not_finite_is_not_sound() -> None:
    assert exactness._largest_difference(np.array([np.nan], np.float32), np.zeros(1, np.float32)) > 1e30
    assert not dataclasses.replace(NOISE, trees=1e30).sound
    assert NOISE.sound
    assert NOISE.epsilon == 0.6
    assert dataclasses.replace(NOISE, chains={1: 0.0, 2: 0.0}, trees=0.0).epsilon == 0


def test_every_text_equals_the_plain_one_or_differs_from_a_near_tie_on(
    tiny_bundle_of: Callable[[str, str], Path],
) -> None:
    prompts = [text[:9] for text in TEXTS]
    fractions: list[float] = []
    for model in (("llama", "fp32"), ("qwen3", "int8")):
        with edgerun.load(tiny_bundle_of(*model)) as engine:
            exactness_report = Comparison(engine, 24).report(prompts, fractions.append)
        assert exactness_report.passed
        assert exactness_report.counterexample is None
        for kind, texts in {"greedy": 9, "sampled": 18, "exact": 9, "together": 3}.items():
            count = getattr(exactness_report, kind)
            assert (count.texts, count.failed) == (texts, 0)
            assert count.drafts.drafted > count.drafts.accepted > 0
        assert exactness_report.exact.identical == exactness_report.exact.texts
        if model[1] == "fp32":
            assert exactness_report.greedy.identical == 9
            assert exactness_report.sampled.identical == 18
            assert exactness_report.together.identical == 3
    assert fractions == [step / 8 for step in range(1, 9)] * 2


def test_answers_that_share_a_pass_and_mix_up_their_rows_fail(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgerun.runtime.graph.shared_passes import PackedPasses

    run, widths = PackedPasses.run, []

    def mixed_up(packed: PackedPasses, texts: Any, options: Any) -> None:
        run(packed, texts, options)
        widths.append(len(texts))
        logits = [each.outputs[packed._outputs[0]].numpy() for each in texts]
        rows = min(map(len, logits))
        logits[0][:rows] = logits[-1][:rows]

    monkeypatch.setattr(PackedPasses, "run", mixed_up)
    with edgerun.load(tiny_bundle) as engine:
        exactness_report = Comparison(engine, 24).report([text[:9] for text in TEXTS], lambda _: None)
    assert max(widths) > 1
    assert not exactness_report.passed
    assert (exactness_report.greedy.failed, exactness_report.exact.failed) == (0, 0)
    assert exactness_report.counterexample.kind == "together"


def test_the_gap_of_a_sampled_token_is_the_distance_to_the_boundary(tiny_bundle: Path) -> None:
    """The other token is sampled if logits move by that much towards each other, but not by less."""
    params = SamplingParams(temperature=0.8, seed=4)
    prompt = TEXTS[0][:9]
    with edgerun.load(tiny_bundle) as engine:
        comparison = Comparison(engine, 8)
        plain = comparison.plain(prompt, params)
        logits = comparison._plain_logits([*prompt, *plain.token_ids[:3]], len(prompt))
        chosen = plain.token_ids[3]
        assert Sampler(params, 300).choose(logits, len(prompt) + 3) == chosen
        for other in (chosen - 1, chosen + 1):
            found = Answer((*plain.token_ids[:3], other), ended=False)
            expected, token, gap = comparison._gap(prompt, params, plain, found, 3)
            assert (expected, token) == (chosen, other)
            below = np.arange(300) < max(chosen, other)
            towards = np.where(below, 1, -1) if other < chosen else np.where(below, -1, 1)
            for share, result in ((0.98, False), (1.02, True)):
                moved = (logits + towards * np.float32(share * gap / 2)).astype(np.float32)
                # Towards `other`, all tokens up to the boundary lose or gain together.
                crossed = Sampler(params, 300).choose(moved, len(prompt) + 3) != chosen
                assert crossed in ((result,) if share * gap < 20 else (True, False))


def test_a_quick_report_contains_the_noise_alone(tiny_bundle: Path) -> None:
    exactness_report = measure_exactness(bind(tiny_bundle), TEXTS[0])
    assert exactness_report.epsilon > 0
    assert exactness_report.passed
    assert (exactness_report.greedy, exactness_report.sampled, exactness_report.exact) == (None, None, None)


@pytest.mark.parametrize("exactness_report", [FULL, ExactnessReport(NOISE)], ids=["full", "quick"])
def test_reports_survive_json(exactness_report: ExactnessReport) -> None:
    assert record_from_json(ExactnessReport, json.loads(json.dumps(exactness_report.to_json()))) == exactness_report


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.pop("noise"),
        lambda data: data["noise"].update(chains={}),
        lambda data: data["noise"].update(chains={"two": 0.1}),
        lambda data: data["noise"].update(trees=-1.0),
        lambda data: data["noise"].update(spread="wide"),
        lambda data: data["noise"].update(positions=True),
        lambda data: data.update(greedy=[]),
        lambda data: data["greedy"].update(near_ties=-2),
        lambda data: data["exact"]["drafts"].update(drafted=None),
        lambda data: data["exact"].update(texts="9"),
        lambda data: data.update(counterexample={"kind": "greedy"}),
        lambda data: data.update(counterexample=[1]),
    ],
)
def test_a_damaged_report_is_not_loaded(tiny_bundle: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    bundle = open_bundle(tiny_bundle)
    file = EXACTNESS_REPORTS.save(model_key(bundle, CONFIG), FULL)
    data = json.loads(file.read_text(encoding="utf-8"))
    change(data)
    file.write_text(json.dumps(data), encoding="utf-8")
    assert EXACTNESS_REPORTS.load(model_key(bundle, CONFIG)) is None
    file.write_bytes(b"\xff\x00")
    assert EXACTNESS_REPORTS.load(model_key(bundle, CONFIG)) is None
