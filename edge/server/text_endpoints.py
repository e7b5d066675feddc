"""Embeddings of texts, token ids of texts, and texts of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...runtime.engine import Engine
from ...runtime.text.messages import template_messages
from ..service.embedding_body import EmbeddingRequest
from ..service.openai_objects import embedding_list
from ..service.request_error import ErrorCode, RequestError
from ..service.token_bodies import DetokenizeRequest, TokenizeRequest
from .answer_endpoint import AnswerEndpoint
from .answer_worker import AnswerWorker
from .error_objects import encode_json


def check_token_ids(engine: Engine, tokens: Sequence[int], param: str) -> None:
    """Check that a model has these tokens.

    Raises:
        RequestError: it does not have one of them.
    """
    most = engine.graph_io.vocab_size
    for index, token in enumerate(tokens):
        if not 0 <= token < most:
            raise RequestError(
                f"{param}[{index}] is {token}",
                f"the model has {most} tokens",
                code=ErrorCode.INVALID_VALUE,
                param=f"{param}[{index}]",
            )


class EmbeddingEndpoint(AnswerEndpoint[EmbeddingRequest]):
    """Vectors of texts, where the model was exported with --hidden-states."""

    def parse(self, body: bytes) -> EmbeddingRequest:
        """Decode an embedding body."""
        return EmbeddingRequest.parse(body)

    def compute(self, request: EmbeddingRequest, engine: Engine, model: str, worker: AnswerWorker[bytes]) -> None:
        """Embed the texts."""
        prompts = [
            engine.tokenizer.encode(each, add_special_tokens=True) if isinstance(each, str) else list(each)
            for each in request.inputs
        ]
        for index, tokens in enumerate(prompts):
            check_token_ids(engine, tokens, "input" if len(prompts) == 1 else f"input[{index}]")
        vectors = engine.embed(prompts, cancelled=lambda: worker.cancellation.cancelled)
        request.check_dimensions(vectors.shape[1])
        prompt_tokens = sum(map(len, prompts))
        worker.push(
            encode_json(embedding_list(vectors, model, as_base64=request.as_base64, prompt_tokens=prompt_tokens))
        )


class TokenizeEndpoint(AnswerEndpoint[TokenizeRequest]):
    """Token ids of a text or a conversation."""

    def parse(self, body: bytes) -> TokenizeRequest:
        """Decode a body."""
        return TokenizeRequest.parse(body)

    def compute(self, request: TokenizeRequest, engine: Engine, model: str, worker: AnswerWorker[bytes]) -> None:
        """Tokenize a text, or a conversation in the chat template."""
        if request.messages is not None:
            ids = engine.model.encode_request(template_messages(request.messages), request.options)
        else:
            ids = engine.tokenizer.encode(request.text or "", add_special_tokens=request.add_special)
        tokens: list[Any] = list(ids)
        if request.with_pieces:
            tokens = [{"id": token, "piece": engine.tokenizer.token_bytes.shown(token)} for token in ids]
        worker.push(encode_json({"model": model, "tokens": tokens, "count": len(ids), "max_model_len": engine.context}))


class DetokenizeEndpoint(AnswerEndpoint[DetokenizeRequest]):
    """The text of token ids."""

    def parse(self, body: bytes) -> DetokenizeRequest:
        """Decode a body."""
        return DetokenizeRequest.parse(body)

    def compute(self, request: DetokenizeRequest, engine: Engine, model: str, worker: AnswerWorker[bytes]) -> None:
        """Give the text of token ids."""
        check_token_ids(engine, request.tokens, "tokens")
        text = engine.tokenizer.decode(list(request.tokens))
        worker.push(encode_json({"model": model, "content": text}))
