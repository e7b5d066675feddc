"""Models worth downloading for this machine, of those in `recommended_models.json`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import msgspec
import psutil

from ....errors import BundleError
from ....models.graph_variant import DeviceKind
from ....models.hub.downloaded_model import DownloadedModel
from ....models.user_text import format_bytes

_FILE: Final = Path(__file__).with_name("recommended_models.json")
_SMALL_SHARE: Final = 0.5
"""Share of the free memory up to which a model leaves enough for other programs."""
_FAST_ON_CPU: Final = 2_000_000_000
"""Bytes of weights up to which a CPU writes faster than people read: each token reads all of them, and the memory of a
laptop gives 20 to 50 GB a second."""


class Recommended(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model of the list. Sizes are approximate: the hub says the exact ones when it is downloaded."""

    repo: str
    """`org/name` on the hub."""
    variants: dict[str, str]
    """Which weights to download, by kind of device: `cpu`, `gpu` or `npu`; empty for what suits the device best."""
    title: str
    parameters: int
    disk_bytes: int
    """Bytes of the weights and the tokenizer of the CPU's variant."""
    cache_bytes_per_token: int
    """Bytes of its KV cache for each token."""
    context: int
    """Tokens of the conversation for which the memory is counted; the model may allow more."""
    memory_bytes: int
    """Memory that it needs: `disk_bytes + context * cache_bytes_per_token`."""
    minimum_free_bytes: int
    """Free memory from which on it is recommended: a quarter more, for the buffers of a pass."""
    licence: str
    languages: str
    good_for: str
    why: str
    quality: int
    """Order by the quality of answers: larger is better."""


@dataclass(frozen=True)
class Recommendation:
    """A model of the list, and why it suits this machine or does not."""

    model: Recommended
    id: str
    """What to download: `org/name:variant`."""
    fits: bool
    downloaded: bool
    reason: str


@cache
def recommended_models() -> tuple[Recommended, ...]:
    """The list, from small to large.

    Raises:
        BundleError: the file of this installation is damaged.
    """
    try:
        data = msgspec.json.decode(_FILE.read_bytes())
        return msgspec.convert(data["models"], tuple[Recommended, ...])
    except (OSError, KeyError, msgspec.MsgspecError) as error:
        raise BundleError(f"{_FILE.name} is damaged: {error}", "install edge-run again") from error


def recommend(free_bytes: int, kind: DeviceKind, here: Collection[str]) -> list[Recommendation]:
    """Order the list for a machine: what fits, the best answers first; then what does not, small ones first.

    A model that takes more than half of the free memory, or is slow on a CPU, fits, but comes after those that are
    neither.

    Args:
        free_bytes: memory that programs can have now.
        kind: kind of device that models run on.
        here: ids of models that are on this machine already.
    """
    found = []
    for model in recommended_models():
        variant = model.variants.get(kind.value, "")
        id_ = DownloadedModel.name(model.repo, variant)
        fits = model.minimum_free_bytes <= free_bytes
        downloaded = any(each == id_ or each.partition(":")[0] == model.repo for each in here)
        found.append(Recommendation(model, id_, fits, downloaded, _reason(model, free_bytes, kind)))
    return sorted(found, key=lambda each: _rank(each, free_bytes, kind))


def free_memory() -> int:
    """Bytes of memory that programs can have now."""
    return int(psutil.virtual_memory().available)


def _rank(each: Recommendation, free_bytes: int, kind: DeviceKind) -> tuple[bool, bool, int]:
    if not each.fits:
        return True, True, each.model.memory_bytes
    return False, _is_large(each.model, free_bytes) or _is_slow(each.model, kind), -each.model.quality


def _is_large(model: Recommended, free_bytes: int) -> bool:
    return model.memory_bytes > _SMALL_SHARE * free_bytes


def _is_slow(model: Recommended, kind: DeviceKind) -> bool:
    return kind is DeviceKind.CPU and model.disk_bytes > _FAST_ON_CPU


def _reason(model: Recommended, free_bytes: int, kind: DeviceKind) -> str:
    needed, free = format_bytes(model.memory_bytes), format_bytes(free_bytes)
    if model.minimum_free_bytes > free_bytes:
        least = format_bytes(model.minimum_free_bytes)
        return f"Too large now: it wants {least} of free memory, and {free} are free."
    if _is_large(model, free_bytes):
        return f"Fits, but takes most of it: needs {needed} of your {free} free."
    if _is_slow(model, kind):
        return f"Fits, but writes slowly without a graphics card: needs {needed} of your {free} free."
    return f"Fits: needs {needed} of your {free} free."
