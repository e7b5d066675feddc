"""Drafts of the target over a part of its cache: its logits are those of a pass that sees these slots alone."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import edgerun
from edgerun import Engine, GenerateOptions, InputError, ResponseFormat
from edgerun.edge.cli.main import main
from edgerun.runtime.decode import DecodeLimits, decode
from edgerun.runtime.graph.bound_session import BoundSession
from edgerun.runtime.graph.graph_io import BASE_GRAPH
from edgerun.runtime.graph.session import GraphSession
from edgerun.runtime.long_context import long_graph
from edgerun.runtime.long_context.long_graph import LongContextGraph
from edgerun.runtime.sampling.sampler import Sampler, SamplingParams
from edgerun.runtime.speculation import drafter_set
from edgerun.runtime.speculation.choice import Speculation
from edgerun.runtime.speculation.drafters import sparse_cache
from edgerun.runtime.speculation.drafters.draft_model import DraftModel
from edgerun.runtime.speculation.drafters.interface import TopTokens
from edgerun.runtime.speculation.drafters.sparse_cache import SparseCacheDraft, chosen_slots, load_sparse_draft, overlap
from edgerun.runtime.speculation.learned_rates import DraftModelValue
from edgerun.runtime.speculation.replay import ReplaySampler
from edgerun.runtime.speculation.speculator import Speculator
from support.adversarial_drafters import NEARLY_FREE, FixedCost
from support.draft_heads import CPU, eager_engine
from support.nightly import examples
from support.tiny_models import write_bundle

CONTEXT = 600
SPARSE, OFF = Speculation.parse("sparse"), Speculation.OFF
GREEDY = GenerateOptions(max_tokens=40, ignore_eos=True)
SAMPLED = GREEDY.changed({"temperature": 0.8, "top_k": 40, "top_p": 0.95, "repeat_penalty": 1.1, "seed": 3})
PROMPT = "the sea and sand of the other thing that was in the sea and then on the sand " * 3
PAYS = DraftModelValue.pays
PLAIN_S, DRAFT_S = 0.05, 0.0125
REHEARSAL = 5
"""Draft passes over one token that take as long as a rehearsal."""
TOKENS = st.lists(st.integers(20, 24), min_size=1, max_size=12)
PATHS = st.lists(st.integers(20, 24), max_size=3).map(tuple)


@pytest.fixture(scope="module", autouse=True)
def few_slots() -> Iterator[None]:
    """Sizes with which short texts have blocks that are left out, and drafts of texts where they would not pay."""
    with pytest.MonkeyPatch.context() as patch:
        sizes = {"BLOCK": 4, "_KEPT_BLOCKS": 5, "_RECENT_BLOCKS": 2, "_REFRESH": 6, "_RECENT_TEXT": 8, "_SCRATCH": 128}
        for name, size in sizes.items():
            patch.setattr(sparse_cache, name, size)
        patch.setattr(sparse_cache, "_ANSWER_SHARE", 1e9)
        patch.setattr(DraftModelValue, "pays", lambda *_, **__: True)
        yield


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("sparse"), max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def target(bundle: Path) -> GraphSession:
    return GraphSession(bundle / "model.onnx", CPU)


@pytest.fixture(scope="module")
def engine(bundle: Path) -> Iterator[Engine]:
    with eager_engine(bundle) as engine:
        yield engine


def new_draft(target: GraphSession) -> SparseCacheDraft:
    new = load_sparse_draft(target, FixedCost(NEARLY_FREE))
    assert not isinstance(new, str)
    return new()


def run(bound: BoundSession, tokens: list[int]) -> None:
    bound.forward(tokens)
    bound.arena.commit(len(tokens))


def seen_alone(bound: BoundSession, text: list[int], path: tuple[int, ...], slots: np.ndarray) -> np.ndarray:
    """Logits behind a path, of a pass over the whole cache that hides all slots but some."""
    tokens, base = [text[-1], *path], bound.arena.length
    mask = np.zeros((len(tokens), base + len(tokens)), np.bool_)
    mask[:, slots] = True
    mask[:, base:] = np.tri(len(tokens), dtype=np.bool_)
    return bound.forward(tokens, tree_mask=mask)[-1].copy()


@settings(max_examples=examples(60))
@given(first=st.lists(TOKENS, min_size=1, max_size=6), grown=st.lists(st.tuples(TOKENS, st.lists(PATHS, max_size=4))))
def test_logits_are_those_of_the_target_over_the_chosen_slots(
    target: GraphSession, first: list[list[int]], grown: list[tuple[list[int], list[tuple[int, ...]]]]
) -> None:
    text = [21, 22, *(token for part in first for token in part)]
    bound, model = target.bind(target.arena(CONTEXT)), new_draft(target)
    run(bound, text[:-1])
    model.attach(bound.arena)
    model.reset(text)
    slots, room = np.zeros(0, np.intp), 0
    for more, paths in [*grown, ([20], [()])]:
        new = np.arange(slots[-1] + 1 if slots.size else 0, len(text) - 1)
        if paths:  # nothing is copied for rounds that draft nothing
            chosen = not slots.size or new.size > room
            slots = chosen_slots(np.array(text), len(text) - 1) if chosen else np.concatenate([slots, new])
            room = 5 * 4 + 6 - slots.size
            assert slots.size <= 5 * 4 + 6
        for path in paths:
            np.testing.assert_allclose(model.logits(path), seen_alone(bound, text, path, slots), atol=2e-4)
        run(bound, [text[-1], *more[:-1]])
        text += more
        for token in more:
            model.append(token)
    assert bound.arena.length == len(text) - 1


def test_blocks_with_the_words_of_the_recent_text_are_chosen() -> None:
    text = np.arange(100, 300)
    text[-8:] = text[61:69]
    slots = chosen_slots(text, 199)
    # The first block, the recent ones, and those of the passage; one is still free, and the latest one is taken.
    np.testing.assert_array_equal(slots, [*range(4), *range(60, 72), *range(196, 199)][:4] + slots[4:].tolist())
    assert {*range(60, 72)} & {*slots.tolist()} >= {*range(64, 72)}
    assert {*range(192, 199)} <= {*slots.tolist()}
    assert slots.size <= 20


def test_what_occurs_everywhere_counts_little() -> None:
    text = np.array([7, 8] * 40 + [1, 2, 3, 9] + [7, 8] * 10 + [2, 3, 7, 8])
    scores = overlap(text, text.size)
    assert scores[:18].max() < 0.3
    assert scores[20:22].max() > 0.5


@pytest.mark.parametrize("options", [GREEDY, GREEDY.changed({"exact": True}), SAMPLED], ids=["", "exact", "sampled"])
@pytest.mark.parametrize("trees", [True, False], ids=["trees", "chains"])
def test_the_text_is_that_of_plain_decoding(bundle: Path, options: GenerateOptions, trees: bool) -> None:
    with eager_engine(bundle, trees=trees) as engine:
        for end in (20, 60, 61, 90, 130):
            plain = engine.generate(PROMPT[:end], options, speculation=OFF)
            drafted = engine.generate(PROMPT[:end], options, speculation=SPARSE)
            assert drafted.text == plain.text
            counts = drafted.stats.by_source.get("sparse")
            assert counts is not None
            assert counts.drafted > 5


def test_wrong_slots_change_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    asked = []

    def wrong(text: np.ndarray, end: int) -> np.ndarray:
        asked.append(end)
        return np.sort(random.choice(end, min(end, 11), replace=False))

    monkeypatch.setattr(sparse_cache, "chosen_slots", wrong)
    for options in (GREEDY, SAMPLED):
        plain = engine.generate(PROMPT, options, speculation=OFF)
        assert engine.generate(PROMPT, options, speculation=SPARSE).text == plain.text
    assert asked


@pytest.mark.parametrize("options", [GREEDY, SAMPLED, SAMPLED.changed({"temperature": 1.5})])
def test_with_all_slots_the_draft_is_what_the_target_chooses(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, options: GenerateOptions
) -> None:
    """With the likeliest tokens alone, temperature 1.5 gives fewer than three tokens a pass."""
    monkeypatch.setattr(sparse_cache, "chosen_slots", lambda text, end: np.arange(end))
    with eager_engine(bundle) as engine:
        stats = engine.generate(PROMPT[:20], options, speculation=SPARSE, top_k=3, max_tokens=60).stats
    assert stats.tokens_per_pass > 4
    assert stats.by_source["sparse"].accepted > 40


def speed(target: GraphSession, monkeypatch: pytest.MonkeyPatch, answer: list[int] | None) -> tuple[float, int]:
    """Speed over plain decoding of a recorded answer, None for the target's own, at given times of passes; and passes.

    The draft is certain of what it finds likeliest.
    """
    monkeypatch.setattr(DraftModelValue, "pays", PAYS)
    monkeypatch.setattr(SparseCacheDraft, "take_seconds_spent", lambda model: DRAFT_S * model.passes - spent[0])
    certain, rehearse = DraftModel.top_tokens, SparseCacheDraft._rehearse

    def rehearsed(model: SparseCacheDraft) -> int:
        model.passes += REHEARSAL
        return rehearse(model)

    monkeypatch.setattr(SparseCacheDraft, "_rehearse", rehearsed)
    monkeypatch.setattr(
        DraftModel, "top_tokens", lambda *arguments: TopTokens(certain(*arguments).tokens[:1], (0.999,))
    )
    new = load_sparse_draft(target, FixedCost({128: {1: DRAFT_S, 8: 3 * DRAFT_S}}))
    assert not isinstance(new, str)
    model, spent = new(), [0.0]
    cost = FixedCost({128: {1: PLAIN_S, 2: 1.3 * PLAIN_S, 16: 5 * PLAIN_S}})
    bound, prompt = target.bind(target.arena(CONTEXT)), [21, 22, 23] * 10
    own = SamplingParams(), target.graph_io.vocab_size
    sampler = Sampler(*own) if answer is None else ReplaySampler(answer, len(prompt), *own)
    model.attach(bound.arena)
    limits = DecodeLimits(400 if answer is None else len(answer))
    steps = decode(bound, prompt, sampler, limits, Speculator((), cost, model=model))
    tokens, seconds = len(next(steps).tokens), 0.0
    for step in steps:
        tokens += len(step.tokens)
        width = 1 if step.round is None else step.round.width
        seconds += cost.seconds(width, 128) + DRAFT_S * model.passes - spent[0]
        spent[0] = DRAFT_S * model.passes
    return (tokens - 1) * PLAIN_S / seconds, model.passes


@pytest.mark.parametrize("tokens", [8, 50, 140, 160, 400])
def test_a_draft_that_is_never_right_costs_at_most_a_hundredth_of_any_answer(
    target: GraphSession, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    monkeypatch.setattr(sparse_cache, "_ANSWER_SHARE", 1 / 128)
    monkeypatch.setattr(sparse_cache, "_REHEARSAL", 2.5 * DRAFT_S / PLAIN_S)  # the draft's cost knows its own times
    found, passes = speed(target, monkeypatch, np.random.default_rng(0).integers(20, 60, tokens).tolist())
    assert found > 0.99
    assert (passes > 0) is (tokens >= 160), "a rehearsal takes 1.16 tokens"
    assert passes < REHEARSAL + 8


def test_a_draft_that_is_right_gains(target: GraphSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_cache, "chosen_slots", lambda text, end: np.arange(end))
    monkeypatch.setattr(sparse_cache, "_KEPT_BLOCKS", 128)
    found, passes = speed(target, monkeypatch, None)
    assert found > 1.4
    assert passes > 100


def test_nothing_is_drafted_before_the_answer_has_enough_to_rehearse_on(target: GraphSession) -> None:
    bound, model = target.bind(target.arena(CONTEXT)), new_draft(target)
    text = [21, 22, 23] * 5
    run(bound, text)
    model.attach(bound.arena)
    model.reset(text)
    for token in (20, 21, 22, 23):
        assert model.seconds(()) == np.inf
        model.append(token)
    run(bound, [20, 21, 22])
    assert model.seconds(()) < np.inf
    assert (model.candidates(()), model.passes) == ((), 0)
    assert model.candidates(())
    model.settle(-9.0)
    assert model.seconds(()) == np.inf


def test_a_grammar_is_followed(engine: Engine) -> None:
    options = GREEDY.changed(
        {"ignore_eos": False, "response_format": ResponseFormat.regex("( the sea| the sand| in the other thing)+")}
    )
    plain = engine.generate(PROMPT, options, speculation=OFF)
    assert engine.generate(PROMPT, options, speculation=SPARSE).text == plain.text


def test_several_requests_have_slots_of_their_own(engine: Engine) -> None:
    prompts = [PROMPT[start:] for start in (0, 30, 70)]
    expected = [engine.generate(prompt, GREEDY, speculation=OFF).text for prompt in prompts]
    texts = [""] * len(prompts)

    def answer(place: int) -> None:
        texts[place] = engine.generate(prompts[place], GREEDY, speculation=SPARSE).text

    threads = [threading.Thread(target=answer, args=(place,)) for place in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == expected


def test_only_long_prompts_are_drafted_so_by_default(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def sources() -> set[str]:
        return set(engine.generate(PROMPT, GREEDY).stats.by_source)

    assert "sparse" not in sources()
    monkeypatch.setattr(drafter_set, "LONG_CONTEXT", 20)
    assert "sparse" in sources()
    assert "sparse" not in set(engine.generate(PROMPT, GREEDY, speculation=Speculation.parse("suffix")).stats.by_source)


@pytest.mark.parametrize("faster", [True, False])
def test_drafts_run_in_the_graph_that_verifies(bundle: Path, monkeypatch: pytest.MonkeyPatch, faster: bool) -> None:
    """Also where it is not the one for their own number of slots."""
    monkeypatch.setattr(long_graph, "LEAST_CONTEXT", 40)
    monkeypatch.setattr(long_graph, "_WORTH", 1e9 if faster else 0.0)
    with eager_engine(bundle) as engine:
        text = engine.generate(PROMPT, GREEDY, speculation=SPARSE).text
        draft: Any = engine.model.drafters._idle[-1]._sparse
        assert draft.passes > 5
        assert draft._arena.length < 40
        assert draft._bound.last_graph == (LongContextGraph.name if faster else BASE_GRAPH)
        assert engine.generate(PROMPT, GREEDY, speculation=OFF).text == text


def test_a_hybrid_model_is_refused_in_one_line(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path, "lfm2")
    with edgerun.load(bundle, threads=1, cache=False) as engine:
        with pytest.raises(InputError) as caught:
            engine.generate("the", speculation=SPARSE)
        assert str(caught.value) == (
            "the drafter sparse is not available: the model has layers without attention, whose states cannot be taken "
            "apart; leave it out"
        )


def test_another_draft_model_beside_it_is_refused(engine: Engine, bundle: Path) -> None:
    with edgerun.load(bundle, threads=1, cache=False, draft=bundle) as paired:
        with pytest.raises(InputError, match="model and sparse cannot draft the same answer; leave one of them out"):
            paired.generate("the", speculation=Speculation.parse("model,sparse"))
        assert paired.generate("the", GREEDY, speculation=SPARSE).text == engine.generate("the", GREEDY).text


def test_the_command_line_drafts_so(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found: dict[str, Any] = {}
    for spec in ("off", "sparse"):
        assert main([str(bundle), "-p", PROMPT, "--raw", "-n", "60", "--ignore-eos", "--spec", spec, "--json"]) == 0
        found[spec] = json.loads(capsys.readouterr().out)
    assert found["sparse"]["text"] == found["off"]["text"]
    assert found["sparse"]["speculation"]["by_source"]["sparse"]["drafted"] > 0
