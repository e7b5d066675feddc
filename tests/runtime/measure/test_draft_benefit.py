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
from edgerun.runtime.measure.draft_benefit import measure_draft_benefit

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


def test_texts_that_are_too_short_are_errors_and_long_ones_are_cut(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="has no draft to measure; export it with --draft"):
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
