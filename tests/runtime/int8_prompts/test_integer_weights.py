"""Codes of MatMulNBits are decoded as the operator reads them, and rounded to integers as NumPy does it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import pytest

from edgerun.models.onnx_file.graph_editor import CannotRewriteError, GraphEditor
from edgerun.models.onnx_file.model_messages import GraphProto, model, node, tensor, value_info
from edgerun.runtime.graph import packed_files
from edgerun.runtime.int8_prompts.integer_weights import (
    FULL_RANGE,
    NARROW_RANGE,
    BlockMatrix,
    IntegerRange,
    products_overflow,
    to_integers,
    write_packed,
)

ROWS, COLUMNS = 24, 80
"""80 is not a multiple of the block sizes, so that every row's last block is padded."""


def write_product(
    folder: Path, bits: int, block: int, zeros: str | None = None, *, order: bool = False, seed: int = 0
) -> Path:
    """A model of one MatMulNBits with random codes; `zeros` is `packed`, `float` or None."""
    random = np.random.default_rng(seed)
    blocks = -(-COLUMNS // block)
    tensors = {
        "codes": random.integers(0, 256, (ROWS, blocks, block * bits // 8), np.uint8),
        "scales": random.standard_normal((ROWS, blocks)).astype(np.float32),
    }
    inputs = ["x", "codes", "scales", "", "", "bias"]
    if zeros == "packed":
        tensors["zeros"] = random.integers(0, 256, (ROWS, -(-blocks * bits // 8)), np.uint8)
    elif zeros == "float":
        tensors["zeros"] = (random.random((ROWS, blocks)) * 2**bits).astype(np.float32)
    if zeros:
        inputs[3] = "zeros"
    if order:
        inputs[4] = "order"
        tensors["order"] = np.arange(COLUMNS, dtype=np.int32) // block
    tensors["bias"] = random.standard_normal(ROWS).astype(np.float32)
    attributes = {"K": COLUMNS, "N": ROWS, "bits": bits, "block_size": block}
    return written(
        folder, node("MatMulNBits", inputs, ["y"], domain="com.microsoft", **attributes), np.float32, tensors
    )


def written(folder: Path, product: Any, dtype: npt.DTypeLike, tensors: dict[str, npt.NDArray[Any]]) -> Path:
    """A model file of one operator with an input `x` and an output `y`."""
    graph = GraphProto(
        name="product",
        node=[product],
        input=[value_info("x", dtype, (1, "tokens", "columns"))],
        output=[value_info("y", np.float32, (1, "tokens", "rows"))],
        initializer=[tensor(name, array) for name, array in tensors.items()],
    )
    (folder / "model.onnx").write_bytes(model(graph, opset=21).SerializeToString())
    return folder / "model.onnx"


def matrix_of(graph: Path) -> BlockMatrix:
    editor = GraphEditor(graph)
    return BlockMatrix.of(editor, editor.graph.node[0])


def run(graph: Path, x: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    session = ort.InferenceSession(str(graph), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x})[0])


@pytest.mark.parametrize(
    ("bits", "block", "zeros"),
    # The operator has no float zero points at 8 bits.
    [*itertools.product((2, 4), (16, 32, 128), (None, "packed", "float")), (8, 32, None), (8, 16, "packed")],
)
def test_decoded_weights_are_those_of_the_operator(tmp_path: Path, bits: int, block: int, zeros: str | None) -> None:
    graph = write_product(tmp_path, bits, block, zeros)
    matrix = matrix_of(graph)
    # Rows of the identity give the columns of the matrix.
    computed = run(graph, np.eye(COLUMNS, dtype=np.float32)[None])[0].T - matrix.bias[:, None]  # type: ignore[index]
    whole = matrix.decoded(0, ROWS)
    np.testing.assert_allclose(whole, computed, rtol=1e-4, atol=1e-4 * np.abs(whole).max())
    np.testing.assert_array_equal(matrix.decoded(5, 9), whole[5:9])


def test_reordered_columns_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CannotRewriteError, match="codes"):
        matrix_of(write_product(tmp_path, 4, 16, order=True))


@pytest.mark.parametrize("limit", [127, 91])
def test_integers_are_the_nearest_ones(tmp_path: Path, limit: int) -> None:
    matrix = matrix_of(write_product(tmp_path, 4, 16, "packed"))
    factors = np.linspace(0.5, 4, COLUMNS, dtype=np.float32)
    integers, found = to_integers(matrix, limit, rows=slice(3, 20), column_factors=factors)
    weights = matrix.decoded(3, 20) * factors
    scales = np.abs(weights).max(axis=1) / np.float32(limit)
    np.testing.assert_array_equal(found, scales)
    np.testing.assert_array_equal(integers, np.rint(weights / scales[:, None]).T)
    assert np.abs(integers).max() == limit
    _, doubled = to_integers(matrix, limit, rows=slice(3, 20), row_factors=np.full(17, 2, np.float32))
    np.testing.assert_array_equal(doubled, 2 * to_integers(matrix, limit, rows=slice(3, 20))[1])


def test_a_row_of_zeros_stays_zero(tmp_path: Path) -> None:
    matrix = matrix_of(write_product(tmp_path, 4, 16))
    scales = np.array(matrix.scales)
    scales[2] = 0
    zeroed = BlockMatrix(ROWS, COLUMNS, 4, matrix.codes, scales, None, None)
    integers, found = to_integers(zeroed, 127)
    assert not integers[:, 2].any()
    assert np.isfinite(found).all()


def test_products_in_the_range_used_here_are_exact(tmp_path: Path) -> None:
    """The largest integers of the range give the true sum; those of the full range only where nothing overflows."""
    limits = NARROW_RANGE if products_overflow() else FULL_RANGE
    assert _largest_product_is_exact(tmp_path, limits)
    assert _largest_product_is_exact(tmp_path, FULL_RANGE) is not products_overflow()
    assert 4 * NARROW_RANGE.activation * NARROW_RANGE.weight < 1 << 15


def _largest_product_is_exact(folder: Path, limits: IntegerRange) -> bool:
    size = 64
    product = node("MatMulIntegerToFloat", ["x", "w", "one", "one", "zero"], ["y"], domain="com.microsoft")
    constants = {
        "w": np.full((size, size), limits.weight, np.int8),
        "one": np.array(1, np.float32),
        "zero": np.array(limits.activation, np.uint8),
    }
    graph = written(folder, product, np.uint8, constants)
    result = run(graph, np.full((1, 1, size), 2 * limits.activation, np.uint8))
    return bool((result == size * limits.activation * limits.weight).all())


def test_packed_weights_are_written_with_their_offsets_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_files, "LARGE_PAGE", 1 << 13)
    random = np.random.default_rng(0)
    matrices = [random.integers(-90, 91, (128, 96), np.int8) for _ in range(2)]
    with (tmp_path / "int8.data").open("xb") as file:
        tensors = [write_packed(file, f"matrix.{number}", each, 90) for number, each in enumerate(matrices)]
    assert {each.name for each in tmp_path.iterdir()} == {"int8.data"}
    data = (tmp_path / "int8.data").read_bytes()
    for packed_tensor, matrix in zip(tensors, matrices, strict=True):
        entries = {each.key: each.value for each in packed_tensor.external_data}
        start = int(entries["offset"])
        assert data[start : start + matrix.size] == matrix.tobytes()
        packed = next(value for key, value in entries.items() if key.startswith("prepacked_"))
        first, length, _ = packed.partition("|")[2].split(";")
        assert start + matrix.size <= int(first) <= len(data) - int(length)
        assert int(first) % (1 << 13) == 0


def test_a_tiny_matrix_is_not_packed(tmp_path: Path) -> None:
    with (tmp_path / "int8.data").open("xb") as file:
        tiny = write_packed(file, "tiny", np.ones((8, 8), np.int8), 90)
    assert tiny.raw_data == np.ones((8, 8), np.int8).tobytes()
    assert not tiny.external_data
