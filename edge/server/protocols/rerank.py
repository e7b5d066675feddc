"""Reranking as Jina, Cohere and vLLM have it: documents ordered for a query, and scores of pairs of texts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Annotated, Any

import numpy as np

from ....runtime.encoders.encoder import AnyModel
from ....runtime.ranking import Relevance
from ....runtime.scheduling.request_run import Cancellation
from ...service.body_decoder import StrictStruct, about
from ...service.generation_fields import PositiveInt
from ...service.openai_objects import new_id
from ...service.request_error import invalid
from ...service.text_bodies import texts_or_ids
from ..endpoints import RequestService, object_route
from ..http_protocol import OPENAI, ProtocolRoute


def _texts(param: str, given: str | list[str]) -> list[str]:
    """One or several texts, none of them empty; errors as for `texts_or_ids`."""
    texts_or_ids(param, given if isinstance(given, str) else [*given])
    return [given] if isinstance(given, str) else given


class Document(StrictStruct):
    """A document as an object."""

    text: str


class RerankBody(StrictStruct, kw_only=True):
    """Body of a request to order documents."""

    query: Annotated[str, about("What is searched.")]
    documents: Annotated[list[str | Document], about("The texts, or objects with a text.")]
    model: Annotated[str | None, about("Name of the model; null for the first one that the server offers.")] = None
    top_n: Annotated[PositiveInt | None, about("Number of results; all by default.")] = None
    return_documents: Annotated[bool | None, about("Whether results have the documents; true by default.")] = None
    instruction: Annotated[str | None, about("Extension. What makes a document relevant, for a language model.")] = None
    user: Annotated[str | None, about("Accepted; does not change the answer.")] = None

    @property
    def texts(self) -> list[str]:
        """The texts of the documents."""
        return [each if isinstance(each, str) else each.text for each in self.documents]

    def request(self) -> RerankBody:
        """The body, whose texts are checked."""
        _texts("query", self.query)
        _texts("documents", self.texts)
        return self


class ScoreBody(StrictStruct, kw_only=True):
    """Body of a request to score pairs of texts."""

    text_1: Annotated[str | list[str], about("The query, or one for each text of text_2.")]
    text_2: Annotated[str | list[str], about("The documents.")]
    model: Annotated[str | None, about("Name of the model; null for the first one that the server offers.")] = None
    user: Annotated[str | None, about("Accepted; does not change the answer.")] = None

    def pairs(self) -> list[tuple[str, str]]:
        """The texts to compare.

        Raises:
            RequestError: there are none, one is empty, or the numbers differ.
        """
        first, second = _texts("text_1", self.text_1), _texts("text_2", self.text_2)
        if len(first) not in (1, len(second)):
            what = f"text_1 has {len(first)} texts and text_2 has {len(second)}"
            raise invalid("text_1", what, "give one query, or as many as documents")
        return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))

    def request(self) -> ScoreBody:
        """The body, whose texts are checked."""
        self.pairs()
        return self


def _rerank(body: RerankBody, model: AnyModel, name: str, cancellation: Cancellation) -> dict[str, Any]:
    """Documents ordered by how well they answer a query."""
    texts = body.texts
    found = model.score(body.query, texts, instruction=body.instruction, cancelled=lambda: cancellation.cancelled)
    results: list[dict[str, Any]] = [
        {"index": index, "relevance_score": found.scores.item(index)}
        for index in np.argsort(-found.scores, kind="stable")[: body.top_n].tolist()
    ]
    for result in results if body.return_documents is not False else ():
        result["document"] = {"text": texts[result["index"]]}
    return {"id": new_id("rerank-"), "model": name, "results": results, "usage": _usage([found])}


def _score(body: ScoreBody, model: AnyModel, name: str, cancellation: Cancellation) -> dict[str, Any]:
    """How well texts answer others."""
    found = [
        model.score(query, [text for _, text in pairs], cancelled=lambda: cancellation.cancelled)
        for query, pairs in groupby(body.pairs(), itemgetter(0))
    ]
    scores = np.concatenate([each.scores for each in found]).tolist()
    data = [{"object": "score", "index": index, "score": score} for index, score in enumerate(scores)]
    return {"id": new_id("score-"), "object": "list", "model": name, "data": data, "usage": _usage(found)}


def _usage(found: Sequence[Relevance]) -> dict[str, Any]:
    tokens, read = sum(each.prompt_tokens for each in found), sum(each.read_tokens for each in found)
    cached = {"cached_tokens": tokens - read}
    return {"prompt_tokens": tokens, "total_tokens": tokens, "prompt_tokens_details": cached}


def routes(service: RequestService) -> list[ProtocolRoute]:
    """The paths of the API."""
    return [
        object_route(service, OPENAI, "/v1/rerank", RerankBody, _rerank, encoders=True),
        object_route(service, OPENAI, "/v1/score", ScoreBody, _score, encoders=True),
    ]
