"""OpenAI's API: chat and text completions, responses, embeddings, models; token ids as other servers have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from ....runtime.encoders.encoder import AnyModel
from ....runtime.engine import Engine
from ....runtime.scheduling.request_run import Cancellation
from ...service.body_decoder import StrictStruct, about
from ...service.generation_fields import check_token_ids
from ...service.model_files import describe_model
from ...service.offered_models import ModelEntry
from ...service.openai_objects import ChatCompletionObjects, CompletionObjects, embedding_list, model_object
from ...service.pooled_model import ModelState
from ...service.response_objects import ResponseObjects
from ...service.responses_body import ResponsesBody
from ...service.text_bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    TokenizeBody,
    encoded_texts,
)
from ..endpoints import RequestService, generating_route, object_route, progress_route
from ..http_protocol import OPENAI, RESPONSES, ProtocolRoute
from ..json_endpoint import json_routes


def routes(service: RequestService) -> list[ProtocolRoute]:
    """The paths of the API; their descriptions are for the list of paths."""
    offered = service.pool.offered

    def described(entry: ModelEntry) -> dict[str, Any]:
        return model_object(entry.id, entry.created, describe_model(entry, service.pool.kind)["capabilities"])

    def models() -> object:
        """The models that are offered."""
        return {"object": "list", "data": [described(entry) for entry in offered.entries()]}

    def model(id: str) -> object:  # noqa: A002  the name in the path
        """One model."""
        return described(offered.find(id))

    def load(body: LoadBody, report: Callable[[object], None], cancellation: Cancellation) -> ModelState:
        """Load a model, with progress as a stream."""

        def progress(stage: str, fraction: float) -> None:
            report({"object": "model.load.progress", "stage": stage, "fraction": fraction})

        return service.pool.load(body.model, progress, cancellation=cancellation)

    def unload(model: str) -> object:
        """Unload a model that is not in use."""
        return {"model": service.pool.find(model).id, "unloaded": service.pool.unload(model)}

    table = (
        ("POST", "/v1/models/unload", unload),
        ("GET", "/v1/models", models),
        ("GET", "/v1/models/{id:path}", model),
    )
    return [
        generating_route(service, OPENAI, "/v1/chat/completions", ChatBody, ChatCompletionObjects),
        generating_route(service, OPENAI, "/v1/completions", CompletionBody, CompletionObjects),
        generating_route(service, RESPONSES, "/v1/responses", ResponsesBody, ResponseObjects),
        object_route(service, OPENAI, "/v1/embeddings", EmbeddingBody, _embed, encoders=True),
        object_route(service, OPENAI, "/tokenize", TokenizeBody, _tokenize),
        object_route(service, OPENAI, "/detokenize", DetokenizeBody, _detokenize),
        progress_route(service, OPENAI, "/v1/models/load", LoadBody, load),
        *json_routes(service.settings, table),
    ]


class LoadBody(StrictStruct):
    """Body of a request to load a model."""

    model: Annotated[str, about("Name of the model.")]
    stream: Annotated[bool | None, about("Whether to send the progress; false by default.")] = None


def _embed(request: EmbeddingBody, engine: AnyModel, model: str, cancellation: Cancellation) -> dict[str, Any]:
    """Vectors of texts, of encoders and models that were exported with --hidden-states."""
    prompts = encoded_texts(engine, "input", request.input)
    vectors = engine.embed(prompts, cancelled=lambda: cancellation.cancelled)
    request.check_dimensions(vectors.shape[1])
    prompt_tokens = sum(map(len, prompts))
    return embedding_list(vectors, model, as_base64=request.encoding_format == "base64", prompt_tokens=prompt_tokens)


def _tokenize(request: TokenizeBody, engine: Engine, model: str, _cancellation: Cancellation) -> dict[str, Any]:
    """Token ids of a text or a conversation."""
    ids = request.encode(engine)
    tokens: list[Any] = list(ids)
    if request.with_pieces:
        tokens = [{"id": token, "piece": engine.tokenizer.token_bytes.shown(token)} for token in ids]
    return {"model": model, "tokens": tokens, "count": len(ids), "max_model_len": engine.context}


def _detokenize(request: DetokenizeBody, engine: Engine, model: str, _cancellation: Cancellation) -> dict[str, Any]:
    """The text of token ids."""
    check_token_ids(engine, request.tokens, "tokens")
    return {"model": model, "content": engine.tokenizer.decode(request.tokens)}
