"""Scales of a quantized KV cache.

The operator stores `round(value / scale)`, from -128 to 127 with 8 bits and from -8 to 7 with 4, with one constant
scale for every channel of every key/value head, so larger values saturate. A slot's codes depend on its own keys and
values only: passes of every width write the same ones. A byte (uint8) holds two codes of 4 bits, each plus 8, the first
one in its low half.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ...models.json_file import typed_record

Floats: TypeAlias = npt.NDArray[np.float32]

MAX_CODE: Final = 127
MAX_CODE_4: Final = 7
"""Largest code of 4 bits."""
_CLIPPED: Final = 0.75
"""Share of the largest values that codes of 4 bits reach: larger ones saturate, and all others become more precise
(docs/decisions/0060-int8-cache.md)."""
_DIGITS: Final = 6
"""Significant digits with which scales are kept."""


class KVFormat(StrEnum):
    """Element type of a KV cache."""

    FLOAT = "float"
    """The graph's own."""
    INT8 = "int8"
    """One byte, a quarter of float32."""
    INT4 = "int4"
    """Half a byte, an eighth of float32."""

    @property
    def bits(self) -> int:
        """Bits of a quantized key's or value's channel."""
        return int(self.removeprefix("int"))

    @property
    def dtype(self) -> np.dtype[Any]:
        """Elements of a quantized cache's tensors."""
        return np.dtype(np.uint8 if self is KVFormat.INT4 else np.int8)


@dataclass(frozen=True, eq=False)
class CacheScales:
    """The scales of every cache tensor of a graph."""

    tensors: Mapping[str, Floats]
    """float32 `[kv_heads, head_dim]` by the name of the cache input."""
    kv: KVFormat = KVFormat.INT8
    """The format they are for."""

    @classmethod
    def of_largest(cls, largest: Mapping[str, Floats]) -> CacheScales:
        """Scales with which `largest` values `[kv_heads, head_dim]` of the cache inputs become the largest int8 code.

        Channels without a value other than 0 get the smallest scale of their tensor.
        """
        scales = {}
        for name, values in largest.items():
            floor = values[values > 0].min() if (values > 0).any() else 1.0
            kept = [_rounded(value) for value in (np.where(values > 0, values, floor) / MAX_CODE).ravel().tolist()]
            scales[name] = np.array(kept, np.float32).reshape(values.shape)
        return cls(scales)

    def of_format(self, kv: KVFormat) -> CacheScales:
        """Scales of another format for the same largest values, from those of int8."""
        ratio = np.float32(1.0 if kv is self.kv else _CLIPPED * MAX_CODE / MAX_CODE_4)
        return CacheScales({name: ratio * each for name, each in self.tensors.items()}, kv)

    @property
    def digest(self) -> str:
        """The format, with a digest of the scales."""
        scales = json.dumps(self.to_json(), sort_keys=True)
        return f"{self.kv} {hashlib.sha256(scales.encode()).hexdigest()}"

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
        stored = typed_record(_StoredScales, data).scales
        even = {name: heads for name, heads in stored.items() if len(set(map(len, heads))) == 1}
        with np.errstate(over="ignore"):
            tensors = {name: np.array(heads, np.float32) for name, heads in even.items()}
        if (
            not stored
            or even != stored
            or not all((each > 0).all() and np.isfinite(each).all() for each in tensors.values())
        ):
            raise ValueError("has scales that are not tables of positive numbers")
        return cls(tensors)


@dataclass(frozen=True)
class _StoredScales:
    """The form in which scales are stored."""

    scales: Mapping[str, tuple[tuple[float, ...], ...]]


def _rounded(scale: float) -> float:
    """A scale with as many digits as are kept, so that one that was just measured equals one that is read back."""
    return float(f"{scale:.{_DIGITS}g}")
