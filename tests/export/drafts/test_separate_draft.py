"""A draft with its own checkpoint, in its target's bundle, and its trimmed head."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import edgerun
from edgerun import InputError
from edgerun.export import FP32, ExportRecipe, WeightFormat, export_checkpoint
from edgerun.export.calibration.calibration_text import CalibrationText
from edgerun.export.check.contract_session import ContractSession
from edgerun.export.drafts.make_draft import adopt_draft
from edgerun.export.drafts.trimmed_head import write_trimmed
from edgerun.export.recipe import DraftTokens
from edgerun.models.bundle import holds_only_bundle_files, open_bundle
from edgerun.models.pairing import find_draft
from edgerun.runtime.measure.bundle_timing import BundleTimer
from support.known_timings import BytesMachine, use_machine
from support.tiny_models import write_bundle, write_checkpoint


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
        export_checkpoint(source, destination, ExportRecipe(WeightFormat(8, 32)))
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


def test_a_draft_is_named_and_its_head_is_trimmed_to_the_given_size(target: Path) -> None:
    assert adopted(target, None) == (None, None)
    assert find_draft(open_bundle(target)).target_ids is None
    tokens, coverage = adopted(target, 40)
    found = find_draft(open_bundle(target))
    assert found.draft.folder == (target / "draft").resolve()
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


VOCABULARY = 300
TOKENS = np.array([5, 299, 17, 120, 64, 3])


def logits(folder: Path) -> npt.NDArray[np.float32]:
    return ContractSession(folder, 16).forward(TOKENS, np.arange(TOKENS.size))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("whole"), weights=WeightFormat(4, 32), seed=3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "trimmed"


@pytest.mark.parametrize(
    ("family", "weight_format", "settings_of_it"),
    [
        ("llama", FP32, {}),
        ("llama", WeightFormat(8, 64), {"tie_word_embeddings": False}),
        ("llama", WeightFormat(4, 32, zero_points=True), {"tie_word_embeddings": False}),
        ("llama", WeightFormat(2, 32), {}),
        ("qwen2", WeightFormat(4, 128), {}),
        ("gemma2", WeightFormat(4, 32), {}),
        ("granite", FP32, {"tie_word_embeddings": False}),
        ("llama", WeightFormat(4, 32, half_scales=True), {}),
        ("llama", WeightFormat(4, 32, half_scales=True), {"tie_word_embeddings": False}),
    ],
    ids=str,
)
def test_kept_logits_are_those_of_the_whole_head(
    tmp_path: Path, family: str, weight_format: WeightFormat, settings_of_it: dict[str, bool]
) -> None:
    bundle = write_bundle(tmp_path, family, weights=ExportRecipe(weight_format), **settings_of_it)
    kept = np.arange(0, VOCABULARY, 7)
    write_trimmed(open_bundle(bundle), tmp_path / "trimmed", kept)
    expected, found = logits(bundle)[:, kept], logits(tmp_path / "trimmed")
    assert found.shape == (TOKENS.size, kept.size)
    np.testing.assert_allclose(found, expected, atol=1e-5 * max(1, float(expected.std())))
    np.testing.assert_array_equal(np.load(tmp_path / "trimmed" / "d2t.npy"), kept)
    graph = onnx.load(tmp_path / "trimmed" / "model.onnx", load_external_data=False).graph
    scales = [each.data_type for each in graph.initializer if each.name == "head.scales.kept"]
    assert (onnx.TensorProto.FLOAT16 in scales) == weight_format.half_scales


@pytest.mark.nightly
@given(kept=st.sets(st.integers(0, VOCABULARY - 1), min_size=1, max_size=40))
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_tokens_can_be_kept(whole: Path, folder: Path, kept: set[int]) -> None:
    ids = np.array(sorted(kept))
    write_trimmed(open_bundle(whole), folder, ids)
    np.testing.assert_allclose(logits(folder), logits(whole)[:, ids], atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_a_trimmed_bundle_is_complete_and_its_head_has_rows_of_its_own(
    tmp_path: Path, whole: Path, folder: Path, tied: bool
) -> None:
    bundle = open_bundle(
        whole if tied else write_bundle(tmp_path, weights=WeightFormat(4, 32), tie_word_embeddings=False)
    )
    write_trimmed(bundle, folder, np.arange(30))
    graph = onnx.load(folder / "model.onnx", load_external_data=False).graph
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    assert shapes["embedding.codes"] == (300, 2, 16)
    assert shapes["head.codes.kept"] == (30, 2, 16)
    assert shapes["head.scales.kept"] == (30, 2)
    assert not shapes.keys() & {"head.codes", "head.scales"}
    manifest, before = open_bundle(folder).manifest, bundle.manifest
    assert manifest.architecture == dataclasses.replace(before.architecture, tied_head=False)
    assert manifest.weights == before.weights
    assert set(manifest.files) == {file.name for file in folder.iterdir()} - {"edge.json"}
    assert manifest.bits_per_weight == pytest.approx(5.0)
    if not tied:
        assert bundle.weight_bytes - open_bundle(folder).weight_bytes == pytest.approx(270 * 40, rel=0.1)
