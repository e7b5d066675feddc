"""What all endpoints of the app share."""

from __future__ import annotations

from dataclasses import dataclass

from ..server.server_settings import ServerSettings
from ..service.model_pool import ModelPool
from .event_channel import EventChannel


@dataclass(frozen=True)
class AppContext:
    """What all endpoints of the app share."""

    pool: ModelPool
    """The models."""
    events: EventChannel
    """Tells the windows what has changed."""
    settings: ServerSettings
    """Limits of requests."""
