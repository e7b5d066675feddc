"""The page's API for conversations and their messages, with search, export and import."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any, Final, TypeAlias
from urllib.parse import quote

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.responses import Response
from starlette.routing import Route

from ...errors import ContextError
from ...runtime.images.decoding import image_bytes, kept_image
from ...runtime.options import GenerateOptions
from ..conversations.answering import fit_context, takes_calls, without_long_files
from ..conversations.records import MAX_ATTACHMENTS, Attachment, MessageState, Role, StoredMessage, safe_file_name
from ..documents.retrieval import document_paths
from ..server.json_endpoint import Handler, JsonRoute, json_routes
from ..service.request_error import RequestError, invalid
from ..service.token_objects import chosen_object
from ..tools.call_rounds import Decision
from .app_context import AppContext
from .generations import Generations, writing_error

_MAX_VARIANTS: Final = 8
"""Largest number of answers that one request asks for."""
_IMPORT_CHARACTERS: Final = 64_000_000


class ConversationFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of a conversation; those that are left out stay as they are."""

    title: str | UnsetType = UNSET
    pinned: bool | UnsetType = UNSET
    folder: str | UnsetType | None = UNSET
    system: str | UnsetType = UNSET
    sampling: dict[str, Any] | UnsetType = UNSET
    model: str | UnsetType | None = UNSET
    tools: list[str] | UnsetType = UNSET
    allowed_tools: list[str] | UnsetType = UNSET
    """Those of them that are called without asking."""
    documents: list[str] | UnsetType = UNSET
    """Folders and files of this machine that its answers come from."""

    def given(self) -> dict[str, Any]:
        """The fields that have a value.

        Raises:
            InputError: documents do not exist.
        """
        fields = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not UNSET}
        if "documents" in fields:
            fields["documents"] = document_paths(fields["documents"])
        return fields


class ConversationChange(ConversationFields, kw_only=True, forbid_unknown_fields=True):
    """Body of a change."""

    leaf: str | UnsetType = UNSET
    """A message whose branch is to be shown."""


Attachments: TypeAlias = Annotated[Sequence[Attachment], Meta(max_length=MAX_ATTACHMENTS)]


def conversation_routes(context: AppContext, generations: Generations) -> list[Route]:
    """The routes of conversations and messages."""
    endpoints, store = _ConversationEndpoints(context, generations), context.store
    conversation, message = "/api/conversations/{conversation_id}", "/api/messages/{message_id}"
    table: tuple[tuple[str, str, Handler], ...] = (
        ("GET", "/api/conversations", endpoints.list),
        ("POST", "/api/conversations", endpoints.create),
        ("GET", conversation, endpoints.read),
        ("PATCH", conversation, endpoints.change),
        ("DELETE", conversation, endpoints.delete),
        ("POST", f"{conversation}/restore", lambda conversation_id: {"conversation": store.restore(conversation_id)}),
        ("GET", "/api/search", lambda query: {"hits": store.search(query.get("q", ""))}),
        ("POST", f"{conversation}/messages", endpoints.send),
        ("POST", f"{message}/edit", endpoints.edit),
        ("POST", f"{message}/regenerate", endpoints.regenerate),
        ("POST", f"{message}/continue", endpoints.resume),
        ("POST", f"{message}/branch", endpoints.branch),
        ("POST", f"{message}/stop", endpoints.stop),
        ("POST", f"{message}/calls/{{call}}", endpoints.decide),
        ("DELETE", message, endpoints.delete_message),
        ("POST", f"{message}/restore", lambda message_id: {"message": store.restore_message(message_id)}),
        ("GET", f"{message}/tokens", lambda message_id: {"tokens": store.tokens(message_id)}),
    )
    slow = (
        ("POST", f"{conversation}/context", endpoints.context),
        ("POST", "/api/tokens", endpoints.count_tokens),
        ("POST", "/api/image", endpoints.kept_image),
        ("GET", f"{conversation}/export", endpoints.export),
        ("GET", "/api/export", endpoints.export_all),
    )
    settings = context.settings
    return [
        *json_routes(settings, table),
        *json_routes(settings, slow, slow=True),
        JsonRoute(settings, "POST", "/api/import", endpoints.import_file, slow=True, max_characters=_IMPORT_CHARACTERS),
    ]


class _ConversationEndpoints:
    def __init__(self, context: AppContext, generations: Generations) -> None:
        self._context: Final = context
        self._store: Final = context.store
        self._generations: Final = generations

    def list(self, query: Mapping[str, str]) -> dict[str, Any]:
        deleted = query.get("deleted", "0") not in {"0", "false", ""}
        return {
            "conversations": self._store.conversations(deleted),
            "writing": sorted({each.conversation for each in self._generations.all()}),
        }

    def create(self, body: ConversationFields) -> dict[str, Any]:
        return {"conversation": self._store.create(**body.given())}

    def read(self, conversation_id: str) -> dict[str, Any]:
        conversation, branch = self._store.shown(conversation_id)
        messages, writing = [], []
        # An answer that ends between the two lines is complete in the second.
        live = {each.id: each for each in self._generations.all(conversation_id)}
        stored = {each.id: each for each in self._store.messages(conversation_id)}
        for message in stored.values():
            if message.state is MessageState.WRITING and message.id in live:
                with live[message.id].snapshot(message) as (shown, progress):
                    messages.append(shown)
                    writing.append(progress)
            else:
                messages.append(message)
        stats = [found.stats for each in branch if (found := stored.get(each.id)) and found.stats is not None]
        # The messages that were left out of the prompt of the last answer that is shown.
        trimmed = stats[-1].get("trimmed", []) if stats else []
        return {"conversation": conversation, "messages": messages, "writing": writing, "trimmed": trimmed}

    def change(self, conversation_id: str, body: ConversationChange) -> dict[str, Any]:
        fields = body.given()
        fields.pop("leaf", None)
        if fields:
            self._store.change(conversation_id, **fields)
        if body.leaf is not UNSET:
            self._store.select_leaf(conversation_id, body.leaf)
        return {"conversation": self._store.conversation(conversation_id)}

    def delete(self, conversation_id: str) -> dict[str, Any]:
        self._store.delete(conversation_id)
        for each in self._generations.all(conversation_id):
            each.cancellation.cancel()
        return {}

    def context(self, conversation_id: str, content: str = "", attachments: Attachments = ()) -> dict[str, Any]:
        """Tokens that the conversation takes with a message that is being written."""
        conversation, branch = self._store.shown(conversation_id)
        model = conversation.model or self._context.default_model()
        unknown: dict[str, Any] = {"tokens": None, "context": None, "reserve": None, "trimmed": []}
        if not self._is_loaded(model):
            return unknown
        if content or attachments or not branch:
            parent, files = conversation.leaf, tuple(attachments)
            branch.append(StoredMessage("draft", conversation.id, parent, Role.USER, content, files))
        tools = [tool.definition(name) for name, tool in self._context.tools.known(conversation.tools).items()]
        with self._context.pool.use(model) as engine:
            offered = GenerateOptions(tools=tools if takes_calls(engine) else ())
            options = offered.changed(conversation.sampling)
            if engine.template is None:
                return {**unknown, "context": engine.context}
            branch, _ = without_long_files(engine, conversation.system, branch, options)
            try:
                fit = fit_context(engine, conversation.system, branch, options)
            except ContextError as error:
                return {**unknown, "context": engine.context, "reserve": 0, "problem": str(error)}
        return {"tokens": fit.tokens, "context": fit.context, "reserve": fit.reserve, "trimmed": fit.trimmed}

    def count_tokens(self, text: str, model: str | None = None) -> dict[str, Any]:
        model = model or self._context.default_model()
        if not self._is_loaded(model):
            return {"tokens": None}
        with self._context.pool.use(model) as engine:
            return {"tokens": len(engine.tokenizer.encode(text, add_special_tokens=False))}

    def kept_image(self, name: str, url: str) -> dict[str, Any]:
        """An image of a `data:` URL as it is attached to messages."""
        return {"image": kept_image(image_bytes({"type": "image", "image": url}, name))}

    def _is_loaded(self, model: str | None) -> bool:
        """Whether asking a model does not have to wait for it."""
        return any(status.loaded and status.id == model for status in self._context.pool.status())

    def export(self, conversation_id: str, query: Mapping[str, str]) -> Response:
        conversation = self._store.conversation(conversation_id)
        name = conversation.title or "conversation"
        match query.get("format", "markdown"):
            case "markdown":
                return _file(f"{name}.md", self._store.export_markdown(conversation.id), "text/markdown")
            case "json":
                return _file(f"{name}.json", self._store.export_json([conversation.id]), "application/json")
            case other:
                raise invalid("format", f"format is {other!r:.50}", "it must be markdown or json")

    def export_all(self) -> Response:
        name = time.strftime("edge-run conversations %Y-%m-%d.json")
        return _file(name, self._store.export_json(), "application/json")

    def import_file(self, name: str, content: str) -> dict[str, Any]:
        """Add the conversations of a file of this name."""
        if name.lower().endswith(".json"):
            found = self._store.import_json(content)
        else:
            found = [self._store.import_markdown(content, name)]
        return {"conversations": found}

    def send(
        self, conversation_id: str, content: str, parent: str | None = None, attachments: Attachments = ()
    ) -> dict[str, Any]:
        if not content.strip() and not attachments:
            raise invalid("content", "the message is empty", "write something")
        self._generations.check_room()
        message = self._store.add_message(conversation_id, parent, "user", content, attachments=attachments)
        return {"message": message, "answer": self._generations.begin(message)[0]}

    def edit(self, message_id: str, content: str, branch: bool = False) -> dict[str, Any]:
        """Replace the text of a message, or make it the text of another message beside it."""
        message = self._ended(message_id)
        if not branch:
            return {"message": self._store.rewrite(message.id, content)}
        if message.role is Role.USER:
            self._generations.check_room()
        beside = self._store.add_message(
            message.conversation,
            message.parent,
            message.role,
            content,
            attachments=message.attachments,
            model=message.model,
            rounds=message.rounds,
        )
        if message.role is Role.ASSISTANT:
            return {"message": beside}
        return {"message": beside, "answer": self._generations.begin(beside)[0]}

    def regenerate(
        self, message_id: str, count: Annotated[int, Meta(ge=1, le=_MAX_VARIANTS)] = 1, model: str | None = None
    ) -> dict[str, Any]:
        """Write further answers to a message, or beside an answer, with a model or the conversation's own."""
        message = self._store.message(message_id)
        question = message if message.role is Role.USER else self._question(message)
        chosen = None if model is None else self._context.pool.offered.find(model).id
        answers = self._generations.begin(question, chosen, count=count)
        return {"answer": answers[0], "answers": answers}

    def resume(self, message_id: str) -> dict[str, Any]:
        message = self._ended(message_id)
        return {"answer": self._generations.resume(message, self._question(message))}

    def branch(
        self, message_id: str, index: Annotated[int, Meta(ge=0)], alternative: Annotated[int, Meta(ge=0)]
    ) -> dict[str, Any]:
        """Write another answer, in which an alternative of a token, by its id, takes the token's place."""
        message = self._ended(message_id)
        question, tokens = self._question(message), self._store.tokens(message.id)
        if index >= len(tokens):
            raise invalid(
                "index",
                f"index is {index}, but {len(tokens)} tokens of the answer are known",
                "answers are recorded with their tokens where the setting is on",
            )
        kept = [*tokens[:index], chosen_object(tokens[index], alternative)]
        text = "".join(token["text"] for token in kept if not token.get("special"))
        (answer,) = self._generations.begin(question, message.model, text, kept, message.rounds)
        return {"answer": answer}

    def stop(self, message_id: str) -> dict[str, Any]:
        if (generation := self._generations.live(self._store.message(message_id).id)) is not None:
            generation.cancellation.cancel()
        return {}

    def decide(self, message_id: str, call: str, decision: Decision) -> dict[str, Any]:
        """Decide about a call of a tool that an answer waits with; one that has ended has none."""
        if (generation := self._generations.live(self._store.message(message_id).id)) is not None:
            generation.decide(call, decision)
        return {}

    def delete_message(self, message_id: str) -> dict[str, Any]:
        message = self._store.message(message_id)
        self._store.delete_message(message.id)
        if generations := self._generations.all(message.conversation):
            left = {each.id for each in self._store.messages(message.conversation)}
            for each in generations:
                if each.id not in left:
                    each.cancellation.cancel()
        return {}

    def _ended(self, message_id: str) -> StoredMessage:
        """The message of a request, which is not being written.

        Raises:
            RefusedError: it is.
        """
        message = self._store.message(message_id)
        if message.state is MessageState.WRITING:
            raise writing_error()
        return message

    def _question(self, message: StoredMessage) -> StoredMessage:
        """The message of the user that a message answers.

        Raises:
            RequestError: it is not an answer.
        """
        question = None if message.parent is None else self._store.message(message.parent)
        if message.role is not Role.ASSISTANT or question is None or question.role is not Role.USER:
            raise RequestError("the message is not an answer to a message", "choose an answer")
        return question


def _file(name: str, text: str, kind: str) -> Response:
    """A response that the browser saves as a file."""
    safe = safe_file_name(name, "export")
    plain = safe.encode("ascii", "replace").decode().replace("?", "_")
    disposition = f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(safe)}"
    return Response(text, HTTPStatus.OK, {"content-disposition": disposition}, kind)
