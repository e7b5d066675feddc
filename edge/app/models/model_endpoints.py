"""Everything about models that the app has beside the pool, and the page's API for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

import msgspec
from starlette.routing import Route

from ....errors import ConversationError, InputError
from ....models.hub.client import search_models
from ...conversations.answering import model_messages
from ...conversations.records import Change, ChangeKind, MessageState, Role
from ..api_endpoint import Handler, api_route
from ..app_context import AppContext
from .download_queue import DownloadQueue
from .exactness_checks import ExactnessChecks
from .export_jobs import ExportJobs
from .model_catalog import ModelCatalog
from .recommended import free_memory, recommend
from .speed_comparison import DEFAULT_TOKENS, SpeedComparisons

_MOST_FOUND: Final = 20
"""Most models that a search of the hub lists."""
_MAX_OBSERVED: Final = 200


class ModelServices:
    """Catalogue, downloads, exports, comparisons and checks: the state behind the endpoints.

    Args:
        context: the models, the store and the events; they outlive this object.
    """

    def __init__(self, context: AppContext) -> None:
        self.context: Final = context
        pool, store, events = context.pool, context.store, context.events
        pool.offer_local()
        self.catalog: Final = ModelCatalog(pool, store)
        self.downloads: Final = DownloadQueue(
            store, pool.kind, lambda download: events.publish("download", download=download), self.tell_models
        )
        self.exports: Final = ExportJobs(lambda job: events.publish("export", job=job), self.tell_models)
        self.comparisons: Final = SpeedComparisons(
            pool, lambda comparison: events.publish("comparison", comparison=comparison)
        )
        self.exactness: Final = ExactnessChecks(
            pool, store, lambda check: events.publish("exactness", check=check), context.load_options
        )

        self._observed: Final[deque[tuple[str, Any]]] = deque(maxlen=_MAX_OBSERVED)
        """Ids and times of the last answers whose speed was kept: a message may change again."""
        self._stop_observing: Final = store.listen(self._observe)

    def models(self) -> list[dict[str, Any]]:
        """The models as JSON objects."""
        return self.catalog.objects()

    def load(self, name: str) -> None:
        """Load a model, and wait until it is.

        Raises:
            EdgeError: there is no such model, or it cannot be loaded.
        """

        def progress(stage: str, fraction: float) -> None:
            self.context.events.publish("models", loading=name, stage=stage, fraction=fraction)

        try:
            self.context.pool.load(name, progress)
        finally:
            self.tell_models()

    def unload(self, name: str) -> None:
        """Unload a model.

        Raises:
            RequestError: there is no such model, or it is in use.
        """
        self.context.pool.unload(name)
        self.tell_models()

    def remove(self, name: str) -> int:
        """Remove a model that was downloaded or exported here; returns the bytes freed; errors as of the catalogue."""
        freed = self.catalog.remove(name)
        self.tell_models()
        return freed

    def tell_models(self) -> None:
        """Tell the windows that the list of models has changed."""
        self.context.events.publish("models")

    def _observe(self, change: Change) -> None:
        """Keep the speed of an answer that has ended."""
        if change.kind is not ChangeKind.MESSAGE or change.message_id is None:
            return
        try:
            message = self.context.store.message(change.message_id)
        except ConversationError:  # deleted meanwhile
            return
        if message.role is not Role.ASSISTANT or message.state is MessageState.WRITING or not message.stats:
            return
        answer = message.id, message.stats.get("total_s")
        if message.model is None or answer in self._observed:
            return
        self._observed.append(answer)
        tokens, speed = message.stats.get("tokens"), message.stats.get("tokens_per_second")
        if isinstance(tokens, int) and self.catalog.speeds.record(message.model, tokens, speed):
            self.tell_models()

    def close(self) -> None:
        """End what works in the background: downloads and exports, the comparison and the check."""
        self._stop_observing()
        self.comparisons.close()
        self.exactness.close()
        self.exports.close()
        self.downloads.close()


def model_routes(services: ModelServices) -> list[Route]:
    """The routes of everything about models."""
    api, downloads, exports = _ModelApi(services), services.downloads, services.exports
    paths: list[tuple[str, str, Handler]] = [
        ("GET", "/api/models", api.models),
        ("POST", "/api/models/load", api.load),
        ("POST", "/api/models/unload", api.unload),
        ("POST", "/api/models/remove", api.remove),
        ("GET", "/api/models/recommended", api.recommended),
        ("GET", "/api/downloads", lambda: {"downloads": downloads.objects()}),
        ("POST", "/api/downloads", api.download),
        ("POST", "/api/downloads/{key}/pause", lambda key: {"download": downloads.pause(key)}),
        ("POST", "/api/downloads/{key}/resume", lambda key: {"download": downloads.resume(key)}),
        ("POST", "/api/downloads/{key}/cancel", lambda key: {"download": downloads.cancel(key)}),
        ("GET", "/api/exports", exports.describe),
        ("POST", "/api/exports", api.export),
        ("POST", "/api/exports/{key}/choose", api.choose_plan),
        ("POST", "/api/exports/{key}/cancel", lambda key: {"job": exports.cancel(key)}),
        ("GET", "/api/comparisons", lambda: {"comparison": services.comparisons.current()}),
        ("POST", "/api/comparisons", api.compare),
        ("POST", "/api/comparisons/stop", lambda: {"comparison": services.comparisons.stop()}),
        ("GET", "/api/exactness", services.exactness.describe),
        ("POST", "/api/exactness", api.check),
        ("POST", "/api/exactness/cancel", services.exactness.cancel),
    ]
    settings = services.context.settings
    routes = [api_route(settings, method, path, handler) for method, path, handler in paths]
    return [*routes, api_route(settings, "GET", "/api/models/search", api.search, slow=True)]


class _ModelApi:
    """The handlers, each called in a thread of its own."""

    def __init__(self, services: ModelServices) -> None:
        self._services: Final = services

    def models(self) -> object:
        """All models."""
        return {"models": self._services.models(), "free_bytes": free_memory()}

    def load(self, id: str) -> object:  # noqa: A002  the name of the field
        """Load a model into memory; answers when it is loaded."""
        self._services.load(id)
        return self.models()

    def unload(self, id: str) -> object:  # noqa: A002  the name of the field
        """Unload a model."""
        self._services.unload(id)
        return self.models()

    def remove(self, id: str) -> object:  # noqa: A002  the name of the field
        """Remove a model's files."""
        freed = self._services.remove(id)
        return {"freed": freed, "models": self._services.models(), "free_bytes": free_memory()}

    def recommended(self) -> object:
        """Models worth downloading for this machine."""
        free = free_memory()
        pool = self._services.context.pool
        here = [entry.id for entry in pool.names()]
        found = [
            {
                "id": each.id,
                "fits": each.fits,
                "downloaded": each.downloaded,
                "reason": each.reason,
                **msgspec.structs.asdict(each.model),
            }
            for each in recommend(free, pool.kind, here)
        ]
        return {"recommended": found, "free_bytes": free}

    def search(self, query: Mapping[str, str]) -> object:
        """Models of the hub by name: the page asks for them when the user presses its button, and at no other time."""
        words = query.get("q", "").strip()
        if not words:
            raise InputError("there is nothing to search for", "type a part of a model's name")
        return {"found": [asdict(each) for each in search_models(words, _MOST_FOUND)]}

    def download(self, id: str) -> object:  # noqa: A002  the name of the field
        """Queue a download."""
        return {"download": self._services.downloads.add(id)}

    def export(
        self, source: str, name: str | None = None, bits: int | None = None, calibration_tokens: int | None = None
    ) -> object:
        """Queue an export."""
        return {"job": self._services.exports.add(source, name, bits, calibration_tokens)}

    def choose_plan(self, key: str, plan: int) -> object:
        """Export one of the plans that were measured."""
        return {"job": self._services.exports.choose(key, plan)}

    def compare(
        self,
        prompt: str | None = None,
        conversation: str | None = None,
        model: str | None = None,
        max_tokens: int = DEFAULT_TOKENS,
    ) -> object:
        """Begin a comparison, of a prompt or of the last question of a conversation."""
        if (prompt is None) == (conversation is None):
            raise InputError("a comparison needs a prompt or a conversation", "give one of them")
        sampling: Mapping[str, Any] | None = None
        messages: list[dict[str, Any]] = [{"role": "user", "content": prompt or ""}]
        if conversation is not None:
            store = self._services.context.store
            stored = store.conversation(conversation)
            branch = [] if stored.leaf is None else store.branch(stored.leaf)
            while branch and branch[-1].role != "user":
                branch.pop()
            messages = model_messages(stored.system, branch, calls=False) if branch else []
            model, sampling = model or stored.model, stored.sampling
        return {"comparison": self._services.comparisons.start(messages, model, sampling, max_tokens)}

    def check(self, model: str | None = None, limit: int = 1, max_tokens: int = 48) -> object:
        """Begin an exactness check."""
        return {"check": self._services.exactness.start(model, limit, max_tokens)}
