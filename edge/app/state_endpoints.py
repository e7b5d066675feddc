"""The page's API for what is neither a conversation nor a model: version, settings, presets, MCP servers."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec
import psutil
from msgspec import UNSET
from starlette.routing import Route

from ...errors import InputError
from ...runtime.devices.processor import usable_cores
from ...version import __version__
from ..conversations.records import Preset
from ..conversations.store import KEPT_DAYS
from .api_endpoint import ApiRoute
from .app_context import SETTING_PREFIX, AppContext, SettingsBody, read_settings
from .conversation_endpoints import checked_sampling
from .models.model_endpoints import ModelServices
from .tools.tool_settings import read_configuration


def state_routes(context: AppContext, models: ModelServices) -> list[Route]:
    """The routes of the state and the settings."""
    store = context.store

    def state() -> dict[str, Any]:
        return {
            "version": __version__,
            "settings": read_settings(store),
            "presets": store.presets(),
            "folders": store.folders(),
            "models": models.catalog.objects(),
            "default_model": context.default_model(),
            "kept_days": KEPT_DAYS,
            "machine": {
                "system": platform.system(),
                "cores": usable_cores(),
                "memory_bytes": psutil.virtual_memory().total,
            },
        }

    def change(body: SettingsBody) -> dict[str, Any]:
        for name, value in msgspec.structs.asdict(body).items():
            if value is not UNSET:
                store.set_setting(SETTING_PREFIX + name, value)
        return {"settings": read_settings(store)}

    def save_preset(
        preset: str, system: str = "", sampling: Mapping[str, Any] = MappingProxyType({})
    ) -> dict[str, Any]:
        saved = Preset(preset, system, checked_sampling(sampling))
        store.save_preset(saved)
        return {"preset": saved}

    def delete_preset(preset: str) -> dict[str, Any]:
        store.delete_preset(preset)
        return {}

    table = (
        ("GET", "/api/state", state),
        ("GET", "/api/usage", lambda: {"usage": store.usage()}),
        ("PATCH", "/api/settings", change),
        ("PUT", "/api/presets/{preset:path}", save_preset),
        ("DELETE", "/api/presets/{preset:path}", delete_preset),
    )
    return [ApiRoute(context.settings, method, path, handler) for method, path, handler in table]


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
