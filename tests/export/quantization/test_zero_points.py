"""Weight formats with zero points or powers of two as scales: their codes, and whole exports."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from edgerun.errors import InputError
from edgerun.export import FP32, ExportRecipe, Method, WeightFormat, export_checkpoint
from edgerun.export.quantization.codes import dequantized, unpack_zero_points
from edgerun.export.quantization.methods import QUANTIZERS
from edgerun.models.bundle import open_bundle
from support.gguf_files import write_gguf
from support.nightly import some_nightly
from support.tiny_models import write_bundle, write_checkpoint
from support.weight_operators import FORMATS

WITH_ZERO_POINTS = [weight_format for weight_format in FORMATS if weight_format.zero_points]
DATA_FREE_METHODS = [Method.RTN, Method.K_QUANT]
weight_matrices = arrays.arrays(
    np.float32,
    st.tuples(st.integers(1, 3), st.integers(1, 200)),
    elements=st.floats(-1e3, 1e3, width=32, allow_subnormal=True),
)


@given(weight_matrices, st.sampled_from(WITH_ZERO_POINTS))
def test_rounding_error_is_at_most_half_a_step(weights, weight_format: WeightFormat) -> None:
    quantized = QUANTIZERS[Method.RTN](weights, weight_format)
    rows, columns = weights.shape
    padded_columns = quantized.scales.shape[1] * weight_format.block
    error = np.zeros((rows, padded_columns), np.float32)
    error[:, :columns] = dequantized(quantized, columns, weight_format) - weights
    step = np.repeat(quantized.scales, weight_format.block, axis=1) + np.float32(1e-30) * (1 << weight_format.bits)
    assert np.all(np.abs(error) <= 0.5001 * step)
    # The padding of the last block is dequantized to zero, so that it adds nothing to a product.
    assert not dequantized(quantized, padded_columns, weight_format)[:, columns:].any()


@pytest.mark.parametrize("method", DATA_FREE_METHODS, ids=str)
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


@pytest.mark.parametrize("weight_format", [WeightFormat(4, 32), WeightFormat(4, 128), WeightFormat(8, 64)], ids=str)
def test_zero_points_reduce_the_error_of_normal_weights(weight_format: WeightFormat) -> None:
    weights = (np.random.default_rng(1).standard_normal((64, 512)) * 0.02).astype(np.float32)
    asymmetric = replace(weight_format, zero_points=True)
    for method in (Method.RTN, Method.K_QUANT):
        error = np.square(dequantized(QUANTIZERS[method](weights, asymmetric), 512, asymmetric) - weights).sum()
        assert (
            error
            < np.square(dequantized(QUANTIZERS[method](weights, weight_format), 512, weight_format) - weights).sum()
        )


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "separate"])
@pytest.mark.parametrize("block", some_nightly([32, 128], every=2))
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_export_with_zero_points(tmp_path, bits: int, block: int, tied: bool) -> None:
    weight_format = WeightFormat(bits, block, zero_points=True)
    bundle = write_bundle(
        tmp_path, "qwen2", weights=weight_format, tie_word_embeddings=tied, hidden_size=96, intermediate_size=172
    )
    manifest = open_bundle(bundle).manifest
    assert set(manifest.weights.values()) == {weight_format}
    assert manifest.parity["max_abs_diff"] < 1e-4
    graph = onnx.load(bundle / "model.onnx", load_external_data=False).graph
    linears = [node for node in graph.node if node.op_type == "MatMulNBits"]
    assert len(linears) == 9
    assert all(node.input[3] for node in linears)
    symmetric = export_checkpoint(
        tmp_path / "checkpoint", tmp_path / "other", ExportRecipe(replace(weight_format, zero_points=False))
    )
    assert symmetric.bits_per_weight < manifest.bits_per_weight


def test_the_manifest_stores_zero_points(tmp_path) -> None:
    weight_format = WeightFormat(4, 64, zero_points=True)
    bundle = write_bundle(tmp_path, weights=ExportRecipe(weight_format, head=FP32))
    written = json.loads((bundle / "edge.json").read_text(encoding="utf-8"))["weights"]
    assert written["layers.0.o"] == {
        "bits": 4,
        "block": 64,
        "zero_points": True,
        "method": "k-quant",
    }
    manifest = open_bundle(bundle).manifest
    assert manifest.weights["layers.0.o"] == weight_format != replace(weight_format, zero_points=False)
    assert str(weight_format) == "int4/64+zero-points"


@pytest.mark.parametrize(
    ("weight_format", "called"),
    [
        (WeightFormat(4, 32, zero_points=True), "zero points"),
        (WeightFormat(4, 32, half_scales=True), "float16 scales"),
    ],
)
def test_experts_reject_other_scales(tmp_path, weight_format: WeightFormat, called: str) -> None:
    source = write_checkpoint(tmp_path / "checkpoint", "qwen3_moe")
    with pytest.raises(InputError, match=f"layers.0.gate_up has experts, whose operator does not support {called}"):
        export_checkpoint(source, tmp_path / "bundle", ExportRecipe(weight_format))


@pytest.mark.parametrize(
    ("weight_format", "option"),
    [
        (WeightFormat(4, 32, zero_points=True), "--zero-points"),
        (WeightFormat(4, 32, half_scales=True), "--half-scales"),
    ],
)
def test_quantized_sources_reject_other_scales(tmp_path, weight_format: WeightFormat, option: str) -> None:
    file = write_gguf(tmp_path / "model.gguf", write_checkpoint(tmp_path / "checkpoint"), "Q8_0")
    with pytest.raises(InputError, match=f"{option}.* is not supported for a GGUF file"):
        export_checkpoint(file, tmp_path / "bundle", ExportRecipe(weight_format))
