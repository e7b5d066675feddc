"""What a target gains from different drafts."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import edgerun
from edgerun.errors import InputError
from edgerun.models.pairing import name_draft
from edgerun.runtime.measure import draft_benefit
from edgerun.runtime.measure.draft_benefit import count_agreement, measure_draft_benefit

tiny = pytest.importorskip("support.tiny_models", reason="needs the export extra")


@pytest.fixture(scope="module")
def texts(tiny_bundle: Path) -> list[np.ndarray]:
    """Three prompts with the answers of the tiny model."""
    with edgerun.load(tiny_bundle, cache=False) as engine:
        found = []
        for start in (20, 40, 60):
            prompt = list(range(start, start + 8))
            sequence = engine.model.new_sequence()
            reply = list(engine.model.answer(sequence, prompt, edgerun.GenerateOptions(max_tokens=24)))
            assert reply
            found.append(np.array(sequence.token_ids))
    return found


pytestmark = pytest.mark.usefixtures("cache")


def paired(target: Path, draft: Path, folder: Path) -> Path:
    copy = shutil.copytree(target, folder / "target")
    name_draft(copy, shutil.copytree(draft, folder / "draft"))
    return copy


def test_the_target_as_its_own_draft_always_agrees(tiny_bundle: Path, tmp_path: Path, texts: list[np.ndarray]) -> None:
    found = measure_draft_benefit(paired(tiny_bundle, tiny_bundle, tmp_path), texts)
    assert found.agreement == 1.0
    assert found.tokens_per_pass >= 1.0
    assert found.plain_seconds > 0
    assert found.speculative_seconds > 0


def test_another_model_as_the_draft_seldom_agrees(tiny_bundle: Path, tmp_path: Path, texts: list[np.ndarray]) -> None:
    other = tiny.write_bundle(tmp_path / "other", seed=7)
    found = measure_draft_benefit(paired(tiny_bundle, other, tmp_path), texts)
    assert found.agreement < 0.5
    assert found.tokens_per_pass >= 1.0


def test_a_draft_on_the_targets_cache_leaves_the_targets_slots(tmp_path: Path) -> None:
    from edgerun.export.drafts.skipped_layers import SubLayer, SubLayerKind, write_layer_skip_draft

    bundle = tiny.write_bundle(tmp_path / "own", num_hidden_layers=4)
    write_layer_skip_draft(bundle, (SubLayer(1, SubLayerKind.ATTENTION), SubLayer(2, SubLayerKind.FEED_FORWARD)))
    text = list(range(20, 60))
    with edgerun.load(bundle, cache=False) as engine:
        draft = engine.model.drafters.draft_model()
        assert draft is not None
        bound, alone = engine.model.new_sequence().bound, engine.model.new_sequence().bound
        agreeing = count_agreement(bound, draft, text)
        assert 0 < agreeing < len(text)
        assert agreeing >= count_agreement(bound, draft, text, 10) >= agreeing - 10
        for token in text:
            alone.forward((token,))
            alone.arena.commit(1)
        np.testing.assert_array_equal(
            bound.forward((5,))[0], alone.forward((5,))[0], "the draft's slots are in the target's cache"
        )
    found = measure_draft_benefit(bundle, [np.array(text)])
    assert 0 < found.agreement < 1


def test_texts_that_are_too_short_are_errors_and_long_ones_are_cut(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="has no draft to measure; export it with --draft or --draft-layers"):
        measure_draft_benefit(tiny_bundle, [np.arange(20, 40)])
    bundle = paired(tiny_bundle, tiny_bundle, tmp_path)
    for texts in ([], [np.array([20, 21])], [np.array([], np.int64)]):
        with pytest.raises(InputError, match="no text is long enough to measure a draft on"):
            measure_draft_benefit(bundle, texts)
    # Of the second text, three tokens are replayed.
    monkeypatch.setattr(draft_benefit, "_MAX_TOKENS", 12)
    assert measure_draft_benefit(bundle, [np.arange(20, 29), np.arange(30, 200)]).agreement == 1.0
    monkeypatch.setattr(draft_benefit, "_MAX_TOKENS", 2)
    with pytest.raises(InputError, match="no text is long enough to measure a draft on"):
        measure_draft_benefit(bundle, [np.arange(20, 29)])
