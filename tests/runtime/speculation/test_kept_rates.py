"""What drafters learn lasts from one run to the next: saved, merged, and replaced where a file is damaged."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import edgerun
from edgerun import Engine, GenerateOptions
from edgerun.runtime.result import Reply
from edgerun.runtime.speculation.choice import Speculation
from edgerun.runtime.speculation.draft_value import DraftModelValue
from edgerun.runtime.speculation.drafters.suffix import SuffixDrafter
from edgerun.runtime.speculation.kept_rates import RatesStore
from edgerun.runtime.speculation.mixing import Mixer
from edgerun.runtime.speculation.speculator import LearnedRates
from edgerun.runtime.speculation.tree import Source
from support.adversarial_drafters import NEARLY_FREE, FixedCost

SUFFIX = int(Source.SUFFIX)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGERUN_CACHE", str(tmp_path))
    return tmp_path


def files(cache: Path) -> list[Path]:
    return sorted((cache / "learned").glob("*"))


def answer(engine: Engine) -> None:
    engine.model.drafters._pass_cost = FixedCost(NEARLY_FREE)
    for _ in range(3):
        engine.generate("in the in the in the", max_tokens=60)


def mixer_of(engine: Engine) -> Mixer:
    answer(engine)
    (rates,) = engine.model.drafters._load_resources().learning.rates.values()
    return rates.mixer


def learned(drafter: SuffixDrafter, bucket: int, right: int, wrong: int, store: RatesStore) -> LearnedRates:
    """Rates that were restored, and then learned from some outcomes of one bucket."""
    rates = LearnedRates([drafter])
    store.restore(rates, [drafter], exact=False)
    for number in range(right + wrong):
        rates.mixer.learn(rates.mixer.predict([(SUFFIX, bucket)]), number < right)
    return rates


def rate_after_restart(model: str, bucket: int) -> float:
    return learned(SuffixDrafter(), bucket, 0, 0, RatesStore(model)).mixer.acceptance_rate(SUFFIX, bucket)


def test_an_engine_begins_with_what_an_earlier_one_learned(tiny_bundle: Path, cache: Path) -> None:
    with edgerun.load(tiny_bundle, threads=1) as engine:
        first = mixer_of(engine).state()
        assert not files(cache)
    (file,) = files(cache)
    described = json.loads(file.read_text(encoding="utf-8"))
    assert described["drafters"] == ["edit", "suffix", "recycle"]
    # No token of the texts: only rates, counts and weights.
    assert set(described) == {"drafters", "rates", "outcomes", "weights", "draft_model"}
    with edgerun.load(tiny_bundle, threads=1) as engine:
        engine.model.drafters._pass_cost = FixedCost(NEARLY_FREE)
        engine.generate("a", max_tokens=2)
        (rates,) = engine.model.drafters._load_resources().learning.rates.values()
        priors = SuffixDrafter().prior
        moved = [
            (prior, before, now)
            for prior, before, now, outcomes in zip(
                priors, first.rates[SUFFIX], rates.mixer.state().rates[SUFFIX], first.outcomes[SUFFIX], strict=False
            )
            if outcomes > 20
        ]
        assert moved
        assert all(min(prior, before) - 0.01 <= now <= max(prior, before) + 0.01 for prior, before, now in moved)
        assert any(abs(now - prior) > 0.01 for prior, _, now in moved)


@pytest.mark.parametrize("options", [{"cache": False}, {"learned": False}], ids=str)
def test_nothing_is_kept_where_that_is_switched_off(tiny_bundle: Path, cache: Path, options: dict[str, bool]) -> None:
    with edgerun.load(tiny_bundle, threads=1, **options) as engine:
        answer(engine)
    assert not files(cache)


def test_replayed_answers_are_not_kept(tiny_bundle: Path, cache: Path) -> None:
    with edgerun.load(tiny_bundle, threads=1) as engine:
        engine.model.drafters._pass_cost = FixedCost(NEARLY_FREE)
        tokens = np.random.default_rng(1).integers(5, 30, 150).tolist()
        assert Reply.of(engine.model.replay(None, tokens[:50], tokens[50:], GenerateOptions())).stats.drafted
    assert not files(cache)


def test_other_drafters_and_exact_answers_have_files_of_their_own(tiny_bundle: Path, cache: Path) -> None:
    with edgerun.load(tiny_bundle, threads=1) as engine:
        engine.model.drafters._pass_cost = FixedCost(NEARLY_FREE)
        for choice in ("auto", "suffix"):
            for exact in (False, True):
                for _ in range(4):
                    engine.generate("in the in the", max_tokens=80, speculation=Speculation.parse(choice), exact=exact)
    assert len(files(cache)) == 4


def test_a_damaged_file_is_ignored_and_replaced(tiny_bundle: Path, cache: Path) -> None:
    with edgerun.load(tiny_bundle, threads=1) as engine:
        answer(engine)
    (file,) = files(cache)
    whole = file.read_bytes()
    described = json.loads(whole)
    wrong = [
        {**described, "rates": {**described["rates"], "1": [0.5]}},
        {**described, "rates": {key: [1.5] * len(each) for key, each in described["rates"].items()}},
        {**described, "outcomes": {key: [-1] * len(each) for key, each in described["outcomes"].items()}},
        {**described, "weights": {"65": [1.0]}},
        {**described, "draft_model": [[0.0] * 10] * 6},
        {**described, "draft_model": 7},
        {"rates": None},
    ]
    contents = [b"", b"{}", b"[1, 2]", *(json.dumps(each).encode() for each in wrong)]
    random = np.random.default_rng(1)
    for _ in range(2):
        bad = bytearray(whole)
        for place in random.integers(0, len(bad), 3).tolist():
            bad[place] = int(random.integers(0, 256))
        contents += [bytes(bad), whole[: int(random.integers(1, len(whole)))]]
    for content in contents:
        file.write_bytes(content)
        drafters = [SuffixDrafter()]
        rates = LearnedRates(drafters)
        with edgerun.load(tiny_bundle, threads=1) as engine:
            engine.model.drafters._pass_cost = FixedCost(NEARLY_FREE)
            text = engine.generate("in the in the in the", max_tokens=60).text
            assert text == engine.generate("in the in the in the", max_tokens=60, speculation=Speculation.OFF).text
            answer(engine)
            (rates,) = engine.model.drafters._load_resources().learning.rates.values()
            assert all(0 < each < 1 for row in rates.mixer.state().rates.values() for each in row)
        assert set(json.loads(file.read_bytes())) == set(described)


def test_two_processes_add_up(cache: Path) -> None:
    first, second = RatesStore("model"), RatesStore("model")
    one = learned(SuffixDrafter(), 4, 90, 10, first)
    other = learned(SuffixDrafter(), 12, 10, 90, second)
    prior = SuffixDrafter().prior
    first.close()
    second.close()
    assert one.mixer.acceptance_rate(SUFFIX, 4) > 0.8 > prior[4]
    assert other.mixer.acceptance_rate(SUFFIX, 12) < 0.3
    # Both are there, halfway between the prior and what was seen.
    assert prior[4] + 0.1 < rate_after_restart("model", 4) < one.mixer.acceptance_rate(SUFFIX, 4)
    assert other.mixer.acceptance_rate(SUFFIX, 12) < rate_after_restart("model", 12) < prior[12] - 0.05
    assert rate_after_restart("another model", 4) == pytest.approx(prior[4])
    assert not list((cache / "learned").glob(".*"))


def test_closing_twice_adds_nothing_and_old_outcomes_fade(cache: Path) -> None:
    del cache
    for right, wrong in ((200, 0), (0, 600), (0, 600)):
        store = RatesStore("model")
        learned(SuffixDrafter(), 4, right, wrong, store)
        store.close()
        after = rate_after_restart("model", 4)
        store.close()
        assert rate_after_restart("model", 4) == after
    # Halfway from the prior to what was seen last.
    assert after < 0.25 < 0.35 < SuffixDrafter().prior[4]


def test_rates_are_written_meanwhile_where_a_process_never_closes(cache: Path) -> None:
    store = RatesStore("model", interval_s=0.0)
    rates = learned(SuffixDrafter(), 4, 100, 0, store)
    store.save_soon()
    assert store._thread is not None
    store._thread.join()
    (file,) = files(cache)
    written = file.read_bytes()
    # A moment later nothing new was learned.
    store.save_soon()
    store._thread.join()
    assert file.read_bytes() == written
    assert rate_after_restart("model", 4) < rates.mixer.acceptance_rate(SUFFIX, 4)
    patient = RatesStore("another model")
    learned(SuffixDrafter(), 4, 100, 0, patient)
    patient.save_soon()
    assert len(files(cache)) == 1


def test_a_disk_that_refuses_loses_nothing_else(cache: Path) -> None:
    (cache / "learned").write_text("a file where the folder should be", encoding="utf-8")
    store = RatesStore("model")
    learned(SuffixDrafter(), 4, 100, 0, store)
    store.close()
    assert (cache / "learned").is_file()


def test_a_few_outcomes_are_not_worth_a_file(cache: Path) -> None:
    store = RatesStore("model")
    learned(SuffixDrafter(), 4, 30, 0, store)
    store.close()
    assert not files(cache)


def test_what_a_draft_model_gained_is_kept_at_the_weight_of_a_few_passes() -> None:
    value, again = DraftModelValue(), DraftModelValue()
    for _ in range(500):
        value.observe(0.1, 0.95)
    again.restore(value.histograms())
    kept = again.histograms()[0]
    assert sum(kept) == pytest.approx(60)
    assert kept[9] / sum(kept) == pytest.approx(value.histograms()[0][9] / sum(value.histograms()[0]))
    assert again.histograms()[3] == value.histograms()[3]
    with pytest.raises(ValueError, match="another form"):
        again.restore([[1.0]])
