"""Static graphs: every family and weight format against the float64 reference decoder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest

from edgerun.errors import ExportError, InputError
from edgerun.export import FP32, INT4, ExportRecipe, WeightFormat, export_checkpoint, export_model
from edgerun.export.check.parity import quantized_weights
from edgerun.export.check.reference import reference_logits
from edgerun.export.checkpoint.open import open_source
from edgerun.export.npu import static_decoder
from edgerun.export.npu.static_shapes import static_shapes
from edgerun.export.quantization.methods import with_methods
from edgerun.models.bundle import open_bundle
from support.gguf_files import write_gguf
from support.static_passes import StaticGraph
from support.tiny_models import (
    ATTENTION_FAMILIES,
    exported,
    tiny_config,
    tiny_weights,
    write_bundle,
    write_checkpoint,
    write_weights,
)

WIDTHS = (1, 4, 40)
CAPACITY = 48
TOLERANCE = 0.03
"""Largest logit difference, relative to the standard deviation of the logits; 0.014 was seen."""
EXPRESSIBLE = [family for family in ATTENTION_FAMILIES if family not in ("qwen3_moe", "gpt_oss", "gemma4_text")]
USUAL = ("gemma2", "phi3")
"""Families that are always tested: windows, soft caps, GELU and norms around each part; partial rotation."""


class Exported:
    """A bundle with static graphs, and what the reference computes of the same weights."""

    def __init__(self, folder: Path, family: str, recipe: ExportRecipe, **overrides: Any) -> None:
        self.bundle = write_bundle(folder, family, weights=recipe, **overrides)
        self._source = folder / "checkpoint"
        self._recipe = recipe

    def graph(self, width: int) -> StaticGraph:
        return StaticGraph(self.bundle / f"model_npu_w{width}_c{CAPACITY}.onnx")

    def reference(self, tokens: Sequence[int]) -> npt.NDArray[np.float64]:
        """Logits of every token, [n, vocabulary]."""
        with open_source(self._source) as (config, checkpoint):
            plan = with_methods(self._recipe.quant_plan(config), self._recipe.methods)
            weights = quantized_weights(checkpoint, config, plan)
            return reference_logits(weights, config, np.array(tokens), self._recipe.context_for(config))


def recipe_of(weights: WeightFormat = INT4, **choices: Any) -> ExportRecipe:
    return ExportRecipe(weights, device="npu", widths=WIDTHS, contexts=(CAPACITY,), **choices)


def require_agreement(exported: Exported) -> None:
    """Compare a prefill, passes of every width at several cache fills, and a tree with the reference."""
    tokens = np.random.default_rng(1).integers(5, 300, 34).tolist()
    expected = exported.reference(tokens)
    allowed = TOLERANCE * expected.std()
    graphs = {width: exported.graph(width) for width in WIDTHS}
    cache = graphs[1].empty_cache()

    def pass_of(width: int, start: int, stop: int) -> None:
        result = graphs[width].run(cache, start, tokens[start:stop])
        wanted = expected[start:stop][-len(result.logits) :]
        assert np.abs(result.logits - wanted).max() < allowed
        assert result.next_ids.tolist() == result.logits.argmax(axis=-1).tolist()

    pass_of(4, 0, 3)
    pass_of(1, 3, 4)
    pass_of(40, 4, 22)
    pass_of(4, 22, 26)
    pass_of(1, 26, 27)
    pass_of(40, 27, 30)
    # A root, its two children, and a child of the first child.
    paths = [[0], [0, 1], [0, 2], [0, 1, 3]]
    sees = np.array([[slot in path for slot in range(4)] for path in paths])
    positions = [30, 31, 31, 32]
    drafted = tokens[30:34]
    tree = graphs[4].run(cache, 30, drafted, positions, sees)
    for path, logits in zip(paths, tree.logits, strict=True):
        wanted = exported.reference([*tokens[:30], *(drafted[slot] for slot in path)])[-1]
        assert np.abs(logits - wanted).max() < allowed


@pytest.mark.parametrize(
    "family", [each if each in USUAL else pytest.param(each, marks=pytest.mark.nightly) for each in EXPRESSIBLE]
)
def test_families_agree_with_the_reference(tmp_path: Path, family: str) -> None:
    require_agreement(Exported(tmp_path, family, recipe_of()))


@pytest.mark.parametrize(
    ("weights", "overrides"),
    [
        (FP32, {}),
        (WeightFormat(8, 128, zero_points=True, half_scales=True), {"tie_word_embeddings": False}),
        pytest.param(WeightFormat(4, 64, zero_points=True), {}, marks=pytest.mark.nightly),
        pytest.param(FP32, {"tie_word_embeddings": False}, marks=pytest.mark.nightly),
        pytest.param(WeightFormat(2, 32), {}, marks=pytest.mark.nightly),
        pytest.param(WeightFormat(4, 128, zero_points=True), {"tie_word_embeddings": False}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_weight_formats_agree_with_the_reference(
    tmp_path: Path, weights: WeightFormat, overrides: dict[str, Any]
) -> None:
    # 96 channels between gate and down do not fill blocks of 64 or 128, so they are padded.
    require_agreement(Exported(tmp_path, "llama", recipe_of(weights), **overrides))


def test_offsets_of_a_gguf_file_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_decoder, "TOLERANCE", TOLERANCE)
    source = write_checkpoint(tmp_path / "checkpoint", "qwen2", num_hidden_layers=1, tie_word_embeddings=False)
    file = write_gguf(tmp_path / "model.gguf", source, "Q4_1")
    recipe = ExportRecipe(None, device="npu", widths=WIDTHS, contexts=(CAPACITY,))
    bundle = exported(file, tmp_path / "bundle", recipe)
    manifest = open_bundle(bundle).manifest
    assert manifest.weights["layers.0.qkv"].offsets


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        ({"o_proj": 300, "v_proj": 300}, "need more range than float16 has: leave --device npu out"),
        ({"o_proj": 3e6}, "layers.0.o.scales has a value of .*, beyond the range of float16"),
    ],
    ids=["activations", "weights"],
)
def test_a_model_beyond_float16_is_not_exported(tmp_path: Path, factors: dict[str, float], message: str) -> None:
    source = write_checkpoint(tmp_path / "checkpoint", tie_word_embeddings=False)
    tensors = tiny_weights(tiny_config(tie_word_embeddings=False))
    for name, factor in factors.items():
        tensors[f"model.layers.0.self_attn.{name}.weight"] *= factor
    write_weights(source, tensors)
    with pytest.raises(ExportError, match=message):
        export_checkpoint(source, tmp_path / "bundle", recipe_of())
    assert not (tmp_path / "bundle").exists()


def test_graphs_are_valid_and_share_their_weights(tmp_path: Path) -> None:
    exported = Exported(tmp_path, "llama", recipe_of())
    bundle = open_bundle(exported.bundle)
    variants = bundle.manifest.variants
    assert [(each.width, each.context) for each in variants] == [(width, CAPACITY) for width in WIDTHS]
    places = []
    for variant in variants:
        model = onnx.load(exported.bundle / variant.file, load_external_data=False)
        _with_standard_norms(model)
        onnx.save(model, exported.bundle / "standard.onnx")
        onnx.checker.check_model(exported.bundle / "standard.onnx", full_check=True)
        inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
        known = {value.name for value in (*inferred.graph.value_info, *inferred.graph.output)}
        assert all(set(node.output) <= known for node in model.graph.node)
        places.append(
            {
                (init.name, *(entry.value for entry in init.external_data))
                for init in model.graph.initializer
                if init.data_location == onnx.TensorProto.EXTERNAL
            }
        )
    assert places[0] == places[1] == places[2]
    codes = {place for place in places[0] if place[0].endswith(".codes")}
    assert {place[1] for place in codes} == {"model.onnx.data"}
    main = onnx.load(exported.bundle / "model.onnx", load_external_data=False)
    assert codes <= {(init.name, *(entry.value for entry in init.external_data)) for init in main.graph.initializer}


def _with_standard_norms(model: onnx.ModelProto) -> None:
    """Give the norms the name that they have in ONNX since opset 23, under which the checker knows them."""
    model.opset_import[0].version = 23
    for node in model.graph.node:
        if node.op_type == "SimplifiedLayerNormalization":
            node.op_type = "RMSNormalization"


def test_contexts_follow_the_model(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path, weights=ExportRecipe(INT4, device="npu", widths=(1,)), max_position_embeddings=2048)
    assert sorted(path.name for path in bundle.glob("model_npu*.onnx")) == [
        "model_npu_w1_c2048.onnx",
        "model_npu_w1_c512.onnx",
    ]
    assert [shape.capacity for shape in static_shapes((1,), None, 100)] == [100]


def test_onnx_models_cannot_have_them(tiny_bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--device npu needs a checkpoint of a family that edge-run exports itself"):
        export_model(tiny_bundle, tmp_path / "bundle", ExportRecipe(None, device="npu"))


@pytest.mark.parametrize(
    ("family", "widths", "contexts", "message"),
    [
        ("qwen3_moe", (1,), None, "qwen3_moe models, which have mixtures of experts"),
        ("llama", (1,), (128, 512), "--contexts 128,512 is longer than the 256 positions"),
        ("llama", (4,), None, "--widths 4 lacks width 1"),
        ("llama", (1, 0), None, "--widths 1,0 is out of range"),
        ("llama", (1, 1), None, "--widths 1,1 names a number twice"),
        ("llama", (1,), (), "--contexts is out of range"),
    ],
)
def test_what_cannot_be_exported_is_refused_first(
    tmp_path: Path, family: str, widths: tuple[int, ...], contexts: tuple[int, ...] | None, message: str
) -> None:
    source = write_checkpoint(tmp_path / "checkpoint", family)
    with pytest.raises(InputError, match=message):
        exported(source, tmp_path / "bundle", ExportRecipe(INT4, device="npu", widths=widths, contexts=contexts))
    assert not (tmp_path / "bundle").exists()
