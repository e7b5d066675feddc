"""Errors of a request: a stable code and the field concerned."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from ...errors import (
    BundleError,
    BusyError,
    CheckpointError,
    ContextError,
    DeviceError,
    EdgeError,
    HubError,
    InputError,
    TemplateError,
)


class ErrorCode(StrEnum):
    """What is wrong, for programs; the strings do not change. Where OpenAI's API has a code for it, it is that one."""

    INVALID_REQUEST = "invalid_request"
    """The request cannot be answered, for a reason that no other code names."""
    INVALID_JSON = "invalid_json"
    """The body is not valid JSON, or not a JSON object."""
    MISSING_FIELD = "missing_required_parameter"
    UNKNOWN_FIELD = "unknown_parameter"
    """A field that OpenAI's API does not have, and edge-run does not either."""
    UNSUPPORTED_FIELD = "unsupported_parameter"
    """A field, or a value of it, that asks for something that edge-run does not do."""
    INVALID_TYPE = "invalid_type"
    INVALID_VALUE = "invalid_value"
    TOO_LARGE = "request_too_large"
    """The body, or a list or text in it, is above a limit."""
    MODEL_NOT_FOUND = "model_not_found"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    TEMPLATE = "template_error"
    """The model's chat template refuses the messages."""
    BUSY = "busy"
    """The queue is full; the request may be sent again."""
    SUPERSEDED = "superseded"
    """A newer request for the same document has come."""
    MODEL = "model_error"
    """The model's files are missing or damaged, it cannot be fetched, or no device can run it."""
    INTERNAL = "server_error"
    """The request is well-formed, and answering it failed."""


class RequestError(InputError):
    """A request cannot be answered.

    Args:
        what: what is wrong, with the value seen.
        hint: what to do about it.
        code: what is wrong, for programs: an `ErrorCode`, or a code of one protocol.
        param: path of the field concerned, such as `messages[0].content`; None if no single field is.
    """

    def __init__(
        self,
        what: str,
        hint: str = "",
        *,
        code: StrEnum = ErrorCode.INVALID_REQUEST,
        param: str | None = None,
    ) -> None:
        super().__init__(what, hint)
        self.code = code
        self.param = param


def invalid(param: str | None, what: str, hint: str) -> RequestError:
    """The error for a value that cannot be used."""
    return RequestError(what, hint, code=ErrorCode.INVALID_VALUE, param=param)


def unsupported(param: str, what: str, hint: str) -> RequestError:
    """The error for a field, or a value of it, that asks for something that edge-run does not do."""
    return RequestError(what, hint, code=ErrorCode.UNSUPPORTED_FIELD, param=param)


_CODES: Final[tuple[tuple[type[EdgeError] | tuple[type[EdgeError], ...], ErrorCode], ...]] = (
    (ContextError, ErrorCode.CONTEXT_LENGTH_EXCEEDED),
    (TemplateError, ErrorCode.TEMPLATE),
    (BusyError, ErrorCode.BUSY),
    ((BundleError, CheckpointError, HubError, DeviceError), ErrorCode.MODEL),
    (InputError, ErrorCode.INVALID_REQUEST),
    (EdgeError, ErrorCode.INTERNAL),
)
"""Codes by the class of an error; the first class that fits counts."""


def describe(error: EdgeError) -> RequestError:
    """Return an error of edge-run as one with a code; its message stays as it is."""
    if isinstance(error, RequestError):
        return error
    code = next(code for kind, code in _CODES if isinstance(error, kind))
    described = RequestError(error.what, error.hint, code=code)
    described.__cause__ = error
    return described
