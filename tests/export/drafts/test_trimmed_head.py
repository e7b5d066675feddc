"""A trimmed head computes the whole head's logits of its tokens."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgerun.export import FP32, ExportRecipe, WeightFormat
from edgerun.export.check.contract_session import ContractSession
from edgerun.export.drafts.trimmed_head import write_trimmed
from edgerun.models.bundle import open_bundle
from support.tiny_models import write_bundle

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


@pytest.mark.nightly
@given(kept=st.sets(st.integers(0, VOCABULARY - 1), min_size=1, max_size=40))
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_tokens_can_be_kept(whole: Path, folder: Path, kept: set[int]) -> None:
    ids = np.array(sorted(kept))
    write_trimmed(open_bundle(whole), folder, ids)
    np.testing.assert_allclose(logits(folder), logits(whole)[:, ids], atol=1e-4)


def matrices(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of embedding and head."""
    found = onnx.load(folder / "model.onnx", load_external_data=False).graph.initializer
    return {tensor.name: tuple(tensor.dims) for tensor in found if tensor.name.startswith(("embedding.", "head."))}


def test_an_untied_head_becomes_smaller(tmp_path: Path, folder: Path) -> None:
    bundle = open_bundle(write_bundle(tmp_path, weights=WeightFormat(4, 32), tie_word_embeddings=False))
    write_trimmed(bundle, folder, np.arange(30))
    assert matrices(folder) == {
        "embedding.codes": (300, 2, 16),
        "embedding.scales": (300, 2, 1),
        "head.axes": (1,),
        "head.codes.kept": (30, 2, 16),
        "head.scales.kept": (30, 2),
    }
    assert bundle.weight_bytes - open_bundle(folder).weight_bytes == pytest.approx(270 * 40, rel=0.1)


def test_a_tied_head_gets_rows_of_its_own(whole: Path, folder: Path) -> None:
    write_trimmed(open_bundle(whole), folder, np.arange(30))
    assert matrices(folder)["embedding.codes"] == (300, 2, 16)
    assert matrices(folder)["head.codes.kept"] == (30, 2, 16)
    manifest, before = open_bundle(folder).manifest, open_bundle(whole).manifest
    assert manifest.architecture == dataclasses.replace(before.architecture, tied_head=False)
    assert manifest.weights == before.weights


def test_the_folder_is_a_complete_bundle(whole: Path, folder: Path) -> None:
    write_trimmed(open_bundle(whole), folder, np.array([1, 2, 40]))
    manifest = open_bundle(folder).manifest
    assert set(manifest.files) == {file.name for file in folder.iterdir()} - {"edge.json"}
    assert manifest.bits_per_weight == pytest.approx(5.0)
