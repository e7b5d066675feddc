"""How far logits are from those of the float model, row by row.

KL(float || other) is summed over the whole vocabulary where that is small. Where it is large, the float model's
likeliest tokens are kept, and all others count as one more: a lower bound that leaves out only how the others differ
among themselves (top-K KL, as in EvoPress, Sieberling et al. 2024).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, TensorProto, helper

from ..check.contract_session import ModelSession
from ..checkpoint.source import Float32Array
from ..graph.decoder import IR_VERSION, OPSET
from .state_cache import owned

Float64Array = npt.NDArray[np.float64]

WHOLE_UP_TO: Final = 8192
"""Tokens of a vocabulary that is compared as a whole."""
LIKELIEST: Final = 1024
"""Tokens that are compared one by one of a larger one."""
_LEAST: Final = 1e-9
"""Probability that all other tokens have at least, so that its logarithm is finite."""


@dataclass(frozen=True)
class Believed:
    """What the float model makes of some rows."""

    log_probs: Float32Array
    """Of its likeliest tokens, or of all, float32 [R, K]."""
    tokens: npt.NDArray[np.int32] | None
    """Which these are, int32 [R, K]; None where they are all."""
    best: npt.NDArray[np.int64]
    """The likeliest token, int64 [R]."""
    surprise: Float64Array
    """-log p of the token that follows, float64 [R]; NaN where none does."""


@dataclass(frozen=True)
class Judged:
    """How another model's rows compare, each array [R]."""

    kl: Float64Array
    """KL(float || other) in nats."""
    agrees: npt.NDArray[np.bool_]
    """Whether both prefer the same token."""
    surprise: Float64Array
    """As in `Believed`, of the other model."""


class LogitsJudge:
    """Turns logits into log-probabilities and compares them."""

    def __init__(self, vocabulary: int) -> None:
        self._whole = vocabulary <= WHOLE_UP_TO
        self._count = min(LIKELIEST, vocabulary)
        self._believe = ModelSession(_log_probs_graph(self._count, self._whole), Path())
        self._compare = ModelSession(_comparison_graph(self._whole), Path())

    def believed(self, logits: Float32Array, following: npt.NDArray[np.int64]) -> Believed:
        """What the float model's logits [R, vocabulary] say; `following` holds the next tokens [R], -1 for none."""
        feeds = {"logits": logits, "following": np.maximum(following, 0)[:, None]}
        if self._whole:
            log_probs, best, next_ = self._believe.run(["log_probs", "best", "next"], feeds)
            return Believed(owned(log_probs), None, owned(best), _surprise(next_, following))
        kept, tokens, best, next_ = self._believe.run(["kept", "tokens", "best", "next"], feeds)
        return Believed(owned(kept), tokens.astype(np.int32), owned(best), _surprise(next_, following))

    def judged(self, logits: Float32Array, following: npt.NDArray[np.int64], believed: Believed) -> Judged:
        """Compare another model's logits of the same rows."""
        feeds = {"logits": logits, "following": np.maximum(following, 0)[:, None], "believed": believed.log_probs}
        if believed.tokens is not None:
            feeds["tokens"] = believed.tokens
        wanted = ["divergence", "best", "next"] if believed.tokens is None else ["divergence", "best", "next", "theirs"]
        divergence, best, next_, *theirs = self._compare.run(wanted, feeds)
        kl: Float64Array = divergence.astype(np.float64)
        for each in theirs:
            kl += _of_the_rest(believed.log_probs, each)
        return Judged(kl, best == believed.best, _surprise(next_, following))


def _of_the_rest(believed: Float32Array, theirs: Float32Array) -> Float64Array:
    """What all other tokens together add to the KL, of log-probabilities [R, K]."""
    first, second = (np.maximum(1 - np.exp(each.astype(np.float64)).sum(axis=1), _LEAST) for each in (believed, theirs))
    return np.asarray(first * np.log(first / second))


def _surprise(log_probs: Float32Array, following: npt.NDArray[np.int64]) -> Float64Array:
    return np.where(following < 0, np.nan, -log_probs[:, 0].astype(np.float64))


def _log_probs_graph(count: int, whole: bool) -> ModelProto:
    nodes = _common()
    if whole:
        return _model(nodes, {}, {"log_probs": TensorProto.FLOAT}, [])
    nodes.append(helper.make_node("TopK", ["log_probs", "count"], ["kept", "tokens"], axis=-1))
    outputs = {"kept": TensorProto.FLOAT, "tokens": TensorProto.INT64}
    return _model(nodes, {}, outputs, [helper.make_tensor("count", TensorProto.INT64, [1], [count])])


def _comparison_graph(whole: bool) -> ModelProto:
    nodes, inputs = _common(), {"believed": TensorProto.FLOAT}
    if whole:
        theirs = "log_probs"
    else:
        theirs = "theirs"
        inputs["tokens"] = TensorProto.INT32
        nodes.append(helper.make_node("GatherElements", ["log_probs", "tokens"], ["theirs"], axis=1))
    nodes += [
        helper.make_node("Sub", ["believed", theirs], ["apart"]),
        helper.make_node("Exp", ["believed"], ["probs"]),
        helper.make_node("Mul", ["probs", "apart"], ["parts"]),
        helper.make_node("ReduceSum", ["parts", "axis"], ["divergence"], keepdims=0),
    ]
    outputs = {"divergence": TensorProto.FLOAT, **({} if whole else {"theirs": TensorProto.FLOAT})}
    return _model(nodes, inputs, outputs, [helper.make_tensor("axis", TensorProto.INT64, [1], [1])])


def _common() -> list[NodeProto]:
    """Log-probabilities of all tokens, the likeliest token, and the log-probability of the one that follows."""
    return [
        helper.make_node("LogSoftmax", ["logits"], ["log_probs"], axis=-1),
        helper.make_node("ArgMax", ["logits"], ["best"], axis=-1, keepdims=0),
        helper.make_node("GatherElements", ["log_probs", "following"], ["next"], axis=1),
    ]


def _model(
    nodes: list[NodeProto], inputs: Mapping[str, int], outputs: Mapping[str, int], constants: list[TensorProto]
) -> ModelProto:
    """A graph of these nodes, with the inputs and outputs of `_common` besides those given with their types."""
    feeds = {"logits": TensorProto.FLOAT, "following": TensorProto.INT64, **inputs}
    results = {"best": TensorProto.INT64, "next": TensorProto.FLOAT, **outputs}
    graph = helper.make_graph(
        nodes,
        "judge",
        [helper.make_tensor_value_info(name, kind, [None, None]) for name, kind in feeds.items()],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in results.items()],
        constants,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
