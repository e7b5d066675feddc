"""What runs behind the page, its API for state and settings, start at login, and the ASGI application of all of it."""

from __future__ import annotations

import logging
import os
import platform
import plistlib
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import partial
from http import HTTPStatus
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec
import psutil
from msgspec import UNSET
from starlette.middleware import Middleware
from starlette.routing import Match, Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ...errors import EdgeError, InputError
from ...models.atomic import write_atomically
from ...models.file_system import remove
from ...runtime.devices.processor import usable_cores
from ...version import __version__
from ..conversations.records import ChangeKind, MessageState, Preset
from ..conversations.store import KEPT_DAYS
from ..server.asgi_app import asgi_app, closing_app, guarded, origin_refusal
from ..server.endpoints import RequestService
from ..server.http_protocol import ProtocolRoute, RefusedError
from ..server.json_endpoint import json_routes
from ..tools.tool_settings import read_configuration
from .app_access import OPEN_PATH, AppAccess, session_refusal
from .app_context import SETTING_PREFIX, AppContext, SettingsBody, read_settings
from .conversation_endpoints import conversation_routes
from .generations import Generations
from .models.model_endpoints import ModelServices, model_objects, model_routes
from .page_files import PageFiles, index_page, with_page_headers

_log: Final = logging.getLogger(__name__)
_POLL_S: Final = 1.0
"""Seconds between two looks for what other processes have written."""


class AppService(RequestService):
    """The state of one running app: requests of other programs to its APIs, and what the page works with.

    Args:
        context: the conversations, the models and the windows; the models are closed with the service.
        access: who is let in.
    """

    def __init__(self, context: AppContext, access: AppAccess) -> None:
        super().__init__(context.pool, context.settings)
        self.context: Final = context
        self.access: Final = access
        self.generations: Final = Generations(context)
        """Messages of conversations that are generated."""
        self.models: Final = ModelServices(context)
        """Downloads, exports, comparisons and exactness checks."""
        context.store.listener = self._publish
        self._ending: Final = threading.Event()
        self._watching: Final = threading.Thread(target=self._watch, name="edge-run changes", daemon=True)
        self._watching.start()

    @property
    def busy(self) -> bool:
        """Whether an answer is in progress."""
        return super().busy or self.generations.busy

    def drain(self) -> None:
        """Begin no further answers, and end those in progress after their current pass, as interrupted."""
        self.access.ending = True
        super().drain()
        super().cancel_all()
        self.generations.interrupt_all()

    def cancel_all(self) -> None:
        """Let the windows go, which have been told how their answers ended."""
        self.context.events.close()

    def close(self) -> None:
        """End all answers, and unload all models."""
        self.drain()
        self.generations.close()
        self.context.events.close()
        self._ending.set()
        self._watching.join()
        self.models.close()
        self.context.tools.close()
        super().close()

    def _publish(self, kind: ChangeKind, conversation_id: str, message_id: str) -> None:
        """Tell the windows that listen of a change of the store by this process, in the thread that made it."""
        store, events = self.context.store, self.context.events
        if not events.listening:
            return
        try:
            with self.generations.lock:  # what another thread reads later is published later
                match kind:
                    case ChangeKind.CONVERSATION:
                        events.publish("conversation", conversation=store.conversation(conversation_id))
                    case ChangeKind.CONVERSATION_DELETED:
                        events.publish("conversation_deleted", id=conversation_id)
                    case ChangeKind.MESSAGE:
                        message = store.message(message_id)
                        live = self.generations.live(message.id)
                        if live is None or message.state is not MessageState.WRITING:
                            events.publish("message", message=message)
                        else:  # its text is newer than the store's
                            with live.snapshot(message) as (shown, _):
                                events.publish("message", message=shown)
                    case ChangeKind.MESSAGE_DELETED:
                        events.publish("message_deleted", id=message_id, conversation=conversation_id)
                    case _:
                        events.publish("settings")
        except EdgeError as error:
            # What is gone already is published by the change that removed it.
            _log.info("a change was not published: %s", error)

    def _watch(self) -> None:
        """Look for what other processes have written, in a thread of its own."""
        while not self._ending.wait(_POLL_S):
            try:
                if self.context.events.listening and self.context.store.database.changed_elsewhere():
                    self.context.events.publish("reload")
            except EdgeError as error:
                _log.info("the store cannot be watched: %s", error)


def chat_app(service: AppService) -> ASGIApp:
    """The ASGI application of the app; ending its lifespan closes the service."""
    context = service.context
    app = closing_app(
        [
            Route("/", index_page, methods=["GET"]),
            Mount("/page", PageFiles()),
            Route(OPEN_PATH, service.access.enter, methods=["GET"]),
            Route(OPEN_PATH, service.access.give_token, methods=["POST"]),
            Route("/api/events", context.events, methods=["GET"]),
            *state_routes(context),
            *conversation_routes(context, service.generations),
            *model_routes(service.models),
            *tool_routes(context),
        ],
        [
            Middleware(with_page_headers),
            Middleware(guarded, partial(origin_refusal, context.settings)),
            Middleware(guarded, partial(session_refusal, service.access)),
        ],
        service.close,
    )
    programs = asgi_app(service, Middleware(guarded, _file_refusal))
    paths = [route for route in programs.routes if isinstance(route, ProtocolRoute)]

    async def side_by_side(scope: Scope, receive: Receive, send: Send) -> None:
        for_programs = scope["type"] == "http" and (
            scope["path"].startswith("/v1/") or any(route.matches(scope)[0] is Match.FULL for route in paths)
        )
        await (programs if for_programs else app)(scope, receive, send)

    return side_by_side


def _file_refusal(scope: Scope) -> RefusedError | None:
    """Why a program may not download or remove models: programs of all users of this machine reach the app."""
    if scope["path"] not in ("/api/pull", "/api/delete"):
        return None
    what = "programs may not download or remove models through the app"
    return RefusedError(HTTPStatus.FORBIDDEN, "no_session", what, "use its page, edge-run pull or edge-run rm")


def state_routes(context: AppContext) -> list[ProtocolRoute]:
    """The routes of the state and the settings."""
    store = context.store

    def state() -> dict[str, Any]:
        return {
            "version": __version__,
            "settings": read_settings(store),
            "presets": store.presets(),
            "folders": store.folders(),
            "models": model_objects(context),
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
        saved = Preset(preset, system, {name: value for name, value in sampling.items() if value is not None})
        store.save_preset(saved)
        return {"preset": saved}

    def delete_preset(preset: str) -> dict[str, Any]:
        store.delete_preset(preset)
        return {}

    table = (
        ("GET", "/api/state", state),
        ("GET", "/api/usage", lambda: {"usage": store.usage()}),
        ("PATCH", "/api/settings", change),
        ("GET", "/api/login", login_state),
        ("PUT", "/api/login", change_login),
        ("PUT", "/api/presets/{preset:path}", save_preset),
        ("DELETE", "/api/presets/{preset:path}", delete_preset),
    )
    return json_routes(context.settings, table)


def tool_routes(context: AppContext) -> list[ProtocolRoute]:
    """The routes of MCP servers."""
    table = (
        ("GET", "/api/tools", context.tools.list),
        ("POST", "/api/tools/configuration", _read_configuration),
        ("PUT", "/api/tools/{name}", context.tools.save),
        ("DELETE", "/api/tools/{name}", context.tools.remove),
    )
    return json_routes(context.settings, table)


def _read_configuration(text: str) -> dict[str, Any]:
    """The servers of a configuration, of which none is added, or why it cannot be read."""
    try:
        return {"servers": read_configuration(text), "problem": None}
    except InputError as error:  # the text may still be being typed, so the request has not failed
        return {"servers": [], "problem": str(error)}


_PROGRAM: Final = "import sys; from edgerun.edge.cli.main import main; sys.exit(main())"
_UNIT: Final = "[Unit]\nDescription=edge-run\n\n[Service]\nExecStart={}\n\n[Install]\nWantedBy=default.target\n"


def login_files() -> Mapping[Path, str | Path]:
    """The files that start the app in the background, with their text, or what they link to."""
    command = [sys.executable, "-I", "-c", _PROGRAM, "app", "--no-browser"]
    if platform.system() == "Windows":
        menu = Path(os.environ.get("APPDATA") or Path.home() / "AppData/Roaming") / "Microsoft/Windows/Start Menu"
        line = subprocess.list2cmdline(command).replace("%", "%%")
        return {menu / "Programs/Startup/edge-run.cmd": f'@chcp 65001 >nul\r\n@start "edge-run" /min {line}\r\n'}
    if platform.system() == "Darwin":
        agent = {"Label": "edge-run", "ProgramArguments": command, "RunAtLoad": True}
        return {Path.home() / "Library/LaunchAgents/edge-run.plist": plistlib.dumps(agent).decode()}
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd/user"
    words = (word.translate({ord(each): "\\" + each for each in '"\\'}) for word in command)
    line = " ".join(f'"{word}"' for word in words).replace("%", "%%").replace("$", "$$")
    unit = folder / "edge-run.service"
    return {unit: _UNIT.format(line), folder / "default.target.wants" / unit.name: unit}


def login_state() -> dict[str, Any]:
    """Whether the app starts at login, and the files that make it do so, which may not be there yet."""
    files = login_files()
    texts = {str(path): f"a link to {text}" if isinstance(text, Path) else text for path, text in files.items()}
    return {"enabled": all(path.exists() for path in files), "files": texts}


def change_login(enabled: bool) -> dict[str, Any]:
    """Write the files, or remove them and nothing else; returns what `login_state` returns.

    Raises:
        InputError: the system refuses.
    """
    try:
        for path, text in login_files().items():
            if enabled and isinstance(text, str):
                write_atomically(path, text.encode())
                continue
            remove(path)
            if enabled:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.symlink_to(text)
    except OSError as error:
        raise InputError(f"{error.filename} cannot be changed: {error.strerror}", "check its permissions") from error
    return login_state()
