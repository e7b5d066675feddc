"""Everything about models that the app has beside the pool: catalogue, downloads, exports, comparisons, checks."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from ....errors import ConversationError
from ...conversations.records import Change, ChangeKind, MessageState, Role
from ..app_context import AppContext
from .download_queue import DownloadQueue
from .exactness_checks import ExactnessChecks
from .export_jobs import ExportJobs
from .model_catalog import ModelCatalog
from .speed_comparison import SpeedComparisons

_MAX_OBSERVED: Final = 200


class ModelServices:
    """The state behind the endpoints of `model_endpoints`.

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
