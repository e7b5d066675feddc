"""The page's API for MCP servers: list, add, change, remove."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from starlette.routing import Route

from ..api_endpoint import ApiCall, api_route
from ..app_context import AppContext
from .tool_servers import ToolServers
from .tool_settings import ToolServer


class ToolServerBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of a server; its name is in the path."""

    command: str
    arguments: list[str] = []
    environment: dict[str, str] = {}
    enabled: bool = True


def tool_routes(context: AppContext) -> list[Route]:
    """The routes of MCP servers."""
    endpoints = _ToolEndpoints(context.tools)
    table = (
        ("GET", "/api/tools", endpoints.list),
        ("PUT", "/api/tools/{name}", endpoints.save),
        ("DELETE", "/api/tools/{name}", endpoints.remove),
    )
    return [api_route(context.settings, method, path, handler) for method, path, handler in table]


class _ToolEndpoints:
    def __init__(self, servers: ToolServers) -> None:
        self._servers: Final = servers

    def list(self, _call: ApiCall) -> dict[str, Any]:
        return {"servers": self._servers.servers(), "problem": self._servers.problem}

    def save(self, call: ApiCall) -> dict[str, Any]:
        body = call.body(ToolServerBody)
        self._servers.save(ToolServer(name=call.path["name"], **msgspec.structs.asdict(body)))
        return self.list(call)

    def remove(self, call: ApiCall) -> dict[str, Any]:
        self._servers.remove(call.path["name"])
        return self.list(call)
