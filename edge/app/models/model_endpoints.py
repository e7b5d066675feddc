"""Everything about models that the app has beside the pool, and the page's API for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, Final

from msgspec import Meta
from starlette.routing import Route

from ....errors import InputError
from ....models.hub.client import search_models
from ....runtime.devices.processor import available_memory
from ...conversations.answering import model_messages
from ...conversations.records import Role
from ...server.json_endpoint import Handler, JsonRoute, json_routes
from ..app_context import AppContext
from .download_queue import DownloadQueue
from .drafting_checks import MAX_TOKENS, ExactnessChecks, SpeedComparisons
from .export_jobs import ExportJobs
from .model_catalog import ModelCatalog, recommend

_MOST_FOUND: Final = 20
"""Most models that a search of the hub lists."""


class ModelServices:
    """Catalogue, downloads, exports, comparisons and checks, and the handlers of their endpoints.

    Args:
        context: the models, the store and the events; they outlive this object.
    """

    def __init__(self, context: AppContext) -> None:
        self.context: Final = context
        context.pool.offered.local = True
        self.catalog: Final = ModelCatalog(context.pool, context.store)
        self.downloads: Final = DownloadQueue(context)
        self.exports: Final = ExportJobs("export", "job", context.events)
        self.comparisons: Final = SpeedComparisons(context)
        self.exactness: Final = ExactnessChecks(context)

    def models(self) -> dict[str, Any]:
        """All models."""
        return {"models": self.catalog.objects(), "free_bytes": available_memory()}

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
        self.catalog.files.remove(id)
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
        return {"found": [asdict(each) for each in search_models(words, _MOST_FOUND)]}

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
