"""EAGLE-3 heads: features along trees, the head's own vocabulary, hybrid targets, sampled drafts, other caches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx", reason="needs the export extra")

import edgerun
from edgerun import GenerateOptions
from edgerun.export import INT4
from edgerun.runtime.graph.session import GraphSession
from edgerun.runtime.speculation.choice import DraftSampling, Speculation
from edgerun.runtime.speculation.tree import Source
from support.draft_heads import bind_with_features, engine_with_eager_head, run_missing
from support.targets_with_heads import (
    CONTEXT,
    TargetWithHead,
    assert_accepted_tokens_run_again,
    export_with_eagle_head,
)

EAGLE = Speculation.of(Source.EAGLE)
GREEDY = GenerateOptions(max_tokens=30)
SAMPLED = GenerateOptions(max_tokens=30, temperature=0.8, top_k=40, top_p=0.95, repeat_penalty=1.1, seed=3)


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> TargetWithHead:
    return export_with_eagle_head(tmp_path_factory.mktemp("eagle"))


@pytest.fixture(scope="module")
def target(headed: TargetWithHead) -> GraphSession:
    return headed.open_target()


def test_trees_leave_the_features_of_the_accepted_path(headed: TargetWithHead, target: GraphSession) -> None:
    bound = bind_with_features(target, CONTEXT)
    bound.forward([20, 21, 22])
    bound.arena.commit(3)
    mask = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], np.bool_)
    bound.forward([23, 30, 31, 32], positions=[3, 4, 4, 5], tree_mask=mask)
    bound.arena.compact(3, [0, 2, 3])
    assert bound.arena.features is not None
    expected = headed.reference.features([20, 21, 22, 23, 31, 32])
    np.testing.assert_allclose(bound.arena.features.read(0, 6), expected, atol=2e-4)


def test_drafts_have_the_ids_of_the_target(headed: TargetWithHead, target: GraphSession) -> None:
    bound, head = bind_with_features(target, CONTEXT), headed.open_head(target)
    tokens = [20, 21, 22, 30, 40]
    run_missing(bound, tokens)
    head.attach(bound.arena)
    head.reset(tokens)
    ids = np.load(headed.bundle / "d2t.npy")
    expected = headed.reference.run(tokens, ()).logits[-1].argsort()[::-1][:3]
    assert ids.size == 200
    assert head.top_tokens((), 3).tokens == tuple(ids[expected].tolist())


@pytest.mark.parametrize("draft_sampling", [DraftSampling.CHAIN, DraftSampling.TREE])
def test_draft_tokens_can_be_sampled_from_it(headed: TargetWithHead, draft_sampling: DraftSampling) -> None:
    with engine_with_eager_head(headed.bundle) as engine:
        reply = engine.generate("the other thing", SAMPLED, draft_sampling=draft_sampling)
    assert reply.stats.by_source["eagle"].drafted > 0


@pytest.mark.parametrize("kind", ["llama, chains", "lfm2", "qwen3_5_text"])
def test_accepted_chains_run_again_with_the_targets_features(headed: TargetWithHead, tmp_path: Path, kind: str) -> None:
    if kind == "llama, chains":
        assert_accepted_tokens_run_again(headed, trees=False)
    else:
        assert_accepted_tokens_run_again(export_with_eagle_head(tmp_path, family=kind, num_key_value_heads=2))


@pytest.mark.parametrize("choice", [Speculation.AUTO, EAGLE], ids=str)
@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text"])
def test_a_hybrid_target_drafts_chains(tmp_path: Path, family: str, choice: Speculation) -> None:
    bundle = export_with_eagle_head(tmp_path, INT4, family, num_key_value_heads=2).bundle
    with engine_with_eager_head(bundle) as engine:
        # Products of int4 weights in wide passes round otherwise on some processors, which changes near ties.
        plain = engine.generate("in the in the", GREEDY, exact=True, speculation=Speculation.OFF)
        reply = engine.generate("in the in the", GREEDY, exact=True, speculation=choice)
        assert not engine.model.graph_io.supports_trees
    assert reply.text == plain.text
    assert reply.stats.by_source["eagle"].drafted > 0


def test_the_int8_prompt_graph_gives_features_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGERUN_CACHE", str(tmp_path / "cache"))
    bundle = export_with_eagle_head(tmp_path, INT4).bundle
    with edgerun.load(bundle, threads=1, learned=False, prefill="int8") as engine:
        reply = engine.generate("the other thing " * 60, max_tokens=4, raw=True, speculation=EAGLE)
        arena = engine.model.prefixes._kept[-1].arena
    assert reply.stats.prompt_readers["int8"] > 100
    assert arena.features is not None
    assert (arena.features.start, arena.features.end >= arena.length) == (0, True)


def test_a_head_works_beside_an_int8_cache(headed: TargetWithHead) -> None:
    with engine_with_eager_head(headed.bundle, kv="int8") as engine:
        plain = engine.generate("in the in the", GREEDY, speculation=Speculation.OFF)
        reply = engine.generate("in the in the", GREEDY, speculation=EAGLE)
    assert reply.text == plain.text
    assert reply.stats.by_source["eagle"].drafted > 0
