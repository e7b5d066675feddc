"""The messages of the protocol: results, notifications and errors; parameters are those of the methods.

Fields are named as in OpenAI's API where it has them. Results may get further fields in later versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ...errors import CancelledError, EdgeError
from ..service.body_decoder import StrictStruct
from ..service.generation_fields import PositiveInt, SamplingFields
from ..service.message_fields import Content
from ..service.pooled_model import ModelState
from ..service.request_error import ErrorCode, RequestError, describe

PROTOCOL_VERSION: Final = 1

RequestId: TypeAlias = int | str
ModelName: TypeAlias = Annotated[str | None, Meta(description="An id of models/list; null for the first model.")]
SessionId: TypeAlias = Annotated[str, Meta(description="What session/new or session/restore returned.")]


class Done(msgspec.Struct):
    """An empty result."""


class ClientInfo(StrictStruct):
    """The program that talks to edge-run."""

    name: str
    version: str | None = None


class ServerInfo(msgspec.Struct):
    """This program."""

    name: str
    version: str


class Capabilities(msgspec.Struct):
    """What this version can do."""

    methods: list[str]
    notifications: Annotated[list[str], Meta(description="Notifications that the client may receive.")]


class Limits(msgspec.Struct):
    """What is refused above, or waits."""

    max_line_bytes: int
    max_requests: Annotated[int, Meta(description="Requests in progress at a time.")]
    max_sessions: int
    max_unread_bytes: Annotated[int, Meta(description="Bytes that the client has not read; then answers wait.")]


class InitializeResult(msgspec.Struct):
    """Versions, capabilities and limits."""

    protocol_version: Annotated[int, Meta(description="The version that is spoken from now on.")]
    server_info: ServerInfo
    capabilities: Capabilities
    limits: Limits


class ModelInfo(msgspec.Struct):
    """A model that is offered."""

    id: str
    loaded: bool
    owner: str
    created: Annotated[int, Meta(description="Time of its files in seconds since 1970; 0 if unknown.")]
    capabilities: Annotated[list[str], Meta(description="embedding, rerank, or completion, tools and vision.")]


class ModelList(msgspec.Struct):
    """The models that are offered, the one that answers requests without a name first."""

    models: list[ModelInfo]


class PullResult(msgspec.Struct):
    """A downloaded model."""

    id: str
    commit: str
    path: str
    bytes: int
    offered: Annotated[bool, Meta(description="Whether requests can name it; not if edge-run was given models.")]


class UnloadResult(msgspec.Struct):
    """Whether the model was in memory."""

    unloaded: bool


class SessionMessage(msgspec.Struct):
    """A message of a conversation."""

    role: str
    content: str | list[dict[str, Any]]


class SessionInfo(msgspec.Struct):
    """An open conversation."""

    session_id: str
    model: str
    context: Annotated[int, Meta(description="Largest number of tokens of the conversation.")]
    messages: Annotated[list[SessionMessage], Meta(description="What was said so far, the system message included.")]


class SessionPromptParams(SamplingFields, kw_only=True):
    """What the user says in a conversation."""

    session_id: SessionId
    prompt: Annotated[Content, Meta(description="A text, or parts with images as OpenAI's chat API has them.")]
    max_tokens: Annotated[PositiveInt | None, Meta(description="Largest number of tokens to generate.")] = None


class Usage(msgspec.Struct):
    """Numbers of tokens of an answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: Annotated[int, Meta(description="Prompt tokens that were not computed again.")]


class Timing(msgspec.Struct):
    """How long an answer took."""

    first_token_s: float
    total_s: float
    tokens_per_second: Annotated[float, Meta(description="After the first token.")]


class PromptResult(msgspec.Struct):
    """An answer of a conversation."""

    text: str
    finish_reason: Annotated[str, Meta(description="stop, length, or cancelled by session/cancel.")]
    usage: Usage
    timing: Timing
    reasoning: Annotated[str | UnsetType, Meta(description="What the model thought before it answered.")] = UNSET


class CancelResult(msgspec.Struct):
    """Whether there was an answer to cancel."""

    cancelled: bool


class SaveResult(msgspec.Struct):
    """The file that was written."""

    path: str
    bytes: int


class Completion(msgspec.Struct):
    """OpenAI's object of a chat or text completion."""

    id: str
    object: str
    created: int
    model: str
    choices: list[dict[str, Any]]
    usage: dict[str, Any]


class TokenizeResult(msgspec.Struct):
    """Token ids."""

    tokens: list[int]
    count: int
    context: Annotated[int, Meta(description="Largest number of tokens of prompt and answer together.")]
    pieces: Annotated[list[str] | UnsetType, Meta(description="The text of each token, with with_pieces.")] = UNSET


class RankResult(msgspec.Struct):
    """How relevant documents are, in their order."""

    scores: Annotated[list[float], Meta(description="From 0 to 1.")]


class DetokenizeResult(msgspec.Struct):
    """The text of tokens."""

    content: str


class Memory(msgspec.Struct):
    """Memory in bytes."""

    process: Annotated[int, Meta(description="Resident memory of this process.")]
    available: Annotated[int, Meta(description="What the machine has free.")]
    total: int
    max_models: Annotated[int | None, Meta(description="What all models may take together; null for no limit.")]


class DeviceInfo(msgspec.Struct):
    """A device that models can run on."""

    name: str
    kind: str
    vendor: str


class PowerState(msgspec.Struct):
    """Where the machine's power comes from, and how models run."""

    on_battery: Annotated[bool | None, Meta(description="null where the machine does not say.")]
    battery_percent: float | None
    mode: Annotated[str, Meta(description="How a model that is loaded now runs: performance or saver.")]


class Requests(msgspec.Struct):
    """Requests at the moment."""

    running: Annotated[int, Meta(description="Requests in progress, this one included.")]
    sessions: Annotated[int, Meta(description="Open sessions.")]


class Status(msgspec.Struct):
    """State of the process."""

    models: Annotated[list[ModelState], Meta(description="Models in memory, the least recently used first.")]
    requests: Requests
    memory: Memory
    devices: list[DeviceInfo]
    power: PowerState


class ProgressParams(msgspec.Struct):
    """What a request waits for."""

    request_id: RequestId
    stage: str
    fraction: Annotated[float, Meta(ge=0, le=1)]
    done_bytes: int | UnsetType = UNSET
    total_bytes: int | UnsetType = UNSET


class GenerateUpdate(msgspec.Struct):
    """A piece of an answer."""

    request_id: RequestId
    chunk: Annotated[dict[str, Any], Meta(description="OpenAI's chat completion chunk, or text completion.")]


class SessionUpdate(msgspec.Struct):
    """A piece of an answer of a conversation."""

    session_id: str
    request_id: RequestId
    text: str
    reasoning: Annotated[str | UnsetType, Meta(description="A piece of what the model thinks.")] = UNSET


NOTIFICATIONS: Final[Mapping[str, type[msgspec.Struct]]] = {
    "$/progress": ProgressParams,
    "generate/update": GenerateUpdate,
    "session/update": SessionUpdate,
}
"""Messages to the client that belong to one of its requests."""


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
