"""Weight formats with zero points or float16 scales: their codes, whole exports, and everything that reads those."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import edgerun
from edgerun.errors import InputError
from edgerun.export import ExportRecipe, Method, WeightFormat, export_checkpoint
from edgerun.export.allocation.format_candidates import completed_plan, planned_linears
from edgerun.export.allocation.plan_costs import file_costs, plan_cost
from edgerun.export.checkpoint.config import read_config
from edgerun.export.quantization.codes import dequantized, unpack_zero_points
from edgerun.export.quantization.methods import QUANTIZERS
from edgerun.models.bundle import open_bundle
from edgerun.models.onnx_file.graph_editor import GraphEditor
from edgerun.runtime.int8_prompts.integer_weights import OPERATOR, BlockMatrix
from support.gguf_files import write_gguf
from support.nightly import examples, some_nightly
from support.tiny_models import write_bundle, write_checkpoint
from support.weight_operators import FORMATS, run_operators

HALF = [replace(weight_format, half_scales=True) for weight_format in FORMATS]


def initializers(bundle: Path) -> dict[str, onnx.TensorProto]:
    """The tensors of a bundle's graph by name, without their external data."""
    graph = onnx.load(bundle / "model.onnx", load_external_data=False).graph
    return {each.name: each for each in graph.initializer}


def stored_bytes(bundle: Path) -> int:
    """Bytes of the tensors of a bundle's linears and embedding; those that share a place count once."""
    places = {}
    for name, tensor in initializers(bundle).items():
        if name.rpartition(".")[2] in ("codes", "scales", "half_scales", "zero_points", "gathered_zero_points"):
            where = {entry.key: entry.value for entry in tensor.external_data}
            places[where.get("offset", name)] = int(where.get("length", len(tensor.raw_data)))
    return sum(places.values())


@settings(max_examples=examples(40))
@given(
    arrays.arrays(
        np.float32, st.tuples(st.integers(1, 3), st.integers(1, 200)), elements=st.floats(-100, 100, width=32)
    ),
    st.sampled_from(HALF),
    st.sampled_from([Method.RTN, Method.K_QUANT]),
)
def test_every_scale_is_a_float16_number(weights, weight_format: WeightFormat, method: Method) -> None:
    quantized = QUANTIZERS[method](weights, weight_format)
    assert np.array_equal(quantized.scales, quantized.scales.astype(np.float16))
    expected = dequantized(quantized, weights.shape[1], weight_format)
    product, _ = run_operators(quantized, weights.shape[1], weight_format)
    np.testing.assert_allclose(product, expected.T, rtol=1e-6, atol=1e-6)


def test_weights_beyond_the_range_of_float16_are_refused() -> None:
    with pytest.raises(InputError, match="beyond the range of float16"):
        QUANTIZERS[Method.RTN](np.full((1, 32), 1e7, np.float32), WeightFormat(4, 32, half_scales=True))


POINTS = {"zero_points": True}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "separate"])
@pytest.mark.parametrize(
    "weight_format",
    [
        WeightFormat(4, 32, **POINTS, half_scales=True),
        WeightFormat(8, 128, half_scales=True),
        WeightFormat(2, 32, **POINTS),
        *some_nightly([WeightFormat(2, block) for block in (32, 64, 128)], every=2),
        *some_nightly([WeightFormat(bits, block, **POINTS) for bits in (4, 8) for block in (32, 128)], every=4),
    ],
    ids=str,
)
def test_export(tmp_path: Path, weight_format: WeightFormat, tied: bool) -> None:
    # Rows that blocks of 128, 64 and 32 leave a part of, and that smaller ones would not make shorter.
    options = {"tie_word_embeddings": tied, "hidden_size": 224, "intermediate_size": 236}
    bundle = write_bundle(tmp_path, "qwen2", weights=weight_format, **options)
    manifest = open_bundle(bundle).manifest
    assert set(manifest.weights.values()) == {weight_format}
    assert str(weight_format).endswith("+half-scales") == weight_format.half_scales
    assert manifest.parity["max_abs_diff"] < 1e-4
    config = read_config(tmp_path / "checkpoint")
    plan = completed_plan(config, {linear.name: weight_format for linear in planned_linears(config)})
    assert stored_bytes(bundle) == plan_cost(plan, file_costs(config), config)
    types = {tensor.data_type for name, tensor in initializers(bundle).items() if name.endswith("scales")}
    assert types == {onnx.TensorProto.FLOAT16 if weight_format.half_scales else onnx.TensorProto.FLOAT}
    graph = onnx.load(bundle / "model.onnx", load_external_data=False).graph
    linears = [node for node in graph.node if node.op_type == "MatMulNBits"]
    assert len(linears) == 9
    assert all((len(node.input) > 3 and bool(node.input[3])) == weight_format.zero_points for node in linears)
    with edgerun.load(bundle, draft=None) as engine:
        assert engine.generate("some text", raw=True, max_tokens=4).stats.completion_tokens


def test_the_int8_prompt_graph_reads_the_codes(tmp_path: Path) -> None:
    weight_format = WeightFormat(4, 32, zero_points=True, half_scales=True)
    editor = GraphEditor(write_bundle(tmp_path, "llama", weights=weight_format) / "model.onnx")
    products = [node for node in editor.graph.node if node.op_type == OPERATOR]
    assert products
    for node in products:
        matrix = BlockMatrix.of(editor, node)
        assert matrix.scales.dtype == np.float32
        assert np.isfinite(matrix.decoded(0, 2)).all()


@pytest.mark.parametrize("method", [Method.RTN, Method.K_QUANT], ids=str)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_blocks_of_one_sign_use_all_codes(bits: int, method: Method) -> None:
    weight_format = WeightFormat(bits, 32, zero_points=True)
    weights = np.random.default_rng(0).uniform(1.0, 4.0, (8, 64)).astype(np.float32)
    weights[4:] *= -1
    quantized = QUANTIZERS[method](weights, weight_format)
    zeros = unpack_zero_points(quantized.zero_points, quantized.scales.shape[1], bits)
    assert (zeros[:4] == 0).all()
    assert (zeros[4:] == (1 << bits) - 1).all()
    without = QUANTIZERS[method](weights, replace(weight_format, zero_points=False))
    error, symmetric_error = (
        np.square(dequantized(each, 64, kind) - weights).sum()
        for each, kind in ((quantized, weight_format), (without, replace(weight_format, zero_points=False)))
    )
    assert error < 0.6 * symmetric_error


@pytest.mark.parametrize(
    ("scales", "called", "option"),
    [
        ({"zero_points": True}, "zero points", "--zero-points"),
        ({"half_scales": True}, "float16 scales", "--half-scales"),
    ],
)
def test_experts_and_quantized_sources_reject_other_scales(tmp_path, scales, called: str, option: str) -> None:
    recipe = ExportRecipe(WeightFormat(4, 32, **scales))
    experts = write_checkpoint(tmp_path / "experts", "qwen3_moe")
    file = write_gguf(tmp_path / "model.gguf", write_checkpoint(tmp_path / "checkpoint"), "Q8_0")
    with pytest.raises(InputError, match=f"layers.0.gate_up has experts, whose operator does not support {called}"):
        export_checkpoint(experts, tmp_path / "bundle", recipe)
    with pytest.raises(InputError, match=f"{option}.* is not supported for a GGUF file"):
        export_checkpoint(file, tmp_path / "bundle", recipe)
