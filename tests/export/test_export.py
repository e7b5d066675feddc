"""Exports of tiny checkpoints: logits of every family and format, and how bundles are written."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgerun.edge.cli.main import main
from edgerun.errors import DestinationError, InputError
from edgerun.export import FP32, INT4, INT8, ExportRecipe, WeightFormat, export_checkpoint, supported_families
from edgerun.export.check.parity import quantized_weights
from edgerun.export.check.reference import reference_logits
from edgerun.export.checkpoint.config import read_config
from edgerun.export.checkpoint.safetensors_files import Checkpoint
from edgerun.export.graph.initializers import WeightFile
from edgerun.export.quantization.methods import with_methods
from edgerun.models.bundle import digest_file, open_bundle
from support.block_models import FAMILIES as BLOCK_FAMILIES
from support.nightly import some_nightly
from support.shared_data import data_path
from support.tiny_models import (
    FAMILY_SETTINGS,
    TOKENS,
    exported,
    greedy_story,
    logits_of,
    require_same_files,
    tiny_config,
    tiny_weights,
    write_bundle,
    write_checkpoint,
    write_weights,
)
from support.unusual_files import needs_links

FAMILIES = sorted(FAMILY_SETTINGS)
WITH_EXPERTS = ("gpt_oss", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next")
FORMATS = [(FP32, True), (INT8, False), (INT8, True), (INT4, False), (FP32, False), (INT4, True)]
"""Formats of weights, and whether the head is that of the embedding."""
UNSUPPORTED = [WeightFormat(4, 16), WeightFormat(2, 16), WeightFormat(3, 32), WeightFormat(32, 32), WeightFormat(4)]
ACTIVATION_NOISE = 0.1
"""Limit on the error of 8-bit activations in the logits of a two-layer model, relative to their standard deviation."""


def expected_logits(bundle: Path, recipe: ExportRecipe):
    """Logits of the reference decoder with the quantized weights of the bundle's checkpoint."""
    source = bundle.parent / "checkpoint"
    config, checkpoint = read_config(source), Checkpoint(source)
    weights = quantized_weights(checkpoint, config, with_methods(recipe.quant_plan(config), recipe.methods))
    return reference_logits(weights, config, TOKENS, 256)


@pytest.mark.parametrize("choice", some_nightly(FORMATS, every=3), ids=lambda each: f"{each[0]} tied={each[1]}")
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_reference(tmp_path, family: str, choice: tuple[WeightFormat, bool]) -> None:
    weight_format, tied = choice
    bundle = write_bundle(tmp_path, family, weights=weight_format, tie_word_embeddings=tied)
    expected = expected_logits(bundle, ExportRecipe(weight_format))
    squares = np.mean((logits_of(bundle) - expected) ** 2, axis=-1)
    # Noise may select another expert where two are nearly tied, which changes some positions a lot. The input of a norm
    # may be nearly zero at one. Without noise, parity is that of the manifest.
    noise = np.median(squares) if family in WITH_EXPERTS else np.mean(squares)
    assert np.sqrt(noise) < ACTIVATION_NOISE * expected.std()
    if weight_format == FP32:
        assert squares.max() < 1e-9
    manifest = open_bundle(bundle).manifest
    assert manifest.parity["max_abs_diff"] < 1e-4
    assert manifest.architecture.tied_head is tied


def test_head_has_its_own_format(tmp_path) -> None:
    recipe = ExportRecipe(WeightFormat(4, 64), head=WeightFormat(8, 32))
    for tied in (True, False):
        bundle = write_bundle(tmp_path / str(tied), weights=recipe, tie_word_embeddings=tied)
        manifest = open_bundle(bundle).manifest
        assert manifest.weights["head"] == manifest.weights["embedding"] == WeightFormat(8, 32)
        layers = {found for linear, found in manifest.weights.items() if linear.startswith("layers")}
        assert layers == {WeightFormat(4, 64), WeightFormat(4, 32)}
        expected = expected_logits(bundle, recipe)
        assert np.sqrt(np.mean((logits_of(bundle) - expected) ** 2)) < ACTIVATION_NOISE * expected.std()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_half_precision_sources(tmp_path, dtype) -> None:
    source = write_checkpoint(tmp_path / "half", dtype=dtype)
    half = logits_of(exported(source, tmp_path / "half-bundle"))
    widened = {name: value.astype(dtype).astype(np.float32) for name, value in tiny_weights(tiny_config()).items()}
    write_weights(write_checkpoint(tmp_path / "float"), widened)
    whole = logits_of(exported(tmp_path / "float", tmp_path / "bundle"))
    np.testing.assert_array_equal(half, whole)


def test_shards_and_bare_names_make_the_same_bundle(tmp_path) -> None:
    whole = write_bundle(tmp_path / "whole", weights=INT4)
    sharded = write_bundle(tmp_path / "sharded", weights=INT4, shards=3)
    bare = write_checkpoint(tmp_path / "bare")
    write_weights(bare, {name.removeprefix("model."): v for name, v in tiny_weights(tiny_config()).items()})
    exported(bare, tmp_path / "bare-bundle", INT4)
    require_same_files(sharded, whole)
    require_same_files(tmp_path / "bare-bundle", whole)


def test_tie_word_embeddings_takes_precedence_over_a_stored_head(tmp_path) -> None:
    source = write_checkpoint(tmp_path / "checkpoint")
    weights = tiny_weights(tiny_config())
    write_weights(source, {**weights, "lm_head.weight": weights["model.embed_tokens.weight"] * 2})
    tied = logits_of(exported(source, tmp_path / "bundle"))
    np.testing.assert_array_equal(tied, logits_of(write_bundle(tmp_path / "tied")))


def test_bundle_is_complete(tmp_path) -> None:
    source = write_checkpoint(tmp_path / "checkpoint")
    (source / "README.md").write_text("not copied", encoding="utf-8")
    reported: list[tuple[str, float]] = []
    report = export_checkpoint(
        source,
        tmp_path / "bundle",
        ExportRecipe(INT8, context=100),
        lambda stage, fraction: reported.append((stage, fraction)),
        command="edge-run export checkpoint bundle",
    )
    names = {"model.onnx", "model.onnx.data", "edge.json"}
    names |= {"config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert {file.name for file in report.bundle.iterdir()} == names == set(report.file_bytes)
    for name, size in report.file_bytes.items():
        assert (report.bundle / name).stat().st_size == size
    bundle = open_bundle(report.bundle)
    assert set(bundle.manifest.files) == names - {"edge.json"}
    for name, digest in bundle.manifest.files.items():
        assert digest_file(report.bundle / name) == digest
    assert bundle.manifest.architecture.context == 100
    assert bundle.manifest.command == "edge-run export checkpoint bundle"
    assert bundle.manifest.parity == asdict(report.parity)
    assert bundle.manifest.bits_per_weight == report.bits_per_weight
    assert report.seconds > 0
    for stage in ("writing weights", "checking"):
        fractions = [fraction for name, fraction in reported if name == stage]
        assert fractions == sorted(fractions)
        assert fractions[-1] == 1.0


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "separate"])
@pytest.mark.parametrize(
    "weight_format", [FP32, *(WeightFormat(bits, block) for bits in (2, 4, 8) for block in (32, 64, 128))], ids=str
)
def test_every_format_is_on_the_fast_path_and_counts_scales_once(
    tmp_path, weight_format: WeightFormat, tied: bool
) -> None:
    """An export counts the products for which ONNX Runtime expands a matrix, and refuses such formats."""
    wide = {"hidden_size": 128, "intermediate_size": 256}  # whole blocks
    bundle = write_bundle(tmp_path, weights=weight_format, tie_word_embeddings=tied, **wide)
    scales = 32 / weight_format.block if weight_format.block else 0
    assert open_bundle(bundle).manifest.bits_per_weight == weight_format.bits + scales


@pytest.mark.parametrize(
    ("weight_format", "message"),
    [
        *((each, "supported are fp32, and 2, 4 and 8 bits in blocks of 32, 64, 128") for each in UNSUPPORTED),
        (WeightFormat(4, 32, offsets=True), "weights with offsets cannot be requested"),
    ],
)
def test_unsupported_formats_are_refused(weight_format: WeightFormat, message: str) -> None:
    for choices in ((weight_format,), (FP32, None, weight_format)):
        with pytest.raises(InputError, match=message):
            ExportRecipe(*choices)


def test_contexts_are_those_of_the_checkpoint_up_to_a_limit(tmp_path) -> None:
    for context in (-1, 0, 1):
        with pytest.raises(InputError, match=f"context of {context} positions is too short; give at least 2"):
            ExportRecipe(context=context)
    source = write_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(InputError, match="context of 99999999999999 positions .*; give at most 1048576"):
        export_checkpoint(source, tmp_path / "bundle", ExportRecipe(FP32, context=99999999999999))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    long, longer = (
        read_config(write_checkpoint(tmp_path / str(positions), max_position_embeddings=positions))
        for positions in (131072, 2_000_000)
    )
    assert ExportRecipe().context_for(long) == 32768
    assert ExportRecipe(context=40000).context_for(long) == 40000
    assert ExportRecipe(context=2_000_000).context_for(longer) == 2_000_000


def test_every_architecture_file_has_a_tiny_model() -> None:
    # The others are language models of these families nested in a multimodal checkpoint, and models of blocks.
    nested = ("gemma3", "gemma4", "idefics3", "lfm2_vl", "mistral3", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe")
    nested += ("qwen3_vl", "smolvlm")
    assert supported_families() == sorted([*FAMILIES, *nested, *BLOCK_FAMILIES])


@pytest.mark.parametrize("manifest", [True, False])
@pytest.mark.parametrize("foreign", ["thesis.txt", "model.safetensors", "photos/", "tokenizer.json/"])
def test_a_folder_with_other_files_is_not_replaced(tmp_path, capsys, foreign: str, manifest: bool) -> None:
    source = write_checkpoint(tmp_path / "checkpoint")
    out = tmp_path / "out"
    out.mkdir()
    if manifest:
        (out / "edge.json").write_text("{}", encoding="utf-8")
    if foreign.endswith("/"):
        (out / foreign).mkdir()
    else:
        (out / foreign).write_text("all my work", encoding="utf-8")
    assert main(["export", str(source), str(out), "--weights", "fp32"]) == 2
    message = capsys.readouterr().err
    assert "exists and holds files that are not part of a bundle; choose another folder" in message
    assert message.count("\n") == 1
    assert sorted(path.name for path in out.iterdir()) == sorted([*["edge.json"] * manifest, foreign.rstrip("/")])


@needs_links
@pytest.mark.parametrize("where", ["checkpoint", "checkpoint/out", ".", "link", "checkpoint/../checkpoint/"])
def test_a_destination_that_overlaps_the_source_is_refused(tmp_path, capsys, where: str) -> None:
    source = write_checkpoint(tmp_path / "checkpoint")
    (source / "edge.json").write_text("{}", encoding="utf-8")
    (tmp_path / "link").symlink_to(source)
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    assert main(["export", str(source), str(tmp_path / where)]) == 2
    assert "overlaps the model" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "link"]


@needs_links
@pytest.mark.parametrize("name", ["bundle", "link"])
def test_an_earlier_bundle_is_replaced_and_a_link_to_it_is_kept(tmp_path, name: str) -> None:
    bundle = write_bundle(tmp_path, weights=FP32)
    (tmp_path / "link").symlink_to(bundle)
    before = digest_file(bundle / "model.onnx.data")
    exported(tmp_path / "checkpoint", tmp_path / name, INT4)
    assert digest_file(bundle / "model.onnx.data") != before
    open_bundle(bundle)
    assert (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "checkpoint", "link"]


@pytest.mark.parametrize("written", [0, 3], ids=["at the beginning", "in the middle"])
def test_a_full_disk_keeps_the_old_bundle(tmp_path, monkeypatch, written: int) -> None:
    bundle = write_bundle(tmp_path, weights=INT4)
    before = {file.name: file.read_bytes() for file in bundle.iterdir()}

    append, parts = WeightFile.append, iter(range(written))

    def refuse(self: WeightFile, part: object) -> None:
        if next(parts, None) is None:
            raise OSError(28, "No space left on device")
        append(self, part)

    monkeypatch.setattr(WeightFile, "append", refuse)
    with pytest.raises(DestinationError, match="cannot be written: No space left on device; free space there") as error:
        export_checkpoint(tmp_path / "checkpoint", bundle, ExportRecipe(FP32))
    assert error.value.exit_code == 2
    assert {file.name: file.read_bytes() for file in bundle.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "checkpoint"]


def test_greedy_text_of_the_stories_model(tmp_path) -> None:
    """The greedy text equals that of llama2.c, which ORIGIN.md of the data quotes."""
    source = data_path("weights/stories260K-hf")
    bundle = exported(source, tmp_path / "stories")
    text = greedy_story(bundle)
    assert len(text) > 350
    assert text in (source / "ORIGIN.md").read_text(encoding="utf-8")


def test_quality_of_the_shell_helper_at_8_bits(tmp_path) -> None:
    source = data_path("weights/shell-helper/target")
    report = export_checkpoint(source, tmp_path / "bundle", ExportRecipe(INT8))
    assert report.parity.mean_kl < 0.01
    assert report.parity.top1_agreement > 0.9
    assert json.loads((report.bundle / "edge.json").read_text(encoding="utf-8"))["bits_per_weight"] == 9.0


def test_a_model_with_enormous_logits_can_be_opened(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "checkpoint", tie_word_embeddings=False)
    weights = load_file(source / "model.safetensors")
    weights["lm_head.weight"] *= 1e5
    save_file(weights, source / "model.safetensors")
    result = export_checkpoint(source, tmp_path / "bundle", ExportRecipe(INT4))
    assert result.quality is not None
    assert result.quality.perplexity > 1e300
    assert open_bundle(result.bundle).manifest.quality["perplexity"] == result.quality.perplexity
