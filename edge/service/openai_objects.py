"""Answer objects of OpenAI's APIs: chat and text completions, whole and streamed; embeddings, models."""

from __future__ import annotations

import base64
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from ...runtime.decode import FinishReason
from ...runtime.result import Chunk, Reply, Stats
from ...runtime.text.token_logprobs import TokenLogprob
from ...version import __version__
from .generation_fields import GenerationRequest
from .request_error import RequestError
from .token_objects import json_logprob

_FINGERPRINT: Final = f"edge-run-{__version__}"
"""What OpenAI's API calls the system fingerprint: answers to one seed may differ between releases."""
_OF_TEXT: Final = frozenset({"completion", "tools"})
"""Capabilities of language models that read and write text alone."""


def new_id(prefix: str) -> str:
    """An identifier for an answer, such as `chatcmpl-...` for the prefix `chatcmpl-`."""
    return f"{prefix}{uuid.uuid4().hex}"


def _finish_reason(reason: FinishReason | None, *, called: bool = False) -> str | None:
    """Why an answer ended, in OpenAI's words; None where it goes on. `called` says that it has calls of functions."""
    if reason is FinishReason.STOP:
        return "tool_calls" if called else "stop"
    # OpenAI's API has no reason for a cancellation. What a program does with an answer that was cut off suits it.
    return None if reason is None else "length"


def _deltas(chunk: Chunk) -> list[dict[str, Any]]:
    """What a chunk adds to the message; at least one where it has tokens."""
    deltas: list[dict[str, Any]] = []
    if chunk.reasoning:
        deltas.append({"reasoning_content": chunk.reasoning})
    if chunk.text:
        deltas.append({"content": chunk.text})
    for call in chunk.tool_calls:
        begun = {"name": call.name, "arguments": ""}
        deltas.append({"tool_calls": [{"index": call.index, "id": call.id, "type": "function", "function": begun}]})
        deltas.append({"tool_calls": [{"index": call.index, "function": {"arguments": call.arguments}}]})
    return deltas or ([{"content": ""}] if chunk.logprobs else [])


def _unparsed(unparsed: bool) -> dict[str, bool]:
    """Extension of a choice: that its text has something in it that began like a call of a function."""
    return {"unparsed_tool_calls": True} if unparsed else {}


def _usage(prompts: Iterable[Sequence[Stats]]) -> dict[str, Any]:
    """The usage of one request.

    Args:
        prompts: statistics of the answers to each of its prompts, which are counted once.
    """
    prompt_tokens = cached_tokens = completion_tokens = 0
    for answers in prompts:
        prompt_tokens += answers[0].prompt_tokens
        # All but one of several answers take over the prompt from that one.
        cached_tokens += min(stats.reused_tokens for stats in answers)
        completion_tokens += sum(stats.completion_tokens for stats in answers)
        # Of several candidates, those count too that are not returned.
        completion_tokens += sum(stats.best_of.discarded_tokens for stats in answers if stats.best_of is not None)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def logprob_object(token: TokenLogprob) -> dict[str, Any]:
    """A token with its log-probability, and its likeliest alternatives."""
    return {**_probability(token), "top_logprobs": [_probability(each) for each in token.top]}


def _probability(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": json_logprob(token), "bytes": list(token.bytes)}


def model_object(name: str, created: int, capabilities: Sequence[str]) -> dict[str, Any]:
    """One model.

    Args:
        name: name of the model in requests.
        created: when the model was made, in seconds since 1970.
        capabilities: see `service.model_files.capabilities`.
    """
    # Objects of models that read and write text alone have OpenAI's fields and no others.
    told = {} if _OF_TEXT.issuperset(capabilities) else {"capabilities": list(capabilities)}
    return {"id": name, "object": "model", "created": created, "owned_by": "edge-run", **told}


def embedding_list(
    vectors: npt.NDArray[np.float32], model: str, *, as_base64: bool, prompt_tokens: int
) -> dict[str, Any]:
    """Embeddings.

    Args:
        vectors: float32 `[n, d]`, one row a text.
        model: name of the model.
        as_base64: whether vectors are the base64 of little-endian float32, which takes a quarter of the bytes.
        prompt_tokens: number of tokens of all texts.
    """
    rows: list[Any] = vectors.tolist()
    if as_base64:
        rows = [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in vectors]
    data = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)]
    return {
        "object": "list",
        "data": data,
        "model": model,
        "usage": {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens},
    }


class GenerationObjects(ABC):
    """The objects of one response to a request for generated text.

    Args:
        request: what was asked for.
        model: name of the model that answers.
    """

    id_prefix: ClassVar[str] = ""
    """What the identifier of a response begins with."""

    def __init__(self, request: GenerationRequest, model: str) -> None:
        self._request: Final = request
        self._head = {"id": new_id(self.id_prefix), "created": int(time.time()), "model": model}

    def started(self) -> list[dict[str, Any]]:
        """The objects of a stream before the first chunk."""
        return []

    def chunk(self, chunk: Chunk, _prompt_index: int = 0) -> list[dict[str, Any]]:
        """The objects to send for one chunk of the stream, in order; there may be none.

        These are the ones of a response with one answer; other responses have a method of their own.

        Args:
            chunk: a piece of an answer.
            _prompt_index: which prompt of the request it answers; the answers may come in any order.
        """
        objects = list(self.pieces(chunk))
        if chunk.finish_reason is not None and chunk.stats is not None:
            objects += self.ended(Reply("", chunk.finish_reason, chunk.stats))
        return objects

    def pieces(self, _chunk: Chunk) -> Iterable[dict[str, Any]]:
        """The objects of what a chunk adds to the answer."""
        return ()

    def ended(self, reply: Reply) -> Iterable[dict[str, Any]]:
        """The last objects of a stream; `reply` is the answer without what was sent of it."""
        return [self.whole(reply)]

    @abstractmethod
    def whole(self, *replies: Reply) -> dict[str, Any]:
        """The object of the whole response, from one reply for each prompt, in their order."""

    def failed(self, _error: RequestError) -> list[dict[str, Any]]:
        """The last objects of a stream that fails, where the API has some."""
        return []


class ChatCompletionObjects(GenerationObjects):
    """The objects of one chat completion."""

    id_prefix = "chatcmpl-"

    def __init__(self, request: GenerationRequest, model: str) -> None:
        super().__init__(request, model)
        self._head["system_fingerprint"] = _FINGERPRINT
        self._finished: list[Stats] = []
        self._begun: set[int] = set()
        self._called: set[int] = set()
        """Answers with calls of functions."""
        self._unparsed: set[int] = set()
        """Answers whose text has something in it that began like a call."""

    def chunk(self, chunk: Chunk, _prompt_index: int = 0) -> list[dict[str, Any]]:
        """The objects to send for one chunk of the stream."""
        index = chunk.index
        objects = []
        if index not in self._begun:
            self._begun.add(index)
            objects.append(self._streamed(index, {"role": "assistant", "content": ""}, None))
        tokens = chunk.logprobs
        for delta in _deltas(chunk):
            objects.append(self._streamed(index, delta, None, tokens))
            tokens = ()
        if chunk.tool_calls:
            self._called.add(index)
        if chunk.unparsed:
            self._unparsed.add(index)
        if chunk.finish_reason is not None and chunk.stats is not None:
            self._finished.append(chunk.stats)
            reason = _finish_reason(chunk.finish_reason, called=index in self._called)
            objects.append(self._streamed(index, {}, reason, unparsed=index in self._unparsed))
            if self._request.include_usage and len(self._finished) == self._request.options.n:
                objects.append(self._chunk_object([], _usage([self._finished])))
        return objects

    def whole(self, *replies: Reply) -> dict[str, Any]:
        """The object of the whole completion."""
        (reply,) = replies
        choices = [
            {
                "index": index,
                "message": {
                    **choice.message,
                    "refusal": None,
                    "content": choice.text or (None if choice.tool_calls else ""),
                },
                "logprobs": self._logprobs(choice.logprobs),
                "finish_reason": _finish_reason(choice.finish_reason, called=bool(choice.tool_calls)),
                **_unparsed(choice.unparsed),
            }
            for index, choice in enumerate(reply.choices)
        ]
        used = _usage([[choice.stats for choice in reply.choices]])
        return {"object": "chat.completion", **self._head, "choices": choices, "usage": used}

    def _streamed(
        self,
        index: int,
        delta: dict[str, Any],
        reason: str | None,
        tokens: Sequence[TokenLogprob] = (),
        *,
        unparsed: bool = False,
    ) -> dict[str, Any]:
        logprobs = self._logprobs(tokens) if tokens else None
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._chunk_object([{**choice, **_unparsed(unparsed)}], None)

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self._request.options.logprobs is None:
            return None
        return {"content": [logprob_object(token) for token in tokens], "refusal": None}

    def _chunk_object(self, choices: list[dict[str, Any]], used: dict[str, Any] | None) -> dict[str, Any]:
        """A chunk; where the usage is asked for, those before the last one have none."""
        tail = {"usage": used} if self._request.include_usage else {}
        return {"object": "chat.completion.chunk", **self._head, "choices": choices, **tail}


class CompletionObjects(GenerationObjects):
    """The objects of one text completion, which answers one prompt or several."""

    id_prefix = "cmpl-"

    def __init__(self, request: GenerationRequest, model: str) -> None:
        super().__init__(request, model)
        self._head = {"id": "", "object": "text_completion", **self._head, "system_fingerprint": _FINGERPRINT}
        self._finished: defaultdict[int, list[Stats]] = defaultdict(list)
        self._lengths: Counter[int] = Counter()

    def chunk(self, chunk: Chunk, prompt_index: int = 0) -> list[dict[str, Any]]:
        """The objects to send for one chunk of the stream."""
        objects = []
        reason = _finish_reason(chunk.finish_reason)
        if chunk.text or chunk.logprobs or reason is not None:
            index = prompt_index * self._request.options.n + chunk.index
            choice = self._choice(index, chunk.text, chunk.logprobs, reason)
            objects.append(
                {**self._head, "choices": [choice], **({"usage": None} if self._request.include_usage else {})}
            )
        if chunk.stats is not None:
            self._finished[prompt_index].append(chunk.stats)
            finished = sum(map(len, self._finished.values()))
            wanted = len(self._request.prompts) * self._request.options.n
            if self._request.include_usage and finished == wanted:
                objects.append({**self._head, "choices": [], "usage": _usage(self._finished.values())})
        return objects

    def whole(self, *replies: Reply) -> dict[str, Any]:
        """The object of the whole completion."""
        answers = [choice for reply in replies for choice in reply.choices]
        choices = [
            self._choice(index, choice.text, choice.logprobs, _finish_reason(choice.finish_reason))
            for index, choice in enumerate(answers)
        ]
        used = _usage([choice.stats for choice in reply.choices] for reply in replies)
        return {**self._head, "choices": choices, "usage": used}

    def _choice(self, index: int, text: str, tokens: Sequence[TokenLogprob], reason: str | None) -> dict[str, Any]:
        logprobs = None if self._request.options.logprobs is None else self._logprobs(index, tokens)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, index: int, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Log-probabilities as lists of equal length; offsets count the characters of the answer."""
        texts = [token.text for token in tokens]
        offsets = list(accumulate(map(len, texts), initial=self._lengths[index]))
        self._lengths[index] = offsets.pop()
        return {
            "tokens": texts,
            "token_logprobs": [json_logprob(token) for token in tokens],
            "top_logprobs": [{each.text: json_logprob(each) for each in token.top} for token in tokens],
            "text_offset": offsets,
        }
