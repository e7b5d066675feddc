"""Comparison of logits with the reference logits of the float model.

KL(float || other) is summed over the whole vocabulary where that is small. Where it is large, the float model's
likeliest tokens are kept, and all others count as one more token: a lower bound that neglects only how the other tokens
differ among themselves (top-K KL, as in EvoPress, Sieberling et al. 2024).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, TensorProto, helper

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


@dataclass(frozen=True)
class ReferenceLogits:
    """Log-probabilities of the float model at R positions."""

    log_probs: Float32Array
    """Log-probabilities of the likeliest tokens, or of all tokens, float32 [R, K]."""
    tokens: npt.NDArray[np.int32] | None
    """Ids of these tokens, int32 [R, K]; None where they are all."""
    best: npt.NDArray[np.int64]
    """The likeliest token, int64 [R]."""
    next_nll: Float64Array
    """-log p of the next token of the text, float64 [R]; NaN at its end."""


@dataclass(frozen=True)
class LogitDifference:
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
        self._reference = ModelSession(_reference_graph(min(TOP_TOKENS, vocabulary_size), self._full), Path())
        self._comparison = ModelSession(_comparison_graph(self._full), Path())

    def reference(self, logits: Float32Array, following: npt.NDArray[np.int64]) -> ReferenceLogits:
        """Log-probabilities of the float model.

        Args:
            logits: float32 [R, vocabulary].
            following: Next tokens of the text, int64 [R]; -1 for none.
        """
        feeds = {"logits": logits, "following": np.maximum(following, 0)[:, None]}
        if self._full:
            log_probs, best, next_ = self._reference.run(["log_probs", "best", "next"], feeds)
            return ReferenceLogits(owned(log_probs), None, owned(best), _nll(next_, following))
        top, tokens, best, next_ = self._reference.run(["top", "tokens", "best", "next"], feeds)
        return ReferenceLogits(owned(top), tokens.astype(np.int32), owned(best), _nll(next_, following))

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
            kl += _remainder_kl(reference.log_probs, log_probs)
        return LogitDifference(kl, best == reference.best, _nll(next_, following))


def _remainder_kl(reference: Float32Array, other: Float32Array) -> Float64Array:
    """Contribution of all tokens but the K whose log-probabilities [R, K] are given, counted as one token."""
    first, second = (
        np.maximum(1 - np.exp(each.astype(np.float64)).sum(axis=1), _MIN_REMAINDER) for each in (reference, other)
    )
    return np.asarray(first * np.log(first / second))


def _nll(log_probs: Float32Array, following: npt.NDArray[np.int64]) -> Float64Array:
    return np.where(following < 0, np.nan, -log_probs[:, 0].astype(np.float64))


def _reference_graph(count: int, full: bool) -> ModelProto:
    nodes = _common_nodes()
    if full:
        return _model(nodes, {}, {"log_probs": TensorProto.FLOAT}, [])
    nodes.append(helper.make_node("TopK", ["log_probs", "count"], ["top", "tokens"], axis=-1))
    outputs = {"top": TensorProto.FLOAT, "tokens": TensorProto.INT64}
    return _model(nodes, {}, outputs, [helper.make_tensor("count", TensorProto.INT64, [1], [count])])


def _comparison_graph(full: bool) -> ModelProto:
    nodes, inputs = _common_nodes(), {"reference": TensorProto.FLOAT}
    if full:
        other = "log_probs"
    else:
        other = "other"
        inputs["tokens"] = TensorProto.INT32
        nodes.append(helper.make_node("GatherElements", ["log_probs", "tokens"], ["other"], axis=1))
    nodes += [
        helper.make_node("Sub", ["reference", other], ["difference"]),
        helper.make_node("Exp", ["reference"], ["probs"]),
        helper.make_node("Mul", ["probs", "difference"], ["terms"]),
        helper.make_node("ReduceSum", ["terms", "axis"], ["divergence"], keepdims=0),
    ]
    outputs = {"divergence": TensorProto.FLOAT, **({} if full else {"other": TensorProto.FLOAT})}
    return _model(nodes, inputs, outputs, [helper.make_tensor("axis", TensorProto.INT64, [1], [1])])


def _common_nodes() -> list[NodeProto]:
    """Log-probabilities of all tokens, the likeliest token, and the log-probability of the next token of the text."""
    return [
        helper.make_node("LogSoftmax", ["logits"], ["log_probs"], axis=-1),
        helper.make_node("ArgMax", ["logits"], ["best"], axis=-1, keepdims=0),
        helper.make_node("GatherElements", ["log_probs", "following"], ["next"], axis=1),
    ]


def _model(
    nodes: list[NodeProto], inputs: Mapping[str, int], outputs: Mapping[str, int], constants: list[TensorProto]
) -> ModelProto:
    """A graph with the inputs and outputs of `_common_nodes` and those given with their element types."""
    feeds = {"logits": TensorProto.FLOAT, "following": TensorProto.INT64, **inputs}
    results = {"best": TensorProto.INT64, "next": TensorProto.FLOAT, **outputs}
    graph = helper.make_graph(
        nodes,
        "comparison",
        [helper.make_tensor_value_info(name, kind, [None, None]) for name, kind in feeds.items()],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in results.items()],
        constants,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)


def owned(array: npt.NDArray[_Scalar]) -> npt.NDArray[_Scalar]:
    """The array itself if NumPy owns its memory, else a copy."""
    holder: npt.NDArray[Any] = array
    while isinstance(holder.base, np.ndarray):
        holder = holder.base
    return array if holder.base is None else array.copy()
