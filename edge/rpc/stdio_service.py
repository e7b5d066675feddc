"""The protocol on standard input and output, from the first line to the end of the process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ...models.graph_variant import DeviceKind
from ...runtime.devices.processor import Power
from ...version import __version__
from ..service.body_decoder import decode_body
from ..service.model_pool import ModelPool
from .connection import Call, Connection
from .line_transport import MAX_UNREAD_BYTES, LineReader, LineWriter
from .model_methods import ModelMethods
from .protocol import (
    METHODS,
    NOTIFICATIONS,
    PROTOCOL_VERSION,
    Capabilities,
    Done,
    InitializeParams,
    InitializeResult,
    Limits,
    NoParams,
    Requests,
    ServerInfo,
)
from .session_methods import MAX_SESSIONS, SessionMethods

MAX_LINE_BYTES: Final = 16 << 20
MAX_REQUESTS: Final = 64
_LAST_LINES_S: Final = 5.0
"""Seconds that the client has to read the last responses when the process ends."""
_AT_ONCE: Final = ("initialize", "session/cancel", "shutdown")


@dataclass(frozen=True)
class RpcSettings:
    """How the service runs."""

    kind: DeviceKind = DeviceKind.CPU
    """Kind of device that models run on."""
    power: Power = Power.AUTO
    """How models run."""
    max_line_bytes: int = MAX_LINE_BYTES
    debug: bool = False
    """Whether to write tracebacks of unexpected errors to standard error."""


def serve(pool: ModelPool, settings: RpcSettings, input_: int, output: int) -> None:
    """Answer the client until the input ends, the client closes the output, or it asks to shut down.

    Args:
        pool: the models; closed at the end.
        settings: how the service runs.
        input_: descriptor to read.
        output: descriptor to write, which is closed at the end.
    """
    service = _Service(pool, settings, output)
    service.connection.serve(LineReader(input_, settings.max_line_bytes))
    pool.close()
    service.writer.close(_LAST_LINES_S)


class _Service:
    """Connects the parts."""

    def __init__(self, pool: ModelPool, settings: RpcSettings, output: int) -> None:
        self._settings = settings
        self._sessions = SessionMethods(pool)
        self.writer = LineWriter(output, self._end)
        models = ModelMethods(pool, settings.kind, settings.power, self._requests)
        handlers = {
            "initialize": self._initialize,
            "shutdown": self._shutdown,
            **models.handlers(),
            **self._sessions.handlers(),
        }
        self.connection = Connection(self.writer, handlers, _AT_ONCE, MAX_REQUESTS, debug=settings.debug)

    def _end(self) -> None:
        self.connection.end()

    def _requests(self) -> Requests:
        return Requests(running=self.connection.running, sessions=len(self._sessions))

    def _initialize(self, _call: Call, params: bytes) -> InitializeResult:
        decode_body(params, InitializeParams)
        return InitializeResult(
            protocol_version=PROTOCOL_VERSION,
            server_info=ServerInfo(name="edge-run", version=__version__),
            capabilities=Capabilities(methods=list(METHODS), notifications=list(NOTIFICATIONS)),
            limits=Limits(
                max_line_bytes=self._settings.max_line_bytes,
                max_requests=MAX_REQUESTS,
                max_sessions=MAX_SESSIONS,
                max_unread_bytes=MAX_UNREAD_BYTES,
            ),
        )

    def _shutdown(self, _call: Call, params: bytes) -> Done:
        decode_body(params, NoParams)
        return Done()
