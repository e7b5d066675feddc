"""Whether an exported graph computes what the checkpoint means.

Two questions, two answers:

1. Is the graph the model? The reference evaluates the weights *as rounded*, the graph runs with float activations
   (accuracy level 1 instead of 4). Nothing separates the two but float32 arithmetic, whatever the weight formats, so
   the largest difference of a logit must stay within `TOLERANCE`; with a wrong norm, bias, rotation, fusion order or
   packing it does not. A breach fails the export.
2. What did the formats cost? The graph as shipped against the reference on the checkpoint's own weights: mean
   KL(reference || graph) and top-1 agreement over seeded random tokens. These are reported; they fail the export only
   when the logits no longer correlate with the reference of question 1, which no rounding explains.

The graph as shipped must also be computed by the kernels that its formats were chosen for: where ONNX Runtime says that
it expands a matrix to float32 instead, which takes many times as long, the export fails.

The first question is put to a prefill that asks for its rows in reverse, followed by single steps, so that the cache
and the row selection answer too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx
from threadpoolctl import threadpool_limits

from ...errors import ExportError
from ...models.bundle import GRAPH_NAME
from ..bundle_content import BundleContent
from ..checkpoint.json_fields import read_json
from .contract_session import ContractSession
from .float_activations import with_float_activations
from .reference import TokenArray, reference_logits
from .reference_positions import Float64Array
from .rounded_weights import RoundedWeights

TOLERANCE: Final = 1e-3
"""Largest difference of a logit between graph and reference, in units of the logits' spread where that exceeds 1."""
MIN_CORRELATION: Final = 0.9
TOKENS: Final = 32
STEPS: Final = 2
"""How many of the tokens are decoded one by one; 8-bit weights are slow at level 1, so not many."""


@dataclass(frozen=True)
class Parity:
    """How near a graph comes to the reference."""

    max_abs_diff: float
    """Largest logit difference between the graph with float activations and the reference on the rounded weights."""
    mean_kl: float
    """Mean over positions of KL(reference || graph as shipped) in nats, the reference on the checkpoint's weights."""
    top1_agreement: float
    """Share of positions where both prefer the same token."""

    def as_mapping(self) -> dict[str, float]:
        """The numbers by name, as `Manifest.parity` keeps them."""
        return asdict(self)


def check_parity(folder: Path, content: BundleContent, progress: Callable[[float], None]) -> Parity:
    """Compare the graph in `folder` with the reference on random tokens; `progress` hears the fraction done.

    Raises:
        ExportError: the graph does not compute what the checkpoint means, or only by slow kernels.
    """
    config, context = content.config, content.context
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, min(TOKENS, context))
    progress(0.0)
    settings = read_json(content.source.folder / "config.json")
    quantized = any(form.bits != 32 for form in content.plan.values())
    # Products this small lose far more to a BLAS's own threads waking up than they gain.
    with threadpool_limits(1, user_api="blas"):
        rounded = reference_logits(RoundedWeights(content.source, config, content.plan), settings, tokens, context)
        progress(0.4)
        original = reference_logits(content.original, settings, tokens, context) if quantized else rounded
    progress(0.8)
    graph = with_float_activations(onnx.load(folder / GRAPH_NAME, load_external_data=False))
    logits = _logits_through_the_cache(ContractSession(folder, config, len(tokens), graph), tokens)
    difference = float(np.abs(logits - rounded).max())
    allowed = TOLERANCE * max(1.0, float(rounded.std()))
    if not difference <= allowed:
        raise ExportError(
            f"the exported graph differs from the reference by {difference:.2g} in a logit, {allowed:.2g} is allowed",
            "this is a defect of the exporter: please report the checkpoint",
        )
    progress(0.9)
    if quantized:
        session = ContractSession(folder, config, len(tokens))
        logits, expanded = session.forward_counting_expansions(tokens, np.arange(len(tokens)))
        _require_fast(expanded, content)
    shipped = logits.astype(np.float64)
    correlation = float(np.corrcoef(shipped.ravel(), rounded.ravel())[0, 1])
    if not correlation >= MIN_CORRELATION:
        raise ExportError(
            f"the exported graph's logits correlate by only {correlation:.2f} with the reference's on this machine",
            "ONNX Runtime's low-bit kernels look wrong here: upgrade onnxruntime, or export fp32",
        )
    return Parity(difference, mean_kl(original, shipped), float(np.mean(shipped.argmax(-1) == original.argmax(-1))))


def _require_fast(expanded: int, content: BundleContent) -> None:
    if expanded:
        forms = sorted({str(form) for form in content.plan.values() if form.bits != 32})
        raise ExportError(
            f"ONNX Runtime has no fast kernel on this machine for some of {', '.join(forms)}: {expanded} products of a "
            "pass would expand their matrices to float32, every time",
            "choose another --weights or --block, or upgrade onnxruntime",
        )


def _logits_through_the_cache(session: ContractSession, tokens: TokenArray) -> npt.NDArray[np.float32]:
    """Logits of every token: a prefill that asks for its rows in reverse, then single steps."""
    start = max(1, len(tokens) - STEPS)
    backwards = np.arange(start)[::-1].copy()
    prefill = session.forward(tokens[:start], backwards)[::-1]
    steps = [session.forward(tokens[row : row + 1], np.array([0])) for row in range(start, len(tokens))]
    return np.concatenate([prefill, *steps])


def mean_kl(reference: Float64Array, graph: Float64Array) -> float:
    """Mean over rows of KL(reference || graph) in nats, of logits [rows, vocabulary]."""
    log_p, log_q = _log_softmax(reference), _log_softmax(graph)
    return float(np.mean(np.sum(np.exp(log_p) * (log_p - log_q), axis=-1)))


def _log_softmax(logits: Float64Array) -> Float64Array:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))
