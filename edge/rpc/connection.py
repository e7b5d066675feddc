"""The connection to the client: messages in, responses out, requests that run at the same time."""

from __future__ import annotations

import logging
import math
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import msgspec

from ...errors import CancelledError, EdgeError
from ...runtime.scheduling.request_run import Run
from ..service.body_decoder import MAX_DEPTH, described
from ..service.request_error import ErrorCode, RequestError
from ..service.text_bodies import Parameters
from .line_transport import LineWriter
from .protocol import NOTIFICATIONS, PROTOCOL_VERSION, ProgressParams, ProtocolCode, RequestId, response_error

_log: Final = logging.getLogger(__name__)
MAX_REQUESTS: Final = 64
"""Number of requests in progress above which others are refused."""
_AT_ONCE: Final = ("initialize", "session/cancel", "shutdown")
"""Methods that are answered before the next line is read."""
_VERSION: Final = "2.0"
_FIELDS: Final = ("jsonrpc", "id", "method", "params")
_MAX_ID_CHARS: Final = 200
_MAX_EXACT: Final = 2**53
"""Largest integer that JSON parsers of all languages read exactly."""
_PROGRESS_S: Final = 0.1
"""Seconds between progress notifications of one stage."""
_STRUCTURE: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"(\s*:)?|[\[\]{}]')
"""A string, which is a name if a colon follows, or an end of an object or a list."""
_LINE_ENDS: Final = {char.encode(): f"\\u{ord(char):04x}".encode() for char in "\x85\u2028\u2029"}


def encode_line(message: Mapping[str, Any]) -> bytes:
    """Encode a message as a line without its end.

    Some readers, `readline` of Node among them, end lines at further characters of Unicode, so these are escaped. JSON
    itself escapes all control characters of ASCII.
    """
    line = msgspec.json.encode(message)
    for char, escape in _LINE_ENDS.items():
        line = line.replace(char, escape)
    return line


class Call(Run[None]):
    """A request in progress; a notification of the client runs in its reader's thread.

    Args:
        id_: the id of the request; empty for a notification.
        method: what is called.
        connection: where it came from, and where notifications go.
        work: answers the request.
    """

    def __init__(self, id_: RequestId, method: str, connection: Connection, work: Callable[[Run[None]], None]) -> None:
        super().__init__(work, f"edge-run {method}")
        self.id: Final = id_
        self.method: Final = method
        self.connection: Final = connection
        self._shown: tuple[str, float] | None = None
        """Stage and time of the last progress notification."""

    def notify(self, method: str, params: msgspec.Struct) -> None:
        """Send a notification; waits while the client does not read, and sends none when the request is cancelled."""
        assert isinstance(params, NOTIFICATIONS[method])  # noqa: S101  what the schema promises
        message = {"jsonrpc": _VERSION, "method": method, "params": params}
        self.connection.output.notify(encode_line(message), self.cancellation)

    def progress(self, stage: str, fraction: float, **counted: int) -> None:
        """Report progress to the client, not more often than a person can follow; `counted` are further fields."""
        params = ProgressParams(request_id=self.id, stage=stage, fraction=min(max(fraction, 0.0), 1.0), **counted)
        now = time.monotonic()
        shown = self._shown
        if shown is None or shown[0] != params.stage or params.fraction >= 1 or now - shown[1] >= _PROGRESS_S:
            self._shown = params.stage, now
            self.notify("$/progress", params)


def method_of(name: str, function: Callable[..., msgspec.Struct | Mapping[str, Any]]) -> Parameters:
    """A method of the protocol, or a notification of the client.

    Args:
        name: its name.
        function: answers a request: called with the owner, the `Call` and the parameters; returns the result.
    """
    return Parameters(function, ("self", "_self", "call", "_call"), f"{name.title().replace('/', '')}Params")


def methods_of(owner: type) -> dict[str, Parameters]:
    """The public methods of a class by their names in the protocol: `models_list` is `models/list`."""
    named = {name: each for kind in reversed(owner.__mro__[:-1]) for name, each in vars(kind).items()}
    return {
        (method := name.replace("_", "/", 1)): method_of(method, each) for name, each in named.items() if name[0] != "_"
    }


class Connection:
    """Reads messages and answers them.

    Every request runs in a thread of its own, except those that take no time. The response to a request that cannot be
    told apart from another one has the id null.

    Args:
        output: where responses and notifications go.
        owner: has the methods that answer the requests.
        methods: the methods of requests, by name.
        notifications: the notifications of the client.
        debug: whether to write tracebacks of unexpected errors to standard error.
    """

    def __init__(
        self,
        output: LineWriter,
        owner: object,
        methods: Mapping[str, Parameters],
        notifications: Mapping[str, Parameters],
        *,
        debug: bool,
    ) -> None:
        self.output: Final = output
        self._owner: Final = owner
        self._methods: Final = methods
        self._notifications: Final = notifications
        self._debug: Final = debug
        self._lock: Final = threading.Lock()
        self._running: Final[dict[RequestId, Call]] = {}
        self._initialized = self._closing = False
        self._ended: Final = threading.Event()

    @property
    def running(self) -> int:
        """Number of requests in progress."""
        return len(self._running)

    def serve(self, lines: Iterable[bytes | None]) -> None:
        """Answer lines in a thread of their own; return at their end, or when `end` was called.

        All requests in progress are cancelled then, and their responses written.
        """
        threading.Thread(target=self._read, args=(lines,), name="edge-run input", daemon=True).start()
        self._ended.wait()
        self.output.end()
        with self._lock:
            self._closing = True
            running = list(self._running.values())
        for call in running:
            call.cancellation.cancel()
        for call in running:
            call.join()

    def end(self) -> None:
        """Let `serve` return."""
        self._ended.set()

    def cancel(self, id_: RequestId) -> bool:
        """Cancel a request; returns whether it was in progress."""
        with self._lock:
            found = self._running.get(id_)
        if found is not None:
            found.cancellation.cancel()
        return found is not None

    def _read(self, lines: Iterable[bytes | None]) -> None:
        try:
            for line in lines:
                if self._ended.is_set():
                    return
                if line is None or line.strip():
                    self._receive(line)
        finally:
            self.end()

    def _receive(self, line: bytes | None) -> None:
        """Take one message; what is wrong with it is told in one response."""
        id_: RequestId | None = None
        try:
            fields = _fields(line)
            id_ = _request_id(fields) if "id" in fields else None
            method = _method(fields)
            params = _params(fields)
            if "id" not in fields:
                self._take_notification(method, params)
            elif id_ is not None:
                self._take_request(id_, method, params)
        except Exception as error:  # noqa: BLE001  the client is told
            # A response with the id of another request would be taken for its response.
            duplicate = isinstance(error, RequestError) and error.code is ProtocolCode.DUPLICATE_ID
            self.output.respond(self._failure(None if duplicate else id_, error))

    def _take_request(self, id_: RequestId, method: str, params: bytes) -> None:
        if method not in self._methods:
            what, hint = f"there is no method {method!r:.200}", f"methods are {', '.join(self._methods)}"
            raise RequestError(what, hint, code=ProtocolCode.METHOD_NOT_FOUND, param="method")
        if not self._initialized and method != "initialize":
            hint = f'send initialize first, with {{"protocol_version": {PROTOCOL_VERSION}}}'
            raise RequestError(f"{method} comes before initialize", hint, code=ProtocolCode.NOT_INITIALIZED)
        if self._initialized and method == "initialize":
            raise _invalid("initialize was sent before", "send it once")
        call = Call(id_, method, self, lambda _: self._answer(call, params))
        with self._lock:
            if id_ in self._running:
                what, hint = f"a request with the id {id_!r} is in progress", "give every request an id of its own"
                raise RequestError(what, hint, code=ProtocolCode.DUPLICATE_ID, param="id")
            if method not in _AT_ONCE:
                if len(self._running) >= MAX_REQUESTS:
                    what = f"{len(self._running)} requests are in progress, which is the limit"
                    raise RequestError(what, "wait for responses, or cancel requests", code=ErrorCode.BUSY)
                if self._closing:
                    return
                self._running[id_] = call
                call.start()
        if method in _AT_ONCE:
            call.run()

    def _answer(self, call: Call, params: bytes) -> None:
        """Answer a request."""
        try:
            result = self._call(self._methods[call.method], call, params)
            response = encode_line({"jsonrpc": _VERSION, "id": call.id, "result": result})
            self._initialized |= call.method == "initialize"
        except Exception as caught:  # noqa: BLE001  the client is told
            cancelled = call.cancellation.cancelled
            response = self._failure(call.id, CancelledError("the request was cancelled") if cancelled else caught)
        with self._lock:
            # From the response on, the client may use the id again.
            self._running.pop(call.id, None)
        self.output.respond(response)
        if call.method == "shutdown":
            self.end()

    def _call(self, method: Parameters, call: Call, params: bytes) -> object:
        return method.function(self._owner, call, **method.read(params))

    def _take_notification(self, method: str, params: bytes) -> None:
        """Do what a notification says; JSON-RPC does not answer one that is wrong."""
        if method not in self._notifications:
            known = f"notifications are {', '.join(self._notifications)}"
            _log.warning("the notification %.200r was ignored; %s; a request has an id", method, known)
            return
        try:
            self._call(self._notifications[method], Call("", method, self, lambda _: None), params)
        except EdgeError as error:
            _log.warning("the notification %s was ignored: %s", method, error)

    def _failure(self, id_: RequestId | None, error: Exception) -> bytes:
        """The response to a request that failed."""
        found = response_error(error)
        if found.data.code == ErrorCode.INTERNAL and self._debug:
            _log.error("%s", "".join(traceback.format_exception(error)))
        return encode_line({"jsonrpc": _VERSION, "id": id_, "error": found})


def _fields(line: bytes | None) -> dict[str, msgspec.Raw]:
    """The members of the object on a line, of which only the names are decoded."""
    if line is None:
        hint = "initialize tells max_line_bytes; edge-run rpc --max-line raises it"
        raise RequestError("the line is longer than the limit", hint, code=ProtocolCode.LINE_TOO_LONG)
    try:
        line.decode("utf-8")
        whole = bytes(msgspec.json.decode(line, type=msgspec.Raw))
    except UnicodeDecodeError as error:
        what, hint = f"the line is not UTF-8: {error.reason} at byte {error.start}", "encode it as UTF-8"
    except msgspec.DecodeError as error:
        what, hint = f"the line is not valid JSON: {error}", "write one JSON object, without line breaks, on each line"
    except RecursionError:
        what, hint = "the line is nested too deeply", f"at most {MAX_DEPTH} levels are read"
    else:
        if whole.startswith(b"["):
            raise _invalid("the line is a batch", "batches are not supported: write each request on a line of its own")
        if not whole.startswith(b"{"):
            raise _invalid(f"the line is {described(_value(whole))}", "it must be an object")
        fields = msgspec.json.decode(whole, type=dict[str, msgspec.Raw])
        if _member_count(whole) == len(fields):
            return fields
        what, hint = "a member of the message occurs twice", "give it once"
    raise RequestError(what, hint, code=ErrorCode.INVALID_JSON)


def _member_count(whole: bytes) -> int:
    """Number of members of an object, of which a dictionary would keep the last of each name."""
    depth = count = 0
    for match in _STRUCTURE.finditer(whole):
        start = match[0][:1]
        depth += (start in b"{[") - (start in b"}]")
        count += depth == 1 and match[1] is not None
    return count


def _value(raw: msgspec.Raw | bytes) -> Any:
    """Decode a value; a number that is too large to be decoded is infinite."""
    try:
        return msgspec.json.decode(raw)
    except msgspec.ValidationError:
        return math.inf


def _request_id(fields: Mapping[str, msgspec.Raw]) -> RequestId:
    value = _value(fields["id"])
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise _invalid(f"id is {described(value)}", "it must be an integer or a string", "id")
    if isinstance(value, int) and abs(value) > _MAX_EXACT:
        raise _invalid(f"id is {value}", f"integers are at most {_MAX_EXACT}; use a string", "id")
    if isinstance(value, str) and len(value) > _MAX_ID_CHARS:
        raise _invalid(f"id has {len(value)} characters", f"at most {_MAX_ID_CHARS} are read", "id")
    return value


def _method(fields: Mapping[str, msgspec.Raw]) -> str:
    if unknown := [name for name in fields if name not in _FIELDS]:
        hint = (
            "edge-run sends no requests" if unknown[0] in ("result", "error") else f"members are {', '.join(_FIELDS)}"
        )
        raise _invalid(f"unknown member {unknown[0]!r:.200}", hint, unknown[0][:200])
    for name in ("jsonrpc", "method"):
        if name not in fields:
            raise _invalid(f"{name} is missing", "every message has jsonrpc and method", name)
    version, method = (_value(fields[name]) for name in ("jsonrpc", "method"))
    if version != _VERSION:
        raise _invalid(f"jsonrpc is {described(version)}", f'it must be "{_VERSION}"', "jsonrpc")
    if not isinstance(method, str):
        raise _invalid(f"method is {described(method)}", "it must be a string", "method")
    return method


def _params(fields: Mapping[str, msgspec.Raw]) -> bytes:
    params = bytes(fields["params"]) if "params" in fields else b"{}"
    if not params.startswith(b"{"):
        what, hint = f"params is {described(_value(fields['params']))}", "it must be an object: parameters have names"
        raise RequestError(what, hint, code=ErrorCode.INVALID_TYPE, param="params")
    return params


def _invalid(what: str, hint: str, param: str | None = None) -> RequestError:
    return RequestError(what, hint, code=ProtocolCode.INVALID_MESSAGE, param=param)
