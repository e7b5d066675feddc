"""What all endpoints of the app share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..conversations.store import ConversationStore
from ..server.server_settings import ServerSettings
from ..service.model_pool import ModelPool
from .app_settings import read_settings
from .event_channel import EventChannel
from .tools.tool_servers import ToolServers


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
    tools: ToolServers = field(default_factory=ToolServers)
    """MCP servers, whose tools conversations can use."""
    load_options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `edgerun.load` with which a check in a process of its own opens a model as the pool does."""

    def default_model(self) -> str | None:
        """The model of conversations that name none; None where there is no model."""
        chosen = read_settings(self.store)["default_model"]
        offered = [entry.id for entry in self.pool.names()]
        return chosen if chosen in offered else next(iter(offered), None)
