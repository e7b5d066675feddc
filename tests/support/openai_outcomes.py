"""What OpenAI's clients return for a request, in a form that is compared with what the engine says.

The functions `expected_...` give what the functions `read_...` have to read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import pytest

from edgerun.runtime.decode import FinishReason
from edgerun.runtime.result import Reply
from support.openai_clients import Outcome


def expected_chat(reply: Reply, model: str) -> dict[str, Any]:
    """What `read_chat` reads of an answer."""
    return {
        "model": model,
        "roles": ["assistant"] * len(reply.choices),
        "texts": [choice.text for choice in reply.choices],
        "finish_reasons": [choice.finish_reason.value for choice in reply.choices],
        "usage": [_expected_usage([reply])],
        "logprobs": [_expected_logprobs(choice) for choice in reply.choices],
    }


def _expected_usage(replies: list[Reply]) -> tuple[int, int, int]:
    prompt = sum(reply.stats.prompt_tokens for reply in replies)
    answers = sum(choice.stats.completion_tokens for reply in replies for choice in reply.choices)
    return prompt, answers, prompt + answers


def _expected_logprobs(reply: Reply) -> dict[str, Any] | None:
    if not reply.logprobs:
        return None
    return {
        "text": reply.text,
        "tokens": [token.text for token in reply.logprobs],
        "numbers": pytest.approx([token.logprob for token in reply.logprobs], abs=1e-4),
        "top tokens": [[each.text for each in token.top] for token in reply.logprobs],
        "top numbers": pytest.approx([each.logprob for token in reply.logprobs for each in token.top], abs=1e-4),
    }


def _read_logprobs(tokens: list[Any]) -> dict[str, Any]:
    return {
        "text": b"".join(bytes(token["bytes"]) for token in tokens).decode(errors="replace"),
        "tokens": [token["token"] for token in tokens],
        "numbers": [token["logprob"] for token in tokens],
        "top tokens": [[each["token"] for each in token["top_logprobs"]] for token in tokens],
        "top numbers": [each["logprob"] for token in tokens for each in token["top_logprobs"]],
    }


def _usage(value: Mapping[str, int] | None) -> list[tuple[int, int, int]]:
    return [(value["prompt_tokens"], value["completion_tokens"], value["total_tokens"])] if value else []


def cached_tokens(outcome: Outcome) -> int:
    return int(_only(outcome)["usage"]["prompt_tokens_details"]["cached_tokens"])


def _only(outcome: Outcome) -> dict[str, Any]:
    """The object that a call returned."""
    assert outcome.error is None, outcome.error
    (found,) = outcome.objects
    return found


def read_chat(outcome: Outcome) -> dict[str, Any]:
    completion = _only(outcome)
    choices = completion["choices"]
    assert [choice["index"] for choice in choices] == [*range(len(choices))]
    return {
        "model": completion["model"],
        "roles": [choice["message"]["role"] for choice in choices],
        "texts": [choice["message"]["content"] for choice in choices],
        "finish_reasons": [choice["finish_reason"] for choice in choices],
        "usage": _usage(completion.get("usage")),
        "logprobs": [choice["logprobs"] and _read_logprobs(choice["logprobs"]["content"]) for choice in choices],
    }


def read_streamed_chat(outcome: Outcome) -> dict[str, Any]:
    assert outcome.error is None, outcome.error
    chunks = outcome.objects
    answers = _by_index(chunks)
    deltas = [[choice["delta"] for choice in choices] for choices in answers]
    tokens = [
        [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["content"]]
        for choices in answers
    ]
    return {
        "ids": len({chunk["id"] for chunk in chunks}),
        "model": chunks[0]["model"],
        "roles": [choices[0]["role"] for choices in deltas],
        "texts": ["".join(delta.get("content") or "" for delta in choices) for choices in deltas],
        "is in pieces": all(sum(bool(delta.get("content")) for delta in choices) > 1 for choices in deltas),
        "finish_reasons": _finish_reasons(answers),
        "usage": [usage for chunk in chunks for usage in _usage(chunk.get("usage"))],
        "logprobs": [_read_logprobs(each) if each else None for each in tokens],
    }


def _by_index(chunks: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The choices of a stream's chunks, by the answer that they belong to."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    indexes = range(1 + max(choice["index"] for choice in choices))
    return [[choice for choice in choices if choice["index"] == index] for index in indexes]


def _finish_reasons(answers: list[list[dict[str, Any]]]) -> list[str | None]:
    """The finish reasons of streamed answers; those of all chunks but the last ones are null."""
    assert all(choice["finish_reason"] is None for choices in answers for choice in choices[:-1])
    return [choices[-1]["finish_reason"] for choices in answers]


def expected_completion(replies: list[Reply]) -> dict[str, Any]:
    answers = [choice for reply in replies for choice in reply.choices]
    return {
        "texts": [answer.text for answer in answers],
        "finish_reasons": [answer.finish_reason.value for answer in answers],
        "usage": [_expected_usage(replies)],
        "logprobs": [
            {
                "tokens": [token.text for token in answer.logprobs],
                "numbers": pytest.approx([token.logprob for token in answer.logprobs], abs=1e-4),
                "top tokens": [{each.text for each in token.top} for token in answer.logprobs],
                "offsets": [*accumulate(map(len, (token.text for token in answer.logprobs)), initial=0)][:-1],
            }
            if answer.logprobs
            else None
            for answer in answers
        ],
    }


def read_completion(outcome: Outcome) -> dict[str, Any]:
    completion = _only(outcome)
    choices = completion["choices"]
    assert [choice["index"] for choice in choices] == [*range(len(choices))]
    return {
        "texts": [choice["text"] for choice in choices],
        "finish_reasons": [choice["finish_reason"] for choice in choices],
        "usage": _usage(completion["usage"]),
        "logprobs": [
            {
                "tokens": logprobs["tokens"],
                "numbers": logprobs["token_logprobs"],
                "top tokens": [set(each) for each in logprobs["top_logprobs"]],
                "offsets": logprobs["text_offset"],
            }
            if (logprobs := choice["logprobs"])
            else None
            for choice in choices
        ],
    }


def read_streamed_completion(outcome: Outcome) -> dict[str, Any]:
    assert outcome.error is None, outcome.error
    answers = _by_index(outcome.objects)
    return {
        "texts": ["".join(choice["text"] for choice in choices) for choices in answers],
        "finish_reasons": _finish_reasons(answers),
        "usage": [usage for chunk in outcome.objects for usage in _usage(chunk.get("usage"))],
        "logprobs": [None for _ in answers],
    }


def expected_response(reply: Reply) -> dict[str, Any]:
    ended = reply.finish_reason is FinishReason.STOP
    return {
        "status": "completed" if ended else "incomplete",
        "incomplete_details": None if ended else {"reason": "max_output_tokens"},
        "text": reply.text,
        "output_text": reply.text,
        "usage": _expected_usage([reply]),
    }


def read_response(outcome: Outcome) -> dict[str, Any]:
    return _response(_only(outcome), outcome.text)


def _response(response: dict[str, Any], output_text: str | None) -> dict[str, Any]:
    (message,) = response["output"]
    (part,) = message["content"]
    usage = response["usage"]
    return {
        "status": response["status"],
        "incomplete_details": response["incomplete_details"],
        "text": part["text"],
        "output_text": output_text,
        "usage": (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]),
    }


def read_streamed_response(outcome: Outcome) -> dict[str, Any]:
    assert outcome.error is None, outcome.error
    events = outcome.objects
    return {
        "events": [kind for kind, _ in groupby(event["type"] for event in events)],
        "are numbered": [event["sequence_number"] for event in events] == [*range(len(events))],
        "text": "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta"),
        "response": _response(events[-1]["response"], None),
    }


def refusal(
    name: str, status: int, code: str, param: str | None, said: str, *, kind: str = "invalid_request_error"
) -> dict[str, Any]:
    """What `read_error` reads of an exception whose message contains `said`."""
    return {"class": name, "status": status, "code": code, "param": param, "type": kind, "message": _Containing(said)}


def read_error(outcome: Outcome) -> dict[str, Any]:
    return outcome.error or {"answered": outcome.objects}


@dataclass(frozen=True, eq=False)
class _Containing:
    """Equals every text that has this one in it."""

    text: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and self.text in other

    __hash__ = None
