"""Zero points, and scales that are powers of two: what they store, and whole exports with them."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from edgerun.errors import ExportError, InputError
from edgerun.export import FP32, ExportRecipe, ExportRequest, Method, WeightFormat, export_checkpoint
from edgerun.export.checkpoint.safetensors_files import Checkpoint
from edgerun.export.graph.initializers import Initializers
from edgerun.export.quantization.codes import dequantized, powers_of_two, unpack_zero_points
from edgerun.export.quantization.methods import QUANTIZERS
from edgerun.models.bundle import open_bundle
from support.gguf_files import write_gguf
from support.tiny_models import write_bundle, write_checkpoint
from support.weight_operators import FORMATS, run_operators

WITH_POINTS = [form for form in FORMATS if form.zero_points]
IN_POWERS = [replace(form, powers_of_two=True) for form in FORMATS]
BLIND = [Method.RTN, Method.K_QUANT, Method.HQQ]
rows_of_weights = arrays.arrays(
    np.float32,
    st.tuples(st.integers(1, 3), st.integers(1, 200)),
    elements=st.floats(-1e3, 1e3, width=32, allow_subnormal=True),
)


@given(rows_of_weights, st.sampled_from(WITH_POINTS))
def test_rounding_to_nearest_loses_at_most_half_a_step_anywhere(weights, form: WeightFormat) -> None:
    quantized = QUANTIZERS[Method.RTN](weights, form)
    rows, columns = weights.shape
    whole = quantized.scales.shape[1] * form.block
    error = np.zeros((rows, whole), np.float32)
    error[:, :columns] = dequantized(quantized, columns, form) - weights
    step = np.repeat(quantized.scales, form.block, axis=1) + np.float32(1e-30) * (1 << form.bits)
    assert np.all(np.abs(error) <= 0.5001 * step)
    # The padding of a tail block adds nothing to a product: it decodes to zero.
    assert not dequantized(quantized, whole, form)[:, columns:].any()


@pytest.mark.parametrize("method", BLIND, ids=str)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_blocks_of_one_sign_use_all_codes(bits: int, method: Method) -> None:
    form = WeightFormat(bits, 32, zero_points=True)
    weights = np.random.default_rng(0).uniform(1.0, 4.0, (8, 64)).astype(np.float32)
    weights[4:] *= -1
    quantized = QUANTIZERS[method](weights, form)
    zeros = unpack_zero_points(quantized.zero_points, quantized.scales.shape[1], bits)
    assert (zeros[:4] == 0).all()
    assert (zeros[4:] == (1 << bits) - 1).all()
    without = QUANTIZERS[method](weights, replace(form, zero_points=False))
    lost, more = (
        np.square(dequantized(each, 64, kind) - weights).sum()
        for each, kind in ((quantized, form), (without, replace(form, zero_points=False)))
    )
    assert lost < 0.6 * more


@pytest.mark.parametrize("form", [WeightFormat(4, 32), WeightFormat(4, 128), WeightFormat(8, 64)], ids=str)
def test_zero_points_leave_less_error_on_rows_like_those_of_models(form: WeightFormat) -> None:
    weights = (np.random.default_rng(1).standard_normal((64, 512)) * 0.02).astype(np.float32)
    form_with = replace(form, zero_points=True)
    for method in (Method.RTN, Method.K_QUANT):
        lost = np.square(dequantized(QUANTIZERS[method](weights, form_with), 512, form_with) - weights).sum()
        assert lost < np.square(dequantized(QUANTIZERS[method](weights, form), 512, form) - weights).sum()


@given(arrays.arrays(np.float32, 20, elements=st.floats(2**-100, 2**100, width=32)), st.booleans())
def test_powers_of_two_are_the_nearest(values, negative: bool) -> None:
    values = -values if negative else values
    powers = powers_of_two(values)
    mantissas, _ = np.frexp(powers)
    assert (np.abs(mantissas) == 0.5).all()
    assert (np.sign(powers) == np.sign(values)).all()
    for other in (powers * 2, powers / 2):
        assert (np.abs(powers - values) <= np.abs(other - values)).all()
    above = powers_of_two(values, turn=0.5)
    assert (np.abs(values) <= np.abs(above)).all()
    assert (np.abs(above) < 2 * np.abs(values)).all()


@settings(max_examples=40)
@given(rows_of_weights, st.sampled_from(IN_POWERS), st.sampled_from(BLIND))
def test_every_scale_is_a_power_of_two(weights, form: WeightFormat, method: Method) -> None:
    quantized = QUANTIZERS[method](weights, form)
    mantissas, _ = np.frexp(quantized.scales[quantized.scales != 0])
    assert (np.abs(mantissas) == 0.5).all()
    expected = dequantized(quantized, weights.shape[1], form)
    product, _ = run_operators(quantized, weights.shape[1], form)
    np.testing.assert_allclose(product, expected.T, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", IN_POWERS, ids=str)
def test_a_search_among_powers_is_better_than_the_first_guess(form: WeightFormat) -> None:
    weights = (np.random.default_rng(2).standard_normal((32, 512)) * 0.02).astype(np.float32)
    nearest, searched = (
        np.square(dequantized(QUANTIZERS[method](weights, form), 512, form) - weights).sum()
        for method in (Method.RTN, Method.K_QUANT)
    )
    assert searched <= nearest


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "separate"])
@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_zero_points_through_the_whole_export(tmp_path, bits: int, block: int, tied: bool) -> None:
    form = WeightFormat(bits, block, zero_points=True)
    bundle = write_bundle(
        tmp_path, "qwen2", weights=form, tie_word_embeddings=tied, hidden_size=96, intermediate_size=172
    )
    manifest = open_bundle(bundle).manifest
    assert set(manifest.weights.values()) == {form}
    assert manifest.parity["max_abs_diff"] < 1e-4
    graph = onnx.load(bundle / "model.onnx", load_external_data=False).graph
    linears = [node for node in graph.node if node.op_type == "MatMulNBits"]
    assert len(linears) == 9
    assert all(node.input[3] for node in linears)
    symmetric = export_checkpoint(
        ExportRequest(tmp_path / "checkpoint", tmp_path / "other", ExportRecipe(replace(form, zero_points=False)))
    )
    assert symmetric.bits_per_weight < manifest.bits_per_weight


def test_a_wrong_zero_point_is_caught(tmp_path, monkeypatch) -> None:
    source = write_checkpoint(tmp_path / "checkpoint")

    class Shifted(Checkpoint):
        def quantized(self, rows, form):
            quantized = super().quantized(rows, form)
            return quantized._replace(zero_points=quantized.zero_points ^ 1)

    monkeypatch.setattr(
        "edgerun.export.bundle_writer.Initializers", lambda _, *rest: Initializers(Shifted(source), *rest)
    )
    with pytest.raises(ExportError, match="differs from the reference"):
        export_checkpoint(
            ExportRequest(source, tmp_path / "bundle", ExportRecipe(WeightFormat(4, 32, zero_points=True)))
        )


def test_the_manifest_tells_forms_apart(tmp_path) -> None:
    form = WeightFormat(4, 64, zero_points=True, powers_of_two=True)
    bundle = write_bundle(tmp_path, weights=ExportRecipe(form, head=FP32))
    written = json.loads((bundle / "edge.json").read_text())["weights"]
    assert written["layers.0.o"] == {
        "bits": 4,
        "block": 64,
        "zero_points": True,
        "powers_of_two": True,
        "method": "k-quant",
    }
    manifest = open_bundle(bundle).manifest
    assert manifest.weights["layers.0.o"] == form != replace(form, powers_of_two=False)
    assert str(form) == "int4/64+zero-points+powers-of-two"


def test_experts_take_no_zero_points(tmp_path) -> None:
    source = write_checkpoint(tmp_path / "checkpoint", "qwen3_moe")
    with pytest.raises(InputError, match="layers.0.gate_up has experts, whose operator does not support zero points"):
        export_checkpoint(
            ExportRequest(source, tmp_path / "bundle", ExportRecipe(WeightFormat(4, 32, zero_points=True)))
        )


def test_experts_take_powers_of_two(tmp_path) -> None:
    bundle = write_bundle(tmp_path, "qwen3_moe", weights=WeightFormat(4, 32, powers_of_two=True))
    assert open_bundle(bundle).manifest.parity["max_abs_diff"] < 1e-4


@pytest.mark.parametrize(
    ("form", "option"),
    [(WeightFormat(4, 32, zero_points=True), "--zero-points"), (WeightFormat(4, 32, powers_of_two=True), "--powers")],
)
def test_what_has_codes_already_keeps_its_scales(tmp_path, form: WeightFormat, option: str) -> None:
    file = write_gguf(tmp_path / "model.gguf", write_checkpoint(tmp_path / "checkpoint"), "Q8_0")
    with pytest.raises(InputError, match=f"{option}.* is not supported for a GGUF file"):
        export_checkpoint(ExportRequest(file, tmp_path / "bundle", ExportRecipe(form)))
