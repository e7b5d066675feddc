"""Draft heads over hidden states: they compute what the reference does, and the text stays the target's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("onnx", reason="needs the export extra")

from edgerun import Engine, GenerateOptions
from edgerun.runtime.graph.session import GraphSession
from edgerun.runtime.speculation.choice import Speculation
from support.draft_heads import (
    WrongHead,
    bind_with_features,
    engine_with_eager_head,
    run_missing,
)
from support.targets_with_heads import (
    CONTEXT,
    TargetWithHead,
    assert_accepted_tokens_run_again,
    export_with_eagle_head,
    export_with_mtp_module,
)

GREEDY = GenerateOptions(max_tokens=30, ignore_eos=True)
SAMPLED = GREEDY.changed({"temperature": 0.8, "top_k": 40, "top_p": 0.95, "repeat_penalty": 1.1, "seed": 3})
OPTIONS = {
    "greedy": GREEDY,
    "until the end of the answer": GREEDY.changed({"ignore_eos": False}),
    "exact": GREEDY.changed({"exact": True}),
    "sampled": SAMPLED,
}
PROMPTS = ("the other thing", "in the in the in the", "a")
TOKENS = st.lists(st.integers(20, 24), min_size=1, max_size=10)
PATHS = st.lists(st.integers(20, 24), max_size=3).map(tuple)


@pytest.fixture(scope="module", params=["EAGLE-3", "MTP, tied head", "MTP, separate head"])
def headed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TargetWithHead:
    folder = tmp_path_factory.mktemp("headed")
    if request.param == "EAGLE-3":
        return export_with_eagle_head(folder)
    return export_with_mtp_module(folder, tie_word_embeddings=request.param == "MTP, tied head")


@pytest.fixture(scope="module")
def target(headed: TargetWithHead) -> GraphSession:
    return headed.open_target()


@pytest.fixture(scope="module")
def engine(headed: TargetWithHead) -> Iterator[Engine]:
    with engine_with_eager_head(headed.bundle) as engine:
        yield engine


def test_the_target_gives_the_features_of_every_token(headed: TargetWithHead, target: GraphSession) -> None:
    tokens = np.random.default_rng(1).integers(5, 300, 40).tolist()
    bound = bind_with_features(target, CONTEXT)
    for start, stop in ((0, 17), (17, 18), (18, 30), (30, 40)):
        bound.forward(tokens[start:stop], logits_for=(stop - start - 1,))
        bound.arena.commit(stop - start)
    assert bound.arena.features is not None
    np.testing.assert_allclose(bound.arena.features.read(0, 40), headed.reference.features(tokens), atol=2e-4)


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_wherever_the_sequence_goes_the_logits_are_those_of_the_reference(
    headed: TargetWithHead, target: GraphSession, data: st.DataObject
) -> None:
    bound, head = bind_with_features(target, CONTEXT), headed.open_head(target)
    head.attach(bound.arena)
    tokens: list[int] = data.draw(TOKENS)
    run_missing(bound, tokens)
    head.reset(tokens)
    for _ in range(data.draw(st.integers(1, 8))):
        match data.draw(st.sampled_from(("ask", "append", "replace", "rewind", "another arena"))):
            case "append":
                for token in data.draw(TOKENS):
                    tokens.append(token)
                    head.append(token)
            case "replace":
                tokens = [*tokens[: data.draw(st.integers(0, len(tokens)))], *data.draw(TOKENS)]
                bound.arena.rewind_to(0)
                head.reset(tokens)
            case "rewind":  # the states of a target's linear attention are computed again
                kept = data.draw(st.integers(0, bound.arena.length))
                bound.arena.rewind_to(kept)
                tokens = [*tokens[:kept], *data.draw(TOKENS)]
                head.reset(tokens)
            case "another arena":
                bound = bind_with_features(target, CONTEXT)
                run_missing(bound, tokens)
                head.attach(bound.arena)
            case _:
                pass
        run_missing(bound, tokens)
        path = data.draw(PATHS)
        logits = head.logits(path)
        if len(tokens) < 2:
            assert logits is None
            continue
        assert logits is not None
        np.testing.assert_allclose(logits, headed.reference.run(tokens, path).logits[-1], atol=1e-3)


def test_where_features_are_unknown_the_head_begins_later(headed: TargetWithHead, target: GraphSession) -> None:
    tokens = np.random.default_rng(2).integers(5, 300, 30).tolist()
    bound, head = bind_with_features(target, CONTEXT), headed.open_head(target)
    run_missing(bound, tokens[:20])
    restored = bind_with_features(target, CONTEXT)
    restored.arena.restore(bound.arena.snapshot())
    head.attach(restored.arena)
    head.reset(tokens[:20])
    assert head.logits(()) is None
    for token in tokens[20:]:
        head.append(token)
    run_missing(restored, tokens)
    logits = head.logits((21, 22))
    assert logits is not None
    np.testing.assert_allclose(logits, headed.reference.run(tokens, (21, 22), first=19).logits[-1], atol=1e-3)


def test_a_head_without_features_proposes_nothing(headed: TargetWithHead, target: GraphSession) -> None:
    head = headed.open_head(target)
    head.attach(target.arena(CONTEXT))
    head.reset([20, 21, 22])
    assert head.top_tokens((), 3).tokens == ()


@pytest.mark.parametrize("auto", [True, False], ids=["auto", "the head alone"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_text_is_that_of_plain_decoding(
    headed: TargetWithHead, engine: Engine, auto: bool, options: GenerateOptions
) -> None:
    drafted, name = 0, str(headed.kind)
    for prompt in PROMPTS:
        plain = engine.generate(prompt, options, speculation=Speculation.OFF)
        reply = engine.generate(prompt, options, speculation=Speculation.AUTO if auto else headed.speculation)
        assert (reply.text, reply.finish_reason) == (plain.text, plain.finish_reason)
        if name in reply.stats.by_source:
            drafted += reply.stats.by_source[name].drafted
    assert drafted > 0 or not options.ignore_eos


def test_edited_prompts_and_kept_prefixes_stay_the_targets(headed: TargetWithHead, engine: Engine) -> None:
    for length in range(3, 12):
        prompt = "the other thing in the other"[: 2 * length]
        for options in (GREEDY, SAMPLED):
            plain = engine.generate(prompt, options, speculation=Speculation.OFF)
            assert engine.generate(prompt, options, speculation=headed.speculation).text == plain.text


def test_a_saved_session_continues_with_the_same_text(headed: TargetWithHead, tmp_path: Path) -> None:
    path = tmp_path / "session.kv"
    with engine_with_eager_head(headed.bundle) as engine, engine.session() as chat:
        chat.send("in the", GREEDY, speculation=headed.speculation)
        chat.save(path)
        expected = chat.send("and of", GREEDY, speculation=Speculation.OFF)
    with engine_with_eager_head(headed.bundle) as engine, engine.session(resume=path) as resumed:
        reply = resumed.send("and of", GREEDY, speculation=headed.speculation)
    assert reply.text == expected.text
    assert reply.stats.by_source[str(headed.kind)].drafted > 0


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_wrong_head_changes_nothing(headed: TargetWithHead, options: GenerateOptions) -> None:
    with engine_with_eager_head(headed.bundle) as engine:
        draft = engine.model.drafters.draft_model()
        assert draft is not None
        draft.__class__ = WrongHead
        plain = engine.generate("the other thing", options, speculation=Speculation.OFF)
        reply = engine.generate("the other thing", options, speculation=headed.speculation)
        counts = reply.stats.by_source[str(headed.kind)]
    assert reply.text == plain.text
    assert counts.drafted > 10 * max(counts.accepted, 1)


def test_accepted_tokens_run_again_with_the_targets_features(headed: TargetWithHead) -> None:
    assert_accepted_tokens_run_again(headed)
