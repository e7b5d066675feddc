"""Comparison of logits with the reference logits of the float model.

KL(float || other) is summed over the whole vocabulary where that is small. Where it is large, the float model's
likeliest tokens are kept, and all others count as one more token: a lower bound that neglects only how the other tokens
differ among themselves (top-K KL, as in EvoPress, Sieberling et al. 2024).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, parser

from ..check.contract_session import ModelSession
from ..checkpoint.source import Float32Array
from ..graph.decoder import IR_VERSION, OPSET

Float64Array = npt.NDArray[np.float64]

_Scalar = TypeVar("_Scalar", bound=np.generic)

FULL_VOCABULARY: Final = 8192
"""Largest vocabulary that is compared as a whole."""
TOP_TOKENS: Final = 1024
"""Number of tokens of a larger vocabulary that are compared one by one."""
_MIN_REMAINDER: Final = 1e-9
"""Lower bound of the total probability of all other tokens, so that its logarithm is finite."""
_INPUTS: Final = "float[r, v] logits, int64[r, one] following"
_OUTPUTS: Final = "int64[r] best, float[r, one] next"
_COMMON: Final = """
log_probs = LogSoftmax <axis = -1> (logits)
best = ArgMax <axis = -1, keepdims = 0> (logits)
next = GatherElements <axis = 1> (log_probs, following)
"""
"""Log-probabilities of all tokens, the likeliest token, and the log-probability of the next token of the text."""


class ReferenceLogits(NamedTuple):
    """Log-probabilities of the float model at R positions."""

    log_probs: Float32Array
    """Log-probabilities of the likeliest tokens, or of all tokens, float32 [R, K]."""
    tokens: npt.NDArray[np.int32] | None
    """Ids of these tokens, int32 [R, K]; None where they are all."""
    best: npt.NDArray[np.int64]
    """The likeliest token, int64 [R]."""
    next_nll: Float64Array
    """-log p of the next token of the text, float64 [R]; NaN at its end."""


class LogitDifference(NamedTuple):
    """Differences of another model from the reference, each array [R]."""

    kl: Float64Array
    """KL(float || other) in nats."""
    agrees: npt.NDArray[np.bool_]
    """Whether both prefer the same token."""
    next_nll: Float64Array
    """-log p of the next token of the text in the other model; NaN at its end."""


class LogitComparison:
    """Computes reference log-probabilities and compares other logits with them, in ONNX Runtime."""

    def __init__(self, vocabulary_size: int) -> None:
        self._full = vocabulary_size <= FULL_VOCABULARY
        top = "" if self._full else "top, tokens = TopK <axis = -1> (log_probs, count)"
        outputs = "log_probs" if self._full else "top, int64[a, b] tokens"
        count = min(TOP_TOKENS, vocabulary_size)
        reference = f"""reference ({_INPUTS}) => ({_OUTPUTS}, float[a, b] {outputs}) <int64[1] count = {{{count}}}>
        {{ {_COMMON} {top} }}"""
        other = "log_probs" if self._full else "other"
        gather = "" if self._full else "other = GatherElements <axis = 1> (log_probs, tokens)"
        tokens = "" if self._full else ", int32[r, k] tokens"
        comparison = f"""comparison ({_INPUTS}, float[r, k] reference{tokens})
        => ({_OUTPUTS}, float[r] divergence{"" if self._full else ", float[a, b] other"}) <int64[1] axis = {{1}}>
        {{
            {_COMMON} {gather}
            difference = Sub(reference, {other})
            probs = Exp(reference)
            terms = Mul(probs, difference)
            divergence = ReduceSum <keepdims = 0> (terms, axis)
        }}"""
        self._reference, self._comparison = (
            ModelSession(parsed_model(text), Path()) for text in (reference, comparison)
        )

    def reference(self, logits: Float32Array, following: npt.NDArray[np.int64]) -> ReferenceLogits:
        """Log-probabilities of the float model.

        Args:
            logits: float32 [R, vocabulary].
            following: Next tokens of the text, int64 [R]; -1 for none.
        """
        feeds = {"logits": logits, "following": np.maximum(following, 0)[:, None]}
        outputs = ["log_probs"] if self._full else ["top", "tokens"]
        log_probs, *tokens, best, next_ = self._reference.run([*outputs, "best", "next"], feeds)
        ids = tokens[0].astype(np.int32) if tokens else None
        return ReferenceLogits(owned(log_probs), ids, owned(best), _nll(next_, following))

    def compare(
        self, logits: Float32Array, following: npt.NDArray[np.int64], reference: ReferenceLogits
    ) -> LogitDifference:
        """Compare another model's logits at the same positions."""
        feeds = {"logits": logits, "following": np.maximum(following, 0)[:, None], "reference": reference.log_probs}
        outputs = ["divergence", "best", "next"]
        if reference.tokens is not None:
            feeds["tokens"] = reference.tokens
            outputs.append("other")
        divergence, best, next_, *other = self._comparison.run(outputs, feeds)
        kl: Float64Array = divergence.astype(np.float64)
        for log_probs in other:
            # All other tokens count as one.
            first, second = (
                np.maximum(1 - np.exp(each.astype(np.float64)).sum(axis=1), _MIN_REMAINDER)
                for each in (reference.log_probs, log_probs)
            )
            kl += first * np.log(first / second)
        return LogitDifference(kl, best == reference.best, _nll(next_, following))


def _nll(log_probs: Float32Array, following: npt.NDArray[np.int64]) -> Float64Array:
    return np.where(following < 0, np.nan, -log_probs[:, 0].astype(np.float64))


def parsed_model(graph: str) -> ModelProto:
    """A model of a graph in ONNX's text format."""
    return parser.parse_model(f'<ir_version: {IR_VERSION}, opset_import: ["": {OPSET}]> {graph}')


def owned(array: npt.NDArray[_Scalar]) -> npt.NDArray[_Scalar]:
    """The array itself if NumPy owns its memory, else a copy."""
    holder: npt.NDArray[Any] = array
    while isinstance(holder.base, np.ndarray):
        holder = holder.base
    return array if holder.base is None else array.copy()
