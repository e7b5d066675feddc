"""The rope scaling of a GGUF file, as config.json states it.

Files of Llama 3.1 and later hold a tensor of frequency divisors, one per channel pair, but not the four numbers from
which they were computed. Those are recovered here, and must reproduce the tensor.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .gguf_metadata import GgufMetadata

RopeFactors = npt.NDArray[np.float32]

ROPE_FACTORS: Final = "rope_freqs.weight"
"""Name of the tensor of rotary frequency divisors."""

_LLAMA3: Final = (1.0, 4.0, 8192)
"""low_freq_factor, high_freq_factor and original context of all published Llama 3 models."""
_TOLERANCE: Final = 1e-5
"""Relative tolerance in comparing divisors, which are float32."""


def rope_scaling(
    metadata: GgufMetadata, name: str, base: float, head_dim: int, factors: RopeFactors | None
) -> dict[str, Any] | None:
    """Return the `rope_scaling` of config.json, None for unscaled frequencies.

    Args:
        metadata: keys of the file.
        name: architecture of the file.
        base: rotary base (theta).
        head_dim: channels per head.
        factors: the tensor `ROPE_FACTORS`, float32 [head_dim / 2]; None where the file has none.

    Raises:
        CheckpointError: the scaling is not one of none, linear, yarn and Llama 3's divisors.
    """
    prefix = f"{name}.rope.scaling"
    kind = metadata.text(f"{prefix}.type") or "none"
    factor = metadata.positive(f"{prefix}.factor") or metadata.positive(f"{name}.rope.scale_linear")
    if factors is not None and not np.all(factors == 1):
        if factors.shape != (head_dim // 2,) or factors.min() <= 0:
            raise metadata.wrong(
                f"{ROPE_FACTORS} does not hold {head_dim // 2} positive divisors", "download the file again"
            )
        if kind != "none":
            raise metadata.wrong(
                f"the file has both {ROPE_FACTORS} and {prefix}.type {kind!r:.40}", "only one of them is supported"
            )
        with np.errstate(all="ignore"):  # NaN fails the comparison
            return _llama3(metadata, name, base, head_dim, factors)
    if kind == "none" and factor in (None, 1.0):
        return None
    if kind in ("none", "linear"):
        return {"rope_type": "linear", "factor": factor or 1.0}
    if kind != "yarn" or factor is None:
        raise metadata.wrong(
            f"rope scaling {kind!r:.40} with factor {factor} is not supported",
            "supported are none, linear, yarn and the divisors of Llama 3",
        )
    for setting, neutral in (("attn_factor", 1.0), ("yarn_attn_factor", 1.0), ("yarn_ext_factor", 1.0)):
        value = metadata.number(f"{prefix}.{setting}")
        if value not in (None, neutral):
            raise metadata.wrong(f"{prefix}.{setting} is {value:g}", f"supported is {neutral:g}")
    if metadata.number(f"{prefix}.yarn_log_multiplier") not in (None, 0.0):
        raise metadata.wrong(f"{prefix}.yarn_log_multiplier is not supported", "export the model's checkpoint instead")
    yarn = {
        "factor": factor,
        "original_max_position_embeddings": metadata.count(f"{prefix}.original_context_length", 1),
        "beta_fast": metadata.positive(f"{prefix}.yarn_beta_fast"),
        "beta_slow": metadata.positive(f"{prefix}.yarn_beta_slow"),
    }
    return {"rope_type": "yarn", **{setting: value for setting, value in yarn.items() if value is not None}}


def _llama3(metadata: GgufMetadata, name: str, base: float, dim: int, factors: RopeFactors) -> dict[str, Any]:
    """Recover the four numbers of Llama 3's scaling from the tensor of divisors.

    The divisor of a pair with frequency f is 1 / ((1 - s) / factor + s), where s rises linearly in f from 0 to 1. Two
    pairs on this ramp determine the line. The original context is taken from the file or assumed, since only its ratio
    to the two frequency factors matters.
    """
    factor = float(factors.max())
    original = metadata.count(f"{name}.rope.scaling.original_context_length", 1) or _LLAMA3[2]
    candidates = [(*_LLAMA3[:2], _LLAMA3[2]), (*_LLAMA3[:2], original)]
    turns = original * _frequencies(base, dim) / (2 * math.pi)
    unchanged = (factor / factors.astype(np.float64) - 1) / max(factor - 1, 1e-9)
    ramp = np.flatnonzero((unchanged > 1e-3) & (unchanged < 1 - 1e-3))
    if len(ramp) >= 2:
        first, last = ramp[0], ramp[-1]
        slope = (unchanged[first] - unchanged[last]) / (turns[first] - turns[last])
        low = turns[first] - unchanged[first] / slope
        candidates.append((float(low), float(low + 1 / slope), original))
    for low, high, positions in candidates:
        if 0 < low < high and np.allclose(_divisors(base, dim, factor, low, high, positions), factors, _TOLERANCE, 0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": positions,
            }
    raise metadata.wrong(
        f"{ROPE_FACTORS} does not hold the divisors of Llama 3's rope scaling", "export the model's checkpoint instead"
    )


def _divisors(base: float, dim: int, factor: float, low: float, high: float, original: int) -> npt.NDArray[np.float64]:
    turns = original * _frequencies(base, dim) / (2 * math.pi)
    unchanged = np.clip((turns - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - unchanged) / factor + unchanged))


def _frequencies(base: float, dim: int) -> npt.NDArray[np.float64]:
    return np.asarray(base ** (-np.arange(0, dim, 2, dtype=np.float64) / dim))
