"""Draft heads over hidden states: they compute what the reference does, and the text stays the target's."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("onnx", reason="needs the export extra")

import edgerun
from edgerun import Speculation
from edgerun.errors import InputError
from edgerun.export import INT4
from edgerun.export.drafts.trimmed_head import trim_own_draft
from edgerun.runtime.graph.session import GraphSession
from edgerun.runtime.speculation.tree import Source
from support.draft_heads import (
    CONTEXT,
    TargetWithHead,
    assert_accepted_tokens_run_again,
    bind_with_features,
    export_with_eagle_head,
    export_with_mtp_module,
    run_missing,
)
from support.tiny_models import write_bundle

KEPT = np.arange(1, 300, 3)
"""Tokens of a trimmed LM head."""
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
        np.testing.assert_allclose(logits, headed.reference.run(tokens, path)[-1], atol=1e-3)


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
    np.testing.assert_allclose(logits, headed.reference.run(tokens, (21, 22), first=19)[-1], atol=1e-3)


def test_accepted_tokens_run_again_with_the_targets_features(headed: TargetWithHead) -> None:
    assert_accepted_tokens_run_again(headed)


@pytest.fixture(scope="module")
def eagle(tmp_path_factory: pytest.TempPathFactory) -> TargetWithHead:
    return export_with_eagle_head(tmp_path_factory.mktemp("eagle"))


def test_trees_leave_the_features_of_the_accepted_path(eagle: TargetWithHead) -> None:
    bound = bind_with_features(eagle.open_target(), CONTEXT)
    bound.forward([20, 21, 22])
    bound.arena.commit(3)
    mask = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], np.bool_)
    bound.forward([23, 30, 31, 32], positions=[3, 4, 4, 5], tree_mask=mask)
    bound.arena.compact(3, [0, 2, 3])
    expected = eagle.reference.features([20, 21, 22, 23, 31, 32])
    np.testing.assert_allclose(bound.arena.features.read(0, 6), expected, atol=2e-4)


@pytest.mark.parametrize("kind", ["llama, chains", "lfm2", "qwen3_5_text"])
def test_accepted_chains_run_again_with_the_targets_features(eagle: TargetWithHead, tmp_path: Path, kind: str) -> None:
    if kind == "llama, chains":
        assert_accepted_tokens_run_again(eagle, trees=False)
    else:
        assert_accepted_tokens_run_again(export_with_eagle_head(tmp_path, family=kind, num_key_value_heads=2))


def test_the_int8_prompt_graph_gives_features_too(tmp_path: Path, cache: Path) -> None:
    bundle = export_with_eagle_head(tmp_path, INT4).bundle
    with edgerun.load(bundle, threads=1, learned=False, prefill="int8") as engine:
        reply = engine.generate(
            "the other thing " * 60, max_tokens=4, raw=True, speculation=Speculation.of(Source.EAGLE)
        )
        arena = engine.model.prefixes._kept[-1].arena()
    assert reply.stats.prompt_readers["int8"] > 100
    assert (arena.features.start, arena.features.end >= arena.length) == (0, True)


@pytest.mark.parametrize("tied", [True, False], ids=["tied head", "separate head"])
def test_a_trimmed_module_has_the_rows_of_the_reference(tmp_path: Path, tied: bool) -> None:
    whole = export_with_mtp_module(tmp_path, tie_word_embeddings=tied)
    trimmed = replace(whole, bundle=Path(shutil.copytree(whole.bundle, tmp_path / "trimmed")))
    trim_own_draft(trimmed.bundle, KEPT)
    target = whole.open_target()
    bound = bind_with_features(target, CONTEXT)
    heads = [each.open_head(target) for each in (whole, trimmed)]
    tokens = [*np.random.default_rng(4).integers(5, 300, 20).tolist(), 21]
    run_missing(bound, tokens)
    for head in heads:
        head.attach(bound.arena)
        head.reset(tokens)
    for path in ((), (22,), (22, 40), (22, 40, 5)):  # tokens that it lacks are read all the same
        expected = whole.reference.run(tokens, path)[-1][KEPT]
        all_logits, found = (head.logits(path) for head in heads)
        assert found.shape == KEPT.shape
        np.testing.assert_allclose(found, expected, atol=1e-3)
        np.testing.assert_allclose(found, all_logits[KEPT], atol=1e-4)
        assert heads[1].top_tokens(path, 4).tokens == tuple(KEPT[np.argsort(-expected)[:4]].tolist())
    assert_accepted_tokens_run_again(trimmed)


def test_features_survive_tokens_that_run_once_more(tmp_path: Path) -> None:
    headed = export_with_mtp_module(tmp_path)
    tokens = np.random.default_rng(3).integers(5, 300, 50).tolist()
    bound = bind_with_features(headed.open_target(), CONTEXT)
    arena = bound.arena
    for start in range(0, 40, 4):  # of every chain of four draft tokens, two are accepted
        bound.forward([*tokens[arena.length : arena.length + 2], 7, 8])
        arena.compact(arena.length, [0, 1])
        assert arena.length == start // 2 + 2
    arena.rewind_to(13)  # where no states are known
    bound.forward(tokens[13:20])
    arena.commit(7)
    assert arena.replayed > 0
    np.testing.assert_allclose(arena.features.read(0, 20), headed.reference.features(tokens[:20]), atol=2e-4)


def test_a_model_without_the_module_says_how_to_get_it(tmp_path: Path) -> None:
    with (
        edgerun.load(write_bundle(tmp_path), cache=False) as engine,
        pytest.raises(InputError, match="multi-token-prediction"),
    ):
        engine.generate("the", speculation=Speculation.of(Source.MTP))
