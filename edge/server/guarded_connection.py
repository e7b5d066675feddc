"""HTTP connections with limits that uvicorn does not have: their number, slow headers, clients that do not read."""

from __future__ import annotations

import asyncio
import socket
from http import HTTPStatus
from typing import ClassVar, Final, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .error_objects import RETRY_AFTER_S, RefusedError, encode_json, error_object
from .server_settings import MAX_HEADER_BYTES, ServerSettings

_CHECKS: Final = 4
"""Checks within the shortest time limit."""


class GuardedConnection(H11Protocol):
    """A connection that is checked from time to time, and closed when its client sends or reads nothing."""

    settings: ClassVar[ServerSettings]
    """Limits; those of a class that `guarded_connections` makes."""

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
            refusal = RefusedError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "busy",
                f"there are {self.settings.max_requests} connections already",
                "try again later",
            )
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
        self._respond(
            RefusedError(
                HTTPStatus.BAD_REQUEST,
                "invalid_http",
                "the request is not valid HTTP/1.1, or its headers are too long",
                f"at most {MAX_HEADER_BYTES} bytes of headers are read",
            )
        )

    def _respond(self, refusal: RefusedError, headers: str = "") -> None:
        """Write an error without the application, and close the connection."""
        body = encode_json(error_object(refusal))
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


def guarded_connection(settings: ServerSettings) -> type[asyncio.Protocol]:
    """The connections of a server with these limits, as a class that uvicorn makes them from."""
    return cast("type[asyncio.Protocol]", type("GuardedConnection", (GuardedConnection,), {"settings": settings}))
