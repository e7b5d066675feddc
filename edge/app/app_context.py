"""What all endpoints of the app share."""

from __future__ import annotations

from dataclasses import dataclass

from ..conversations.store import ConversationStore
from ..server.server_settings import ServerSettings
from ..service.model_pool import ModelPool
from .app_settings import read_settings
from .event_channel import EventChannel


@dataclass(frozen=True)
class AppContext:
    """What all endpoints of the app share."""

    store: ConversationStore
    """Conversations and settings."""
    pool: ModelPool
    """The models."""
    events: EventChannel
    """Tells the windows what has changed."""
    settings: ServerSettings
    """Limits of requests."""

    def default_model(self) -> str | None:
        """The model of conversations that name none; None where there is no model."""
        chosen = read_settings(self.store)["default_model"]
        offered = [entry.id for entry in self.pool.names()]
        return chosen if chosen in offered else next(iter(offered), None)
