"""Answer objects of the Responses API: whole, and as the events of a stream."""

from __future__ import annotations

from typing import Any, Final

from ...runtime.decode import FinishReason
from ...runtime.result import Chunk, Reply, Stats
from .openai_objects import logprob_object, new_id
from .request_error import ErrorCode, RequestError
from .responses_body import ResponsesRequest

_STATUS: Final = {
    FinishReason.STOP: "completed",
    FinishReason.LENGTH: "incomplete",
    FinishReason.CANCELLED: "incomplete",
}
_INCOMPLETE: Final = {FinishReason.LENGTH: {"reason": "max_output_tokens"}, FinishReason.CANCELLED: {"reason": None}}
_ERROR_CODES: Final = {
    ErrorCode.BUSY: "rate_limit_exceeded",
    ErrorCode.MODEL: "server_error",
    ErrorCode.INTERNAL: "server_error",
}
"""Codes in response objects, of which OpenAI's API has few; all others are `invalid_prompt`."""


class ResponseObjects:
    """The objects of one response, which has one message with one text.

    Args:
        request: what was asked for.
        model: name of the model that answers.
        created: when the request came, in seconds since 1970.
        response_id: identifier of the response.
    """

    def __init__(self, request: ResponsesRequest, model: str, created: int, response_id: str) -> None:
        self._fields: Final = {
            "id": response_id,
            "object": "response",
            "created_at": created,
            "model": model,
            **request.repeated,
            "background": False,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "text": {"format": {"type": "text"}},
            "truncation": "disabled",
        }
        self._item_id: Final = new_id("msg_")
        self._texts: list[str] = []
        self._tokens: list[dict[str, Any]] = []
        self._events = 0

    def started(self) -> list[dict[str, Any]]:
        """The events before the first chunk."""
        response = self._response("in_progress")
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
            self._event("response.output_item.added", output_index=0, item=self._message("in_progress", [])),
            self._text_event("response.content_part.added", part=_text_part("", [])),
        ]

    def chunk(self, chunk: Chunk) -> list[dict[str, Any]]:
        """The events of one chunk of the stream, in order; there may be none."""
        events = []
        if chunk.text or chunk.logprobs:
            self._texts.append(chunk.text)
            tokens = [logprob_object(token) for token in chunk.logprobs]
            self._tokens += tokens
            events.append(self._text_event("response.output_text.delta", delta=chunk.text, logprobs=tokens))
        if chunk.finish_reason is not None and chunk.stats is not None:
            part = _text_part("".join(self._texts), self._tokens)
            status = _STATUS[chunk.finish_reason]
            response = self._ended(part, chunk.finish_reason, chunk.stats)
            events += [
                self._text_event("response.output_text.done", text=part["text"], logprobs=self._tokens),
                self._text_event("response.content_part.done", part=part),
                self._event("response.output_item.done", output_index=0, item=self._message(status, [part])),
                self._event(f"response.{status}", response=response),
            ]
        return events

    def failed(self, error: RequestError) -> list[dict[str, Any]]:
        """The last event of a stream that fails."""
        described = {"code": _ERROR_CODES.get(error.code, "invalid_prompt"), "message": str(error)}
        return [self._event("response.failed", response={**self._response("failed"), "error": described})]

    def whole(self, reply: Reply) -> dict[str, Any]:
        """The object of the whole answer."""
        part = _text_part(reply.text, [logprob_object(token) for token in reply.logprobs])
        return self._ended(part, reply.finish_reason, reply.stats)

    def _ended(self, part: dict[str, Any], reason: FinishReason, stats: Stats) -> dict[str, Any]:
        status = _STATUS[reason]
        return {
            **self._response(status),
            "incomplete_details": _INCOMPLETE.get(reason),
            "output": [self._message(status, [part])],
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

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        event = {"type": kind, "sequence_number": self._events, **fields}
        self._events += 1
        return event

    def _text_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return self._event(kind, item_id=self._item_id, output_index=0, content_index=0, **fields)


def _text_part(text: str, tokens: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": tokens}
