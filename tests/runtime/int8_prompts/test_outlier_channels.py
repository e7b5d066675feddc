"""Channels with outliers: factors make their products as fine as others, and what stays coarse keeps its format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from safetensors.numpy import load_file, save_file

from edgerun.export import FP32, INT8, export_checkpoint
from edgerun.export.recipe import ExportRecipe
from edgerun.models.bundle import open_bundle
from edgerun.models.manifest import GraphLayout
from edgerun.models.onnx_file.graph_editor import GraphEditor
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph.attention_edits import serve_plain_passes
from edgerun.runtime.graph.bound_session import BoundSession
from edgerun.runtime.graph.model_metadata import metadata_of
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from edgerun.runtime.int8_prompts import outlier_channels
from edgerun.runtime.int8_prompts.int8_graph import Int8Products, find_products
from edgerun.runtime.int8_prompts.int8_graph_files import int8_graph_path
from edgerun.runtime.int8_prompts.integer_weights import FULL_RANGE
from edgerun.runtime.int8_prompts.outlier_channels import InputSample, sample_inputs, too_coarse
from edgerun.runtime.measure.logit_quality import KL_LIMIT, measure_quality
from support.tiny_models import write_bundle, write_checkpoint

CPU = SessionConfig(choose_device("cpu"), 1)
SIZES = {"hidden_size": 256, "intermediate_size": 384}
OUTLIERS = [3, 17]
"""They lie in one block of the model's own format, which rounds activations by blocks."""
TEXTS = [np.random.default_rng(seed).integers(5, 300, 120).tolist() for seed in range(4)]
Tensors = dict[str, npt.NDArray[np.float32]]


def enlarge_norms(tensors: Tensors) -> None:
    """Make channels of norms 30 times as large and their weights smaller, so that the model computes the same."""
    for name in [name for name in tensors if name.endswith("layernorm.weight")]:
        layer = name.rpartition(".weight")[0].rpartition(".")[0]
        tensors[name][OUTLIERS] *= 30
        readers = ("mlp.gate", "mlp.up") if "post_attention" in name else ("self_attn.q", "self_attn.k", "self_attn.v")
        for reader in readers:
            tensors[f"{layer}.{reader}_proj.weight"][:, OUTLIERS] /= 30


def enlarge_values(tensors: Tensors) -> None:
    """The same for a channel of values, which lie in the cache and so cannot be divided."""
    for name in [name for name in tensors if name.endswith("v_proj.weight")]:
        tensors[name][1] *= 100
        # Two query heads read the first head of keys and values.
        tensors[name.replace("v_proj", "o_proj")][:, [1, 65]] /= 100


def bundle_with(folder: Path, change: Callable[[Tensors], None] | None) -> Path:
    """A tiny llama whose checkpoint was changed."""
    checkpoint = write_checkpoint(folder / "checkpoint", "llama", seed=1, **SIZES)
    if change is not None:
        tensors = load_file(checkpoint / "model.safetensors")
        change(tensors)
        save_file(tensors, checkpoint / "model.safetensors")
    return export_checkpoint(checkpoint, folder / "bundle", ExportRecipe(INT8)).bundle


def bound_to(graph: Path, bundle: Path) -> BoundSession:
    session = GraphSession(graph, CPU, metadata_of(open_bundle(bundle)))
    return session.bind(session.arena(256))


def int8_path_of(bundle: Path) -> Path:
    int8_path = int8_graph_path(open_bundle(bundle), CPU)
    assert int8_path is not None
    return int8_path


def divergence(bundle: Path) -> float:
    """Mean KL divergence of a bundle's int8 graph from its checkpoint in float32.

    The bundle's own graph cannot be the reference: it rounds activations too, on some processors more than this.
    """
    reference = bundle.with_name("float32")
    if not reference.exists():
        export_checkpoint(bundle.with_name("checkpoint"), reference, ExportRecipe(FP32))
    int8_graph, own = bound_to(int8_path_of(bundle), bundle), bound_to(reference / "model.onnx", reference)
    return measure_quality(int8_graph, own, TEXTS, prompts=True).mean_kl


def kept_products(int8_path: Path) -> list[str]:
    """Products in the model's own format in which all tokens take part."""
    nodes = onnx.load(int8_path, load_external_data=False).graph.node
    return [each.output[0] for each in nodes if each.op_type == "MatMulNBits" and "layers.0" in each.output[0]]


def analysed(bundle: Path) -> tuple[GraphEditor, Int8Products, dict[str, InputSample]]:
    opened = open_bundle(bundle)
    editor = GraphEditor(opened.graph)
    serve_plain_passes(editor, keep_computed=True)
    found = find_products(editor)
    channels = {each.inputs: each.matrix.columns for each in found.products}
    return editor, found, sample_inputs(GraphEditor(opened.graph), opened.graph, opened, CPU, channels)


pytestmark = pytest.mark.usefixtures("cache")


def test_factors_make_up_for_outliers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = divergence(bundle_with(tmp_path / "even", None))
    outliers = bundle_with(tmp_path / "outliers", enlarge_norms)
    with_factors = divergence(outliers)
    assert not kept_products(int8_path_of(outliers))
    with monkeypatch.context() as patch:
        patch.setattr(outlier_channels, "_EXPONENTS", ())
        patch.setattr(outlier_channels, "MAX_ERROR", 1.0)
        monkeypatch.setenv("EDGERUN_CACHE", str(tmp_path / "another"))
        without = divergence(outliers)
    assert plain < with_factors < without / 5
    assert without > KL_LIMIT


def test_products_that_stay_coarse_keep_their_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outliers = bundle_with(tmp_path / "outliers", enlarge_values)
    assert kept_products(int8_path_of(outliers)) == ["layers.0.o"]
    kept = divergence(outliers)
    with monkeypatch.context() as patch:
        patch.setattr(outlier_channels, "MAX_ERROR", 1.0)
        monkeypatch.setenv("EDGERUN_CACHE", str(tmp_path / "another"))
        assert not kept_products(int8_path_of(outliers))
        coarse = divergence(outliers)
    assert coarse > 2.5 * kept


def test_factors_change_no_product_in_floats(tmp_path: Path) -> None:
    """What the division takes from the inputs, the weights have: norms and gated products are divided where made."""
    bundle = bundle_with(tmp_path, enlarge_norms)
    editor, found, samples = analysed(bundle)
    before = {each.name: (each.inputs, each.matrix.decoded(0, each.matrix.rows)) for each in found.products}
    norms = {each.output[0]: editor.array(each.input[2]) for each in editor.graph.node if len(each.output) == 4}
    assert not too_coarse(editor, found, samples, FULL_RANGE)
    divided = {each.inputs for each in found.products if each.column_factors is not None}
    assert any(name.endswith("gated") for name in divided)
    assert any(name in norms for name in divided)
    for product in found.products:
        if product.column_factors is None:
            continue
        producer = editor.producer(product.inputs)
        if product.inputs in norms:
            old, new = norms[product.inputs], editor.array(producer.input[2])
            assert old is not None
            np.testing.assert_allclose(new * product.column_factors, old, rtol=1e-6)
        elif producer.op_type == "Mul":
            gate = next(each for each in found.products if each.name in producer.input and not each.keeps_step)
            np.testing.assert_allclose(gate.row_factors * product.column_factors, 1, rtol=1e-6)
        assert before[product.name][0] == product.inputs


def test_gates_in_floats_are_multiplied_with_the_factors_of_their_inputs(tmp_path: Path) -> None:
    """A delta net's decays and betas stay float32, beside products whose inputs they share."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "qwen3_5_text", seed=1, **SIZES)
    tensors = load_file(checkpoint / "model.safetensors")
    name = next(name for name in tensors if name.endswith("layers.0.input_layernorm.weight"))
    tensors[name][OUTLIERS] = 60.0  # the norm adds one
    for reader in ("qkv", "z", "a", "b"):
        tensors[name.replace("input_layernorm", f"linear_attn.in_proj_{reader}")][:, OUTLIERS] /= 60
    save_file(tensors, checkpoint / "model.safetensors")
    bundle = export_checkpoint(checkpoint, tmp_path / "bundle", ExportRecipe(INT8)).bundle
    assert not kept_products(int8_path_of(bundle))
    editor, found, samples = analysed(bundle)
    gates = next(each for each in editor.graph.node if each.op_type == "MatMul")
    before = editor.array(gates.input[1])
    assert not too_coarse(editor, found, samples, FULL_RANGE)
    product = next(each for each in found.products if each.inputs == gates.input[0])
    after = editor.array(gates.input[1])
    assert after is not None
    np.testing.assert_allclose(after, before * product.column_factors[:, None], rtol=1e-6)
    norm = editor.producer(gates.input[0])
    assert norm.op_type == "SimplifiedLayerNormalization"


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_a_graph_in_the_layout_of_another_runtime_has_an_int8_graph(tmp_path: Path, family: str) -> None:
    """Lengths are counted from a mask there, all tokens get logits, and nothing says what edge-run exported."""
    edge = write_bundle(tmp_path / "edge", family, weights=INT8, seed=1)
    recipe = ExportRecipe(INT8, layout=GraphLayout.GENAI)
    genai = export_checkpoint(edge.with_name("checkpoint"), tmp_path / "genai", recipe).bundle
    (genai / "edge.json").unlink()
    assert open_bundle(genai).manifest is None
    int8_path = int8_path_of(genai)
    assert (
        measure_quality(bound_to(int8_path, genai), bound_to(genai / "model.onnx", genai), TEXTS, prompts=True).mean_kl
        < 0.05
    )
