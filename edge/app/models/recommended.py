"""Models worth downloading for this machine, of those in `recommended_models.json`."""

from __future__ import annotations

import json
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any, Final

import psutil

from ....models.graph_variant import DeviceKind
from ....models.hub.downloaded_model import DownloadedModel
from ....models.user_text import format_bytes

_FILE: Final = Path(__file__).with_name("recommended_models.json")
_SMALL_SHARE: Final = 0.5
"""Share of the free memory up to which a model leaves enough for other programs."""
_FAST_ON_CPU: Final = 2_000_000_000
"""Bytes of weights up to which a CPU writes faster than people read: each token reads all of them, and the memory of a
laptop gives 20 to 50 GB a second."""


@cache
def recommended_models() -> list[dict[str, Any]]:
    """The list, from small to large. Sizes are approximate: the hub says the exact ones.

    Of a model the list has the `variants` to download by kind of device, the `disk_bytes` of the CPU's variant, and the
    `memory_bytes` that it needs with a `context`: `disk_bytes + context * cache_bytes_per_token`. A model is
    recommended from `minimum_free_bytes` on: a quarter more, for the buffers of a pass. `quality` orders the models by
    their answers: larger is better.
    """
    models: list[dict[str, Any]] = json.loads(_FILE.read_text(encoding="utf-8"))["models"]
    return models


def recommend(free_bytes: int, kind: DeviceKind, here: Collection[str]) -> list[dict[str, Any]]:
    """Order the list for a machine: what fits, the best answers first; then what does not, small ones first.

    A model that takes more than half of the free memory, or is slow on a CPU, fits, but comes after those that are
    neither.

    Args:
        free_bytes: memory that programs can have now.
        kind: kind of device that models run on.
        here: ids of models that are on this machine already.

    Returns:
        The models with their `id` on the hub, whether it `fits` and is `downloaded`, and the `reason` in a sentence.
    """
    ranked = []
    free = format_bytes(free_bytes)
    for model in recommended_models():
        name, needed = DownloadedModel.name(model["repo"], model["variants"].get(kind.value, "")), model["memory_bytes"]
        fits = model["minimum_free_bytes"] <= free_bytes
        large = needed > _SMALL_SHARE * free_bytes
        slow = kind is DeviceKind.CPU and model["disk_bytes"] > _FAST_ON_CPU
        if not fits:
            least = format_bytes(model["minimum_free_bytes"])
            reason = f"Too large now: it wants {least} of free memory, and {free} are free."
        elif large:
            reason = f"Fits, but takes most of it: needs {format_bytes(needed)} of your {free} free."
        else:
            but = ", but writes slowly without a graphics card" if slow else ""
            reason = f"Fits{but}: needs {format_bytes(needed)} of your {free} free."
        downloaded = any(each == name or each.partition(":")[0] == model["repo"] for each in here)
        rank = (False, large or slow, -model["quality"]) if fits else (True, True, needed)
        ranked.append((rank, {"id": name, "fits": fits, "downloaded": downloaded, "reason": reason, **model}))
    return [model for _, model in sorted(ranked, key=lambda each: each[0])]


def free_memory() -> int:
    """Bytes of memory that programs can have now."""
    return int(psutil.virtual_memory().available)
