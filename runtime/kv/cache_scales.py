"""Scales of an int8 KV cache, and slots converted by them.

The operator stores `clip(round(value / scale), -128, 127)` with one constant scale for every channel of every key/value
head, so values beyond 127 scales saturate. A slot's codes depend on its own keys and values only: passes of every width
write the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ...models.json_file import is_finite
from .buffers import CacheSnapshot, CacheTensorType

Floats: TypeAlias = npt.NDArray[np.float32]

MAX_CODE: Final = 127
_DIGITS: Final = 6
"""Significant digits with which scales are kept."""


class KVFormat(StrEnum):
    """Element type of a KV cache."""

    FLOAT = "float"
    """The graph's own."""
    INT8 = "int8"
    """One byte, a quarter of float32."""


@dataclass(frozen=True, eq=False)
class CacheScales:
    """The scales of every cache tensor of a graph."""

    tensors: Mapping[str, Floats]
    """float32 `[kv_heads, head_dim]` by the name of the cache input."""

    @classmethod
    def of_largest(cls, largest: Mapping[str, Floats]) -> CacheScales:
        """Scales with which `largest` values `[kv_heads, head_dim]` of the cache inputs become the largest code.

        Channels without a value other than 0 get the smallest scale of their tensor.
        """
        scales = {}
        for name, values in largest.items():
            floor = values[values > 0].min() if (values > 0).any() else 1.0
            kept = [_rounded(value) for value in (np.where(values > 0, values, floor) / MAX_CODE).ravel().tolist()]
            scales[name] = np.array(kept, np.float32).reshape(values.shape)
        return cls(scales)

    def stacked(self, names: Sequence[str]) -> Floats:
        """Scales of several cache inputs of one shape, `[tensors, kv_heads, head_dim]`.

        Raises:
            KeyError: one of the inputs has no scales.
        """
        return np.stack([self.tensors[name] for name in names])

    def to_json(self) -> dict[str, Any]:
        """Convert to a plain JSON object."""
        tensors = {name: scales.tolist() for name, scales in self.tensors.items()}
        return {"scales": {name: [[*map(_rounded, head)] for head in heads] for name, heads in tensors.items()}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CacheScales:
        """Read what `to_json` returned.

        Raises:
            ValueError: it is something else; the message continues the name of the file.
        """
        tensors = data.get("scales")
        if not isinstance(tensors, dict) or not tensors:
            raise ValueError("lacks scales")
        return cls({name: _scales_of(name, heads) for name, heads in tensors.items()})


def quantize_slots(slots: npt.NDArray[Any], scales: Floats) -> npt.NDArray[np.int8]:
    """Codes of cached slots `[tensors, 1, kv_heads, slots, head_dim]`, given `[tensors, kv_heads, head_dim]` scales.

    The codes are those that the operator stores, of halves the even one.
    """
    codes = np.rint(slots / scales[:, None, :, None, :])
    return np.clip(codes, -MAX_CODE - 1, MAX_CODE).astype(np.int8)


def dequantize_slots(codes: npt.NDArray[np.int8], scales: Floats) -> Floats:
    """The float32 values of cached slots; shapes as for `quantize_slots`."""
    values: Floats = codes * scales[:, None, :, None, :]
    return values


def convert_snapshot(
    snapshot: CacheSnapshot,
    stored: Sequence[Floats] | None,
    wanted: Sequence[Floats] | None,
    types: Sequence[CacheTensorType],
) -> CacheSnapshot:
    """Slots of one cache format in the other, or with other scales.

    Args:
        snapshot: for every type of tensor an array `[tensors, 1, kv_heads, slots, head_dim]`; what follows these, as
            the states of a hybrid model, stays as it is.
        stored: the scales of each array, `[tensors, kv_heads, head_dim]`; None for a float cache.
        wanted: the scales of the result; None for a float cache.
        types: the types of the result's tensors.

    Raises:
        ValueError: arrays and scales do not fit each other.
    """
    if stored is None and wanted is None:
        return snapshot
    if len(snapshot) < len(types) or any(each is not None and len(each) != len(types) for each in (stored, wanted)):
        raise ValueError(f"{len(snapshot)} arrays for {len(types)} types of tensors and their scales")
    none = [None] * len(types)
    converted = []
    for slots, tensor_type, old, new in zip(snapshot, types, stored or none, wanted or none, strict=False):
        shape = (slots.shape[0], *slots.shape[2:3], *slots.shape[4:])
        for scales in (old, new):
            if scales is not None and (scales.shape != shape or slots.ndim != len(tensor_type.shape) + 1):
                raise ValueError(f"scales of shape {list(scales.shape)} for slots of {list(slots.shape)}")
        if old is not None and new is not None and np.array_equal(old, new):
            converted.append(slots)
            continue
        values = slots if old is None else dequantize_slots(slots, old)
        converted.append(values.astype(tensor_type.dtype) if new is None else quantize_slots(values, new))
    return (*converted, *snapshot[len(types) :])


def _rounded(scale: float) -> float:
    """A scale with as many digits as are kept, so that one that was just measured equals one that is read back."""
    return float(f"{scale:.{_DIGITS}g}")


def _scales_of(name: object, heads: object) -> Floats:
    if not isinstance(name, str) or not isinstance(heads, list) or not heads:
        raise ValueError("has scales that are not a table")
    if not all(isinstance(head, list) and head and all(map(is_finite, head)) for head in heads):
        raise ValueError(f"has scales of {name} that are not numbers")
    if len({len(head) for head in heads}) != 1:
        raise ValueError(f"has scales of {name} in rows of several lengths")
    with np.errstate(over="ignore"):
        scales = np.array(heads, np.float32)
    if not ((scales > 0) & np.isfinite(scales)).all():
        raise ValueError(f"has scales of {name} that are not positive")
    return scales
