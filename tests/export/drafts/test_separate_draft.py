"""A draft with its own checkpoint, in its target's bundle."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

import edgerun
from edgerun import InputError
from edgerun.export import ExportRecipe, WeightFormat, export_checkpoint
from edgerun.export.calibration.calibration_text import CalibrationText
from edgerun.export.drafts.make_draft import adopt_draft
from edgerun.export.recipe import DraftTokens
from edgerun.models.bundle import holds_only_bundle_files, open_bundle
from edgerun.models.pairing import find_draft
from edgerun.runtime.measure.bundle_timing import BundleTimer
from support.known_timings import BytesMachine, use_machine
from support.tiny_models import write_checkpoint

FORMAT = WeightFormat(8, 32)


def texts(seed: int) -> list[np.ndarray]:
    """Texts of few tokens, each after a template."""
    random = np.random.default_rng(seed)
    return [np.array([2, *random.integers(20, 60, 9), 3, *random.integers(20, 60, 20), 0]) for _ in range(6)]


TEXT = CalibrationText(tuple(texts(0)), tuple(texts(1)), "random")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Checkpoints of a target, and of a draft whose untied head is most of it."""
    folder = tmp_path_factory.mktemp("pair")
    write_checkpoint(folder / "target", num_hidden_layers=3)
    write_checkpoint(folder / "draft", seed=1, num_hidden_layers=1, tie_word_embeddings=False)
    return folder / "target", folder / "draft"


@pytest.fixture
def target(checkpoints: tuple[Path, Path], tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    for source, destination in zip(checkpoints, (folder, folder / "draft"), strict=True):
        export_checkpoint(source, destination, ExportRecipe(FORMAT))
    return folder


@pytest.fixture(autouse=True)
def _known_times(monkeypatch: pytest.MonkeyPatch) -> None:
    use_machine(monkeypatch, BytesMachine())


def adopted(target: Path, wanted: DraftTokens) -> tuple[int | None, float | None]:
    reported: list[float] = []
    figures = adopt_draft(target, wanted, TEXT, lambda stage, done: reported.append(done) or None)
    assert reported == sorted(reported)
    assert reported[-1] == 1
    assert holds_only_bundle_files(target)
    open_bundle(target)
    return figures


def test_a_whole_draft_is_named(target: Path) -> None:
    assert adopted(target, None) == (None, None)
    found = find_draft(open_bundle(target))
    assert (found.draft.folder, found.target_ids) == ((target / "draft").resolve(), None)


def test_a_head_is_trimmed_to_the_given_size(target: Path) -> None:
    tokens, coverage = adopted(target, 40)
    found = find_draft(open_bundle(target))
    kept = set(found.target_ids.tolist())
    assert tokens == len(kept) == 40
    assert set(range(5)) <= kept
    assert len(kept & set(range(20, 60))) == 35
    answers = np.concatenate([text[11:] for text in texts(1)])
    assert coverage == pytest.approx(np.isin(answers, list(kept)).mean())
    with edgerun.load(target) as engine:
        plain = engine.generate("what", max_tokens=30, speculation=edgerun.Speculation.OFF)
        assert engine.generate("what", max_tokens=30).text == plain.text


def test_no_agreement_is_lost_where_rows_cost_nothing(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def even(_: BundleTimer, bundles: Sequence[Path], widths: Sequence[int], rounds: int) -> list[Mapping[int, float]]:
        return [dict.fromkeys(widths, 1.0 * rounds) for _ in bundles]

    monkeypatch.setattr(BundleTimer, "time_passes", even)
    shutil.rmtree(target / "draft")
    shutil.copytree(target, target.with_name("same"))
    target.with_name("same").rename(target / "draft")  # a draft that is always right while its head is whole
    tokens, _ = adopted(target, "auto")
    assert tokens is not None
    assert (target / "draft" / "d2t.npy").exists() == (tokens < 300)


@pytest.mark.parametrize("vocabulary", [4, 301])
def test_an_impossible_size_is_refused_without_changes(target: Path, vocabulary: int) -> None:
    before = {path: path.read_bytes() for path in target.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=f"a draft's head cannot have {vocabulary} tokens; give 5 to 300"):
        adopted(target, vocabulary)
    assert before == {path: path.read_bytes() for path in target.rglob("*") if path.is_file()}
