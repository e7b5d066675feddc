"""Answers and options of an engine, on a tiny exported model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import edgerun
from edgerun import (
    ContextError,
    DeviceError,
    EdgeError,
    Engine,
    FinishReason,
    GenerateOptions,
    InputError,
    Speculation,
)
from edgerun.runtime.measure import pass_timing
from edgerun.runtime.measure.system_load import LoadMeter
from support.freed_sessions import require_freed_sessions


def test_generate_and_stream_give_the_same_text(engine: Engine) -> None:
    reply = engine.generate("the other thing", max_tokens=20)
    chunks = list(engine.stream("the other thing", max_tokens=20))
    assert "".join(chunk.text for chunk in chunks) == reply.text
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert reply.finish_reason is chunks[-1].finish_reason is FinishReason.LENGTH
    counts = [chunk.completion_tokens for chunk in chunks]
    assert counts[:-1] == sorted(set(counts[:-1]))
    assert 0 < counts[0] <= counts[-1] == chunks[-1].stats.completion_tokens
    stats = reply.stats
    assert stats.completion_tokens == 20
    assert stats.target_passes == 20 - stats.accepted
    assert stats.tokens_per_pass == 19 / stats.decode_passes
    assert 0 < stats.first_token_s <= stats.total_s
    assert 0 < stats.prefill_s <= stats.first_token_s


def test_a_seed_gives_one_text_and_no_seed_gives_many(engine: Engine) -> None:
    options = GenerateOptions(max_tokens=25, temperature=1.5, raw=True)
    assert len({engine.generate("a", options, seed=3).text for _ in range(3)}) == 1
    assert len({engine.generate("a", options).text for _ in range(5)}) > 1


def test_stop_sequences_end_the_answer_at_any_position(engine: Engine) -> None:
    text = engine.generate("the", max_tokens=40).text
    for start in range(2, len(text) - 4, 3):
        stop = text[start : start + 4]
        reply = engine.generate("the", max_tokens=40, stop=stop)
        assert engine.generate("the", max_tokens=40, stop=["\0", stop]).text == reply.text
        assert reply.text == text[: text.index(stop)]
        assert reply.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("a", {"temprature": 1}, "unknown option 'temprature'; options are: .*max_tokens, min_p"),
        ("a", {"max_tokens": 0}, "max_tokens is 0; it must be 1 or more"),
        ("a", {"top_p": 2}, "top-p is 2; it must be above 0 and at most 1"),
        ("a", {"stop": ""}, "stop is ''; it must be a non-empty string, or several"),
        ("", {"raw": True}, "the prompt is empty"),
        ("a", {"raw": True, "system": "b"}, "a raw prompt has no system message"),
        ("\ud800", {"raw": True}, "the text is not valid Unicode"),
    ],
)
def test_unknown_options_and_bad_values_are_refused(
    engine: Engine, prompt: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        engine.generate(prompt, **options)


def test_a_prompt_longer_than_the_context_is_refused_before_the_first_pass(engine: Engine) -> None:
    with pytest.raises(ContextError, match=r"the prompt has \d+ tokens and the model's context is 256; shorten it"):
        engine.stream("x" * 300)


def test_context_can_be_shorter_but_not_longer_than_the_models(tiny_bundle: Path) -> None:
    with edgerun.load(tiny_bundle, context=16) as engine:
        assert engine.generate("abc", raw=True).stats.completion_tokens <= 13
    with pytest.raises(InputError, match="context is 257; this model allows at most 256"):
        edgerun.load(tiny_bundle, context=257)


def test_a_closed_engine_refuses_answers(tiny_bundle: Path) -> None:
    engine = edgerun.load(tiny_bundle)
    engine.close()
    engine.close()
    with pytest.raises(EdgeError, match="this engine is closed; load the model again"):
        engine.generate("a")


def test_closing_an_engine_frees_its_sessions_at_once(endless_bundle: Path) -> None:
    def opened() -> Engine:
        engine = edgerun.load(endless_bundle, threads=1)
        engine.generate("the", max_tokens=4)
        return engine

    require_freed_sessions(opened)


def test_a_filter_switches_sampling_on(engine: Engine) -> None:
    assert GenerateOptions().sampling(engine.model.defaults).greedy
    params = GenerateOptions(top_p=0.5).sampling(engine.model.defaults)
    assert (params.temperature, params.top_p) == (1.0, 0.5)


def test_penalties_and_biases_change_what_is_chosen_with_and_without_drafting(engine: Engine) -> None:
    plain = engine.generate("the", max_tokens=20).text
    options = GenerateOptions(max_tokens=20, presence_penalty=2.0, frequency_penalty=2.0)
    varied = engine.generate("the", options, speculation=Speculation.OFF).text
    assert varied != plain
    assert len(set(varied)) > len(set(plain))
    assert engine.generate("the", options).text == varied
    (wanted,) = engine.tokenizer.encode("e", add_special_tokens=False)
    assert engine.generate("the", max_tokens=5, logit_bias={wanted: 100.0}).text == "eeeee"
    with pytest.raises(InputError, match="logit_bias has token 300; token ids of this model are 0 to 299"):
        engine.generate("the", logit_bias={300: 1.0})


def test_an_answer_may_go_on_after_the_end_of_the_text(engine: Engine) -> None:
    (end,) = engine.tokenizer.eos
    options = GenerateOptions(max_tokens=9, logit_bias={end: 100.0})
    assert engine.generate("the", options).finish_reason is FinishReason.STOP
    reply = engine.generate("the", options, ignore_eos=True)
    assert (reply.finish_reason, reply.stats.completion_tokens, reply.text) == (FinishReason.LENGTH, 9, "")


def test_defaults_come_from_generation_config(editable_bundle: Path) -> None:
    config = {
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 5,
        "top_p": 0.9,
        "repetition_penalty": 1.2,
        "eos_token_id": [0, 7],
    }
    (editable_bundle / "generation_config.json").write_text(json.dumps(config), encoding="utf-8")
    with edgerun.load(editable_bundle) as engine:
        params = GenerateOptions().sampling(engine.model.defaults)
        assert (params.temperature, params.top_k, params.top_p, params.repeat_penalty) == (0.7, 5, 0.9, 1.2)
        assert GenerateOptions(temperature=0).sampling(engine.model.defaults).greedy
        assert engine.tokenizer.eos == {0, 7}


def test_an_unknown_device_is_refused_with_a_list_of_devices(tiny_bundle: Path) -> None:
    with pytest.raises(DeviceError, match="this machine has no device 'abacus'; available: .*CPU"):
        edgerun.load(tiny_bundle, device="abacus")
    with pytest.raises(InputError, match="threads is 0; it must be 1 or more"):
        edgerun.load(tiny_bundle, threads=0)
    with edgerun.load(tiny_bundle, device="CPUExecutionProvider") as engine:
        assert str(engine.device) == "CPU"


def test_the_first_answer_of_a_new_model_counts_and_reports_its_measurement(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    # What other programs disturb would be measured again by the next engine.
    monkeypatch.setattr(LoadMeter, "is_busy", property(lambda _: False))
    monkeypatch.setattr(pass_timing, "time_pass", lambda _bound, width: 0.001 + 0.0001 * width)
    reports: list[tuple[str, float]] = []
    with edgerun.load(tiny_bundle, progress=lambda stage, fraction: reports.append((stage, fraction))) as engine:
        assert not reports
        first = engine.generate("the", max_tokens=2).stats
        stages = list(dict.fromkeys(stage for stage, _ in reports))
        assert stages == ["measuring the speed of this model", "reading the prompt"]
        assert first.measuring_s > 0
        assert first.drafter_loading_s > 0
        assert first.prefill_s > 0
        assert first.measuring_s + first.drafter_loading_s + first.prefill_s == pytest.approx(first.first_token_s)
        assert first.first_token_s + first.decode_s == pytest.approx(first.total_s)
        second = engine.generate("the", max_tokens=2).stats
        assert second.measuring_s == 0
        assert (first + second).measuring_s == first.measuring_s
    with edgerun.load(tiny_bundle) as engine:
        assert engine.generate("the", max_tokens=2).stats.measuring_s == 0
        exact = engine.generate("the", max_tokens=2, exact=True).stats
        assert exact.measuring_s > 0


def test_a_cache_folder_that_cannot_be_written_is_not_an_error(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EDGERUN_CACHE", str(tmp_path / "file"))
    with edgerun.load(tiny_bundle, history=True) as engine:
        assert engine.generate("the", max_tokens=8, ignore_eos=True).stats.completion_tokens == 8


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_what_is_learned_from_conversations_is_for_the_user_alone(
    tiny_bundle: Path, tmp_path: Path, cache: Path
) -> None:

    def shared_paths() -> set[str]:
        """What other users could read below a folder of the cache, and these folders."""
        return {
            path.parent.name if path.is_file() else path.name
            for path in (tmp_path / "cache").rglob("*")
            if path.stat().st_mode & 0o077
        }

    def answer() -> None:
        with edgerun.load(tiny_bundle) as engine:
            engine.generate("the other is that the other", max_tokens=48, ignore_eos=True)

    answer()
    kept = {path.parent.name for path in (tmp_path / "cache").glob("*/*")}
    assert kept >= {"recycled", "pass-cost"}
    assert not shared_paths() & kept
    for path in (tmp_path / "cache").rglob("*"):  # as earlier versions left them
        path.chmod(0o755 if path.is_dir() else 0o644)
    answer()
    assert not shared_paths() & kept


def test_reading_a_long_prompt_is_reported_pass_by_pass(tiny_bundle: Path) -> None:
    reports: list[float] = []

    def record(stage: str, fraction: float) -> None:
        if stage == "reading the prompt":
            reports.append(fraction)

    with edgerun.load(tiny_bundle, progress=record) as engine:
        stats = engine.generate("x" * 200, max_tokens=1, raw=True).stats
        assert reports == [0.0, 128 / stats.prompt_tokens, 1.0]
        session = engine.session()
        session.send("x" * 150, max_tokens=1)
        reports.clear()
        session.send("y", max_tokens=1)
        assert reports == [0.0, 1.0], "only what the cache lacks"


def test_finish_reasons_are_printed_as_the_guide_spells_them() -> None:
    reason = FinishReason.LENGTH
    assert (str(reason), f"{reason}", json.dumps(reason), reason == "length") == ("length", "length", '"length"', True)
