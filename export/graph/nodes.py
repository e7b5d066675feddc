"""Building blocks of the graph: nodes, constants, norms and linears."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from onnx import NodeProto, TensorProto, helper

from ...models.manifest import WeightFormat
from ..checkpoint.config import DecoderConfig
from ..checkpoint.layer_weights import FusedLinear, Norm, QuantPlan
from ..quantization.codes import OFFSETS, blocks_of, code_parts, kernel_bits
from .initializers import Initializers, StoredMatrix

MICROSOFT: Final = "com.microsoft"
INT8_ACTIVATIONS: Final = 4
"""Accuracy level at which the operators round activations to 8 bits."""


def matmul_nbits_settings(shape: tuple[int, int], bits: int, block: int) -> dict[str, Any]:
    """Domain and attributes of MatMulNBits for a matrix of shape (N, K)."""
    settings = {"N": shape[0], "K": shape[1], "bits": bits, "block_size": block}
    return {"domain": MICROSOFT, **settings, "accuracy_level": INT8_ACTIVATIONS}


def gather_settings(weight_format: WeightFormat) -> dict[str, Any]:
    """Domain and attributes of GatherBlockQuantized for rows in that format."""
    axes = {"gather_axis": 0, "quantize_axis": 2}
    return {"domain": MICROSOFT, "bits": weight_format.bits, "block_size": weight_format.block, **axes}


class Nodes:
    """The nodes of the graph so far. Methods append nodes and take and return names of values.

    They raise CheckpointError when a tensor cannot be read and OSError when the disk refuses a write.
    """

    def __init__(self, config: DecoderConfig, plan: QuantPlan, weights: Initializers) -> None:
        self.config = config
        self.plan = plan
        self.weights = weights
        self.protos: list[NodeProto] = []
        self._constants: set[str] = set()

    def add(self, operator: str, inputs: Sequence[str], output: str, domain: str = "", **attributes: Any) -> str:
        """Append a node with one output, which gives the node its name."""
        return self.add_multi_output(operator, inputs, [output], output, domain, **attributes)[0]

    def add_multi_output(
        self,
        operator: str,
        inputs: Sequence[str],
        outputs: list[str],
        name: str,
        domain: str | None = None,
        **attributes: Any,
    ) -> list[str]:
        """Append a node with several outputs."""
        self.protos.append(helper.make_node(operator, inputs, outputs, name=name, domain=domain, **attributes))
        return outputs

    def all(self) -> list[NodeProto]:
        """The nodes, behind those that convert stored constants."""
        return [*self.weights.conversions, *self.protos]

    def integers(self, name: str, *values: int) -> str:
        """A small int64 constant, created once per name."""
        return self.constant(name, np.array(values, np.int64))

    def scalar(self, name: str, value: float) -> str:
        """A float32 scalar constant, created once per name."""
        return self.constant(name, np.array(value, np.float32))

    def constant(self, name: str, value: np.ndarray[Any, np.dtype[Any]]) -> str:
        """A constant, created once per name."""
        if name not in self._constants:
            self._constants.add(name)
            self.weights.constant(name, value)
        return name

    def split(self, value: str, outputs: list[str], widths: str) -> list[str]:
        """Split the last axis."""
        return self.add_multi_output("Split", [value, widths], outputs, outputs[0], axis=-1)

    def scaled(self, value: str, factor: float, constant: str, output: str) -> str:
        """Append `value * factor`, unless the factor is 1; `constant` names the initializer of the factor."""
        return value if factor == 1 else self.add("Mul", [value, self.scalar(constant, factor)], output)

    def silu(self, value: str, output: str) -> str:
        """Append SiLU as one node: QuickGelu computes x * sigmoid(alpha * x)."""
        return self.add("QuickGelu", [value], output, domain=MICROSOFT, alpha=1.0)

    def together(self, heads: str, output: str) -> str:
        """Append the reshaping of [1, M, heads, channels] to [1, M, heads * channels]."""
        return self.add("Reshape", [heads, self.integers("heads.together", 0, 0, -1)], output)

    def norm(self, value: str, norm: Norm, output: str) -> str:
        """Append an RMS norm over the last axis."""
        return self.norm_by(value, self._norm_weight(norm, output), output)

    def unweighted_norm(self, value: str, width: int, output: str) -> str:
        """Append an RMS norm without weights over the last axis, of `width` channels."""
        return self.norm_by(value, self.constant(f"ones.{width}", np.ones(width, np.float32)), output)

    def norm_by(self, value: str, factors: str, output: str, epsilon: float | None = None) -> str:
        """Append an RMS norm over the last axis that scales by the initializer `factors`."""
        return self.add(
            "SimplifiedLayerNormalization",
            [value, factors],
            output,
            axis=-1,
            epsilon=self.config.norm_epsilon if epsilon is None else epsilon,
            stash_type=1,
        )

    def add_and_norm(self, value: str, residual: str, norm: Norm, output: str) -> tuple[str, str]:
        """Append the RMS norm of `value + residual`; returns the names of the norm and of the sum."""
        sum_ = f"{output}.residual"
        self.add_multi_output(
            "SkipSimplifiedLayerNormalization",
            [value, residual, self._norm_weight(norm, output)],
            [output, "", "", sum_],
            output,
            MICROSOFT,
            epsilon=self.config.norm_epsilon,
        )
        return output, sum_

    def within_text(self, value: str, back: int) -> str:  # noqa: ARG002 -- see the return value
        """What `value` of the tokens `back` tokens before each one is, zero where these belong to another text.

        A pass of the exported graph is over one text, so it is `value` itself.
        """
        return value

    def forgetting_other_texts(self, decay: str) -> str:
        """The logarithm of a state's decay, without bound below where a text begins; one pass is over one text."""
        return decay

    def linear(self, linear: FusedLinear, value: str) -> str:
        """Append a linear of a layer, including its bias."""
        weight_format = self.plan[linear.name]
        bias = self.weights.vector(f"{linear.name}.bias", linear.biases) if linear.biased else ""
        if weight_format.offsets:
            return self._linear_with_offsets(linear, weight_format, value, bias)
        if weight_format.bits < 16:
            stored = self.weights.quantized(linear, weight_format)
            stored = stored._replace(codes=self._expanded(stored.codes, weight_format))
            inputs = [value, *stored.inputs(bias)]
            return self.matmul_nbits(linear.shape, weight_format, inputs, linear.name)
        matrix = self.weights.float32_transposed(linear, half=weight_format.bits == 16)
        product = self.add("MatMul", [value, matrix], f"{linear.name}.product")
        return self.add("Add", [product, bias], linear.name) if bias else product

    def _expanded(self, codes: str, weight_format: WeightFormat) -> str:
        """Append what makes the operator's codes of stored ones, which ONNX Runtime runs when it loads the graph."""
        bits, kernel = weight_format.bits, kernel_bits(weight_format.bits)
        if bits == kernel:
            return codes
        parts, stop = list[str](), 0
        for start, shifts, mask in code_parts(bits):
            first, stop = stop, stop + weight_format.block * kernel // 8 // len(shifts)
            bounds = [self.integers(f"codes.{each}", each) for each in (first, stop, 2)]
            expanded = (np.arange(256, dtype=np.uint8)[:, None] << shifts & mask) >> np.uint8(start)
            stored = self.add("Slice", [codes, *bounds], f"{codes}.{start}.stored")
            stored = self.add("Cast", [stored], f"{codes}.{start}.numbers", to=TensorProto.INT32)
            part = self.add(
                "Gather", [self.constant(f"codes.{bits}.{start}", expanded), stored], f"{codes}.{start}.bytes"
            )
            parts.append(self.add("Reshape", [part, self.integers("codes.joined", 0, 0, -1)], f"{codes}.{start}"))
        return self.add("BitwiseOr", parts, f"{codes}.expanded")

    def _linear_with_offsets(self, linear: FusedLinear, weight_format: WeightFormat, value: str, bias: str) -> str:
        """Append the product with the codes plus the product of the block sums of the inputs with the offsets."""
        codes, scales, offset_codes, offset_scales = self.weights.quantized_with_offsets(linear, weight_format)
        inputs = [value, *StoredMatrix(codes, scales).inputs(bias)]
        product = self.matmul_nbits(linear.shape, weight_format, inputs, f"{linear.name}.product")
        blocks = self.integers(f"blocks.{weight_format.block}", 0, 0, -1, weight_format.block)
        grouped = self.add("Reshape", [value, blocks], f"{linear.name}.blocks")
        sums = self.add("ReduceSum", [grouped, self.integers("last.axis", -1)], f"{linear.name}.sums", keepdims=0)
        shape = (linear.shape[0], blocks_of(linear.columns, weight_format))
        offsets = self.matmul_nbits(shape, OFFSETS, [sums, offset_codes, offset_scales], f"{linear.name}.offsets")
        return self.add("Add", [product, offsets], linear.name)

    def matmul_nbits(self, shape: tuple[int, int], weight_format: WeightFormat, inputs: list[str], output: str) -> str:
        """Append the product with a quantized matrix of shape (N, K)."""
        settings = matmul_nbits_settings(shape, kernel_bits(weight_format.bits), weight_format.block)
        return self.add("MatMulNBits", inputs, output, **settings)

    def _norm_weight(self, norm: Norm, output: str) -> str:
        # The models compute 1 + weight in float32 too, so computing it here loses nothing.
        return self.weights.vector(f"{output}.weight", [norm.weight], plus=float(self.config.traits.norms_add_one))
