"""Multi-token-prediction modules: replayed tokens, trimmed LM heads, exports in int4, models without a module."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("onnx", reason="needs the export extra")

import edgerun
from edgerun import GenerateOptions
from edgerun.errors import InputError
from edgerun.export import INT4
from edgerun.export.drafts.trimmed_head import trim_own_draft
from edgerun.runtime.speculation.choice import Speculation
from edgerun.runtime.speculation.drafters.target_drafts import HiddenStateHead
from edgerun.runtime.speculation.tree import Source
from support.draft_heads import bind_with_features, engine_with_eager_head, run_missing
from support.targets_with_heads import (
    CONTEXT,
    TargetWithHead,
    assert_accepted_tokens_run_again,
    export_with_mtp_module,
)
from support.tiny_models import write_bundle

MTP = Speculation.of(Source.MTP)
GREEDY = GenerateOptions(max_tokens=30, ignore_eos=True)
SAMPLED = GREEDY.changed({"temperature": 0.8, "top_k": 40, "repeat_penalty": 1.1, "seed": 3})
KEPT = np.arange(1, 300, 3)
"""Tokens of a trimmed LM head."""


@pytest.fixture(scope="module", params=[True, False], ids=["tied head", "separate head"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TargetWithHead:
    return export_with_mtp_module(tmp_path_factory.mktemp("mtp"), tie_word_embeddings=request.param)


@pytest.fixture(scope="module")
def trimmed(whole: TargetWithHead, tmp_path_factory: pytest.TempPathFactory) -> TargetWithHead:
    """The same, whose module has a third of the tokens."""
    bundle = Path(shutil.copytree(whole.bundle, tmp_path_factory.mktemp("trimmed") / "bundle"))
    trim_own_draft(bundle, KEPT)
    return replace(whole, bundle=bundle)


def test_a_trimmed_lm_head_has_the_rows_of_the_reference(whole: TargetWithHead, trimmed: TargetWithHead) -> None:
    target = whole.open_target()
    bound = bind_with_features(target, CONTEXT)
    heads = [each.open_head(target) for each in (whole, trimmed)]
    tokens = [*np.random.default_rng(4).integers(5, 300, 20).tolist(), 21]
    run_missing(bound, tokens)
    for head in heads:
        head.attach(bound.arena)
        head.reset(tokens)
    for path in ((), (22,), (22, 40), (22, 40, 5)):  # tokens that it lacks are read all the same
        expected = whole.reference.run(tokens, path).logits[-1][KEPT]
        all_logits, found = (head.logits(path) for head in heads)
        assert all_logits is not None
        assert found is not None
        assert found.shape == KEPT.shape
        np.testing.assert_allclose(found, expected, atol=1e-3)
        np.testing.assert_allclose(found, all_logits[KEPT], atol=1e-4)
        assert heads[1].top_tokens(path, 4).tokens == tuple(KEPT[np.argsort(-expected)[:4]].tolist())


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_trimmed_module_drafts_its_tokens_alone_and_changes_no_text(
    trimmed: TargetWithHead, options: GenerateOptions
) -> None:
    continued: set[int] = set()

    class Watched(HiddenStateHead):
        """Records the draft tokens that are continued."""

        def logits(self, path: tuple[int, ...]) -> npt.NDArray[np.float32] | None:
            continued.update(path)
            return super().logits(path)

    with engine_with_eager_head(trimmed.bundle) as engine:
        head = engine.model.drafters.draft_model()
        assert head is not None
        head.__class__ = Watched
        for prompt in ("the other thing", "in the in the in the", "a"):
            plain = engine.generate(prompt, options, speculation=Speculation.OFF)
            reply = engine.generate(prompt, options, speculation=MTP)
            assert reply.text == plain.text
            assert reply.stats.by_source["mtp"].drafted > 0
    assert continued
    assert continued <= set(KEPT.tolist())


def test_tokens_that_a_trimmed_module_has_are_accepted(trimmed: TargetWithHead) -> None:
    assert_accepted_tokens_run_again(trimmed)


def test_features_survive_tokens_that_run_once_more(tmp_path: Path) -> None:
    headed = export_with_mtp_module(tmp_path)
    tokens = np.random.default_rng(3).integers(5, 300, 50).tolist()
    bound = bind_with_features(headed.open_target(), CONTEXT)
    arena = bound.arena
    assert arena.states is not None
    for start in range(0, 40, 4):  # of every chain of four draft tokens, two are accepted
        bound.forward([*tokens[arena.length : arena.length + 2], 7, 8])
        arena.compact(arena.length, [0, 1])
        assert arena.length == start // 2 + 2
    arena.rewind_to(13)  # where no states are known
    bound.forward(tokens[13:20])
    arena.commit(7)
    assert arena.replayed > 0
    assert arena.features is not None
    np.testing.assert_allclose(arena.features.read(0, 20), headed.reference.features(tokens[:20]), atol=2e-4)


def test_int4_exports_draft_from_the_outside(tmp_path: Path) -> None:
    bundle = export_with_mtp_module(tmp_path, INT4).bundle
    with engine_with_eager_head(bundle) as engine:
        # Products of int4 weights in wide passes round otherwise on some processors, which changes near ties.
        plain = engine.generate("in the in the", GREEDY, exact=True, speculation=Speculation.OFF)
        reply = engine.generate("in the in the", GREEDY, exact=True, speculation=MTP)
        assert not engine.model.graph_io.supports_trees
    assert reply.text == plain.text
    assert reply.stats.by_source["mtp"].drafted > 0


def test_a_model_without_the_module_says_how_to_get_it(tmp_path: Path) -> None:
    with (
        edgerun.load(write_bundle(tmp_path), cache=False) as engine,
        pytest.raises(InputError, match="multi-token-prediction"),
    ):
        engine.generate("the", GREEDY, speculation=MTP)
