"""What the app says of each model on this machine: its size, its memory, its speed, and what it is for."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, Final

from ....models.find import BUNDLED_MODEL
from ....models.graph_variant import DeviceKind
from ....models.hub.downloaded_model import DownloadedModel
from ....models.user_text import format_bytes
from ....runtime.result import Stats
from ...conversations.store import ConversationStore
from ...service.model_files import ModelFiles, is_removable
from ...service.model_pool import ModelPool
from ..app_context import AppContext

_SPEEDS: Final = "model_speeds"
"""Name of the setting that keeps the speeds of the last answers of each model."""
_KEPT_SPEEDS: Final = 5
_RECORDING: Final = threading.Lock()
_LEAST_TOKENS: Final = 8
"""Shorter answers say little about a model's speed."""
_MAX_MODELS: Final = 200
"""Models whose speeds are kept; beyond it the ones measured longest ago are dropped."""
_BUNDLED_ABOUT: Final = (
    'A shell helper: it turns a request in English into one shell command, such as "find large files here". It is '
    "not a chat model, and answers small talk with nonsense. To chat, download one of the recommended models."
)
_FILE: Final = Path(__file__).with_name("recommended_models.json")
_SMALL_SHARE: Final = 0.5
"""Share of the free memory up to which a model leaves enough for other programs."""
_FAST_ON_CPU: Final = 2_000_000_000
"""Bytes of weights up to which a CPU writes faster than people read: each token reads all of them, and the memory of a
laptop gives 20 to 50 GB a second."""


class ModelCatalog:
    """The models of the app.

    Args:
        pool: the models that the app offers.
        store: keeps measured speeds.
    """

    def __init__(self, pool: ModelPool, store: ConversationStore) -> None:
        self._pool: Final = pool
        self._store: Final = store
        self.files: Final = ModelFiles(pool)

    def objects(self) -> list[dict[str, Any]]:
        """All models as JSON objects, the one that answers requests without a name first; unknown numbers are None.

        `weight_bytes` is the size of the graph and its weights: ONNX Runtime keeps them in memory as packed for the
        processor, which is as many bytes within about a tenth (`export.allocation.plan_costs`). `memory_bytes` is what
        the model needs with its `context` full; the cache grows with the conversation, so short ones need less. Of a
        loaded model, the context and the bytes of the cache are read from its graph as it was opened.
        `tokens_per_second` is the median of its last answers on this machine.
        """
        status = {each.id: each for each in self._pool.status()}
        found = []
        for entry in self._pool.offered.entries():
            known, files = status.get(entry.id), self.files.describe(entry)
            context, cache = self._pool.sizes_of(entry.id) or (files["context"], files["cache_bytes_per_token"])
            bundled = entry.id == BUNDLED_MODEL
            name, _, variant = entry.id.rpartition("/")[2].partition(":")
            speeds = self._store.setting(_SPEEDS, {}).get(entry.id)
            found.append(
                {
                    **files,
                    "id": entry.id,
                    "title": f"{name} ({variant})" if variant else name,
                    "loaded": known is not None and known.loaded,
                    "loading": known is not None and not known.loaded,
                    "in_use": known is not None and known.users > 0,
                    "bundled": bundled,
                    "removable": not bundled and is_removable(Path(entry.source)),
                    "about": _BUNDLED_ABOUT if bundled else "",
                    "chats": files["chats"] and not bundled,
                    "cache_bytes_per_token": cache,
                    "context": context,
                    "memory_bytes": files["weight_bytes"] + (context or 0) * (cache or 0),
                    "tokens_per_second": median(speeds) if speeds else None,
                }
            )
        return found


def record_speed(context: AppContext, model: str | None, stats: Stats) -> None:
    """Keep the speed of an answer that is long enough to count, and tell the page."""
    if model and stats.text_tokens >= _LEAST_TOKENS and (speed := stats.decode_tokens_per_second):
        with _RECORDING:
            known = context.store.setting(_SPEEDS, {})
            known[model] = [*known.pop(model, [])[1 - _KEPT_SPEEDS :], round(speed, 2)]
            context.store.set_setting(_SPEEDS, dict(list(known.items())[-_MAX_MODELS:]))
        context.events.publish("models")


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
