"""Runs ONNX Runtime's low-bit operators on quantized weights."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from edgerun.export import WeightFormat
from edgerun.export.checkpoint.source import QuantizedRows
from edgerun.export.quantization.codes import unpack_zero_points

FORMATS = [
    WeightFormat(bits, block, zero_points=zero_points)
    for bits in (2, 4, 8)
    for block in (32, 64, 128)
    for zero_points in (False, True)
]


def run_operators(
    quantized: QuantizedRows, columns: int, weight_format: WeightFormat, accuracy_level: int = 1, inputs=None
):
    """Run both operators on quantized weights [N, K].

    Returns:
        MatMulNBits of `inputs` [m, K] (by default the identity, which gives the transposed weights), and
        GatherBlockQuantized of every row.
    """
    rows = len(quantized.packed)
    # An input of the graph: a product of constants would be computed at load time, by other kernels.
    inputs = np.eye(columns, dtype=np.float32) if inputs is None else inputs
    points = quantized.zero_points
    product = helper.make_node(
        "MatMulNBits",
        ["inputs", "codes", "scales", *(["zero_points"] if points is not None else [])],
        ["product"],
        domain="com.microsoft",
        K=columns,
        N=rows,
        bits=weight_format.bits,
        block_size=weight_format.block,
        accuracy_level=accuracy_level,
    )
    gathered = helper.make_node(
        "GatherBlockQuantized",
        ["codes", "rows", "gather_scales", *(["gather_zero_points"] if points is not None else [])],
        ["gathered"],
        domain="com.microsoft",
        bits=weight_format.bits,
        block_size=weight_format.block,
        gather_axis=0,
        quantize_axis=2,
    )
    constants = {
        "codes": quantized.packed,
        "scales": quantized.scales,
        "gather_scales": quantized.scales[..., None],
        "rows": np.arange(rows),
    }
    if points is not None:
        constants["zero_points"] = points
        constants["gather_zero_points"] = unpack_zero_points(points, quantized.scales.shape[1], weight_format.bits)[
            ..., None
        ]
    graph = helper.make_graph(
        [product, gathered],
        "operators",
        [helper.make_tensor_value_info("inputs", TensorProto.FLOAT, ["m", columns])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("product", "gathered")],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {"inputs": inputs})
