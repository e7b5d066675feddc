"""Error codes of the protocol, and the error objects of its responses."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from ...errors import CancelledError, EdgeError
from ..service.request_error import ErrorCode, RequestError, describe


class ProtocolCode(StrEnum):
    """What is wrong, for errors that only this protocol has; the other codes are in `ErrorCode`."""

    CANCELLED = "cancelled"
    NOT_INITIALIZED = "not_initialized"
    LINE_TOO_LONG = "line_too_long"
    DUPLICATE_ID = "duplicate_id"
    METHOD_NOT_FOUND = "method_not_found"
    INVALID_MESSAGE = "invalid_message"
    """A line is JSON, but not a request of JSON-RPC 2.0."""
    SESSION_NOT_FOUND = "session_not_found"
    FILE = "file_error"
    """A saved session cannot be written or read."""


_INTERNAL_ERROR: Final = -32603
_INVALID_PARAMS: Final = (
    *(ErrorCode.INVALID_REQUEST, ErrorCode.MISSING_FIELD, ErrorCode.UNKNOWN_FIELD, ErrorCode.UNSUPPORTED_FIELD),
    *(ErrorCode.INVALID_TYPE, ErrorCode.INVALID_VALUE),
)
NUMBERS: Final[dict[StrEnum, int]] = {
    ErrorCode.INVALID_JSON: -32700,
    ProtocolCode.INVALID_MESSAGE: -32600,
    ProtocolCode.METHOD_NOT_FOUND: -32601,
    **dict.fromkeys(_INVALID_PARAMS, -32602),
    ErrorCode.INTERNAL: _INTERNAL_ERROR,
    ProtocolCode.CANCELLED: -32000,
    ProtocolCode.NOT_INITIALIZED: -32001,
    ProtocolCode.LINE_TOO_LONG: -32002,
    ProtocolCode.DUPLICATE_ID: -32003,
    ErrorCode.BUSY: -32004,
    ErrorCode.MODEL_NOT_FOUND: -32005,
    ErrorCode.MODEL: -32006,
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: -32007,
    ErrorCode.TEMPLATE: -32008,
    ErrorCode.TOO_LARGE: -32009,
    ProtocolCode.SESSION_NOT_FOUND: -32010,
    ProtocolCode.FILE: -32011,
    ErrorCode.SUPERSEDED: -32012,
}
"""JSON-RPC's number by code; docs/rpc.md lists them, and they do not change."""


class ErrorData(msgspec.Struct, kw_only=True):
    """What an error object says besides its number and message."""

    code: str
    """The same as the number, as a word; finer where several words share a number."""
    param: str | None = None
    """Path of the parameter concerned, such as `messages[0].content`."""
    hint: str | None = None
    """What to do about it."""


class ErrorObject(msgspec.Struct, kw_only=True):
    """The error of a response."""

    code: int
    message: str
    data: ErrorData


def response_error(error: Exception) -> ErrorObject:
    """The error object of an exception that ended a request."""
    if isinstance(error, CancelledError):
        error = RequestError(error.what, code=ProtocolCode.CANCELLED)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        error = RequestError(f"{where}{error.strerror or error}", "check the path and the disk", code=ProtocolCode.FILE)
    if not isinstance(error, EdgeError):
        error = RequestError(
            f"{type(error).__name__}: {error}"[:500], "see standard error for details", code=ErrorCode.INTERNAL
        )
    found = describe(error)
    data = ErrorData(code=found.code.value, param=found.param, hint=found.hint or None)
    return ErrorObject(code=NUMBERS.get(found.code, _INTERNAL_ERROR), message=found.what, data=data)
