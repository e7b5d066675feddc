"""The endpoint of llama.cpp's server by which editors ask for completions; its other paths are OpenAI's."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Final

from ....errors import EdgeError
from ....runtime.decode import FinishReason
from ....runtime.result import Chunk, Reply, Stats
from ...service.body_decoder import about, decode_body
from ...service.generation_fields import GenerationRequest, RequestFields, TokenLimit, generation_request, option_meta
from ...service.openai_objects import GenerationObjects
from ...service.text_bodies import OtherFile, file_options
from ..endpoints import RequestService, generating_route
from ..http_protocol import OPENAI, Protocol, ProtocolRoute, error_object, error_status, event


def _error(error: EdgeError) -> dict[str, Any]:
    described = error_object(error)["error"]
    return {"error": {"code": int(error_status(error)), "message": described["message"], "type": described["type"]}}


LLAMACPP: Final = Protocol(_error, event, OPENAI.headers, OPENAI.silence)


class InfillBody(RequestFields, kw_only=True):
    """Body of a request to fill a gap; without a temperature, the likeliest tokens are taken."""

    input_prefix: Annotated[str, about("The text before the gap.")]
    input_suffix: Annotated[str, about("The text after the gap.")]
    input_extra: Annotated[list[OtherFile] | None, about("Other files, the most important one last.")] = None
    prompt: Annotated[str | None, about("What the text in the gap begins with, such as the line of the cursor.")] = None
    n_predict: Annotated[
        TokenLimit | None,
        about("Largest number of tokens; -1 for no limit, the default, and 0 to read the texts for later requests."),
    ] = None
    suffix_first: Annotated[bool | None, option_meta("suffix_first", extension=True)] = None
    document: Annotated[str | None, option_meta("document", extension=True)] = None
    id_slot: Annotated[int | None, about("A newer request for the slot ends the older one; -1 for no slot.")] = None
    response_fields: Annotated[list[str] | None, about("Fields of the response, such as timings/prompt_n.")] = None
    samplers: Annotated[list[str] | str | None, about("Accepted; other fields say how tokens are chosen.")] = None
    n_indent: Annotated[int | None, about("Accepted; does not end the text.")] = None
    t_max_predict_ms: Annotated[float | None, about("Accepted; n_predict bounds the text.")] = None
    t_max_prompt_ms: Annotated[float | None, about("Accepted; llama.cpp does not use it either.")] = None

    @classmethod
    def parse(cls, body: bytes) -> GenerationRequest:
        """Decode a body; errors as for OpenAI's."""
        fields = decode_body(body, cls)
        others = {
            "suffix": fields.input_suffix,
            "answer_start": fields.prompt,
            "max_tokens": 1 if fields.n_predict == 0 else fields.n_predict,
            "temperature": fields.temperature or 0.0,
            **file_options(fields.input_extra),
        }
        repeated = {"n_predict": fields.n_predict, "response_fields": fields.response_fields}
        request = generation_request(fields, [fields.input_prefix], others, repeated=repeated)
        slotted = fields.id_slot is not None and fields.id_slot >= 0
        return replace(request, slot=f"id_slot {fields.id_slot}" if slotted else None)


class InfillObjects(GenerationObjects):
    """The objects of one completion; the last one has why it ended, counts and times."""

    id_prefix = ""

    def chunk(self, chunk: Chunk, _prompt_index: int = 0) -> list[dict[str, Any]]:
        """The objects of one chunk of the stream."""
        objects = [{"index": 0, "content": chunk.text, "stop": False}] if chunk.text and not self._only_reads else []
        if chunk.finish_reason is not None and chunk.stats is not None:
            objects.append(self._last("", chunk.finish_reason, chunk.stats))
        return objects

    def whole(self, *replies: Reply) -> dict[str, Any]:
        """The object of the whole completion."""
        (reply,) = replies
        return self._last("" if self._only_reads else reply.text, reply.finish_reason, reply.stats)

    @property
    def _only_reads(self) -> bool:
        return bool(self._request.repeated["n_predict"] == 0)

    def _last(self, content: str, reason: FinishReason, stats: Stats) -> dict[str, Any]:
        predicted = 0 if self._only_reads else stats.completion_tokens
        read = stats.prompt_tokens - stats.reused_tokens
        timings = {
            "cache_n": stats.reused_tokens,
            **_timings("prompt", read, stats.first_token_s),
            **_timings("predicted", predicted, stats.decode_s),
        }
        described: dict[str, Any] = {
            "index": 0,
            "content": content,
            "stop": True,
            "model": self._head["model"],
            "tokens_predicted": predicted,
            "tokens_evaluated": stats.prompt_tokens,
            "tokens_cached": stats.prompt_tokens + predicted,
            "truncated": False,
            "stop_type": "limit" if reason is not FinishReason.STOP else "word" if stats.stop_sequence else "eos",
            "stopping_word": stats.stop_sequence,
            "timings": timings,
        }
        wanted = self._request.repeated["response_fields"]
        every = described | {f"timings/{name}": value for name, value in timings.items()}
        return described if wanted is None else {name: every[name] for name in wanted if name in every}


def _timings(name: str, tokens: int, seconds: float) -> dict[str, float]:
    return {
        f"{name}_n": tokens,
        f"{name}_ms": seconds * 1e3,
        f"{name}_per_token_ms": seconds * 1e3 / tokens if tokens else 0.0,
        f"{name}_per_second": tokens / seconds if seconds else 0.0,
    }


def routes(service: RequestService) -> list[ProtocolRoute]:
    """The paths of the API."""
    about_infill = "The text between two texts, for editors."
    return [generating_route(service, LLAMACPP, "/infill", about_infill, InfillBody.parse, InfillObjects)]
