"""Trimmed LM heads of multi-token-prediction modules: how many tokens are kept, which, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest

import edgerun
from edgerun import GenerateOptions
from edgerun.edge.cli.main import main
from edgerun.errors import InputError
from edgerun.export import FP32, INT4, ExportRecipe, export_checkpoint
from edgerun.export.calibration.calibration_text import CalibrationText
from edgerun.export.drafts import trimmed_head
from edgerun.export.drafts.trimmed_head import trim_own_draft, trim_vocabulary
from edgerun.export.recipe import OWN_MODULE
from edgerun.models.bundle import open_bundle
from edgerun.models.manifest import HeadKind
from edgerun.models.pairing import find_draft
from edgerun.models.progress import silent
from edgerun.runtime.measure.bundle_timing import BundleTimer
from edgerun.runtime.speculation.drafters.target_drafts import HiddenStateHead
from support.known_timings import BytesMachine, use_machine
from support.tiny_heads import write_eagle_head, write_mtp_checkpoint
from support.tiny_models import WORDS, tiny_config, write_checkpoint

VOCABULARY = 300


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mtp_checkpoint(tmp_path_factory.mktemp("mtp") / "source")


@pytest.fixture(scope="module")
def exported(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = ExportRecipe(FP32, draft=OWN_MODULE)
    return export_checkpoint(source, tmp_path_factory.mktemp("exported") / "bundle", recipe).bundle


@pytest.fixture
def bundle(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "bundle"))


def kept_by(bundle: Path) -> npt.NDArray[np.int32] | None:
    """The tokens of the module; None for all."""
    pair = find_draft(open_bundle(bundle))
    assert pair.head is HeadKind.MTP
    return pair.target_ids


def logits_of(bundle: Path) -> int:
    """Number of logits that the module's graph states."""
    (info,) = (each for each in onnx.load(bundle / "draft.onnx").graph.output if each.name == "logits")
    return int(info.type.tensor_type.shape.dim[-1].dim_value)


def write_words(folder: Path) -> list[str]:
    """Write a text, and return the options of an export that reads it."""
    (folder / "text.txt").write_text(" ".join(np.random.default_rng(0).choice(WORDS, 1200)), encoding="utf-8")
    return ["--calibration", str(folder / "text.txt"), "--calibration-tokens", "1100"]


def text_of(*counted: list[int]) -> CalibrationText:
    """Text in which these tokens occur, in both parts."""
    texts = tuple(np.array(each) for each in counted)
    return CalibrationText(texts, texts, "a test")


def test_from_the_outside_a_module_gets_the_tokens_that_the_text_has(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    use_machine(monkeypatch, BytesMachine())
    bundle = tmp_path / "bundle"
    assert main(["export", str(source), str(bundle), "--draft-vocab", "90", *write_words(tmp_path)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "The multi-token-prediction module drafts 90 of 300 tokens, 100.0% of those in held-out answers." in printed
    kept = kept_by(bundle)
    assert kept.size == logits_of(bundle) == 90
    open_bundle(bundle).verify()
    draft = onnx.load(bundle / "draft.onnx", load_external_data=False).graph
    assert {entry.value for each in draft.initializer for entry in each.external_data if entry.key == "location"} == {
        "model.onnx.data",
        "draft.onnx.data",
    }
    assert main(["inspect", str(bundle)]) == 0
    assert "mtp head, a head of 90 tokens" in " ".join(capsys.readouterr().out.split())
    greedy = GenerateOptions(max_tokens=24, ignore_eos=True)
    with edgerun.load(bundle, draft=None) as plain, edgerun.load(bundle) as drafting:
        assert drafting.generate("the sea", greedy).text == plain.generate("the sea", greedy).text


def test_what_calibration_scaled_is_scaled_in_the_trimmed_head_too(
    tmp_path: Path, monkeypatch: Any, cache: Path
) -> None:
    """The export compares the trimmed graph with the float64 reference, here with AWQ scaling of a separate LM head."""
    use_machine(monkeypatch, BytesMachine())
    source = write_mtp_checkpoint(tmp_path / "source", tie_word_embeddings=False)
    options = ["--method", "awq", "--draft-vocab", "80", "--half-scales", "--zero-points"]
    assert main(["export", str(source), str(tmp_path / "bundle"), *options, *write_words(tmp_path)]) == 0
    assert logits_of(tmp_path / "bundle") == 80


def test_by_default_large_vocabularies_are_trimmed_where_there_is_text(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = text_of([5, 6, 7, 8], [9, 6, 7, 8])
    assert not trim_vocabulary(bundle, None, text, silent)  # 300 tokens are few
    assert kept_by(bundle) is None
    monkeypatch.setattr(trimmed_head, "DEFAULT_TOKENS", 120)
    monkeypatch.setattr(trimmed_head, "_LARGE", 240)
    assert not trim_vocabulary(bundle, None, None, silent)
    assert not trim_vocabulary(bundle, "all", text, silent)
    assert not trim_vocabulary(bundle, VOCABULARY, text, silent)
    assert kept_by(bundle) is None
    assert trim_vocabulary(bundle, None, text, silent)
    kept = kept_by(bundle)
    assert kept.size == logits_of(bundle) == 120


def greedy_text(bundle: Path) -> list[int]:
    """What the model writes, so that the next token of the text is always the one that it prefers."""
    with edgerun.load(bundle, threads=1, draft=None, cache=False) as engine:
        engine.generate("the other thing", GenerateOptions(max_tokens=60, ignore_eos=True))
        return [int(token) for token in engine.model.prefixes._kept[-1].token_ids]


@pytest.mark.parametrize(("smallest", "expected"), [(0.02, "few"), (0.299, "all")])
def test_the_fastest_size_weighs_agreement_against_time(
    bundle: Path, smallest: float, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that knows the answer agrees wherever its LM head has the token."""
    text = greedy_text(bundle)
    knows = np.array(text)

    def right(self: HiddenStateHead, path: tuple[int, ...]) -> npt.NDArray[np.float32] | None:
        place = len(self._token_ids)
        assert self._token_ids == text[:place]
        return np.eye(VOCABULARY, dtype=np.float32)[text[place]]

    monkeypatch.setattr(HiddenStateHead, "logits", right)
    monkeypatch.setattr(BundleTimer, "time_heads", lambda *_: [0.3, smallest])
    monkeypatch.setattr(BundleTimer, "time_passes", lambda _, __, widths, ___: [dict.fromkeys(widths, 1.0)])
    measured = CalibrationText((knows,), (knows,), "a test")
    trim_vocabulary(bundle, "auto", measured, silent)
    kept = kept_by(bundle)
    if expected == "all":
        assert kept is None
    else:
        assert kept.size < 150
        assert set(text[2:]) <= set(kept.tolist())
    assert not [each.name for each in bundle.iterdir() if each.name.startswith(".")]


def test_real_passes_are_timed_and_measured(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trimmed_head, "_ROUNDS", 1)
    text = np.random.default_rng(2).integers(5, VOCABULARY, 40)
    trim_vocabulary(bundle, "auto", CalibrationText((text,), (text,), "a test"), silent)
    kept = kept_by(bundle)
    assert logits_of(bundle) == (VOCABULARY if kept is None else kept.size)


def test_sizes_are_refused_before_anything_slow(source: Path, tmp_path: Path) -> None:
    def export(checkpoint: Path, draft: str | Path, vocabulary: int, message: str) -> None:
        recipe = ExportRecipe(INT4, draft=draft, draft_vocab=vocabulary)
        with pytest.raises(InputError, match=message):
            export_checkpoint(checkpoint, tmp_path / "bundle", recipe, lambda *_: pytest.fail("slow"))

    export(source, OWN_MODULE, 301, "cannot have 301 tokens; give at most 300, the model's vocabulary")
    head, target = write_eagle_head(tmp_path / "head", tiny_config()), write_checkpoint(tmp_path / "target")
    export(target, head, 10, "--draft-vocab has no effect on the draft head .*head, whose size is that")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--draft-vocab", "0"), "--draft-vocab must be a positive number of tokens, not '0'; give such a"),
        (("--draft", "mtp", "--draft-vocab", "many"), "--draft-vocab must be a positive number of tokens, not 'many'"),
        (("--draft", "none", "--draft-vocab", "100"), "--draft-vocab has no effect on --draft none"),
        (("--draft", "none", "--draft-weights", "int8"), "--draft-weights has no effect on --draft none"),
        (("--draft", "mtp", "--device", "gpu"), "on the CPU"),
        (("--draft", "mtp", "--layout", "genai"), "layout"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_options_that_cannot_be_used(source: Path, tmp_path: Path, arguments, message: str, capsys) -> None:
    assert main(["export", str(source), str(tmp_path / "bundle"), *arguments]) == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert message in printed
    assert not (tmp_path / "bundle").exists()


def test_a_map_that_does_not_fit_the_lm_head_is_refused(bundle: Path) -> None:
    trim_own_draft(bundle, np.arange(40))
    np.save(bundle / "d2t.npy", np.arange(39))
    manifest = json.loads((bundle / "edge.json").read_text(encoding="utf-8"))
    del manifest["files"]["d2t.npy"]
    (bundle / "edge.json").write_text(json.dumps(manifest), encoding="utf-8")
    with (
        pytest.raises(edgerun.BundleError, match="has 39 ids for a head of 40 tokens") as error,
        edgerun.load(bundle, threads=1, cache=False) as engine,
    ):
        engine.model.drafters.draft_model()
    assert "\n" not in str(error.value)
