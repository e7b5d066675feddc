"""Reads the JSON in which Claude Desktop, Cursor and VS Code keep their MCP servers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from ....errors import EdgeError, InputError
from ...service.body_decoder import decode_fields
from ...service.strict_json import described
from .tool_settings import ToolServer

_LISTS: Final = ("mcpServers", "servers")
"""Names of the object with the servers: the usual one, and that of VS Code."""
_ADDRESSES: Final = frozenset({"url", "serverUrl", "httpUrl"})
_PLACEHOLDER: Final = re.compile(r"\$\{[^}]*\}")
_FORM: Final = 'paste {"mcpServers": {"name": {"command": "…", "args": ["…"]}}}'


class ConfigurationError(InputError):
    """A text is not a list of servers."""


class _Configured(msgspec.Struct, kw_only=True):
    """A server in the form of these programs. Other fields of theirs are named to the user, and not taken over."""

    command: str
    args: list[str] = []
    env: dict[str, Any] = {}
    disabled: bool = False
    type: str = "stdio"


def read_configuration(text: str) -> list[dict[str, Any]]:
    """The servers of a configuration as JSON objects. Nothing is added or started.

    Args:
        text: an object with the servers by name, alone or below one of the names that these programs give it. The
            braces around it may be missing.

    Returns:
        For each server its `name`, what `ToolServer` keeps (`command`, `arguments`, `environment`, `enabled`), the
        names of the fields that are `ignored`, and the `problem` that prevents it from being added, or None.

    Raises:
        ConfigurationError: the text is not a list of servers.
    """
    return [_described(name, fields) for name, fields in _servers(_parsed(text)).items()]


def _parsed(text: str) -> Any:
    text = text.strip()
    if text.startswith('"'):  # cut out of the object around it
        text = "{" + text.rstrip(",") + "}"
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        what = f"this is not JSON: {error}"
        raise ConfigurationError(what, "copy the whole object, from its first brace to its last") from None


def _servers(value: Any) -> Mapping[str, Any]:
    for name in ("mcp", *_LISTS):  # settings of VS Code have the list below `mcp`
        if isinstance(value, dict) and isinstance(value.get(name), dict) and "command" not in value[name]:
            value = value[name]
    if not isinstance(value, dict) or not value:
        raise ConfigurationError("there are no servers in it", _FORM)
    if not isinstance(value.get("command", {}), dict):
        raise ConfigurationError("the server has no name", _FORM)
    return value


def _described(name: str, fields: Any) -> dict[str, Any]:
    given = fields if isinstance(fields, dict) else {}
    shown: dict[str, Any] = {"name": name, "command": "", "arguments": [], "environment": {}, "enabled": True}
    problem = None
    try:
        if _ADDRESSES & given.keys() or given.get("type", "stdio") != "stdio":
            raise InputError("it is reached over HTTP", "only servers that are programs can be added")
        configured = decode_fields(given, _Configured)
        for key, variable in configured.env.items():
            if not isinstance(variable, str):
                raise InputError(f"env.{key} is {described(variable)}", "it must be a string")
        shown |= {"command": configured.command, "arguments": configured.args}
        shown |= {"environment": configured.env, "enabled": not configured.disabled}
        ToolServer(**shown).check()
        for part in (configured.command, *configured.args, *configured.env.values()):
            if found := _PLACEHOLDER.search(part):
                raise InputError(f"it has the placeholder {found[0]:.60}", "write the value itself")
    except EdgeError as error:
        problem = str(error)
    ignored = sorted(given.keys() - set(_Configured.__struct_fields__))
    return {**shown, "ignored": ignored, "problem": problem}
