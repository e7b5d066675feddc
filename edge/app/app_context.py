"""What all endpoints of the app share, and the settings of the page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ..conversations.store import ConversationStore
from ..server.server_settings import ServerSettings
from ..service.model_files import ModelFiles
from ..service.model_pool import ModelPool
from ..tools.tool_servers import ToolServers
from .event_channel import EventChannel

_DEFAULTS: Final[Mapping[str, Any]] = {
    "theme": "system",
    "font_size": 16,
    "enter_sends": True,
    "token_details": True,
    "show_statistics": True,
    "default_model": None,
}
SETTING_PREFIX: Final = "page."
"""What the names of these settings begin with in the store."""


class SettingsBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of a change of settings; those that are left out stay as they are."""

    theme: Literal["system", "light", "dark"] | UnsetType = UNSET
    font_size: Annotated[int, Meta(ge=12, le=24)] | UnsetType = UNSET
    """In pixels."""
    enter_sends: bool | UnsetType = UNSET
    """Whether Enter sends a message; else Ctrl+Enter does."""
    token_details: bool | UnsetType = UNSET
    """Whether each token of an answer is kept with its probability, its alternatives and its origin."""
    show_statistics: bool | UnsetType = UNSET
    default_model: str | UnsetType | None = UNSET
    """The model of conversations that name none; None for the first one that is offered."""


def read_settings(store: ConversationStore) -> dict[str, Any]:
    """All settings, by name."""
    return {name: store.setting(SETTING_PREFIX + name, default) for name, default in _DEFAULTS.items()}


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
    embedding_model: str | None = None
    """Which model finds passages of documents by their meaning; as for `passage_encoder`."""

    @cached_property
    def files(self) -> ModelFiles:
        """What the files of the models say."""
        return ModelFiles(self.pool)

    def default_model(self) -> str | None:
        """The model of conversations that name none; None where no model writes texts."""
        chosen = read_settings(self.store)["default_model"]
        entries = self.pool.offered.entries()
        offered = [entry.id for entry in entries if "completion" in self.files.describe(entry)["capabilities"]]
        return chosen if chosen in offered else next(iter(offered), None)
