"""The page's API for messages: send, edit, regenerate, continue, branch, stop, delete."""

from __future__ import annotations

from typing import Annotated, Any, Final

from msgspec import Meta
from starlette.routing import Route

from ..conversations.records import MessageState, Role, StoredMessage, as_object
from ..service.request_error import RequestError
from ..service.token_objects import chosen_object
from .api_endpoint import api_route, invalid
from .app_context import AppContext
from .conversation_endpoints import Attachments
from .generations import Generations, writing_error
from .message_generation import Decision

MAX_VARIANTS: Final = 8
"""Largest number of answers that one request asks for."""


def message_routes(context: AppContext, generations: Generations) -> list[Route]:
    """The routes of messages."""
    endpoints = _MessageEndpoints(context, generations)
    message = "/api/messages/{message_id}"
    table = (
        ("POST", "/api/conversations/{conversation_id}/messages", endpoints.send),
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
    def __init__(self, context: AppContext, generations: Generations) -> None:
        self._store: Final = context.store
        self._pool: Final = context.pool
        self._generations: Final = generations

    def send(
        self, conversation_id: str, content: str, parent: str | None = None, attachments: Attachments = ()
    ) -> dict[str, Any]:
        if not content.strip() and not attachments:
            raise invalid("content", "the message is empty", "write something")
        self._generations.check_room()
        message = self._store.add_message(conversation_id, parent, "user", content, attachments=attachments)
        return {"message": as_object(message), "answer": as_object(self._generations.begin(message)[0])}

    def edit(self, message_id: str, content: str, branch: bool = False) -> dict[str, Any]:
        """Replace the text of a message, or let it become that of another message beside it."""
        message = self._ended(message_id)
        if not branch:
            return {"message": as_object(self._store.rewrite(message.id, content))}
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
            return {"message": as_object(beside)}
        return {"message": as_object(beside), "answer": as_object(self._generations.begin(beside)[0])}

    def regenerate(
        self, message_id: str, count: Annotated[int, Meta(ge=1, le=MAX_VARIANTS)] = 1, model: str | None = None
    ) -> dict[str, Any]:
        """Write further answers to a message, or beside an answer; without a model, with that of the conversation."""
        message = self._store.message(message_id)
        question = message if message.role is Role.USER else self._question(message)
        chosen = None if model is None else self._pool.find(model).id
        answers = [as_object(answer) for answer in self._generations.begin(question, chosen, count=count)]
        return {"answer": answers[0], "answers": answers}

    def resume(self, message_id: str) -> dict[str, Any]:
        message = self._ended(message_id)
        return {"answer": as_object(self._generations.resume(message, self._question(message)))}

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
        return {"answer": as_object(answer)}

    def stop(self, message_id: str) -> dict[str, Any]:
        self._generations.stop(self._store.message(message_id).id)
        return {}

    def decide(self, message_id: str, call: str, decision: Decision) -> dict[str, Any]:
        """Decide about a call of a tool that an answer waits with; one that has ended has none."""
        if (generation := self._generations.live(self._store.message(message_id).id)) is not None:
            generation.decide(call, decision)
        return {}

    def delete(self, message_id: str) -> dict[str, Any]:
        message = self._store.message(message_id)
        self._store.delete_message(message.id)
        if generations := self._generations.all(message.conversation):
            left = {each.id for each in self._store.messages(message.conversation)}
            for each in generations:
                if each.id not in left:
                    each.cancellation.cancel()
        return {}

    def restore(self, message_id: str) -> dict[str, Any]:
        return {"message": as_object(self._store.restore_message(message_id))}

    def tokens(self, message_id: str) -> dict[str, Any]:
        return {"tokens": self._store.tokens(message_id)}

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
