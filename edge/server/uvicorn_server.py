"""The server process: its socket, its signals, and an orderly end."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final, Protocol

import uvicorn
from starlette.types import ASGIApp

from ...errors import InputError
from .guarded_connection import guarded_connection
from .server_settings import MAX_HEADER_BYTES, ServerSettings

_TWICE_S: Final = 0.3
"""Signals within this time are one request to end: `timeout` sends one to the process and one to its group."""
_POLL_S: Final = 0.05
_CLOSING_S: Final = 5
"""Seconds within which responses are written after the last answer has ended."""
_BACKLOG: Final = 128


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket that listens at an address.

    Raises:
        InputError: the address cannot be bound.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise InputError(f"there is no address {host}: {error.strerror or error}", "give another --host") from None
    try:
        # On Windows the option of other systems would let two servers share a port, and its opposite is needed.
        if sys.platform == "win32":
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        else:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise InputError(f"port {port} of {host} is in use", "end what uses it, or give another --port") from None
        raise InputError(
            f"{host} port {port} cannot be used: {error.strerror or error}", "give another --host or --port"
        ) from None
    return listening


class DrainedService(Protocol):
    """The answers behind an application, as the end of its server sees them."""

    @property
    def busy(self) -> bool:
        """Whether an answer is in progress."""

    def drain(self) -> None:
        """Begin no further answers."""

    def cancel_all(self) -> None:
        """End all answers soon."""


def draining_server(app: ASGIApp, service: DrainedService, settings: ServerSettings, drain_s: float) -> DrainingServer:
    """A server that answers requests until a signal; `run` runs it on a socket.

    Args:
        app: the application, whose lifespan ends with the server.
        service: its answers.
        settings: limits of connections.
        drain_s: seconds for which answers that have begun may go on after the signal. A second signal ends the process
            at once.
    """
    # Its warnings are about requests that are not HTTP, of which anybody can send any number.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    config = uvicorn.Config(
        app,
        http=guarded_connection(settings),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=round(settings.keep_alive_s),
        timeout_graceful_shutdown=_CLOSING_S,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        backlog=_BACKLOG,
    )
    return DrainingServer(config, service, drain_s)


class DrainingServer(uvicorn.Server):
    """A server whose running answers are finished before it ends."""

    def __init__(self, config: uvicorn.Config, service: DrainedService, drain_s: float) -> None:
        super().__init__(config)
        self._service: Final = service
        self._drain_s: Final = drain_s
        self._signalled_at: float | None = None
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals within the block, except those that the parent process ignores."""
        loop = self._loop = asyncio.get_running_loop()
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, _frame: FrameType | None) -> None:
            now = time.monotonic()
            if self._signalled_at is None:
                self._signalled_at = now
                loop.call_soon_threadsafe(self.drain)
            elif now - self._signalled_at > _TWICE_S:
                os._exit(128 + number)

        numbers = [signal.SIGINT, signal.SIGTERM]
        if sys.platform == "win32":
            numbers.append(signal.SIGBREAK)
        previous = {number: signal.getsignal(number) for number in numbers}
        for number, handler in previous.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, handle)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def end(self) -> None:
        """Begin to end the server, as a signal does; in any thread."""
        self.should_exit = self._loop is None
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.drain)

    def drain(self) -> None:
        """Begin to end the server; on its event loop."""
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        """Refuse new requests, and end the server when the answers have ended."""
        self._service.drain()
        until = time.monotonic() + self._drain_s
        while self._service.busy and time.monotonic() < until:
            await asyncio.sleep(_POLL_S)
        self._service.cancel_all()
        self.should_exit = True
