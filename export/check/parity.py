"""Checks that an exported graph computes the same as the reference decoder.

The check answers two questions:

1. Is the graph correct? The reference evaluates the weights *as quantized*, and the graph runs with float activations
   (accuracy level 1 instead of 4). The two then differ by float32 rounding only, whatever the weight formats, so the
   largest difference of a logit must stay within `TOLERANCE`. A wrong norm, bias, rotation, fusion order or packing
   exceeds it and fails the export. The graph runs a prefill whose logits are requested in reverse order, then single
   tokens, so that the cache and the selection of logits are checked too.
2. What did quantization cost? The graph as shipped is compared with the reference on the checkpoint's own weights: mean
   KL(reference || graph) and top-1 agreement over seeded random tokens. These numbers are recorded, but not shown as
   quality, which is measured on text. They fail the export only if the logits no longer correlate with the reference of
   question 1, which quantization cannot explain.

The graph as shipped must also run on the kernels that its formats were chosen for: the export fails if ONNX Runtime
logs that it expands a matrix to float32 instead, which is many times slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper
from threadpoolctl import threadpool_limits

from ...errors import ExportError
from ...models.bundle import GRAPH_NAME, Bundle
from ...models.manifest import WeightFormat
from ...runtime.measure.exactness import SAMPLE_TEXT
from ...runtime.measure.logit_quality import log_softmax
from ...runtime.text.tokenizer import TextTokenizer
from ..bundle_content import BundleContent
from ..calibration.divergence import Divergence
from ..checkpoint.config import DecoderConfig
from ..checkpoint.layer_weights import FusedLinear
from ..checkpoint.layout import fused_linears
from ..checkpoint.source import Float32Array, ModelSource, RowRange
from ..quantization.codes import dequantized
from .contract_session import ContractSession, require_close
from .reference import TokenArray, reference_logits

MIN_CORRELATION: Final = 0.9
NUM_TOKENS: Final = 32
NUM_SINGLE_TOKENS: Final = 2
"""Number of tokens that run one by one after the prefill; few, as 8-bit weights are slow at accuracy level 1."""
_FLOAT32_ACCURACY: Final = 1
"""Accuracy level at which operators do not quantize activations."""
_QMOE_CODES_AND_SCALES: Final = ((2, 3), (5, 6))
"""Input indices of codes and scales in QMoE, for the first and the second matrix of an expert."""
_QMOE_BIASES: Final = (4, 7)
_QMOE_ONLY: Final = ("expert_weight_bits", "block_size", "accuracy_level", "weights_prepacked")
"""Attributes of QMoE that MoE does not have."""
MAX_TOKENS: Final = 64
"""Number of tokens at most: the reference decoder takes as long for them as a parity check does."""


@dataclass(frozen=True)
class Parity:
    """Differences between a graph and the reference."""

    max_abs_diff: float
    """Largest logit difference between the graph with float activations and the reference on the quantized weights."""
    mean_kl: float
    """Mean over positions of KL(reference on the checkpoint's weights || graph as shipped), in nats."""
    top1_agreement: float
    """Share of positions where the two have the same most likely token."""

    @classmethod
    def of(cls, difference: float, reference: npt.NDArray[np.floating[Any]], shipped: Float32Array) -> Parity:
        """Compare logits, each [positions, vocabulary], for a graph with that largest difference."""
        log_p, log_q = (log_softmax(each.astype(np.float64)) for each in (reference, shipped))
        kl = np.sum(np.exp(log_p) * (log_p - log_q), axis=-1)
        return cls(difference, float(kl.mean()), float(np.mean(shipped.argmax(-1) == reference.argmax(-1))))


class RoundedLinears(ModelSource):
    """Reads a checkpoint with the weights of some linears quantized to their formats and dequantized."""

    def __init__(
        self, checkpoint: ModelSource, linears: Iterable[FusedLinear], plan: Mapping[str, WeightFormat]
    ) -> None:
        super().__init__(checkpoint)
        self._formats = {name: plan[linear.name] for linear in linears for name in linear.weights}

    def read_rows(self, rows: RowRange) -> Float32Array:
        """Read rows of a linear's matrix."""
        weight_format = self._formats[rows.name]
        if weight_format.bits == 32:
            return super().read_rows(rows)
        return dequantized(self.quantized(rows, weight_format), self.shape(rows.name)[1], weight_format)


def quantized_weights(
    checkpoint: ModelSource, config: DecoderConfig, plan: Mapping[str, WeightFormat]
) -> RoundedLinears:
    """Read a checkpoint with every linear's weights quantized to its format and dequantized."""
    return RoundedLinears(checkpoint, fused_linears(config), plan)


def check_parity(folder: Path, content: BundleContent, progress: Callable[[float], None]) -> Parity:
    """Compare the graph in `folder` with the reference on random tokens.

    Args:
        folder: the exported graph and its weights.
        content: the model that was exported.
        progress: called with the fraction done, 0 to 1.

    Raises:
        ExportError: the graph differs from the reference, or needs slow kernels.
    """
    config, context = content.config, content.context
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, min(NUM_TOKENS, context))
    progress(0.0)
    quantized = any(weight_format.bits != 32 for weight_format in content.plan.values())
    # Products this small lose far more to the wake-up of BLAS threads than they gain from them.
    with threadpool_limits(1, user_api="blas"):
        expected = reference_logits(quantized_weights(content.source, config, content.plan), config, tokens, context)
        progress(0.4)
        original = reference_logits(content.original, config, tokens, context) if quantized else expected
    progress(0.8)
    graph = with_float_activations(onnx.load(folder / GRAPH_NAME, load_external_data=False))
    logits = _logits_with_cache(ContractSession(folder, len(tokens), graph), tokens)
    difference = require_close(logits, expected, "the exported graph differs from the reference")
    progress(0.9)
    if quantized:
        # No name keeps the session, which maps files: Windows could not remove the folder of an export that fails here.
        logits, expanded = ContractSession(folder, len(tokens)).forward_counting_expansions(
            tokens, np.arange(len(tokens))
        )
        if expanded:
            formats = sorted({str(each) for each in content.plan.values() if each.bits != 32})
            raise ExportError(
                f"ONNX Runtime has no fast kernel on this machine for some of {', '.join(formats)}: {expanded} "
                "products of a pass would expand their matrices to float32 every time",
                "choose another --weights or --block, or upgrade onnxruntime",
            )
    what = "the exported graph's logits correlate by only {:.2f} with the reference's on this machine"
    hint = "ONNX Runtime's low-bit kernels look wrong here: upgrade onnxruntime, or export fp32"
    require_correlation(logits, expected, MIN_CORRELATION, what, hint)
    return Parity.of(difference, original, logits)


def require_correlation(
    found: Float32Array, expected: npt.NDArray[np.floating[Any]], least: float, what: str, hint: str
) -> None:
    """Raise ExportError `what`, which names the correlation, where that of logits with others is below `least`."""
    with np.errstate(invalid="ignore"):  # logits that are all equal
        correlation = float(np.corrcoef(found.ravel(), expected.ravel())[0, 1])
    if not correlation >= least:
        raise ExportError(what.format(correlation), hint)


def _logits_with_cache(session: ContractSession, tokens: TokenArray) -> npt.NDArray[np.float32]:
    """Logits of every token, from a prefill with logits in reverse order and passes over single tokens."""
    start = max(1, len(tokens) - NUM_SINGLE_TOKENS)
    reverse = np.arange(start)[::-1].copy()
    prefill = session.forward(tokens[:start], reverse)[::-1]
    single = [session.forward(tokens[i : i + 1], np.array([0])) for i in range(start, len(tokens))]
    return np.concatenate([prefill, *single])


def with_float_activations(model: ModelProto) -> ModelProto:
    """Change every operator of `model` that has an accuracy level to float32 activations, in place.

    With float activations, an exported graph and its reference differ by float32 rounding only. QMoE has no such level
    for 8-bit experts, so their weights are dequantized in the graph and the node becomes a MoE.

    Returns:
        `model`.
    """
    nodes = [each for node in model.graph.node for each in _with_float32(node)]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def _with_float32(node: NodeProto) -> list[NodeProto]:
    attributes = {attribute.name: attribute for attribute in node.attribute}
    bits, block = attributes.get("expert_weight_bits"), attributes.get("block_size")
    if node.op_type != "QMoE" or bits is None or bits.i != 8 or block is None:
        if "accuracy_level" in attributes:
            attributes["accuracy_level"].i = _FLOAT32_ACCURACY
        return [node]
    dequantize: list[NodeProto] = []
    weights = []
    for codes, scales in ((node.input[first], node.input[second]) for first, second in _QMOE_CODES_AND_SCALES):
        zero_point = helper.make_tensor("zero_point", TensorProto.UINT8, [1], [128])
        name = f"{codes}.float"
        dequantize += [
            helper.make_node("Shape", [scales], [f"{name}.shape"]),
            helper.make_node("ConstantOfShape", [f"{name}.shape"], [f"{name}.zero_point"], value=zero_point),
            helper.make_node(
                "DequantizeLinear", [codes, scales, f"{name}.zero_point"], [name], axis=2, block_size=block.i
            ),
        ]
        weights.append(name)
    first, second = (node.input[index] if index < len(node.input) else "" for index in _QMOE_BIASES)
    inputs = [*node.input[:2], weights[0], first, weights[1], second]
    moe = helper.make_node("MoE", inputs, list(node.output), name=node.name, domain=node.domain)
    moe.attribute.extend(attribute for attribute in node.attribute if attribute.name not in _QMOE_ONLY)
    return [*dequantize, moe]


def quality_on_sample_text(folder: Path, content: BundleContent) -> Divergence | None:
    """Compare the graph in `folder`, as shipped, with the reference decoder on the weights that it was made from.

    Returns:
        The figures; None where the tokenizer gives fewer than two tokens.

    Raises:
        CheckpointError: a tensor cannot be read.
        ExportError: the graph cannot be loaded or run.
    """
    tokenizer = TextTokenizer(Bundle(folder, folder / GRAPH_NAME, None), content.config.vocab_size)
    ids = tokenizer.encode(SAMPLE_TEXT, add_special_tokens=True)
    tokens = np.array(ids[: min(MAX_TOKENS, content.context)], np.int64)
    if len(tokens) < 2:
        return None
    with threadpool_limits(1, user_api="blas"):
        original = log_softmax(reference_logits(content.original, content.config, tokens, content.context))
    session = ContractSession(folder, len(tokens))
    shipped = log_softmax(session.forward(tokens, np.arange(len(tokens))).astype(np.float64))
    kl = np.sum(np.exp(original) * (original - shipped), axis=-1)
    nll, float_nll = (-each[np.arange(len(tokens) - 1), tokens[1:]] for each in (shipped, original))
    return Divergence.of(kl, shipped.argmax(-1) == original.argmax(-1), nll, float_nll)
