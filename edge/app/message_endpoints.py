"""The page's API for messages: send, edit, regenerate, continue, branch, stop, delete."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta
from starlette.routing import Route

from ..conversations.records import MAX_ATTACHMENTS, MessageState, Role, StoredMessage, as_object
from ..service.request_error import ErrorCode, RequestError
from ..service.token_objects import chosen_object
from .answer_work import StoredStart, text_of
from .api_endpoint import ApiCall, api_route
from .app_context import AppContext
from .background_answers import BackgroundAnswers, writing_error
from .conversation_endpoints import AttachmentBody, attachments_of
from .live_answer import Decision

MAX_VARIANTS: Final = 8
"""Largest number of answers that one request asks for."""


class NewMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of a new message of the user."""

    content: str
    parent: str | None = None
    attachments: Annotated[list[AttachmentBody], Meta(max_length=MAX_ATTACHMENTS)] = []


class EditBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of an edit."""

    content: str
    branch: bool = False
    """Whether the message stays as it is, and the text becomes another one beside it."""


class RegenerateBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of further answers to a message."""

    count: Annotated[int, Meta(ge=1, le=MAX_VARIANTS)] = 1
    """Number of answers."""
    model: str | None = None
    """The model that writes them; None for that of the conversation."""


class BranchBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of a branch at a token."""

    index: Annotated[int, Meta(ge=0)]
    """Number of the token in the answer."""
    alternative: Annotated[int, Meta(ge=0)]
    """Id of the token that takes its place: one of its alternatives."""


class DecisionBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of a decision about a call of a tool."""

    decision: Decision


def message_routes(context: AppContext, answers: BackgroundAnswers) -> list[Route]:
    """The routes of messages."""
    endpoints = _MessageEndpoints(context, answers)
    message = "/api/messages/{id}"
    table = (
        ("POST", "/api/conversations/{id}/messages", endpoints.send),
        ("POST", f"{message}/edit", endpoints.edit),
        ("POST", f"{message}/regenerate", endpoints.regenerate),
        ("POST", f"{message}/continue", endpoints.resume),
        ("POST", f"{message}/branch", endpoints.branch),
        ("POST", f"{message}/stop", endpoints.stop),
        ("POST", f"{message}/calls/{{call}}", endpoints.decide),
        ("DELETE", message, endpoints.delete),
        ("POST", f"{message}/restore", endpoints.restore),
        ("GET", f"{message}/tokens", endpoints.tokens),
    )
    return [api_route(context.settings, method, path, handler) for method, path, handler in table]


class _MessageEndpoints:
    def __init__(self, context: AppContext, answers: BackgroundAnswers) -> None:
        self._store: Final = context.store
        self._pool: Final = context.pool
        self._answers: Final = answers

    def send(self, call: ApiCall) -> dict[str, Any]:
        body = call.body(NewMessage)
        if not body.content.strip() and not body.attachments:
            raise RequestError("the message is empty", "write something", code=ErrorCode.INVALID_VALUE, param="content")
        self._answers.check_room()
        attachments = attachments_of(body.attachments)
        message = self._store.add_message(call.path["id"], body.parent, "user", body.content, attachments=attachments)
        return {"message": as_object(message), "answer": as_object(self._answers.answer(message))}

    def edit(self, call: ApiCall) -> dict[str, Any]:
        body = call.body(EditBody)
        message = self._ended(call)
        if not body.branch:
            return {"message": as_object(self._store.rewrite(message.id, body.content))}
        if message.role is Role.USER:
            self._answers.check_room()
        beside = self._store.add_message(
            message.conversation,
            message.parent,
            message.role,
            body.content,
            attachments=message.attachments,
            model=message.model,
            rounds=message.rounds,
        )
        if message.role is Role.ASSISTANT:
            return {"message": as_object(beside)}
        return {"message": as_object(beside), "answer": as_object(self._answers.answer(beside))}

    def regenerate(self, call: ApiCall) -> dict[str, Any]:
        body = call.body(RegenerateBody)
        message = self._store.message(call.path["id"])
        question = message if message.role is Role.USER else self._question(message)
        start = StoredStart(model=None if body.model is None else self._pool.find(body.model).id)
        answers = [as_object(answer) for answer in self._answers.answers(question, body.count, start)]
        return {"answer": answers[0], "answers": answers}

    def resume(self, call: ApiCall) -> dict[str, Any]:
        message = self._ended(call)
        self._question(message)
        return {"answer": as_object(self._answers.resume(message))}

    def branch(self, call: ApiCall) -> dict[str, Any]:
        body = call.body(BranchBody)
        message = self._ended(call)
        question, tokens = self._question(message), self._store.tokens(message.id)
        if body.index >= len(tokens):
            raise RequestError(
                f"index is {body.index}, but {len(tokens)} tokens of the answer are known",
                "answers are recorded with their tokens where the setting is on",
                code=ErrorCode.INVALID_VALUE,
                param="index",
            )
        kept = [*tokens[: body.index], chosen_object(tokens[body.index], body.alternative)]
        start = StoredStart(text_of(kept), kept, message.model, message.rounds)
        return {"answer": as_object(self._answers.answer(question, start))}

    def stop(self, call: ApiCall) -> dict[str, Any]:
        self._answers.stop(self._store.message(call.path["id"]).id)
        return {}

    def decide(self, call: ApiCall) -> dict[str, Any]:
        """Decide about a call of a tool that an answer waits with; one that has ended has none."""
        body = call.body(DecisionBody)
        live = self._answers.live(self._store.message(call.path["id"]).id)
        if live is not None:
            live.approvals.decide(call.path["call"], body.decision)
        return {}

    def delete(self, call: ApiCall) -> dict[str, Any]:
        message = self._store.message(call.path["id"])
        self._store.delete_message(message.id)
        if live := self._answers.of_conversation(message.conversation):
            left = {each.id for each in self._store.messages(message.conversation)}
            for answer in live:
                if answer.id not in left:
                    answer.cancellation.cancel()
        return {}

    def restore(self, call: ApiCall) -> dict[str, Any]:
        return {"message": as_object(self._store.restore_message(call.path["id"]))}

    def tokens(self, call: ApiCall) -> dict[str, Any]:
        return {"tokens": self._store.tokens(call.path["id"])}

    def _ended(self, call: ApiCall) -> StoredMessage:
        """The message of a request, which is not being written.

        Raises:
            RefusedError: it is.
        """
        message = self._store.message(call.path["id"])
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
