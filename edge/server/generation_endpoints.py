"""Chat completions, text completions and responses."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TypeVar

from ...errors import EdgeError
from ...runtime.decode import FinishReason
from ...runtime.engine import Engine
from ...runtime.result import Chunk, Reply
from ...runtime.scheduling.answer_stream import AnswerStream
from ..service.cancellation import CancelledError
from ..service.chat_body import ChatRequest
from ..service.completion_body import CompletionRequest
from ..service.generation_fields import AnswerRequest
from ..service.openai_objects import ChatCompletionObjects, CompletionObjects, new_id
from ..service.request_error import describe
from ..service.response_objects import ResponseObjects
from ..service.responses_body import ResponsesRequest
from .answer_endpoint import AnswerEndpoint
from .answer_worker import AnswerWorker
from .error_objects import encode_json
from .event_stream import DONE, event, named_event
from .text_endpoints import check_token_ids

_Request = TypeVar("_Request", bound=AnswerRequest)


class GenerationEndpoint(AnswerEndpoint[_Request]):
    """An endpoint whose answers are generated text."""

    def streams(self, request: _Request) -> bool:
        """Whether the request asks for events."""
        return request.stream

    @contextmanager
    def chunks(self, stream: AnswerStream, model: str, worker: AnswerWorker[bytes]) -> Iterator[Iterator[Chunk]]:
        """Take a place in the engine's queue and accept the worker; the answer ends with the `with` block.

        Raises:
            BusyError: the queue is full.
        """
        with closing(stream), worker.cancellation.calling(stream.cancel):
            stream.start()
            worker.accept()
            yield self._counted(stream, model)

    def _counted(self, stream: AnswerStream, model: str) -> Iterator[Chunk]:
        """The chunks of an answer, which is counted at its end.

        Raises:
            CancelledError: the answer was cancelled.
        """
        for chunk in stream:
            if chunk.finish_reason is not None and chunk.stats is not None:
                self.service.metrics.count_answer(
                    model, chunk.finish_reason.value, chunk.stats, first_choice=chunk.index == 0
                )
            if chunk.finish_reason is FinishReason.CANCELLED:
                raise CancelledError("the answer was cancelled")
            yield chunk


class ChatEndpoint(GenerationEndpoint[ChatRequest]):
    """The next message of a conversation."""

    def parse(self, body: bytes) -> ChatRequest:
        """Decode a chat body."""
        return ChatRequest.parse(body)

    def compute(self, request: ChatRequest, engine: Engine, model: str, worker: AnswerWorker[bytes]) -> None:
        """Generate the assistant's message."""
        request.check_context(engine.context)
        objects = ChatCompletionObjects(request, model, int(time.time()), new_id("chatcmpl-"))
        with self.chunks(engine.stream(request.messages, request.options), model, worker) as chunks:
            if not request.stream:
                worker.push(encode_json(objects.whole(Reply.of(chunks))))
                return
            for chunk in chunks:
                for each in objects.chunk(chunk):
                    worker.push(event(each))
        worker.push(DONE)


class CompletionEndpoint(GenerationEndpoint[CompletionRequest]):
    """The continuation of a text, or of token ids; several prompts are answered one after the other."""

    def parse(self, body: bytes) -> CompletionRequest:
        """Decode a completion body."""
        return CompletionRequest.parse(body)

    def compute(self, request: CompletionRequest, engine: Engine, model: str, worker: AnswerWorker[bytes]) -> None:
        """Continue the prompts."""
        request.check_context(engine.context)
        objects = CompletionObjects(request, model, int(time.time()), new_id("cmpl-"))
        for index, prompt in enumerate(request.prompts):
            if not isinstance(prompt, str):
                check_token_ids(engine, prompt, "prompt" if len(request.prompts) == 1 else f"prompt[{index}]")
        replies = []
        for index, prompt in enumerate(request.prompts):
            stream = (
                engine.stream(prompt, request.options)
                if isinstance(prompt, str)
                else engine.model.answer(None, list(prompt), request.options)
            )
            with self.chunks(stream, model, worker) as chunks:
                if not request.stream:
                    replies.append(Reply.of(chunks))
                    continue
                for chunk in chunks:
                    for each in objects.chunk(chunk, index):
                        worker.push(event(each))
        worker.push(DONE if request.stream else encode_json(objects.whole(replies)))


class ResponsesEndpoint(GenerationEndpoint[ResponsesRequest]):
    """The Responses API, for text; nothing is stored."""

    def parse(self, body: bytes) -> ResponsesRequest:
        """Decode the body of a response."""
        return ResponsesRequest.parse(body)

    def compute(self, request: ResponsesRequest, engine: Engine, model: str, worker: AnswerWorker[bytes]) -> None:
        """Generate a response. In a stream, an error in its middle is an event of OpenAI's API."""
        request.check_context(engine.context)
        objects = ResponseObjects(request, model, int(time.time()), new_id("resp_"))
        with self.chunks(engine.stream(request.messages, request.options), model, worker) as chunks:
            if not request.stream:
                worker.push(encode_json(objects.whole(Reply.of(chunks))))
                return
            try:
                for each in objects.started():
                    worker.push(named_event(each))
                for chunk in chunks:
                    for each in objects.chunk(chunk):
                        worker.push(named_event(each))
            except CancelledError:
                raise
            except EdgeError as error:
                for each in objects.failed(describe(error)):
                    worker.push(named_event(each))
