"""`edge-run app [MODEL ...]`: the chat app, a page in the browser served by this machine."""

from __future__ import annotations

import os
import platform
import threading
import webbrowser
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ...errors import InputError, missing_extra
from ...models.user_folders import data_folder
from ...runtime.arguments.argument_types import option
from ...runtime.arguments.load_options import LoadOptions
from ...runtime.prefill import PrefillMode
from ..conversations.store import ConversationStore
from ..terminal.output import showing_tracebacks, write_error
from .serve import POOL, Models
from .shared_options import OptionsOf, embedding_option, takes_options

if TYPE_CHECKING:
    import socket

    from ..server.uvicorn_server import DrainingServer
    from ..service.model_pool import ModelPool

_HOST: Final = "127.0.0.1"
_PORT: Final = 8642
_PORTS: Final = 20
"""Number of ports that are tried where none is given."""
_MAX_BODY_BYTES: Final = 128 << 20
"""Largest body of a request: the import of an export of many conversations."""
_DRAIN_S: Final = 10.0
"""Seconds within which the passes in progress have to end when the app is ended."""
_END_S: Final = 30.0
_LOAD: Final = OptionsOf(LoadOptions(), without=("tokenizer", "tool_format", "learned", "max_waiting"))


@dataclass(frozen=True)
class AppOptions:
    """Options of `edge-run app`."""

    port: int | None = option(
        None, "Port of the app; 0 for a free one.", metavar="N", least=0, most=65535, unset=f"{_PORT} or the next free"
    )
    browser: bool = option(True, "Open the page in the browser, or only print its address.")
    window: bool = option(False, "Open the page in a window of its own (extra window).")
    embedding_model: str | None = embedding_option()


_APP: Final = OptionsOf(AppOptions())


@takes_options(POOL, _APP, _LOAD, offline=True)
def app(
    models: Models = None,
    **given: Any,
) -> None:
    """Chat with models in the browser, until Ctrl-C; everything stays on this machine.

    The address that is printed opens the page once, within a few minutes. While the app runs, another edge-run app
    opens it again. The guide is docs/app.md.

    Example: edge-run app
    """
    options, load = _APP.record(given), _LOAD.record(given)
    with missing_extra("the app", "app"):
        from ..app import app_service  # noqa: F401  what it needs has to be there before the app begins
        from ..app.app_access import join_running_app
        from ..documents.retrieval import passage_encoder
        from ..server import uvicorn_server  # noqa: F401
    if options.window:
        try:
            import webview  # noqa: F401
        except ModuleNotFoundError as error:
            raise InputError("a window needs the package pywebview", 'pip install "edge-run[window]"') from error
    if options.embedding_model is not None:
        passage_encoder(options.embedding_model)
    with ExitStack() as stack:
        if (running := join_running_app(stack, data_folder())) is not None:
            others = ", with the models that it was started with; end it first to give it others"
            write_error(f"edge-run: the app runs already{others if models else ''}")
            _show(running, browser=options.browser, window=options.window)
            return
        store = stack.enter_context(ConversationStore(notice=lambda text: write_error(f"edge-run: {text}")))
        pool = stack.enter_context(POOL.record(given).open(models, load))
        listening = stack.enter_context(_bound_socket(options.port))
        server, url = _server(store, pool, listening.getsockname()[1], load, options.embedding_model)
        with showing_tracebacks(given["debug"]):
            if options.window:
                _run_in_window(server, listening, url)
            else:
                _show(url, browser=options.browser, window=False)
                server.run([listening])


def _server(
    store: ConversationStore, pool: ModelPool, port: int, load: LoadOptions, embedding_model: str | None
) -> tuple[DrainingServer, str]:
    """The app at a port, which other processes of this user find from now on, and the address that opens it once."""
    from ..app.app_access import AppAccess, announce, open_url, session_secret
    from ..app.app_context import AppContext, EventChannel
    from ..app.app_service import AppService, chat_app
    from ..server.server_settings import ServerSettings
    from ..server.uvicorn_server import DrainingServer
    from ..tools.tool_servers import ToolServers

    folder = data_folder()
    settings = ServerSettings(host=_HOST, max_body_bytes=_MAX_BODY_BYTES)
    access = AppAccess(session_secret(folder), port)
    events = EventChannel()
    tools = ToolServers(folder, lambda: events.publish("tools"))
    # What decides which tokens a model computes and how, for other processes: options of `edgerun.load` as JSON values.
    shared = {name: getattr(load, name) for name in ("device", "threads", "context", "draft", "cache", "kv")}
    # Checks of exactness compare texts whose prompts were read by the model's own graph.
    shared |= {"prefill": PrefillMode.PLAIN.value}
    service = AppService(AppContext(store, pool, events, settings, tools, shared, embedding_model), access)
    server = DrainingServer(chat_app(service), service, _DRAIN_S)
    announce(folder, port, access)
    return server, open_url(port, access.new_token())


def _bound_socket(port: int | None) -> socket.socket:
    """A socket at the given port, or else at the first free one from the default on.

    Raises:
        InputError: there is none.
    """
    from ..server.uvicorn_server import bound_socket

    if port is not None:
        return bound_socket(_HOST, port)
    for candidate in range(_PORT, _PORT + _PORTS):
        try:
            found = bound_socket(_HOST, candidate)
        except InputError:
            continue
        if candidate != _PORT:
            write_error(f"edge-run: port {_PORT} is in use, so the app is at port {candidate}")
        return found
    raise InputError(f"the ports {_PORT} to {_PORT + _PORTS - 1} of {_HOST} are in use", "give another --port")


def _show(url: str, *, browser: bool, window: bool) -> None:
    """Print the address, and open it as was asked for."""
    write_error(f"edge-run: open {url}")
    if window:
        import webview

        webview.create_window("edge-run", url, width=1100, height=800)
        webview.start()  # returns when the window is closed
        return
    # Without a desktop, Python would start a text browser in this terminal.
    has_display = platform.system() in {"Windows", "Darwin"} or any(map(os.getenv, ("DISPLAY", "WAYLAND_DISPLAY")))
    if browser and has_display:
        # Starting a browser can take seconds, and the page needs the server.
        threading.Thread(target=webbrowser.open, args=(url,), name="edge-run browser", daemon=True).start()


def _run_in_window(server: DrainingServer, listening: socket.socket, url: str) -> None:
    """Run the server in a thread while the window is open, which has to be in the main thread."""
    thread = threading.Thread(target=server.run, args=([listening],), name="edge-run app", daemon=True)
    thread.start()
    try:
        _show(url, browser=False, window=True)
    finally:
        server.end()
        thread.join(_END_S)
