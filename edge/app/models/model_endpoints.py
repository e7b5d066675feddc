"""Everything about models that the app has beside the pool, and the page's API for it."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

from msgspec import Meta
from starlette.routing import Route

from ....errors import InputError
from ....models.find import BUNDLED_MODEL
from ....models.hub.client import search_models
from ....models.hub.downloaded_model import DownloadedModel
from ....models.manifest import DeviceKind
from ....models.user_text import format_bytes
from ....runtime.devices.processor import available_memory
from ....runtime.result import Stats
from ...conversations.answering import model_messages
from ...conversations.records import Role
from ...server.json_endpoint import Handler, JsonRoute, json_routes
from ...service.model_files import describe_model, is_removable, remove_model
from ..app_context import AppContext
from .download_queue import DownloadQueue
from .drafting_checks import MAX_TOKENS, ExactnessChecks, SpeedComparisons
from .export_jobs import ExportJobs

_MOST_FOUND: Final = 20
"""Most models that a search of the hub lists."""
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


class ModelServices:
    """Models, downloads, exports, comparisons and checks, and the handlers of their endpoints.

    Args:
        context: the models, the store and the events; they outlive this object.
    """

    def __init__(self, context: AppContext) -> None:
        self.context: Final = context
        context.pool.offered.local = True
        self.downloads: Final = DownloadQueue(context)
        self.exports: Final = ExportJobs("export", "job", context.events)
        self.comparisons: Final = SpeedComparisons(context)
        self.exactness: Final = ExactnessChecks(context)

    def models(self) -> dict[str, Any]:
        """All models."""
        return {"models": model_objects(self.context), "free_bytes": available_memory()}

    def load(self, id: str) -> object:  # noqa: A002  the name of the field
        """Load a model into memory; answers when it is loaded."""

        def progress(stage: str, fraction: float) -> None:
            self.context.events.publish("models", loading=id, stage=stage, fraction=fraction)

        try:
            self.context.pool.load(id, progress)
        finally:
            self.context.events.publish("models")
        return self.models()

    def unload(self, id: str) -> object:  # noqa: A002  the name of the field
        """Unload a model."""
        self.context.pool.unload(id)
        self.context.events.publish("models")
        return self.models()

    def remove(self, id: str) -> object:  # noqa: A002  the name of the field
        """Remove a model that was downloaded or exported here."""
        remove_model(self.context.pool, id)
        self.context.events.publish("models")
        return self.models()

    def recommended(self) -> object:
        """Models worth downloading for this machine."""
        free, pool = available_memory(), self.context.pool
        return {
            "recommended": recommend(free, pool.kind, [entry.id for entry in pool.offered.entries()]),
            "free_bytes": free,
        }

    def search(self, query: Mapping[str, str]) -> object:
        """Models of the hub by name: the page asks for them when the user presses its button, and at no other time."""
        words = query.get("q", "").strip()
        if not words:
            raise InputError("there is nothing to search for", "type a part of a model's name")
        return {"found": search_models(words, _MOST_FOUND)}

    def compare(
        self,
        prompt: str | None = None,
        conversation: str | None = None,
        model: str | None = None,
        max_tokens: Annotated[int, Meta(ge=2, le=MAX_TOKENS)] = 256,
    ) -> object:
        """Begin a comparison, of a prompt or of the last question of a conversation."""
        if (prompt is None) == (conversation is None):
            raise InputError("a comparison needs a prompt or a conversation", "give one of them")
        sampling: Mapping[str, Any] | None = None
        messages: list[dict[str, Any]] = [{"role": "user", "content": prompt or ""}]
        if conversation is not None:
            stored, branch = self.context.store.shown(conversation)
            while branch and branch[-1].role is not Role.USER:
                branch.pop()
            messages = model_messages(stored.system, branch, calls=False) if branch else []
            model, sampling = model or stored.model, stored.sampling
        return self.comparisons.start(messages, model, sampling, max_tokens)

    def close(self) -> None:
        """End what works in the background: downloads and exports, the comparison and the check."""
        for each in (self.comparisons, self.exactness, self.exports, self.downloads):
            each.close()


def model_routes(services: ModelServices) -> list[Route]:
    """The routes of everything about models."""
    downloads, exports = services.downloads, services.exports
    paths: list[tuple[str, str, Handler]] = [
        ("GET", "/api/models", services.models),
        ("POST", "/api/models/load", services.load),
        ("POST", "/api/models/unload", services.unload),
        ("POST", "/api/models/remove", services.remove),
        ("GET", "/api/models/recommended", services.recommended),
        ("GET", "/api/downloads", downloads.list),
        ("POST", "/api/downloads", downloads.add),
        ("POST", "/api/downloads/{key}/pause", downloads.pause),
        ("POST", "/api/downloads/{key}/resume", downloads.resume),
        ("POST", "/api/downloads/{key}/cancel", downloads.cancel),
        ("GET", "/api/exports", exports.describe),
        ("POST", "/api/exports", exports.add),
        ("POST", "/api/exports/{key}/choose", exports.choose),
        ("POST", "/api/exports/{key}/cancel", exports.cancel),
        ("GET", "/api/comparisons", services.comparisons.current),
        ("POST", "/api/comparisons", services.compare),
        ("POST", "/api/comparisons/stop", services.comparisons.stop),
        ("GET", "/api/exactness", services.exactness.describe),
        ("POST", "/api/exactness", services.exactness.start),
        ("POST", "/api/exactness/cancel", services.exactness.cancel),
    ]
    settings = services.context.settings
    search = JsonRoute(settings, "GET", "/api/models/search", services.search, slow=True)
    return [*json_routes(settings, paths), search]


def model_objects(context: AppContext) -> list[dict[str, Any]]:
    """All models as JSON objects, the one that answers requests without a name first; unknown numbers are None.

    `weight_bytes` is the size of the graph and its weights: ONNX Runtime keeps them in memory as packed for the
    processor, which is as many bytes within about a tenth (`export.allocation.plan_costs`). `memory_bytes` is what
    the model needs with its `context` full; the cache grows with the conversation, so short ones need less. Of a
    loaded model, the context and the bytes of the cache are read from its graph as it was opened.
    `tokens_per_second` is the median of its last answers on this machine.
    """
    status = {each.id: each for each in context.pool.status()}
    found = []
    for entry in context.pool.offered.entries():
        known, files = status.get(entry.id), describe_model(entry, context.pool.kind)
        length, cache = context.pool.sizes_of(entry.id) or (files["context"], files["cache_bytes_per_token"])
        bundled = entry.id == BUNDLED_MODEL
        name, _, variant = entry.id.rpartition("/")[2].partition(":")
        speeds = context.store.setting(_SPEEDS, {}).get(entry.id)
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
                "cache_bytes_per_token": cache,
                "context": length,
                "memory_bytes": files["weight_bytes"] + (length or 0) * (cache or 0),
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
