"""Answer objects of the Responses API: whole, and as the events of a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

from ...runtime.decode import FinishReason
from ...runtime.result import Chunk, Reply
from ...runtime.tools.calls import ToolCall
from .generation_fields import GenerationRequest
from .openai_objects import GenerationObjects, logprob_object, new_id
from .request_error import ErrorCode, RequestError

_ERROR_CODES: Final[Mapping[StrEnum, str]] = {
    ErrorCode.BUSY: "rate_limit_exceeded",
    ErrorCode.MODEL: "server_error",
    ErrorCode.INTERNAL: "server_error",
}
"""Codes in response objects, of which OpenAI's API has few; all others are `invalid_prompt`."""


class ResponseObjects(GenerationObjects):
    """The objects of one response: reasoning, a message with one text, and calls of functions."""

    id_prefix = "resp_"

    def __init__(self, request: GenerationRequest, model: str) -> None:
        super().__init__(request, model)
        self._fields: Final = {
            "id": self._head["id"],
            "object": "response",
            "created_at": self._head["created"],
            "model": model,
            **request.repeated,
            "background": False,
            "parallel_tool_calls": request.options.parallel_tool_calls,
            "previous_response_id": None,
            "service_tier": "default",
            "truncation": "disabled",
        }
        self._items: list[dict[str, Any]] = []
        """The items of the output that are complete."""
        self._kind: str | None = None
        """The kind of the item that is being written, `message` or `reasoning`; None for none."""
        self._item_id = ""
        self._texts: list[str] = []
        self._tokens: list[dict[str, Any]] = []
        self._events = 0

    def started(self) -> list[dict[str, Any]]:
        """The events before the first chunk."""
        response = self._response("in_progress")
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def pieces(self, chunk: Chunk | Reply) -> list[dict[str, Any]]:
        """The events of what a chunk adds to the answer, or of a whole one; there may be none."""
        events: list[dict[str, Any]] = []
        if chunk.reasoning:
            events += self._write("reasoning", chunk.reasoning)
        if chunk.text or (chunk.logprobs and not chunk.reasoning and not chunk.tool_calls):
            events += self._write("message", chunk.text, [logprob_object(token) for token in chunk.logprobs])
        for call in chunk.tool_calls:
            events += self._close("completed")
            events += self._call_events(call)
        return events

    def ended(self, reply: Reply) -> list[dict[str, Any]]:
        """The last events of a stream."""
        status, events = "completed" if reply.finish_reason is FinishReason.STOP else "incomplete", []
        if self._kind is None and not {"message", "function_call"} & {item["type"] for item in self._items}:
            events = self._open("message")
        events += self._close(status)
        return [*events, self._event(f"response.{status}", response=self._complete(reply, status))]

    def failed(self, error: RequestError) -> list[dict[str, Any]]:
        """The last event of a stream that fails."""
        described = {"code": _ERROR_CODES.get(error.code, "invalid_prompt"), "message": str(error)}
        return [self._event("response.failed", response={**self._response("failed"), "error": described})]

    def whole(self, *replies: Reply) -> dict[str, Any]:
        """The object of the whole response."""
        (reply,) = replies
        self.pieces(reply)
        response: dict[str, Any] = self.ended(reply)[-1]["response"]
        return response

    def _write(self, kind: str, text: str, tokens: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
        """The events of a piece of a message or of reasoning."""
        events = [] if self._kind == kind else [*self._close("completed"), *self._open(kind)]
        self._texts.append(text)
        self._tokens += tokens
        return [*events, self._text_event("delta", delta=text, logprobs=list(tokens))]

    def _open(self, kind: str) -> list[dict[str, Any]]:
        """The events with which an item begins."""
        self._kind, self._texts, self._tokens = kind, [], []
        self._item_id = new_id("msg_" if kind == "message" else "rs_")
        item = _item(kind, self._item_id, "in_progress", [])
        return [
            self._event("response.output_item.added", output_index=len(self._items), item=item),
            self._part_event("response.content_part.added", part=_part(kind, "", [])),
        ]

    def _close(self, status: str) -> list[dict[str, Any]]:
        """The events with which the item that is being written ends."""
        if self._kind is None:
            return []
        text = "".join(self._texts)
        part = _part(self._kind, text, self._tokens)
        item = _item(self._kind, self._item_id, status, [part])
        events = [
            self._text_event("done", text=text, logprobs=self._tokens),
            self._part_event("response.content_part.done", part=part),
            self._event("response.output_item.done", output_index=len(self._items), item=item),
        ]
        self._items.append(item)
        self._kind = None
        return events

    def _call_events(self, call: ToolCall) -> list[dict[str, Any]]:
        """The events of a call of a function."""
        item_id, index = new_id("fc_"), len(self._items)
        begun = _call(item_id, ToolCall(call.id, call.name, ""), "in_progress")
        item = _call(item_id, call, "completed")
        place = {"item_id": item_id, "output_index": index}
        self._items.append(item)
        return [
            self._event("response.output_item.added", output_index=index, item=begun),
            self._event("response.function_call_arguments.delta", **place, delta=call.arguments),
            self._event("response.function_call_arguments.done", **place, name=call.name, arguments=call.arguments),
            self._event("response.output_item.done", output_index=index, item=item),
        ]

    def _complete(self, reply: Reply, status: str) -> dict[str, Any]:
        """The response with the whole answer."""
        stats = reply.stats
        return {
            **self._response(status),
            "incomplete_details": None if status == "completed" else {"reason": "max_output_tokens"},
            "output": self._items,
            "usage": {
                "input_tokens": stats.prompt_tokens,
                "input_tokens_details": {"cached_tokens": stats.reused_tokens, "cache_write_tokens": 0},
                "output_tokens": stats.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": stats.prompt_tokens + stats.completion_tokens,
            },
        }

    def _response(self, status: str) -> dict[str, Any]:
        """A response without an answer."""
        return {
            **self._fields,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
        }

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        event = {"type": kind, "sequence_number": self._events, **fields}
        self._events += 1
        return event

    def _text_event(self, what: str, logprobs: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """An event of the text that is being written; only the text of a message has log-probabilities."""
        if self._kind == "message":
            return self._part_event(f"response.output_text.{what}", **fields, logprobs=logprobs)
        return self._part_event(f"response.reasoning_text.{what}", **fields)

    def _part_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """An event of the only part of the item that is being written."""
        place = {"item_id": self._item_id, "output_index": len(self._items), "content_index": 0}
        return self._event(kind, **place, **fields)


def _item(kind: str, item_id: str, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    """A message or reasoning."""
    if kind == "message":
        return {"id": item_id, "type": kind, "role": "assistant", "status": status, "content": content}
    return {"id": item_id, "type": kind, "status": status, "summary": [], "content": content}


def _part(kind: str, text: str, tokens: list[dict[str, Any]]) -> dict[str, Any]:
    """The only part of a message or of reasoning."""
    if kind == "message":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": tokens}
    return {"type": "reasoning_text", "text": text}


def _call(item_id: str, call: ToolCall, status: str) -> dict[str, Any]:
    return {
        "id": item_id,
        "type": "function_call",
        "status": status,
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
    }
