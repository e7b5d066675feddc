"""The list of MCP servers that the user keeps in a private file, and lists in the form of other programs."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from ...errors import EdgeError, InputError
from ...models.atomic import write_atomically
from ...models.user_folders import make_private_file, make_private_folder
from ...models.user_text import read_text
from ..service.body_decoder import decode_fields, described

FILE_NAME: Final = "tools.json"
MAX_SERVERS: Final = 32
_log: Final = logging.getLogger(__name__)
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,40}")
_Text = Annotated[str, Meta(max_length=10_000)]
_LISTS: Final = ("mcp", "mcpServers", "servers")
"""Names of the object with the servers: the usual one, and VS Code's, whose settings have the list below `mcp`."""
_ADDRESSES: Final = frozenset({"url", "serverUrl", "httpUrl"})
"""Names that these programs have for the address of a server."""
_TYPES: Final = ("stdio", "http", "streamable-http", "streamable_http", "streamableHttp")
"""Names of the two transports."""
_PLACEHOLDER: Final = re.compile(r"\$\{[^}]*\}")
_FORM: Final = 'write {"mcpServers": {"name": {"command": "…", "args": ["…"]}}}, or "url" for "command" and "args"'


def host_of(url: str) -> str:
    """The host of a web address; empty if it is not one."""
    try:
        parts = urlsplit(url)
        return parts.hostname or "" if parts.scheme in {"http", "https"} and parts.port != 0 else ""
    except ValueError:  # the port is not a number, or brackets do not match
        return ""


class ServerFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is said of a server that has a name."""

    command: _Text = ""
    """The program: a path, or a name that is looked up in PATH; empty for a server with an address."""
    arguments: Annotated[list[_Text], Meta(max_length=200)] = []
    environment: dict[_Text, _Text] = {}
    """Variables that it gets besides PATH, HOME and the like."""
    url: _Text = ""
    """The address of a server that runs already."""
    headers: dict[_Text, _Text] = {}
    """Headers of every request to the address."""
    enabled: bool = True
    """Whether it may be started."""


class ToolServer(ServerFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An MCP server: a program that speaks over its standard input and output, or an address (Streamable HTTP)."""

    name: str

    def check(self) -> None:
        """Raise if it cannot be started with certainty.

        Raises:
            InputError: the name, the command, a variable or the address is not one.
        """
        if not _NAME.fullmatch(self.name):
            raise InputError(f"the name is {self.name!r:.60}", "use 1 to 40 letters, digits, - and _")
        if bool(self.url) == bool(self.command.strip()):
            what = "there are a command and a URL" if self.url else "the command is empty"
            raise InputError(what, "name the program that is the server, or give a URL")
        if self.url and not host_of(self.url):
            raise InputError(f"the URL is {self.url!r:.200}", "write one such as http://127.0.0.1:8000/mcp")
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

    command: str = ""
    args: list[str] = []
    env: dict[str, Any] = {}
    url: str = ""
    headers: dict[str, Any] = {}
    disabled: bool = False
    type: str = "stdio"


def read_configuration(text: str) -> list[dict[str, Any]]:
    """The servers of a configuration as JSON objects. Nothing is added or started.

    Args:
        text: an object with the servers by name, alone or below one of the names that these programs give it. The
            braces around it may be missing.

    Returns:
        For each server the fields of `ToolServer`, the names of the fields that are `ignored`, and the `problem` that
        prevents it from being added, or None.

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
        if isinstance(value, dict) and isinstance(value.get(name), dict) and not _is_server(value[name]):
            value = value[name]
    if not isinstance(value, dict) or not value:
        raise InputError("there are no servers in it", _FORM)
    if _is_server(value):
        raise InputError("the server has no name", _FORM)
    return [_described(name, fields) for name, fields in value.items()]


def configured_servers(path: Path) -> list[ToolServer]:
    """The servers of a file in the form of these programs.

    Raises:
        InputError: it cannot be read, or one of the servers cannot be started.
    """
    found = read_configuration(read_text(path, "give a file with mcpServers"))
    for each in found:
        if each["problem"] is not None:
            raise InputError(f"the server {each['name']!r:.60} in {path} cannot be used", each["problem"])
    return [ToolServer(**{name: each[name] for name in ToolServer.__struct_fields__}) for each in found]


def _is_server(value: dict[str, Any]) -> bool:
    return any(isinstance(value.get(field), str) for field in ("command", *_ADDRESSES))


def _described(name: str, fields: Any) -> dict[str, Any]:
    members = fields.items() if isinstance(fields, dict) else ()
    given = {"url" if key in _ADDRESSES else key: value for key, value in members}
    shown: dict[str, Any] = {"name": name, **msgspec.structs.asdict(ServerFields())}
    problem = None
    try:
        if given.get("type", "stdio") not in _TYPES:
            what = f"its type is {described(given['type'])}"
            raise InputError(what, "servers are programs (stdio), or are reached over Streamable HTTP (http)")
        configured = decode_fields(given, _Configured)
        for field in ("env", "headers"):
            for key, text in getattr(configured, field).items():
                if not isinstance(text, str):
                    raise InputError(f"{field}.{key} is {described(text)}", "it must be a string")
        shown |= {"command": configured.command, "arguments": configured.args, "environment": configured.env}
        shown |= {"url": configured.url, "headers": configured.headers, "enabled": not configured.disabled}
        ToolServer(**shown).check()
        texts = (configured.command, configured.url, *configured.args)
        for part in (*texts, *configured.env.values(), *configured.headers.values()):
            if found := _PLACEHOLDER.search(part):
                raise InputError(f"it has the placeholder {found[0]:.60}", "write the value itself")
    except EdgeError as error:
        problem = str(error)
    ignored = sorted(given.keys() - set(_Configured.__struct_fields__))
    return {**shown, "ignored": ignored, "problem": problem}
