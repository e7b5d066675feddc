"""The page's API for what is neither a conversation nor a model: version, settings, presets, MCP servers."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec
import psutil
from msgspec import UNSET
from starlette.routing import Route

from ...errors import InputError
from ...runtime.devices.processor import usable_cores
from ...version import __version__
from ..conversations.records import Preset, as_object
from ..conversations.store import KEPT_DAYS
from .api_endpoint import ApiRoute
from .app_context import SETTING_PREFIX, AppContext, SettingsBody, read_settings
from .conversation_endpoints import checked_sampling
from .models.model_endpoints import ModelServices
from .tools.tool_settings import read_configuration


def state_routes(context: AppContext, models: ModelServices) -> list[Route]:
    """The routes of the state and the settings."""
    endpoints = _StateEndpoints(context, models)
    table = (
        ("GET", "/api/state", endpoints.state),
        ("GET", "/api/usage", lambda: {"usage": context.store.usage()}),
        ("PATCH", "/api/settings", endpoints.change),
        ("PUT", "/api/presets/{preset:path}", endpoints.save_preset),
        ("DELETE", "/api/presets/{preset:path}", endpoints.delete_preset),
    )
    return [ApiRoute(context.settings, method, path, handler) for method, path, handler in table]


class _StateEndpoints:
    def __init__(self, context: AppContext, models: ModelServices) -> None:
        self._context: Final = context
        self._models: Final = models
        self._store: Final = context.store

    def state(self) -> dict[str, Any]:
        return {
            "version": __version__,
            "settings": read_settings(self._store),
            "presets": [as_object(preset) for preset in self._store.presets()],
            "folders": self._store.folders(),
            "models": self._models.catalog.objects(),
            "default_model": self._context.default_model(),
            "kept_days": KEPT_DAYS,
            "machine": {
                "system": platform.system(),
                "cores": usable_cores(),
                "memory_bytes": psutil.virtual_memory().total,
            },
        }

    def change(self, body: SettingsBody) -> dict[str, Any]:
        for name, value in msgspec.structs.asdict(body).items():
            if value is not UNSET:
                self._store.set_setting(SETTING_PREFIX + name, value)
        return {"settings": read_settings(self._store)}

    def save_preset(
        self,
        preset: str,
        system: str = "",
        sampling: Mapping[str, Any] = MappingProxyType({}),
    ) -> dict[str, Any]:
        saved = Preset(preset, system, checked_sampling(sampling))
        self._store.save_preset(saved)
        return {"preset": as_object(saved)}

    def delete_preset(self, preset: str) -> dict[str, Any]:
        self._store.delete_preset(preset)
        return {}


def tool_routes(context: AppContext) -> list[Route]:
    """The routes of MCP servers."""
    table = (
        ("GET", "/api/tools", context.tools.list),
        ("POST", "/api/tools/configuration", _read_configuration),
        ("PUT", "/api/tools/{name}", context.tools.save),
        ("DELETE", "/api/tools/{name}", context.tools.remove),
    )
    return [ApiRoute(context.settings, method, path, handler) for method, path, handler in table]


def _read_configuration(text: str) -> dict[str, Any]:
    """The servers of a configuration, of which none is added, or why it cannot be read."""
    try:
        return {"servers": read_configuration(text), "problem": None}
    except InputError as error:  # the text may still be being typed, so the request has not failed
        return {"servers": [], "problem": str(error)}
