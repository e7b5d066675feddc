"""OpenAI's API: chat and text completions, responses, embeddings, models; token ids as other servers have them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any

from ....runtime.encoders.encoder import AnyModel
from ....runtime.engine import Engine
from ....runtime.scheduling.request_run import Cancellation, Run
from ...service.body_decoder import StrictStruct, about, decode_body
from ...service.generation_fields import check_token_ids
from ...service.model_pool import ModelPool
from ...service.offered_models import ModelEntry
from ...service.openai_objects import ChatCompletionObjects, CompletionObjects, embedding_list, model_object
from ...service.response_objects import ResponseObjects
from ...service.responses_body import parse_response
from ...service.text_bodies import (
    DetokenizeBody,
    EmbeddingBody,
    TokenizeRequest,
    encoded_texts,
    parse_chat,
    parse_completion,
)
from ..endpoints import Endpoint, RequestService, generating_route
from ..http_protocol import OPENAI, RESPONSES, ProtocolRoute, encode_json, event
from ..json_endpoint import JsonRoute


def routes(service: RequestService) -> list[ProtocolRoute]:
    """The paths of the API; their descriptions are for the list of paths."""
    offered = service.pool.offered

    def described(entry: ModelEntry) -> dict[str, Any]:
        return model_object(entry.id, entry.created, service.files.describe(entry)["capabilities"])

    def models() -> object:
        """The models that are offered."""
        return {"object": "list", "data": [described(entry) for entry in offered.entries()]}

    def model(id: str) -> object:  # noqa: A002  the name in the path
        """One model."""
        return described(offered.find(id))

    def unload(model: str) -> object:
        """Unload a model that is not in use."""
        return {"model": service.pool.find(model).id, "unloaded": service.pool.unload(model)}

    chat = "The next message of a conversation."
    text = "The continuation of a text, or of token ids; several prompts are answered one after the other."
    response = "The Responses API, for text; nothing is stored."
    vectors = "Vectors of texts, of encoders and models that were exported with --hidden-states."
    load = "Load a model, with progress as a stream."
    ids = "Token ids of a text or a conversation."
    detokenize = partial(decode_body, kind=DetokenizeBody)
    parse_load, load_model = partial(decode_body, kind=LoadBody), partial(_load, service.pool)
    return [
        generating_route(service, OPENAI, "/v1/chat/completions", chat, parse_chat, ChatCompletionObjects),
        generating_route(service, OPENAI, "/v1/completions", text, parse_completion, CompletionObjects),
        generating_route(service, RESPONSES, "/v1/responses", response, parse_response, ResponseObjects),
        ProtocolRoute(
            OPENAI, "POST", "/v1/embeddings", Endpoint(service, vectors, EmbeddingBody.parse, _embed, encoders=True)
        ),
        ProtocolRoute(OPENAI, "POST", "/tokenize", Endpoint(service, ids, TokenizeRequest.parse, _tokenize)),
        ProtocolRoute(
            OPENAI, "POST", "/detokenize", Endpoint(service, "The text of token ids.", detokenize, _detokenize)
        ),
        ProtocolRoute(OPENAI, "POST", "/v1/models/load", Endpoint(service, load, parse_load, load_model, loads=False)),
        JsonRoute(service.settings, "POST", "/v1/models/unload", unload),
        JsonRoute(service.settings, "GET", "/v1/models", models),
        JsonRoute(service.settings, "GET", "/v1/models/{id:path}", model),
    ]


class LoadBody(StrictStruct):
    """Body of a request to load a model."""

    model: Annotated[str, about("Name of the model.")]
    stream: Annotated[bool | None, about("Whether to send the progress; false by default.")] = None


def _load(pool: ModelPool, body: LoadBody, run: Run[bytes]) -> Iterator[bytes]:
    """Load a model, with an event for each piece of progress, and say what `ModelState` says of it."""

    def progress(stage: str, fraction: float) -> None:
        if body.stream:
            run.put(event({"object": "model.load.progress", "stage": stage, "fraction": fraction}))

    state = pool.load(body.model, progress, cancellation=run.cancellation)
    yield event(state) + OPENAI.end if body.stream else encode_json(state)


def _embed(request: EmbeddingBody, engine: AnyModel, model: str, cancellation: Cancellation) -> Iterator[bytes]:
    prompts = encoded_texts(engine, "input", request.input)
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
