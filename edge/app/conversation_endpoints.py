"""The page's API for conversations: list, change, delete, context, search, export and import."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from http import HTTPStatus
from typing import Annotated, Any, Final
from urllib.parse import quote

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.responses import Response
from starlette.routing import Route

from ...errors import ContextError
from ...runtime.options import GenerateOptions
from ..conversations.answering import fit_context, generate_options, takes_calls
from ..conversations.records import (
    MAX_ATTACHMENTS,
    Attachment,
    Conversation,
    MessageState,
    Role,
    StoredMessage,
    as_object,
)
from ..service.request_error import ErrorCode, RequestError
from ..service.strict_json import RequestLimits
from .api_endpoint import ApiCall, api_route
from .app_context import AppContext
from .background_answers import BackgroundAnswers

_MAX_HITS: Final = 200
_IMPORT_LIMITS: Final = RequestLimits(characters=64_000_000)
_UNSAFE: Final = re.compile(r"[^\w .,()-]+")
"""What file names of exports do not have."""


class AttachmentBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A text file that belongs to a message."""

    name: str
    text: str


class NewConversation(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of a new conversation."""

    title: str = ""
    folder: str | None = None
    system: str = ""
    sampling: dict[str, Any] = {}
    model: str | None = None
    tools: list[str] = []
    """Tools that its answers may call, by their ids."""


class ConversationChange(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of a change; fields that are left out stay as they are."""

    title: str | UnsetType = UNSET
    pinned: bool | UnsetType = UNSET
    folder: str | UnsetType | None = UNSET
    system: str | UnsetType = UNSET
    sampling: dict[str, Any] | UnsetType = UNSET
    model: str | UnsetType | None = UNSET
    tools: list[str] | UnsetType = UNSET
    allowed_tools: list[str] | UnsetType = UNSET
    """Those of them that are called without asking."""
    leaf: str | UnsetType = UNSET
    """A message whose branch is to be shown."""


class ContextBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of a request for the context that a message would take."""

    content: str = ""
    attachments: Annotated[list[AttachmentBody], Meta(max_length=MAX_ATTACHMENTS)] = []


class TokensBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of a request for the number of tokens of a text."""

    text: str
    model: str | None = None


class ImportBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of an import."""

    name: str
    """Name of the file."""
    content: str


def checked_sampling(sampling: dict[str, Any]) -> dict[str, Any]:
    """The options that have a value.

    Raises:
        InputError: one is unknown, or its value is not valid.
    """
    given = {name: value for name, value in sampling.items() if value is not None}
    generate_options(GenerateOptions(), given)
    return given


def attachments_of(bodies: Sequence[AttachmentBody]) -> tuple[Attachment, ...]:
    """Attachments of a body."""
    return tuple(Attachment(each.name, each.text) for each in bodies)


def conversation_routes(context: AppContext, answers: BackgroundAnswers) -> list[Route]:
    """The routes of conversations."""
    endpoints = _ConversationEndpoints(context, answers)
    conversation = "/api/conversations/{id}"
    table = (
        ("GET", "/api/conversations", endpoints.list),
        ("POST", "/api/conversations", endpoints.create),
        ("GET", conversation, endpoints.read),
        ("PATCH", conversation, endpoints.change),
        ("DELETE", conversation, endpoints.delete),
        ("POST", f"{conversation}/restore", endpoints.restore),
        ("GET", "/api/search", endpoints.search),
    )
    slow = (
        ("POST", f"{conversation}/context", endpoints.context),
        ("POST", "/api/tokens", endpoints.count_tokens),
        ("GET", f"{conversation}/export", endpoints.export),
        ("GET", "/api/export", endpoints.export_all),
        ("POST", "/api/import", endpoints.import_file),
    )
    settings = context.settings
    return [
        *(api_route(settings, method, path, handler) for method, path, handler in table),
        *(api_route(settings, method, path, handler, slow=True) for method, path, handler in slow),
    ]


class _ConversationEndpoints:
    def __init__(self, context: AppContext, answers: BackgroundAnswers) -> None:
        self._context: Final = context
        self._store: Final = context.store
        self._answers: Final = answers

    def list(self, call: ApiCall) -> dict[str, Any]:
        deleted = call.query.get("deleted", "0") not in {"0", "false", ""}
        return {
            "conversations": [as_object(each) for each in self._store.conversations(deleted)],
            "writing": sorted({answer.conversation for answer in self._answers.all()}),
        }

    def create(self, call: ApiCall) -> dict[str, Any]:
        fields = msgspec.structs.asdict(call.body(NewConversation))
        fields["sampling"] = checked_sampling(fields["sampling"])
        return _object(self._store.create(**fields))

    def read(self, call: ApiCall) -> dict[str, Any]:
        conversation = self._store.conversation(call.path["id"])
        messages, writing = [], []
        # An answer that ends between the two lines is complete in the second.
        live = {answer.id: answer for answer in self._answers.of_conversation(conversation.id)}
        for message in self._store.messages(conversation.id):
            if message.state is MessageState.WRITING and message.id in live:
                with live[message.id].snapshot(message) as (shown, progress):
                    messages.append(shown)
                    writing.append(progress)
            else:
                messages.append(as_object(message))
        return {
            **_object(conversation),
            "messages": messages,
            "writing": writing,
            "trimmed": self._trimmed(conversation),
        }

    def _trimmed(self, conversation: Conversation) -> Sequence[str]:
        """Messages that were left out of the prompt of the last answer that is shown."""
        if conversation.leaf is None:
            return []
        for message in reversed(self._store.branch(conversation.leaf)):
            if message.role is Role.ASSISTANT and message.stats is not None:
                trimmed = message.stats.get("trimmed", [])
                return trimmed if isinstance(trimmed, list) else []
        return []

    def change(self, call: ApiCall) -> dict[str, Any]:
        body = call.body(ConversationChange)
        fields = {name: value for name, value in msgspec.structs.asdict(body).items() if value is not UNSET}
        leaf = fields.pop("leaf", None)
        if "sampling" in fields:
            fields["sampling"] = checked_sampling(fields["sampling"])
        if fields:
            self._store.change(call.path["id"], **fields)
        if leaf is not None:
            self._store.select_leaf(call.path["id"], leaf)
        return _object(self._store.conversation(call.path["id"]))

    def delete(self, call: ApiCall) -> dict[str, Any]:
        self._store.delete(call.path["id"])
        for answer in self._answers.of_conversation(call.path["id"]):
            answer.cancellation.cancel()
        return {}

    def restore(self, call: ApiCall) -> dict[str, Any]:
        return _object(self._store.restore(call.path["id"]))

    def context(self, call: ApiCall) -> dict[str, Any]:
        """Tokens that the conversation takes with a message that is being written."""
        body = call.body(ContextBody)
        conversation = self._store.conversation(call.path["id"])
        model = conversation.model or self._context.default_model()
        if not self._is_loaded(model):
            return {"tokens": None, "context": None, "reserve": None, "trimmed": []}
        branch = [] if conversation.leaf is None else self._store.branch(conversation.leaf)
        if body.content or body.attachments or not branch:
            branch.append(_draft(conversation, body))
        tools = [each.definition for each in self._context.tools.known(conversation.tools)]
        with self._context.pool.use(model) as engine:
            offered = GenerateOptions(tools=tools if takes_calls(engine) else ())
            options = generate_options(offered, conversation.sampling)
            if engine.template is None:
                return {"tokens": None, "context": engine.context, "reserve": None, "trimmed": []}
            try:
                fit = fit_context(engine, conversation.system, branch, options)
            except ContextError as error:
                return {"tokens": None, "context": engine.context, "reserve": 0, "trimmed": [], "problem": str(error)}
        return {"tokens": fit.tokens, "context": fit.context, "reserve": fit.reserve, "trimmed": fit.trimmed}

    def count_tokens(self, call: ApiCall) -> dict[str, Any]:
        body = call.body(TokensBody)
        model = body.model or self._context.default_model()
        if not self._is_loaded(model):
            return {"tokens": None}
        with self._context.pool.use(model) as engine:
            return {"tokens": len(engine.tokenizer.encode(body.text, add_special_tokens=False))}

    def _is_loaded(self, model: str | None) -> bool:
        """Whether asking a model does not have to wait for it."""
        return any(status.loaded and status.id == model for status in self._context.pool.status())

    def search(self, call: ApiCall) -> dict[str, Any]:
        limit = call.integer("limit", 50, _MAX_HITS)
        return {"hits": [as_object(hit) for hit in self._store.search(call.query.get("q", ""), limit)]}

    def export(self, call: ApiCall) -> Response:
        conversation = self._store.conversation(call.path["id"])
        name = conversation.title or "conversation"
        match call.query.get("format", "markdown"):
            case "markdown":
                return _file(f"{name}.md", self._store.export_markdown(conversation.id), "text/markdown")
            case "json":
                return _file(f"{name}.json", self._store.export_json([conversation.id]), "application/json")
            case other:
                raise RequestError(
                    f"format is {other!r:.50}",
                    "it must be markdown or json",
                    code=ErrorCode.INVALID_VALUE,
                    param="format",
                )

    def export_all(self, _call: ApiCall) -> Response:
        name = time.strftime("edge-run conversations %Y-%m-%d.json")
        return _file(name, self._store.export_json(), "application/json")

    def import_file(self, call: ApiCall) -> dict[str, Any]:
        body = call.body(ImportBody, _IMPORT_LIMITS)
        if body.name.lower().endswith(".json"):
            found = self._store.import_json(body.content)
        else:
            found = [self._store.import_markdown(body.content, body.name)]
        return {"conversations": [as_object(each) for each in found]}


def _object(conversation: Conversation) -> dict[str, Any]:
    return {"conversation": as_object(conversation)}


def _draft(conversation: Conversation, body: ContextBody) -> StoredMessage:
    """A message that is not stored yet."""
    return StoredMessage(
        id="draft",
        conversation=conversation.id,
        parent=conversation.leaf,
        role=Role.USER,
        content=body.content,
        attachments=attachments_of(body.attachments),
        created=0.0,
        model=None,
        state=MessageState.COMPLETE,
        error=None,
        stats=None,
        has_tokens=False,
    )


def _file(name: str, text: str, kind: str) -> Response:
    """A response that the browser saves as a file."""
    safe = _UNSAFE.sub("_", name)[-120:].strip(" .") or "export"
    plain = safe.encode("ascii", "replace").decode().replace("?", "_")
    disposition = f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(safe)}"
    return Response(text, HTTPStatus.OK, {"content-disposition": disposition}, kind)
