"""Exports with a multi-token-prediction module: what is chosen, what is written, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file

import edgerun
from edgerun.edge.cli.main import main
from edgerun.errors import CheckpointError, InputError
from edgerun.export import INT4, ExportRecipe, WeightFormat, export_checkpoint
from edgerun.export.bundle_content import BundleContent
from edgerun.export.bundle_writer import write_bundle
from edgerun.export.calibration.awq import AwqScales, AwqSource
from edgerun.export.check.parity import with_float_activations
from edgerun.export.checkpoint.config import read_config
from edgerun.export.checkpoint.safetensors_files import Checkpoint
from edgerun.export.drafts.draft_head import add_draft_head, head_passes, open_draft_head
from edgerun.export.drafts.make_draft import DraftRequest
from edgerun.export.quantization.methods import FP32
from edgerun.export.recipe import OWN_MODULE
from edgerun.models.bundle import open_bundle
from edgerun.models.manifest import HeadKind
from edgerun.models.pairing import find_draft
from edgerun.models.progress import silent
from support.tiny_heads import write_mtp_checkpoint
from support.tiny_models import exported, write_checkpoint, write_weights

MODULE = DraftRequest(None, HeadKind.MTP)


def export(*arguments: object) -> int:
    return main(["export", *map(str, arguments)])


def draft_of(bundle: Path) -> dict[str, Any] | None:
    found = json.loads((bundle / "edge.json").read_text(encoding="utf-8")).get("draft")
    assert found is None or isinstance(found, dict)
    return found


@pytest.mark.parametrize("weights", [None, "fp32"])
def test_the_module_becomes_the_draft_where_no_other_is_asked_for(tmp_path: Path, weights: str | None) -> None:
    source, bundle = write_mtp_checkpoint(tmp_path / "source"), tmp_path / "bundle"
    assert export(source, bundle, *(("--draft", "mtp", "--draft-weights", weights) if weights else ())) == 0
    assert draft_of(bundle)["head"] == "mtp"
    assert find_draft(open_bundle(bundle)).head is HeadKind.MTP
    graph = onnx.load(bundle / "draft.onnx", load_external_data=False).graph
    linears = [node for node in graph.node if node.op_type == "MatMulNBits"]
    assert {each.i for node in linears for each in node.attribute if each.name == "bits"} == {4}
    assert (len(linears) == 1) == (weights == "fp32")  # the LM head is the model's
    locations = {entry.value for each in graph.initializer for entry in each.external_data if entry.key == "location"}
    assert locations == {"model.onnx.data", "draft.onnx.data"}


def test_there_is_none_where_it_is_declined(tmp_path: Path) -> None:
    source, bundle = write_mtp_checkpoint(tmp_path / "source"), tmp_path / "bundle"
    assert export(source, bundle, "--draft", "none") == 0
    assert draft_of(bundle) is None
    assert not (bundle / "draft.onnx").exists()
    outputs = {each.name for each in onnx.load(bundle / "model.onnx", load_external_data=False).graph.output}
    assert "draft_features" not in outputs


@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "qwen3_next"])
def test_the_module_of_a_model_with_experts_has_experts_too(tmp_path: Path, family: str) -> None:
    """Also where the model's first layer, whose place it takes, has none."""
    overrides = {"mlp_only_layers": [0]} if family == "qwen3_next" else {}
    source, bundle = write_mtp_checkpoint(tmp_path / "source", family=family, **overrides), tmp_path / "bundle"
    assert export(source, bundle) == 0
    graph = onnx.load(bundle / "draft.onnx", load_external_data=False).graph
    operators = [node.op_type for node in graph.node]
    assert (operators.count("QMoE"), operators.count("MoE")) == (1, 0)
    router = next(each for each in graph.initializer if each.name == "layers.0.router.weight")
    assert router.data_type == onnx.TensorProto.FLOAT
    with edgerun.load(bundle, threads=1, cache=False, learned=False, history=False) as engine:
        options = edgerun.GenerateOptions(raw=True, ignore_eos=True, max_tokens=40, temperature=0)
        texts = {
            engine.generate("the and of the", options, speculation=edgerun.Speculation.parse(sources)).text
            for sources in ("off", "mtp", "auto")
        }
    assert len(texts) == 1


def test_formats_that_the_experts_of_a_module_cannot_have_are_refused(tmp_path: Path) -> None:
    source = write_mtp_checkpoint(tmp_path / "source", family="qwen3_5_moe_text")
    recipe = ExportRecipe(FP32, draft=OWN_MODULE, draft_weights=WeightFormat(4, 64))
    with pytest.raises(
        InputError, match=r"layers\.0\.down have 32 columns, which is not a multiple of the block size 64"
    ):
        export_checkpoint(source, tmp_path / "bundle", recipe)
    assert not (tmp_path / "bundle").exists()


def test_multimodal_checkpoints_have_it_beside_the_language_model(tmp_path: Path) -> None:
    source = write_mtp_checkpoint(tmp_path / "source")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    nested = {"model_type": "qwen3_5", "tie_word_embeddings": True, "text_config": config}
    (source / "config.json").write_text(json.dumps(nested), encoding="utf-8")
    tensors = load_file(source / "model.safetensors")
    renamed = {
        f"model.language_model.{name.removeprefix('model.')}" if name.startswith("model.") else name: value
        for name, value in tensors.items()
    }
    write_weights(source, renamed)
    bundle = exported(source, tmp_path / "bundle", ExportRecipe(INT4, draft=OWN_MODULE))
    assert (draft_of(bundle) or {})["head"] == "mtp"


PARTS = {
    "a tensor": ({"without": "mtp.layers.0.self_attn.q_proj.weight"}, "mtp.layers.0.self_attn.q_proj.weight"),
    "a norm": ({"without": "mtp.pre_fc_norm_hidden.weight"}, "mtp.pre_fc_norm_hidden.weight"),
    "more layers": ({"mtp_num_hidden_layers": 2}, "has 2 layers"),
    "an embedding": ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings"),
}


@pytest.mark.parametrize(("overrides", "message"), PARTS.values(), ids=PARTS)
def test_a_module_that_cannot_be_used_is_left_out_with_a_line(
    tmp_path: Path, overrides: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source, bundle = write_mtp_checkpoint(tmp_path / "source", **overrides), tmp_path / "bundle"
    assert export(source, bundle) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "exported without a draft head" in printed
    assert message.rpartition(".")[2] in printed
    assert draft_of(bundle) is None
    with pytest.raises(CheckpointError, match=message) as error:  # where it was asked for
        export_checkpoint(source, tmp_path / "other", ExportRecipe(INT4, draft=OWN_MODULE))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_a_checkpoint_without_one(tmp_path: Path, family: str) -> None:
    """Settings without weights do not make a module: checkpoints lose its weights when transformers saves them."""
    source = write_checkpoint(tmp_path / "source", family, mtp_num_hidden_layers=1)
    assert export(source, tmp_path / "bundle") == 0
    assert draft_of(tmp_path / "bundle") is None
    with pytest.raises(CheckpointError, match="has no multi-token-prediction module"):
        export_checkpoint(source, tmp_path / "other", ExportRecipe(INT4, draft=OWN_MODULE))


def test_scales_that_calibration_put_into_the_head_do_not_reach_the_module(tmp_path: Path) -> None:
    """AWQ scaling divides the last norm and multiplies a separate LM head, which the module uses too."""
    source = write_mtp_checkpoint(tmp_path / "source", tie_word_embeddings=False)
    config, checkpoint = read_config(source), Checkpoint(source)
    factors = np.exp(np.random.default_rng(0).standard_normal(config.hidden_size)).astype(np.float32)
    scales = AwqScales()
    scales.norms["model.norm.weight"] = 1 / factors
    scales.columns["lm_head.weight"] = factors
    recipe = ExportRecipe(FP32, draft=OWN_MODULE)
    head = open_draft_head(MODULE, recipe, source, config)
    logits = []
    for name, used in (("plain", checkpoint), ("scaled", AwqSource(checkpoint, config, scales))):
        content = BundleContent(
            source=used,
            original=checkpoint,
            config=config,
            plan=recipe.quant_plan(config),
            context=64,
            features=head.features,
        )
        (tmp_path / name).mkdir()
        write_bundle(tmp_path / name, content, silent)
        add_draft_head(head, recipe, tmp_path / name, content, silent)  # compares it with the reference
        logits.append(_logits(tmp_path / name, config.hidden_size))
    np.testing.assert_allclose(logits[0], logits[1], atol=2e-4)


def _logits(bundle: Path, hidden: int) -> Any:
    graph = with_float_activations(onnx.load(bundle / "draft.onnx", load_external_data=False))
    features = np.random.default_rng(2).standard_normal((3, hidden)).astype(np.float32)
    return np.concatenate([each for each, *_ in head_passes(bundle, graph, np.arange(5, 9), features, hidden)])
