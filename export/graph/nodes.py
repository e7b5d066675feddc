"""The graph under construction, and the parts every piece of it is made of: nodes, constants, norms and linears."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from onnx import NodeProto, helper

from ...models.manifest import WeightFormat
from ..checkpoint.config import DecoderConfig
from ..checkpoint.layout import FusedLinear, Norm
from ..quantization.codes import OFFSETS, blocks_of, factor_format
from .initializers import Initializers, StoredMatrix

MICROSOFT: Final = "com.microsoft"
INT8_ACTIVATIONS: Final = 4
"""The accuracy level that rounds a product's inputs to 8 bits."""


class Nodes:
    """Appends nodes; methods take and return names of tensors.

    Raises CheckpointError when a tensor cannot be read and OSError when the disk refuses a write.
    """

    def __init__(self, config: DecoderConfig, plan: Mapping[str, WeightFormat], weights: Initializers) -> None:
        """`plan` holds the weight format by unit (see `Manifest.weights`)."""
        self.config = config
        self.plan = plan
        self.weights = weights
        self.protos: list[NodeProto] = []
        self._constants: set[str] = set()

    def add(self, operator: str, inputs: Sequence[str], output: str, domain: str = "", **attributes: Any) -> str:
        """A node of one output, which it is named after."""
        return self.add_of_many(operator, inputs, [output], output, domain, **attributes)[0]

    def add_of_many(
        self,
        operator: str,
        inputs: Sequence[str],
        outputs: list[str],
        name: str,
        domain: str | None = None,
        **attributes: Any,
    ) -> list[str]:
        """A node of several outputs."""
        self.protos.append(helper.make_node(operator, inputs, outputs, name=name, domain=domain, **attributes))
        return outputs

    def integers(self, name: str, *values: int) -> str:
        """A small int64 constant, made once."""
        return self._constant(name, np.array(values, np.int64))

    def scalar_integer(self, name: str, value: int) -> str:
        """An int64 constant without dimensions, made once."""
        return self._constant(name, np.array(value, np.int64))

    def scalar(self, name: str, value: float) -> str:
        """A float32 constant without dimensions, made once."""
        return self._constant(name, np.array(value, np.float32))

    def split(self, value: str, outputs: list[str], widths: str) -> list[str]:
        """The last axis cut into pieces."""
        return self.add_of_many("Split", [value, widths], outputs, outputs[0], axis=-1)

    def scaled(self, value: str, factor: float, constant: str, output: str) -> str:
        """`value * factor`, or `value` itself for a factor of 1; `constant` names the factor, perhaps made before."""
        return value if factor == 1 else self.add("Mul", [value, self.scalar(constant, factor)], output)

    def norm(self, value: str, norm: Norm, output: str) -> str:
        """RMS norm over the last axis."""
        return self.add(
            "SimplifiedLayerNormalization",
            [value, self._norm_weight(norm, output)],
            output,
            axis=-1,
            epsilon=self.config.norm_epsilon,
            stash_type=1,
        )

    def add_and_norm(self, value: str, residual: str, norm: Norm, output: str) -> tuple[str, str]:
        """RMS norm of `value + residual`, and that sum."""
        total = f"{output}.residual"
        self.add_of_many(
            "SkipSimplifiedLayerNormalization",
            [value, residual, self._norm_weight(norm, output)],
            [output, "", "", total],
            output,
            MICROSOFT,
            epsilon=self.config.norm_epsilon,
        )
        return output, total

    def linear(self, linear: FusedLinear, value: str) -> str:
        """A unit of the layers, bias included."""
        weight_format = self.plan[linear.name]
        bias = self.weights.vector(f"{linear.name}.bias", linear.biases) if linear.biased else ""
        if weight_format.offsets:
            return self._linear_with_offsets(linear, weight_format, value, bias)
        if weight_format.rank:
            return self._repaired_linear(linear, weight_format, value, bias)
        if weight_format.bits != 32:
            stored = self.weights.quantized(linear, weight_format)
            return self.matmul_nbits(linear.shape, weight_format, [value, *stored.inputs(bias)], linear.name)
        product = self.add("MatMul", [value, self.weights.plain_transposed(linear)], f"{linear.name}.product")
        return self.add("Add", [product, bias], linear.name) if bias else product

    def _linear_with_offsets(self, linear: FusedLinear, weight_format: WeightFormat, value: str, bias: str) -> str:
        """The product with the codes, and that of the inputs' sums over blocks with the offsets."""
        codes, scales, offset_codes, offset_scales = self.weights.quantized_with_offsets(linear, weight_format)
        inputs = [value, *StoredMatrix(codes, scales).inputs(bias)]
        product = self.matmul_nbits(linear.shape, weight_format, inputs, f"{linear.name}.product")
        blocks = self.integers(f"blocks.{weight_format.block}", 0, 0, -1, weight_format.block)
        apart = self.add("Reshape", [value, blocks], f"{linear.name}.blocks")
        sums = self.add("ReduceSum", [apart, self.integers("last.axis", -1)], f"{linear.name}.sums", keepdims=0)
        shape = (linear.shape[0], blocks_of(linear.columns, weight_format))
        offsets = self.matmul_nbits(shape, OFFSETS, [sums, offset_codes, offset_scales], f"{linear.name}.offsets")
        return self.add("Add", [product, offsets], linear.name)

    def _repaired_linear(self, linear: FusedLinear, weight_format: WeightFormat, value: str, bias: str) -> str:
        """The product with the codes, and that with two thin matrices one after the other."""
        matrix, down, up = self.weights.repaired(linear, weight_format)
        stored, (rows, columns) = factor_format(weight_format), linear.shape
        product = self.matmul_nbits(
            linear.shape, weight_format, [value, *matrix.inputs(bias)], f"{linear.name}.product"
        )
        thin = self.matmul_nbits((weight_format.rank, columns), stored, [value, *down.inputs()], f"{linear.name}.thin")
        repair = self.matmul_nbits((rows, weight_format.rank), stored, [thin, *up.inputs()], f"{linear.name}.repair")
        return self.add("Add", [product, repair], linear.name)

    def matmul_nbits(self, shape: tuple[int, int], weight_format: WeightFormat, inputs: list[str], output: str) -> str:
        """The product with a quantized matrix of that many outputs (N) and inputs (K)."""
        return self.add(
            "MatMulNBits",
            inputs,
            output,
            domain=MICROSOFT,
            N=shape[0],
            K=shape[1],
            bits=weight_format.bits,
            block_size=weight_format.block,
            accuracy_level=INT8_ACTIVATIONS,
        )

    def _norm_weight(self, norm: Norm, output: str) -> str:
        # 1 + weight is what the models themselves compute, in float32 too: nothing is lost by doing it here.
        return self.weights.vector(f"{output}.weight", [norm.weight], plus=float(self.config.traits.norms_add_one))

    def _constant(self, name: str, value: np.ndarray[Any, np.dtype[Any]]) -> str:
        if name not in self._constants:
            self._constants.add(name)
            self.weights.constant(name, value)
        return name
