"""What a draft gains, on real pairs: the target itself as its draft, another model, the target with parts left out."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import edgerun
from edgerun.errors import InputError
from edgerun.models.pairing import name_draft
from edgerun.runtime.measure.agreement import agreeing
from edgerun.runtime.measure.draft_benefit import DraftJudge

tiny = pytest.importorskip("support.tiny_models", reason="needs the export extra")


@pytest.fixture
def texts(tiny_bundle: Path) -> list[np.ndarray]:
    """What the tiny model writes, from a token each."""
    with edgerun.load(tiny_bundle, cache=False) as engine:
        found = []
        for start in (20, 40, 60):
            prompt = list(range(start, start + 8))
            text = engine.model.new_sequence()
            reply = list(engine.model.answer(text, prompt, edgerun.GenerateOptions(max_tokens=24)))
            assert reply
            found.append(np.array(text.token_ids))
    return found


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGERUN_CACHE", str(tmp_path / "cache"))


def paired(target: Path, draft: Path, folder: Path) -> Path:
    copy = shutil.copytree(target, folder / "target")
    name_draft(copy, shutil.copytree(draft, folder / "draft"))
    return copy


def test_a_draft_that_is_the_target_is_always_right(tiny_bundle: Path, tmp_path: Path, texts: list[np.ndarray]) -> None:
    found = DraftJudge(threads=1)(paired(tiny_bundle, tiny_bundle, tmp_path), texts)
    assert found.agreement == 1.0
    assert found.tokens_per_pass >= 1.0
    assert found.plain_seconds > 0
    assert found.speculative_seconds > 0


def test_another_model_is_seldom_right(tiny_bundle: Path, tmp_path: Path, texts: list[np.ndarray]) -> None:
    other = tiny.write_bundle(tmp_path / "other", seed=7)
    found = DraftJudge(threads=1)(paired(tiny_bundle, other, tmp_path), texts)
    assert found.agreement < 0.5
    assert found.tokens_per_pass >= 1.0


def test_a_draft_on_the_targets_cache_leaves_the_targets_rows(tmp_path: Path) -> None:
    from edgerun.export.drafts.skipped_layers import Part, SubLayer, write_own_draft

    bundle = tiny.write_bundle(tmp_path / "own", num_hidden_layers=4)
    write_own_draft(bundle, (SubLayer(1, Part.ATTENTION), SubLayer(2, Part.FEED_FORWARD)))
    text = list(range(20, 60))
    with edgerun.load(bundle, cache=False, threads=1) as engine:
        draft = engine.model.drafters.draft_model()
        assert draft is not None
        bound, alone = engine.model.new_sequence().bound, engine.model.new_sequence().bound
        same = agreeing(bound, draft, text)
        assert 0 < same < len(text)
        assert same >= agreeing(bound, draft, text, 10) >= same - 10
        for token in text:
            alone.forward((token,))
            alone.arena.commit(1)
        np.testing.assert_array_equal(
            bound.forward((5,))[0], alone.forward((5,))[0], "the draft's rows are in the target's cache"
        )
    found = DraftJudge(threads=1)(bundle, [np.array(text)])
    assert 0 < found.agreement < 1


def test_without_a_draft_or_without_text_there_is_nothing_to_judge(tiny_bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no draft to judge; export it with --draft or --draft-layers"):
        DraftJudge(threads=1)(tiny_bundle, [np.arange(20, 40)])
    bundle = paired(tiny_bundle, tiny_bundle, tmp_path)
    for texts in ([], [np.array([20, 21])], [np.array([], np.int64)]):
        with pytest.raises(InputError, match="no text is long enough to judge a draft by"):
            DraftJudge(threads=1)(bundle, texts)


def test_no_more_than_asked_is_looked_at(tiny_bundle: Path, tmp_path: Path) -> None:
    judge = DraftJudge(threads=1, most_tokens=12)
    found = judge(paired(tiny_bundle, tiny_bundle, tmp_path), [np.arange(20, 29), np.arange(30, 200)])
    assert found.agreement == 1.0
