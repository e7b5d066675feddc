"""Feed-forwards by experts in NumPy, with the inputs of every expert.

The operators of ONNX Runtime run all selected experts at once and give no inputs of single ones. What an operator
computes is stated in `graph.feed_forward`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..checkpoint.config import ExpertsConfig
from ..checkpoint.layer_weights import FusedLinear
from ..checkpoint.source import Float32Array


class RoutedInputs(NamedTuple):
    """The inputs of a linear of one expert: those of the tokens that the router sent there."""

    tokens: npt.NDArray[np.intp]
    """Indices of the tokens among all of a pass, [n]."""
    values: Float32Array
    """float32 [n, K]."""


class ExpertWeights(NamedTuple):
    """The weights of one linear of all experts."""

    linear: FusedLinear
    matrix: Float32Array
    """float32 [N, K], expert by expert, as the checkpoint stores them."""
    bias: Float32Array | None
    """float32 [N] in the same order."""

    def of(self, expert: int, inputs: Float32Array) -> Float32Array:
        """The outputs of one expert."""
        rows = len(self.matrix) // self.linear.experts
        part = slice(expert * rows, (expert + 1) * rows)
        product: Float32Array = inputs @ self.matrix[part].T
        return product if self.bias is None else product + self.bias[part]


def expert_of(linear: str, expert: int) -> str:
    """Name under which the statistics of one expert of a linear are known."""
    return f"{linear}.{expert}"


def run_experts(
    config: ExpertsConfig, gate_up: ExpertWeights, down: ExpertWeights, normed: Float32Array, scores: Float32Array
) -> tuple[Float32Array, dict[str, RoutedInputs]]:
    """Send tokens through the experts that their scores select.

    Args:
        config: the experts.
        gate_up: the first linear of the experts.
        down: the second one.
        normed: inputs of router and experts, float32 [n, hidden].
        scores: outputs of the router, float32 [n, experts].

    Returns:
        The weighted sum of the outputs, float32 [n, hidden], and the inputs of both linears by `expert_of`.
    """
    output, routed = np.zeros_like(normed), {}
    for expert, (tokens, shares) in enumerate(_routes(config, scores)):
        inputs = normed[tokens]
        inner = _activated(config, gate_up, gate_up.of(expert, inputs))
        output[tokens] += shares[:, None] * down.of(expert, inner)
        routed[expert_of(gate_up.linear.name, expert)] = RoutedInputs(tokens, inputs)
        routed[expert_of(down.linear.name, expert)] = RoutedInputs(tokens, inner)
    return output, routed


def _routes(config: ExpertsConfig, scores: Float32Array) -> Iterator[tuple[npt.NDArray[np.intp], Float32Array]]:
    """For each expert the tokens that select it, and the factors of its outputs for them."""
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares = exponentials / exponentials.sum(axis=-1, keepdims=True)
    selected = np.zeros(scores.shape, bool)
    np.put_along_axis(selected, np.argsort(-scores, axis=-1, kind="stable")[:, : config.top_k], True, axis=-1)
    if config.normalized:
        shares = shares / np.where(selected, shares, 0).sum(axis=-1, keepdims=True)
    for expert in range(config.count):
        tokens = np.flatnonzero(selected[:, expert])
        yield tokens, shares[tokens, expert].astype(np.float32)


def _activated(config: ExpertsConfig, gate_up: ExpertWeights, outputs: Float32Array) -> Float32Array:
    """gate * sigmoid(alpha * gate) * (up + offset), with the bounds of both."""
    if gate_up.linear.stacked:
        gate, up = outputs[:, ::2], outputs[:, 1::2]
    else:
        gate, up = np.split(outputs, 2, axis=-1)
    if config.limit is not None:
        gate, up = np.minimum(gate, config.limit), np.clip(up, -config.limit, config.limit)
    with np.errstate(over="ignore"):  # exp overflows far below zero, where the quotient is zero
        activated = gate / (1 + np.exp(-config.alpha * gate))
    return np.asarray(activated * (up + config.up_offset), np.float32)
