"""Building blocks of static graphs: nodes with fixed shapes, norms and linears."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from onnx import TensorProto, ValueInfoProto, helper

from ...models.manifest import WeightFormat
from ..checkpoint.config import DecoderConfig
from ..checkpoint.layer_weights import FusedLinear, Norm, QuantPlan
from ..checkpoint.source import Float32Array
from ..graph.nodes import MICROSOFT, Nodes
from ..quantization.codes import OFFSETS
from .npu_weights import HEAD_BITS, IntegerLinears, NpuWeights, integer_range


class StaticNodes(Nodes):
    """The nodes of one static graph. Methods append nodes and take and return names of values, [1, W, channels]."""

    weights: NpuWeights  # type: ignore[assignment]

    def __init__(self, config: DecoderConfig, plan: QuantPlan, weights: NpuWeights, width: int) -> None:
        super().__init__(config, plan, weights)  # type: ignore[arg-type]  # the methods here need no others of theirs
        self.width: Final = width
        """Number of token positions of a pass, W."""
        self.rows = width
        """Number of token positions that products have: W until those without logits are dropped."""
        self.shapes: list[ValueInfoProto] = []
        """Shapes of the outputs of ONNX Runtime's own operators, which ONNX's shape inference does not know."""

    def reshape(self, value: str, shape: Sequence[int], output: str) -> str:
        """Append a Reshape."""
        return self.add("Reshape", [value, self.integers("", *shape)], output)

    def transpose(self, value: str, order: Sequence[int], output: str) -> str:
        """Append a Transpose."""
        return self.add("Transpose", [value], output, perm=list(order))

    def integers(self, name: str, *values: int) -> str:  # noqa: ARG002 -- the values name it
        """A small int64 constant, created once."""
        return self.weights.constant(f"integers.{'x'.join(map(str, values))}", np.array(values, np.int64))

    def scalar(self, name: str, value: float) -> str:  # noqa: ARG002 -- the value names it
        """A float16 constant of one element, created once."""
        return self.weights.constant(f"factor.{value!r}", np.array([value], np.float16))

    def silu(self, value: str, output: str) -> str:
        """Append SiLU as two nodes."""
        sigmoid = self.add("Sigmoid", [value], f"{output.removesuffix('silu')}sigmoid")
        return self.add("Mul", [value, sigmoid], output)

    def add_and_norm(self, value: str, residual: str, norm: Norm, output: str) -> tuple[str, str]:
        """Append the RMS norm of `value + residual`; returns the names of the norm and of the sum."""
        total = self.add("Add", [value, residual], f"{output}.residual")
        return self.norm(total, norm, output), total

    def norm(self, value: str, norm: Norm, output: str, rows: int | None = None) -> str:
        """Append an RMS norm of `rows` vectors, None for one a token; squares are summed in more than float16."""
        # RMSNormalization of opset 23 is the same operator, but OpenVINO does not take it.
        weight = self.weights.vector(norm.weight, [norm.weight], float(self.config.traits.norms_add_one))
        self._declare(output, [1, self.rows if rows is None else rows, norm.width])
        return self.norm_by(value, weight, output)

    def linear(self, linear: FusedLinear, value: str) -> str:
        """Append a linear of a layer, including its bias; returns the name of [1, W, rows]."""
        name, columns, weight_format = linear.name, linear.columns, self.plan[linear.name]
        product = f"{name}.product" if linear.biased else name
        if self.weights.integers is not None:
            self.integer_product(self.weights.integers, linear, value, product)
        elif weight_format.bits == 32:
            self.add("MatMul", [value, self.weights.float16(f"{name}.weight")], product)
        elif weight_format.offsets:
            self._with_offsets(linear, weight_format, value, product)
        else:
            self.quantized(name, weight_format, value, columns, product)
        if not linear.biased:
            return product
        # QNN does not take the bias input of MatMulNBits.
        return self.add("Add", [product, self.weights.vector(f"{name}.bias", linear.biases)], name)

    def integer_product(self, integers: IntegerLinears, linear: FusedLinear, value: str, output: str) -> None:
        """Append the product with integer matrices, one for each module, whose outputs differ in range."""
        bits = HEAD_BITS if linear.name == "head" else integers.bits
        inputs = self._rounded(value, integers.ranges[linear.name], bits, f"{linear.name}.inputs")
        names = [f"{output}.{part}" for part in range(len(linear.weights))] if len(linear.weights) > 1 else [output]
        for name, matrix in zip(names, linear.weights, strict=True):
            stored = self.weights.integer_matrix(integers, linear, matrix, 8 if self.plan[linear.name].bits > 4 else 4)
            weights = self.add("DequantizeLinear", stored, f"{name}.matrix", axis=1)
            self._rounded(self.add("MatMul", [inputs, weights], f"{name}.exact"), integers.ranges[matrix], bits, name)
        if len(names) > 1:
            self.add("Concat", names, output, axis=-1)

    def _rounded(self, value: str, values: Float32Array, bits: int, output: str) -> str:
        """Append the rounding of `value` to integers of these bits, for the range of its values [2, channels]."""
        scale, zero = integer_range(values, bits)
        numbers = [self.weights.constant(f"{output}.scale", scale), self.weights.constant(f"{output}.zero", zero)]
        rounded = self.add("QuantizeLinear", [value, *numbers], f"{output}.rounded")
        return self.add("DequantizeLinear", [rounded, *numbers], output)

    def _with_offsets(self, linear: FusedLinear, weight_format: WeightFormat, value: str, output: str) -> None:
        """Append the product with the codes plus the product of the block sums of the inputs with the offsets."""
        name, block = linear.name, weight_format.block
        product = self.quantized(name, weight_format, value, linear.columns, f"{name}.codes_product")
        padded, columns = self._padded(value, linear.columns, block, f"{name}.summed")
        blocks = self.reshape(padded, [1, self.rows, columns // block, block], f"{name}.blocks")
        sums = self.add("ReduceSum", [blocks, self.integers("", -1)], f"{name}.sums", keepdims=0)
        offsets = self.quantized(name, OFFSETS, sums, columns // block, f"{name}.offsets", "offset_")
        self.add("Add", [product, offsets], output)

    def quantized(
        self,
        name: str,
        weight_format: WeightFormat,
        value: str,
        columns: int,
        output: str,
        part: str = "",
    ) -> str:
        """Append the product of `value` [1, rows, columns] with a quantized matrix of model.onnx.

        Args:
            name: name of the linear.
            weight_format: its bits, block and zero points.
            value: the activations; they are padded with zeros to whole blocks, as the codes are.
            columns: number of channels of `value`.
            output: name of the product.
            part: what precedes `codes` and `scales` in the names of the initializers.
        """
        codes = self.weights.shared(f"{name}.{part}codes")
        outputs, blocks, _ = self.weights.shape(codes)
        scales = self.weights.float16(f"{name}.{part}scales", (outputs, blocks))
        points = [self.weights.packed_zero_points(name, weight_format.bits)] if weight_format.zero_points else []
        padded, inner = self._padded(value, columns, weight_format.block, f"{output}.input")
        self._declare(output, [1, self.rows, outputs])
        return self.add(
            "MatMulNBits",
            [padded, codes, scales, *points],
            output,
            domain=MICROSOFT,
            N=outputs,
            K=inner,
            bits=weight_format.bits,
            block_size=weight_format.block,
        )

    def _declare(self, value: str, shape: Sequence[int]) -> None:
        self.shapes.append(helper.make_tensor_value_info(value, TensorProto.FLOAT16, shape))

    def _padded(self, value: str, columns: int, block: int, output: str) -> tuple[str, int]:
        """Append zeros to `value` up to a multiple of `block`; returns the name and the number of channels."""
        missing = -columns % block
        if not missing:
            return value, columns
        # Not Pad, which QNN's HTP backend computes wrongly in float16.
        shape = (1, self.rows, missing)
        zeros = self.weights.constant(f"zeros.{'x'.join(map(str, shape))}", np.zeros(shape, np.float16))
        return self.add("Concat", [value, zeros], output, axis=-1), columns + missing
