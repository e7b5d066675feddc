"""The list of MCP servers that the user keeps in a private file, and lists in the form of other programs."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from ...errors import EdgeError, InputError
from ...models.atomic import write_atomically
from ...models.user_folders import make_private_file, make_private_folder
from ..service.body_decoder import decode_fields, described

FILE_NAME: Final = "tools.json"
MAX_SERVERS: Final = 32
_log: Final = logging.getLogger(__name__)
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,40}")
_Text = Annotated[str, Meta(max_length=10_000)]
_LISTS: Final = ("mcp", "mcpServers", "servers")
"""Names of the object with the servers: the usual one, and VS Code's, whose settings have the list below `mcp`."""
_ADDRESSES: Final = frozenset({"url", "serverUrl", "httpUrl"})
_PLACEHOLDER: Final = re.compile(r"\$\{[^}]*\}")
_FORM: Final = 'paste {"mcpServers": {"name": {"command": "…", "args": ["…"]}}}'


class ServerFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is said of a server that has a name."""

    command: _Text
    """The program: a path, or a name that is looked up in PATH."""
    arguments: Annotated[list[_Text], Meta(max_length=200)] = []
    environment: dict[_Text, _Text] = {}
    """Variables that it gets besides PATH, HOME and the like."""
    enabled: bool = True
    """Whether it may be started."""


class ToolServer(ServerFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An MCP server that speaks over its standard input and output."""

    name: str

    def check(self) -> None:
        """Raise if it cannot be started with certainty.

        Raises:
            InputError: the name, the command or a variable is not one.
        """
        if not _NAME.fullmatch(self.name):
            raise InputError(f"the name is {self.name!r:.60}", "use 1 to 40 letters, digits, - and _")
        if not self.command.strip():
            raise InputError("the command is empty", "name the program that is the server")
        for text in (self.command, *self.arguments, *self.environment, *self.environment.values()):
            if "\0" in text:
                raise InputError("there is a NUL character in the command", "take it out")
        for variable in self.environment:
            if not variable or "=" in variable:
                raise InputError(f"{variable!r:.60} cannot be the name of a variable", "write NAME=value")


def read_servers(path: Path) -> tuple[list[ToolServer], str | None]:
    """The servers of a list by name, and why it could not be read, in a sentence; none if there is no list."""
    try:
        servers = msgspec.json.decode(path.read_bytes(), type=list[ToolServer])
        for server in servers:
            server.check()
    except FileNotFoundError:
        return [], None
    except (OSError, msgspec.DecodeError, EdgeError) as error:
        problem = f"{path} cannot be read: {error}; it stays as it is until a server is added"
        _log.warning("%s", problem)
        return [], problem
    return sorted(servers, key=lambda server: server.name), None


def write_servers(path: Path, servers: Sequence[ToolServer], *, unreadable: bool) -> None:
    """Keep the servers, in a file that only its owner can read: variables may be secrets.

    Args:
        path: the file.
        servers: the servers.
        unreadable: whether the file could not be read; it is kept under another name.

    Raises:
        EdgeError: the file cannot be written.
    """
    try:
        make_private_folder(path.parent)
        if unreadable:
            path.replace(path.with_name(f"{path.name}.unreadable"))
        make_private_file(path)
        write_atomically(path, msgspec.json.format(msgspec.json.encode(servers)), private=True)
    except OSError as error:
        raise EdgeError(
            f"the list of servers cannot be written: {error.strerror or error}",
            f"give yourself the permission to write {path}",
        ) from error


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
        InputError: the text is not a list of servers.
    """
    text = text.strip()
    if text.startswith('"'):  # cut out of the object around it
        text = "{" + text.rstrip(",") + "}"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        what = f"this is not JSON: {error}"
        raise InputError(what, "copy the whole object, from its first brace to its last") from None
    for name in _LISTS:
        if isinstance(value, dict) and isinstance(value.get(name), dict) and "command" not in value[name]:
            value = value[name]
    if not isinstance(value, dict) or not value:
        raise InputError("there are no servers in it", _FORM)
    if not isinstance(value.get("command", {}), dict):
        raise InputError("the server has no name", _FORM)
    return [_described(name, fields) for name, fields in value.items()]


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
