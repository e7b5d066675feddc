"""Which form of a decoder graph each GPU provider takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ...models.graph_variant import GraphVariant

REWRITING: Final = 5
"""Version of the graphs that `rewriting` makes of these forms; cached ones of other versions are not used."""


@dataclass(frozen=True)
class GpuForm:
    """A form of the GPU graph. Weights, inputs and outputs are those of docs/graph-contract.md in all of them."""

    variant: GraphVariant
    """Precision of activations, scales and cache."""
    suffix: str
    """What distinguishes its file in a bundle: `model_{suffix}.onnx`."""
    matmul_bits: frozenset[int] = frozenset({2, 4, 8})
    """Bits for which MatMulNBits has a kernel; matrices of other formats become float when the graph is loaded."""
    gathers_blocks: bool = True
    """Whether GatherBlockQuantized has a kernel. Codes with zero points are never left to it: it fails on WebGPU."""
    onnx_gelu: bool = True
    """Whether ONNX's own Gelu has a kernel; otherwise those of com.microsoft take its place."""
    has_plain_form: bool = False
    """Whether passes of consecutive tokens have a graph of their own, because a bias takes a slow kernel."""
    only_operators_of: str = ""
    """Provider whose table of operators and types (`operator_table`) a graph has to keep to; empty for none."""


WEBGPU: Final = GpuForm(GraphVariant.GPU, "gpu")
"""Also for providers that are not listed. Float16 is left to a later version: not every adapter has it."""
CUDA: Final = GpuForm(
    # GroupQueryAttention has kernels for float16 and bfloat16 only, and fast ones only without a bias.
    GraphVariant.GPU_FP16,
    "gpu_fp16",
    matmul_bits=frozenset({4, 8}),
    has_plain_form=True,
)
DIRECTML: Final = GpuForm(
    GraphVariant.GPU_FP16,
    "gpu_dml",
    matmul_bits=frozenset({4}),
    gathers_blocks=False,
    onnx_gelu=False,
    only_operators_of="DmlExecutionProvider",
)
FORMS: Final[Mapping[str, GpuForm]] = {
    "WebGpuExecutionProvider": WEBGPU,
    "CUDAExecutionProvider": CUDA,
    "DmlExecutionProvider": DIRECTML,
}
"""Forms by name of the execution provider."""


def form_of(provider: str) -> GpuForm:
    """The form of the graph that a provider takes."""
    return FORMS.get(provider, WEBGPU)
