"""The page's API for MCP servers: list, read a configuration, add, change, remove."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from starlette.routing import Route

from ..api_endpoint import ApiCall, api_route
from ..app_context import AppContext
from .server_configuration import ConfigurationError, read_configuration
from .tool_servers import ToolServers
from .tool_settings import ToolServer


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
