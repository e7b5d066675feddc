"""The protocol on standard input and output, from the first line to the end of the process."""

from __future__ import annotations

from typing import Final

from ...models.graph_variant import DeviceKind
from ...runtime.devices.processor import Power
from ...version import __version__
from ..service.model_pool import ModelPool
from .connection import MAX_REQUESTS, Call, Connection
from .line_transport import MAX_UNREAD_BYTES, LineWriter, read_lines
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
    Requests,
    ServerInfo,
)
from .session_methods import MAX_SESSIONS, SessionMethods

_LAST_LINES_S: Final = 5.0
"""Seconds that the client has to read the last responses when the process ends."""


def serve(
    pool: ModelPool,
    input_: int,
    output: int,
    *,
    kind: DeviceKind,
    power: Power,
    max_line_bytes: int,
    debug: bool,
) -> None:
    """Answer the client until the input ends, the client closes the output, or it asks to shut down.

    Args:
        pool: the models; closed at the end.
        input_: descriptor to read.
        output: descriptor to write, which is closed at the end.
        kind: kind of device that models run on.
        power: how models run.
        max_line_bytes: largest line of the client.
        debug: whether to write tracebacks of unexpected errors to standard error.
    """

    def initialize(_call: Call, _params: InitializeParams) -> InitializeResult:
        return InitializeResult(
            protocol_version=PROTOCOL_VERSION,
            server_info=ServerInfo(name="edge-run", version=__version__),
            capabilities=Capabilities(methods=list(METHODS), notifications=list(NOTIFICATIONS)),
            limits=Limits(
                max_line_bytes=max_line_bytes,
                max_requests=MAX_REQUESTS,
                max_sessions=MAX_SESSIONS,
                max_unread_bytes=MAX_UNREAD_BYTES,
            ),
        )

    def requests() -> Requests:
        return Requests(running=connection.running, sessions=len(sessions))

    sessions = SessionMethods(pool)
    handlers = {**ModelMethods(pool, kind, power, requests).handlers(), **sessions.handlers()}
    writer = LineWriter(output, lambda: connection.end())  # noqa: PLW0108  the connection is made after it
    handlers |= {"initialize": initialize, "shutdown": lambda _call, _params: Done()}
    connection = Connection(writer, handlers, debug=debug)
    connection.serve(read_lines(input_, max_line_bytes))
    pool.close()
    writer.close(_LAST_LINES_S)
