"""The server process: its socket, limits of its connections, its signals, and an orderly end."""

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
from http import HTTPStatus
from types import FrameType
from typing import ClassVar, Final, cast

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from ...errors import InputError
from .endpoints import RequestService
from .http_protocol import OPENAI, RETRY_AFTER_S, RefusedError, encode_json
from .server_settings import MAX_HEADER_BYTES, ServerSettings

_TWICE_S: Final = 0.3
"""Signals within this time are one request to end: `timeout` sends one to the process and one to its group."""
_POLL_S: Final = 0.05
_CLOSING_S: Final = 5
"""Seconds within which responses are written after the last answer has ended."""
_BACKLOG: Final = 128
_CHECKS: Final = 4
"""Checks within the shortest time limit."""


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


class DrainingServer(uvicorn.Server):
    """A server that answers requests until a signal, and finishes running answers; `run` runs it on a socket.

    Args:
        app: the application, whose lifespan ends with the server.
        service: its answers, and limits of connections.
        drain_s: seconds for which answers that have begun may go on after the signal. A second signal ends the process
            at once.
    """

    def __init__(self, app: ASGIApp, service: RequestService, drain_s: float) -> None:
        settings = service.settings
        # Its warnings are about requests that are not HTTP, of which anybody can send any number.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        connection = type("GuardedConnection", (GuardedConnection,), {"settings": settings})
        config = uvicorn.Config(
            app,
            http=cast("type[asyncio.Protocol]", connection),
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
        super().__init__(config)
        self._service: Final = service
        self._drain_s: Final = drain_s
        self._signalled_at: float | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals within the block, except signals that the parent process ignores."""
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


class GuardedConnection(H11Protocol):
    """A connection that is checked from time to time, and closed when its client sends or reads nothing."""

    settings: ClassVar[ServerSettings]
    """Limits, which `DrainingServer` sets in a subclass."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to check the connection, or refuse it where there are too many."""
        super().connection_made(transport)
        self._incomplete_since: float | None = self.loop.time()
        """Time since which the headers of a request are awaited that has begun, or is the first one."""
        self._unread = 0
        self._unread_since = self.loop.time()
        self._check: asyncio.TimerHandle | None = None
        connected = transport.get_extra_info("socket")
        if connected is not None:
            # A computer that vanished without a word is noticed by the system, also where nothing is written.
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if len(self.connections) > self.settings.max_requests:
            what = f"there are {self.settings.max_requests} connections already"
            refusal = RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "busy", what, "try again later")
            self._respond(refusal, f"retry-after: {RETRY_AFTER_S}\r\n")
        else:
            self._check_later()

    def data_received(self, data: bytes) -> None:
        """Pass what the client sent on."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._incomplete_since = None
        elif self._incomplete_since is None:
            self._incomplete_since = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the checks."""
        if self._check is not None:
            self._check.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002  uvicorn's own text
        """Refuse a request that is not valid HTTP, or has headers that are too long."""
        what = "the request is not valid HTTP/1.1, or its headers are too long"
        hint = f"at most {MAX_HEADER_BYTES} bytes of headers are read"
        self._respond(RefusedError(HTTPStatus.BAD_REQUEST, "invalid_http", what, hint))

    def _respond(self, refusal: RefusedError, headers: str = "") -> None:
        """Write an error without the application, and close the connection."""
        body = encode_json(OPENAI.error(refusal))
        head = (
            f"HTTP/1.1 {refusal.status.value} {refusal.status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n{headers}connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _check_later(self) -> None:
        period = min(self.settings.header_timeout_s, self.settings.write_timeout_s) / _CHECKS
        self._check = self.loop.call_later(period, self._check_now)

    def _check_now(self) -> None:
        now = self.loop.time()
        if self._incomplete_since is not None and now - self._incomplete_since > self.settings.header_timeout_s:
            self.transport.abort()
            return
        unread = self.transport.get_write_buffer_size()
        # While an answer is written and its client reads slowly, the amount that waits may grow.
        writing = not (self.flow.write_paused or self.cycle is None or self.cycle.response_complete)
        if not unread or writing or unread < self._unread:
            self._unread_since = now
        self._unread = unread
        if now - self._unread_since > self.settings.write_timeout_s:
            self.transport.abort()
            return
        self._check_later()
