"""The page's API for what is neither a conversation nor a model: version, settings, presets, MCP servers."""

from __future__ import annotations

import platform
from typing import Any, Final

import msgspec
import psutil
from starlette.routing import Route

from ...runtime.devices.processor import usable_cores
from ...version import __version__
from ..conversations.records import Preset, as_object
from ..conversations.store import KEPT_DAYS
from .api_endpoint import ApiCall, api_route
from .app_context import AppContext, SettingsBody, change_settings, read_settings
from .conversation_endpoints import checked_sampling
from .models.model_endpoints import ModelServices
from .tools.tool_servers import ToolServers
from .tools.tool_settings import ConfigurationError, ToolServer, read_configuration


class PresetBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of a preset."""

    system: str = ""
    sampling: dict[str, Any] = {}
    name: str = ""
    """Not read: the name is in the path."""


def state_routes(context: AppContext, models: ModelServices) -> list[Route]:
    """The routes of the state and the settings."""
    endpoints = _StateEndpoints(context, models)
    table = (
        ("GET", "/api/state", endpoints.state),
        ("GET", "/api/usage", endpoints.usage),
        ("PATCH", "/api/settings", endpoints.change),
        ("PUT", "/api/presets/{name:path}", endpoints.save_preset),
        ("DELETE", "/api/presets/{name:path}", endpoints.delete_preset),
    )
    return [api_route(context.settings, method, path, handler) for method, path, handler in table]


class _StateEndpoints:
    def __init__(self, context: AppContext, models: ModelServices) -> None:
        self._context: Final = context
        self._models: Final = models
        self._store: Final = context.store

    def state(self, _call: ApiCall) -> dict[str, Any]:
        return {
            "version": __version__,
            "settings": read_settings(self._store),
            "presets": [as_object(preset) for preset in self._store.presets()],
            "folders": self._store.folders(),
            "models": self._models.models(),
            "default_model": self._context.default_model(),
            "kept_days": KEPT_DAYS,
            "machine": {
                "system": platform.system(),
                "cores": usable_cores(),
                "memory_bytes": psutil.virtual_memory().total,
            },
        }

    def usage(self, _call: ApiCall) -> dict[str, Any]:
        return {"usage": [as_object(each) for each in self._store.usage()]}

    def change(self, call: ApiCall) -> dict[str, Any]:
        change_settings(self._store, call.body(SettingsBody))
        return {"settings": read_settings(self._store)}

    def save_preset(self, call: ApiCall) -> dict[str, Any]:
        body = call.body(PresetBody)
        preset = Preset(call.path["name"], body.system, checked_sampling(body.sampling))
        self._store.save_preset(preset)
        return {"preset": as_object(preset)}

    def delete_preset(self, call: ApiCall) -> dict[str, Any]:
        self._store.delete_preset(call.path["name"])
        return {}


class ToolServerBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of a server; its name is in the path."""

    command: str
    arguments: list[str] = []
    environment: dict[str, str] = {}
    enabled: bool = True


class ConfigurationBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of a configuration that is to be shown."""

    text: str


def tool_routes(context: AppContext) -> list[Route]:
    """The routes of MCP servers."""
    endpoints = _ToolEndpoints(context.tools)
    table = (
        ("GET", "/api/tools", endpoints.list),
        ("POST", "/api/tools/configuration", endpoints.read),
        ("PUT", "/api/tools/{name}", endpoints.save),
        ("DELETE", "/api/tools/{name}", endpoints.remove),
    )
    return [api_route(context.settings, method, path, handler) for method, path, handler in table]


class _ToolEndpoints:
    def __init__(self, servers: ToolServers) -> None:
        self._servers: Final = servers

    def list(self, _call: ApiCall) -> dict[str, Any]:
        return {"servers": self._servers.servers(), "problem": self._servers.problem}

    def read(self, call: ApiCall) -> dict[str, Any]:
        """The servers of a configuration, of which none is added, or why it cannot be read."""
        try:
            return {"servers": read_configuration(call.body(ConfigurationBody).text), "problem": None}
        except ConfigurationError as error:  # the text may still be being typed, so the request has not failed
            return {"servers": [], "problem": str(error)}

    def save(self, call: ApiCall) -> dict[str, Any]:
        body = call.body(ToolServerBody)
        self._servers.save(ToolServer(name=call.path["name"], **msgspec.structs.asdict(body)))
        return self.list(call)

    def remove(self, call: ApiCall) -> dict[str, Any]:
        self._servers.remove(call.path["name"])
        return self.list(call)
