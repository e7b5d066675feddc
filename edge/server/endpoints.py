"""The endpoints that compute: chat and text completions, responses, embeddings, and tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from starlette.routing import Route

from ...errors import CancelledError, EdgeError
from ...runtime.decode import FinishReason
from ...runtime.engine import Engine
from ...runtime.result import Chunk, Reply
from ...runtime.scheduling.request_run import Cancellation
from ..service.body_decoder import decode_body
from ..service.chat_body import parse_chat
from ..service.generation_fields import GenerationRequest, check_token_ids
from ..service.openai_objects import ChatCompletionObjects, CompletionObjects, GenerationObjects, embedding_list, new_id
from ..service.request_error import describe
from ..service.response_objects import ResponseObjects
from ..service.responses_body import parse_response
from ..service.text_bodies import DetokenizeBody, EmbeddingBody, TokenizeRequest, parse_completion, texts_or_ids
from .endpoint import Endpoint, RequestService
from .http_messages import DONE, encode_json, event, named_event
from .server_metrics import ServerMetrics


def computing_routes(service: RequestService) -> list[Route]:
    """The routes of all endpoints that compute."""

    def route(path: str, about: str, parse: Callable[[bytes], Any], compute: Any) -> Route:
        return Route(path, Endpoint(service, about, parse, compute), methods=["POST"])

    generate = partial(_generate, service.metrics)
    return [
        route(
            "/v1/chat/completions",
            "The next message of a conversation.",
            parse_chat,
            partial(generate, ChatCompletionObjects, "chatcmpl-", False),
        ),
        route(
            "/v1/completions",
            "The continuation of a text, or of token ids; several prompts are answered one after the other.",
            parse_completion,
            partial(generate, CompletionObjects, "cmpl-", False),
        ),
        route(
            "/v1/responses",
            "The Responses API, for text; nothing is stored.",
            parse_response,
            partial(generate, ResponseObjects, "resp_", True),
        ),
        route(
            "/v1/embeddings",
            "Vectors of texts, where the model was exported with --hidden-states.",
            EmbeddingBody.parse,
            _embed,
        ),
        route("/tokenize", "Token ids of a text or a conversation.", TokenizeRequest.parse, _tokenize),
        route("/detokenize", "The text of token ids.", partial(decode_body, kind=DetokenizeBody), _detokenize),
    ]


def _generate(
    metrics: ServerMetrics,
    kind: Callable[..., GenerationObjects],
    id_prefix: str,
    named_events: bool,
    request: GenerationRequest,
    engine: Engine,
    model: str,
    cancellation: Cancellation,
) -> Iterator[bytes]:
    """Answer the prompts one after the other; each takes a place in the engine's queue before its first piece.

    Args:
        metrics: count the answers.
        kind: makes the objects of the response.
        id_prefix: what the id of the response begins with.
        named_events: whether events have names, and the last one ends a stream.
        request: what to answer.
        engine: the model.
        model: its id.
        cancellation: says when to stop.
    """
    request.check(engine)
    encode = named_event if named_events else event
    objects = kind(request, model, int(time.time()), new_id(id_prefix))
    replies = []
    for index in range(len(request.prompts)):
        with cancellation.reading(request.begin(engine, index)) as stream:
            stream.start()
            chunks: list[Chunk] = []
            # An empty piece begins the response too; see `Compute`.
            yield b"".join(map(encode, objects.started())) if request.stream else b""
            try:
                for chunk in stream:
                    if chunk.finish_reason is not None and chunk.stats is not None:
                        waited_s = None if chunk.index else stream.waited_s
                        metrics.count_answer(model, chunk.finish_reason.value, chunk.stats, waited_s)
                    if chunk.finish_reason is FinishReason.CANCELLED:
                        raise CancelledError("the answer was cancelled")
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
    elif not named_events:
        yield DONE


def _embed(request: EmbeddingBody, engine: Engine, model: str, cancellation: Cancellation) -> Iterator[bytes]:
    prompts = [
        engine.tokenizer.encode(each, add_special_tokens=True) if isinstance(each, str) else list(each)
        for each in texts_or_ids("input", request.input)
    ]
    for index, tokens in enumerate(prompts):
        check_token_ids(engine, tokens, "input" if len(prompts) == 1 else f"input[{index}]")
    vectors = engine.embed(prompts, cancelled=lambda: cancellation.cancelled)
    request.check_dimensions(vectors.shape[1])
    prompt_tokens = sum(map(len, prompts))
    yield encode_json(
        embedding_list(vectors, model, as_base64=request.encoding_format == "base64", prompt_tokens=prompt_tokens)
    )


def _tokenize(request: TokenizeRequest, engine: Engine, model: str, _cancellation: Cancellation) -> Iterator[bytes]:
    ids = request.encode(engine)
    tokens: list[Any] = list(ids)
    if request.with_pieces:
        tokens = [{"id": token, "piece": engine.tokenizer.token_bytes.shown(token)} for token in ids]
    yield encode_json({"model": model, "tokens": tokens, "count": len(ids), "max_model_len": engine.context})


def _detokenize(request: DetokenizeBody, engine: Engine, model: str, _cancellation: Cancellation) -> Iterator[bytes]:
    check_token_ids(engine, request.tokens, "tokens")
    yield encode_json({"model": model, "content": engine.tokenizer.decode(request.tokens)})
