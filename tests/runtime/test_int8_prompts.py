"""Prompts read by the int8 prompt graph: who reads them, what stays the same, and what happens without it."""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import edgerun
from edgerun import Engine, FinishReason, GenerateOptions, InputError, Reply, Speculation
from edgerun.models.bundle import Bundle, open_bundle
from edgerun.models.json_file import record_from_json
from edgerun.models.manifest import GraphLayout
from edgerun.runtime.devices import processor
from edgerun.runtime.devices.providers import cpu_device
from edgerun.runtime.graph import open_graph, session
from edgerun.runtime.graph.probe import probe
from edgerun.runtime.graph.session import SessionConfig
from edgerun.runtime.int8_prompts import int8_graph_files, prefill_choice, prompt_graph
from edgerun.runtime.measure import prompt_choice, system_load
from edgerun.runtime.measure.logit_quality import log_softmax
from edgerun.runtime.measure.measurement_store import model_key
from edgerun.runtime.measure.prompt_choice import PROMPT_CHOICES, PromptChoice
from edgerun.runtime.measure.system_load import GraphTimes, LoadMeter
from edgerun.runtime.prefill import PrefillMode, prefill
from edgerun.runtime.scheduling import idle_thread
from support.freed_sessions import require_freed_sessions
from support.waiting import wait_until

PROMPT = [5 + 37 * number % 290 for number in range(200)]
FAST, SLOW = {64: 0.02, 128: 0.03}, {64: 0.03, 128: 0.05}


def choice_of(plain: dict[int, float], int8: dict[int, float], mean_kl: float = 0.001) -> PromptChoice:
    """What was measured of passes of both graphs, by width."""
    return PromptChoice(None, GraphTimes({str(width): (plain[width], int8[width]) for width in plain}), mean_kl, 0.02)


FASTER = choice_of(SLOW, FAST)


FAMILIES = pytest.mark.parametrize("bundle", ["llama", "lfm2", "qwen3_5_text", "granitemoehybrid"], indirect=True)
"""With attention alone, and with states that every token changes."""


@pytest.fixture
def bundle(
    request: pytest.FixtureRequest,
    tiny_bundle_of: Callable[[str, str], Path],
    monkeypatch: pytest.MonkeyPatch,
    cache: Path,
) -> Path:
    """An int4 model with a cache folder of its own, as if it were not small."""
    monkeypatch.setattr(open_graph, "_SMALL_MODEL_BYTES", 0)
    monkeypatch.setattr(prompt_graph, "TOKENS_TO_LOAD", 0)
    return tiny_bundle_of(getattr(request, "param", "llama"), "int4")


@pytest.fixture
def files(tmp_path: Path) -> Callable[[], list[Path]]:
    """The files of int8 prompt graphs in the cache."""
    return lambda: sorted((tmp_path / "cache" / "prompt-int8").glob("*/*"))


def loaded(bundle: Path, **options: Any) -> Engine:
    return edgerun.load(bundle, threads=1, power="performance", draft=None, **options)


def store(bundle: Path, choice: PromptChoice) -> None:
    """Keep an int8 prompt graph of a model, and what was measured of it."""
    opened, config = open_bundle(bundle), SessionConfig(cpu_device(), 1)
    int8_graph_files.int8_graph_path(opened, config)
    PROMPT_CHOICES.save(model_key(opened, config), choice)


def answer(engine: Engine, prompt: Sequence[int] = PROMPT, **options: Any) -> Reply:
    return Reply.of(engine.model.answer(None, prompt, GenerateOptions(**{"max_tokens": 8, **options})))


@FAMILIES
def test_short_prompts_and_exact_answers_are_the_own_graphs(bundle: Path, files: Callable[[], list[Path]]) -> None:
    stages: list[tuple[str, float]] = []
    with loaded(bundle, prefill="int8", progress=lambda *each: stages.append(each)) as engine:
        assert files(), "it is made when the model is loaded"
        assert stages[0][0] == prefill_choice.MAKING
        assert answer(engine).stats.prompt_readers == {"int8": 200}
        assert answer(engine, PROMPT[:40]).stats.prompt_readers.keys() == {"base"}
        assert answer(engine, exact=True).stats.prompt_readers == {"base": 200}


@FAMILIES
def test_exact_answers_recompute_what_it_wrote(bundle: Path) -> None:
    """A conversation whose first prompt was read with int8 weights answers exactly what plain prefill gives."""
    with loaded(bundle, prefill="int8") as engine, loaded(bundle, prefill="plain") as plain:
        sequences = [each.model.new_sequence() for each in (engine, plain)]
        for each, sequence in zip((engine, plain), sequences, strict=True):
            Reply.of(each.model.answer(sequence, PROMPT[:150], GenerateOptions(max_tokens=1)))
        assert sequences[0].arena.plain_length == 0
        assert sequences[1].arena.plain_length == 150
        options = GenerateOptions(max_tokens=20, exact=True)
        texts = [
            Reply.of(each.model.answer(sequence, PROMPT, options)).text
            for each, sequence in zip((engine, plain), sequences, strict=True)
        ]
        assert texts[0] == texts[1]


@FAMILIES
def test_what_follows_its_prompts_does_not_depend_on_rejected_drafts(bundle: Path) -> None:
    """Rejections rewind states that the int8 graph wrote, and a second prompt starts where a draft was cut.

    Passes of other widths round activations of int4 products otherwise, so distributions are compared, not texts.
    """
    opened, config = open_bundle(bundle), SessionConfig(cpu_device(), 1)
    graphs = open_graph.open_graph(opened, config, cache=True, prefill=PrefillMode.INT8)
    further = graphs.further[0]
    further.refusal = None

    def log_probs(random: np.random.Generator | None) -> npt.NDArray[np.float64]:
        """Log-probabilities after each token but those of prompts: one by one, or in chains with a wrong end."""
        bound, rows = graphs.bind(graphs.arena(256)), []
        for start, stop in ((70, 100), (170, 200)):
            assert prefill(bound, PROMPT[:start]).tokens_by_graph["int8"] >= 64
            while (base := bound.arena.length) < stop:
                right = 1 if random is None else min(int(random.integers(1, 6)), stop - base)
                wrong = [] if random is None else random.integers(5, 300, random.integers(0, 5)).tolist()
                logits = bound.forward([*PROMPT[base : base + right], *wrong])[:right]
                rows.append(log_softmax(logits.astype(np.float64)))
                bound.arena.commit(right)
        return np.concatenate(rows)

    expected, found = log_probs(None), log_probs(np.random.default_rng(4))
    divergence = np.sum(np.exp(expected) * (expected - found), axis=-1)
    assert divergence.size == 60
    assert divergence.max() < 0.02


def test_speculation_and_the_prefix_cache_leave_the_text_as_it_is(bundle: Path) -> None:
    with (
        loaded(bundle, prefill="int8", prefix_cache=1 << 30) as cached,
        loaded(bundle, prefill="int8", prefix_cache=0) as fresh,
    ):
        reused = 0
        for length in (150, 100, 170, 170, 200):
            reply = answer(cached, PROMPT[:length])
            expected = answer(fresh, PROMPT[:length], speculation=Speculation.OFF)
            assert reply.text == expected.text
            reused += reply.stats.reused_tokens
        assert reused > 200


def test_auto_follows_what_was_measured(bundle: Path) -> None:
    with loaded(bundle) as engine:
        assert engine.model.prefill_choice.refusal == prompt_choice.NOT_MADE
        assert engine.model.prefill_choice.described(answer(engine, PROMPT[:100]).stats.prompt_readers) == (
            "int8 prompt graph: not made yet (edge-run tune makes it)"
        )
    results = [
        (FASTER, None),
        (choice_of(FAST, SLOW), "not faster here: 0.60 times the speed"),
        (choice_of(SLOW, FAST, 0.08), "failed the quality check: KL 0.08 > 0.02"),
        (choice_of(SLOW, FAST, float("inf")), prompt_choice.NOT_MADE),  # not a figure
        (PromptChoice("its weights are float32"), "its weights are float32"),
    ]
    for choice, refusal in results:
        store(bundle, choice)
        with loaded(bundle) as engine:
            assert engine.model.prefill_choice.refusal == refusal
            assert answer(engine).stats.prompt_readers.keys() == ({"base"} if refusal else {"int8"})


def test_passes_are_as_wide_as_was_measured(bundle: Path) -> None:
    store(bundle, choice_of({64: 0.019, 128: 0.05}, {64: 0.02, 128: 0.03}))
    with loaded(bundle) as engine:
        # A pass over the last 72 tokens is one of those that are not faster.
        assert answer(engine).stats.prompt_readers == {"int8": 128, "base": 72}


def test_the_best_short_enough_pass_is_chosen() -> None:
    plain = {64: 0.22, 128: 0.4, 256: 0.8, 512: 1.6}
    choice = choice_of(plain, {64: 0.2, 128: 0.3, 256: 0.56, 512: 1.02})
    assert choice.refusal is None
    assert (choice.least_width, choice.width) == (64, 256)
    assert choice_of(plain, {64: 1.2, 128: 1.9, 256: 3.0, 512: 5.0}).width == 64
    assert record_from_json(PromptChoice, json.loads(json.dumps(asdict(choice)))) == choice
    for damaged in (
        {},
        {"obstacle": 3},
        asdict(choice) | {"mean_kl": None},
        asdict(choice) | {"times": {"seconds": {"64": [1.0, -1.0]}}},
        asdict(choice) | {"times": {"seconds": {"wide": [1.0, 1.0]}}},
    ):
        with pytest.raises(ValueError, match=r".+"):
            record_from_json(PromptChoice, damaged)


def test_the_copy_of_a_foreign_graph_is_not_probed(
    tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding to 8 bits differs between passes by more than a probe permits, in models of many layers."""
    from edgerun.export import INT4, ExportRecipe, export_checkpoint

    recipe = ExportRecipe(INT4, layout=GraphLayout.GENAI)
    foreign = export_checkpoint(bundle.with_name("checkpoint"), tmp_path / "genai", recipe).bundle
    (foreign / "edge.json").unlink()
    probed: list[str] = []

    def counting(*arguments: Any, **options: Any) -> Any:
        probed.append(arguments[2])
        return probe(*arguments, **options)

    monkeypatch.setattr(session, "probe", counting)
    with loaded(foreign, prefill="int8") as engine:
        assert answer(engine).stats.prompt_readers["int8"] > 0
    assert set(probed) == {str(foreign / "model.onnx")}


def test_it_is_loaded_for_prompts_that_it_saves_more_time_of(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_graph, "TOKENS_TO_LOAD", 300)
    store(bundle, FASTER)
    with loaded(bundle, prefix_cache=0) as engine:
        first = answer(engine)
        assert first.stats.prompt_readers == {"base": 200}
        note = engine.model.prefill_choice.described(first.stats.prompt_readers)
        assert note == "int8 prompt graph: not loaded, which would take longer than it saves"
        # The time that was lost with the first prompt counts.
        assert answer(engine).stats.prompt_readers == {"int8": 200}
        assert engine.model.prefill_choice.described({"base": 40}) is None


def test_it_is_loaded_while_the_engine_is_idle_after_such_a_prompt(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_graph, "TOKENS_TO_LOAD", 1000)
    store(bundle, FASTER)
    with loaded(bundle, prefix_cache=0) as engine:
        answer(engine, PROMPT[:40])
        assert engine.model.prefill_choice._background._thread is None, "the prompt was short"
        assert answer(engine).stats.prompt_readers == {"base": 200}
        wait_until(lambda: engine.model.prefill_choice.refusal_of({"base": 200}) is None)
        assert answer(engine).stats.prompt_readers == {"int8": 200}


def test_a_full_disk_costs_a_line_and_the_speed(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, files: Callable[[], list[Path]]
) -> None:
    usage = shutil.disk_usage(bundle)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with caplog.at_level(logging.WARNING), loaded(bundle, prefill="int8") as engine:
        assert answer(engine).stats.prompt_readers == {"base": 200}
        assert engine.model.prefill_choice.refusal is not None
    assert len(caplog.records) == 1
    assert not files()


def test_without_memory_for_its_weights_it_is_not_loaded(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store(bundle, FASTER)
    with loaded(bundle) as engine:
        monkeypatch.setattr(prompt_graph, "available_memory", lambda: 1000)
        assert answer(engine).stats.prompt_readers == {"base": 200}
        assert str(engine.model.prefill_choice.refusal).startswith("too little memory: 1 kB are free")


def test_without_memory_for_its_weights_it_is_not_made(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, files: Callable[[], list[Path]]
) -> None:
    with loaded(bundle) as engine:
        monkeypatch.setattr(prompt_graph, "available_memory", lambda: 1000)
        assert engine.model.prefill_choice.tune() is None
        assert str(engine.model.prefill_choice.refusal).startswith("too little memory: 1 kB are free")
    assert not files()


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"cache": False}, "--no-cache was given"), ({"kv": "int8"}, "not with --kv int8")],
)
def test_asked_for_by_name_where_it_cannot_run(bundle: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        loaded(bundle, prefill="int8", **options)
    with loaded(bundle, **options) as engine:
        assert reason in str(engine.model.prefill_choice.refusal)
        assert answer(engine).stats.prompt_readers == {"base": 200}


@FAMILIES
def test_two_answers_at_a_time_say_what_each_says_alone(bundle: Path) -> None:
    prompts = [PROMPT, PROMPT[::-1]]
    with loaded(bundle, prefill="int8", prefix_cache=0) as engine:
        expected = [answer(engine, prompt).text for prompt in prompts]
    with loaded(bundle, prefill="int8", prefix_cache=0) as engine, ThreadPoolExecutor(2) as threads:
        replies = list(threads.map(partial(answer, engine), prompts))
    assert [reply.text for reply in replies] == expected
    assert all(reply.stats.prompt_readers == {"int8": 200} for reply in replies)


def test_a_prompt_is_cancelled_between_two_passes(bundle: Path) -> None:
    store(bundle, choice_of({64: 1.0}, {64: 0.4}))
    fractions: list[float] = []

    def progress(_: str, fraction: float) -> None:
        fractions.append(fraction)
        if len(fractions) == 2:
            engine.cancel()

    with loaded(bundle, progress=progress, prefix_cache=1 << 30) as engine:
        answer(engine, PROMPT[:5])  # measures the model
        fractions.clear()
        reply = answer(engine)
        assert reply.finish_reason is FinishReason.CANCELLED
        assert fractions == [0.0, 64 / 200]
        # What was read is not read again.
        again = answer(engine)
        assert again.finish_reason is FinishReason.LENGTH
        assert again.stats.reused_tokens == 128
        assert again.text == answer(engine, prompt=PROMPT).text


def test_it_is_made_in_the_background_after_a_long_prompt(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, files: Callable[[], list[Path]]
) -> None:
    monkeypatch.setattr(prompt_graph, "_WORTH_MAKING", 150)
    monkeypatch.setattr(prompt_choice, "_WORTH", 0.0)
    monkeypatch.setattr(system_load, "_SECONDS_BUDGET", 0.0)
    monkeypatch.setattr(idle_thread, "_RETRY_S", 0.0)
    failed: list[str] = []

    def fails(_: Bundle) -> int | str:
        failed.append(threading.current_thread().name)
        raise OSError("the disk is gone")

    with loaded(bundle, prefix_cache=0) as engine:
        answer(engine, PROMPT[:100])
        assert engine.model.prefill_choice._background._thread is None, "the prompt was short"
        with monkeypatch.context() as broken:
            broken.setattr(int8_graph_files, "int8_graph_plan", fails)
            assert answer(engine).stats.prompt_readers == {"base": 200}
            thread = engine.model.prefill_choice._background._thread
            thread.join()
            assert failed == [thread.name]
        first = answer(engine)
        assert first.stats.prompt_readers == {"base": 200}
        wait_until(lambda: engine.model.prefill_choice.refusal != prompt_choice.NOT_MADE)
        assert engine.model.prefill_choice.refusal is None
        assert files()
        assert "int8" in answer(engine).stats.prompt_readers
    with loaded(bundle) as engine:
        assert "int8" in answer(engine).stats.prompt_readers, "the measurement was stored"


@pytest.mark.parametrize("threads", [None, 2])
def test_what_tune_measured_beside_other_programs_is_used_until_later_processes_have_measured(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, threads: int | None
) -> None:
    """Also where the number of threads is given that is the default; each process measures once, three in all."""
    monkeypatch.setattr(processor, "physical_cores", lambda: (processor.Core(frozenset({0})),) * 2)
    monkeypatch.setattr(processor, "allowed_cpus", lambda: None)
    monkeypatch.setattr(processor, "cpu_quota", lambda: None)
    monkeypatch.setattr(LoadMeter, "is_busy", property(lambda _: True))
    monkeypatch.setattr(prompt_graph, "_WORTH_MAKING", 150)
    monkeypatch.setattr(prompt_choice, "_WORTH", 0.0)
    monkeypatch.setattr(system_load, "_SECONDS_BUDGET", 0.0)
    settings = {"draft": None, "prefix_cache": 0}
    with edgerun.load(bundle, **settings) as engine:
        first = engine.model.prefill_choice.tune()
        assert set(first.times.disturbed.values()) == {1}
    for disturbed, measures in ((2, True), (3, True), (3, False)):
        with edgerun.load(bundle, threads=threads, **settings) as engine:
            assert "int8" in answer(engine).stats.prompt_readers
            graph = engine.model.prefill_choice._prompt
            found = {"64": disturbed, "128": disturbed}
            wait_until(lambda graph=graph, found=found: graph.choice.times.disturbed == found)
            assert graph.choice.seconds[64] <= first.seconds[64]
            assert graph.choice.mean_kl == first.mean_kl
            assert measures or engine.model.prefill_choice._background._thread is None
    monkeypatch.setattr(LoadMeter, "is_busy", property(lambda _: False))
    with edgerun.load(bundle, **settings) as engine:
        assert not engine.model.prefill_choice.tune().times.disturbed


def test_closing_an_engine_ends_work_in_the_background(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, files: Callable[[], list[Path]]
) -> None:
    monkeypatch.setattr(prompt_graph, "_WORTH_MAKING", 150)
    with loaded(bundle) as engine:
        answer(engine)
    names = {thread.name for thread in threading.enumerate()}
    assert "edge-run prompt graph" not in names
    assert not files()


def test_closing_an_engine_frees_its_sessions_at_once(bundle: Path) -> None:
    def opened() -> Engine:
        engine = loaded(bundle, prefill="int8")
        answer(engine)
        return engine

    require_freed_sessions(opened)
