"""The endpoints that compute: chat and text completions, responses, embeddings, and tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any, TypeVar

from ...errors import CancelledError, EdgeError
from ...runtime.decode import FinishReason
from ...runtime.engine import Engine
from ...runtime.result import Chunk, Reply
from ...runtime.scheduling.request_run import Cancellation
from ..service.body_decoder import decode_body
from ..service.chat_body import ChatRequest
from ..service.generation_fields import GenerationRequest
from ..service.openai_objects import ChatCompletionObjects, CompletionObjects, GenerationObjects, embedding_list, new_id
from ..service.request_error import describe
from ..service.response_objects import ResponseObjects
from ..service.responses_body import ResponsesRequest
from ..service.text_bodies import CompletionRequest, DetokenizeBody, EmbeddingRequest, TokenizeRequest, check_token_ids
from .endpoint import Endpoint
from .http_messages import DONE, encode_json, event, named_event

_Request = TypeVar("_Request", bound=GenerationRequest)


class GenerationEndpoint(Endpoint[_Request]):
    """An endpoint whose responses are generated text; its subclasses name what differs between the APIs."""

    objects: type[Any]
    """The class of the objects of a response, a `GenerationObjects`."""
    id_prefix: str
    named_events = False
    """Whether events have names, and the last one ends a stream."""

    def streams(self, request: _Request) -> bool:
        """Whether the request asks for events."""
        return request.stream

    def compute(self, request: _Request, engine: Engine, model: str, cancellation: Cancellation) -> Iterator[bytes]:
        """Answer the prompts one after the other; each takes a place in the engine's queue before its first piece."""
        request.check(engine)
        encode = named_event if self.named_events else event
        objects: GenerationObjects = self.objects(request, model, int(time.time()), new_id(self.id_prefix))
        replies = []
        for index in range(len(request.prompts)):
            with cancellation.reading(request.begin(engine, index)) as stream:
                stream.start()
                chunks: list[Chunk] = []
                # An empty piece begins the response too; see `Endpoint.compute`.
                yield b"".join(map(encode, objects.started())) if request.stream else b""
                try:
                    for chunk in stream:
                        self._count(chunk, model)
                        if request.stream:
                            yield b"".join(map(encode, objects.chunk(chunk, index)))
                        else:
                            chunks.append(chunk)
                except CancelledError:
                    raise
                except EdgeError as error:
                    if not request.stream or not (failed := objects.failed(describe(error))):
                        raise
                    yield b"".join(map(encode, failed))
                if not request.stream:
                    replies.append(Reply.of(chunks))
        if not request.stream:
            yield encode_json(objects.whole(*replies))
        elif not self.named_events:
            yield DONE

    def _count(self, chunk: Chunk, model: str) -> None:
        """Count an answer at its end.

        Raises:
            CancelledError: the answer was cancelled.
        """
        if chunk.finish_reason is not None and chunk.stats is not None:
            self.service.metrics.count_answer(
                model, chunk.finish_reason.value, chunk.stats, first_choice=chunk.index == 0
            )
        if chunk.finish_reason is FinishReason.CANCELLED:
            raise CancelledError("the answer was cancelled")


class ChatEndpoint(GenerationEndpoint[ChatRequest]):
    """The next message of a conversation."""

    objects = ChatCompletionObjects
    id_prefix = "chatcmpl-"
    parse = staticmethod(ChatRequest.parse)


class CompletionEndpoint(GenerationEndpoint[CompletionRequest]):
    """The continuation of a text, or of token ids; several prompts are answered one after the other."""

    objects = CompletionObjects
    id_prefix = "cmpl-"
    parse = staticmethod(CompletionRequest.parse)


class ResponsesEndpoint(GenerationEndpoint[ResponsesRequest]):
    """The Responses API, for text; nothing is stored."""

    objects = ResponseObjects
    id_prefix = "resp_"
    named_events = True
    parse = staticmethod(ResponsesRequest.parse)


class EmbeddingEndpoint(Endpoint[EmbeddingRequest]):
    """Vectors of texts, where the model was exported with --hidden-states."""

    parse = staticmethod(EmbeddingRequest.parse)

    def compute(
        self, request: EmbeddingRequest, engine: Engine, model: str, cancellation: Cancellation
    ) -> Iterator[bytes]:
        """Embed the texts."""
        prompts = [
            engine.tokenizer.encode(each, add_special_tokens=True) if isinstance(each, str) else list(each)
            for each in request.inputs
        ]
        for index, tokens in enumerate(prompts):
            check_token_ids(engine, tokens, "input" if len(prompts) == 1 else f"input[{index}]")
        vectors = engine.embed(prompts, cancelled=lambda: cancellation.cancelled)
        request.check_dimensions(vectors.shape[1])
        prompt_tokens = sum(map(len, prompts))
        yield encode_json(embedding_list(vectors, model, as_base64=request.as_base64, prompt_tokens=prompt_tokens))


class TokenizeEndpoint(Endpoint[TokenizeRequest]):
    """Token ids of a text or a conversation."""

    parse = staticmethod(TokenizeRequest.parse)

    def compute(
        self, request: TokenizeRequest, engine: Engine, model: str, _cancellation: Cancellation
    ) -> Iterator[bytes]:
        """Tokenize a text, or a conversation in the chat template."""
        ids = request.encode(engine)
        tokens: list[Any] = list(ids)
        if request.with_pieces:
            tokens = [{"id": token, "piece": engine.tokenizer.token_bytes.shown(token)} for token in ids]
        yield encode_json({"model": model, "tokens": tokens, "count": len(ids), "max_model_len": engine.context})


class DetokenizeEndpoint(Endpoint[DetokenizeBody]):
    """The text of token ids."""

    parse = staticmethod(partial(decode_body, kind=DetokenizeBody))

    def compute(
        self, request: DetokenizeBody, engine: Engine, model: str, _cancellation: Cancellation
    ) -> Iterator[bytes]:
        """Give the text of token ids."""
        check_token_ids(engine, request.tokens, "tokens")
        yield encode_json({"model": model, "content": engine.tokenizer.decode(request.tokens)})
