"""The endpoint of llama.cpp's server by which editors ask for completions; its other paths are OpenAI's."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Final

from ....runtime.decode import FinishReason
from ....runtime.result import Chunk, Reply
from ...service.body_decoder import about
from ...service.generation_fields import GenerationRequest, RequestFields, TokenLimit, option_meta
from ...service.openai_objects import GenerationObjects
from ...service.text_bodies import OtherFile, file_options
from ..endpoints import RequestService, generating_route
from ..http_protocol import OPENAI, Protocol, ProtocolRoute, event

LLAMACPP: Final = Protocol(
    lambda status, error: {"error": {"code": int(status), "message": error["message"], "type": error["type"]}},
    event,
    OPENAI.headers,
    OPENAI.silence,
)


class InfillBody(RequestFields, kw_only=True):
    """Body of a request to fill a gap; without a temperature, the likeliest tokens are taken."""

    input_prefix: Annotated[str, about("The text before the gap.")]
    input_suffix: Annotated[str, about("The text after the gap.")]
    input_extra: Annotated[list[OtherFile] | None, about("Other files, the most important one last.")] = None
    prompt: Annotated[str | None, about("What the text in the gap begins with, such as the line of the cursor.")] = None
    n_predict: Annotated[TokenLimit | None, about("Largest number of tokens; -1 for no limit, 0 to read only.")] = None
    suffix_first: Annotated[bool | None, option_meta("suffix_first", extension=True)] = None
    document: Annotated[str | None, option_meta("document", extension=True)] = None
    id_slot: Annotated[int | None, about("A newer request for the slot ends the older one; -1 for no slot.")] = None
    response_fields: Annotated[list[str] | None, about("Fields of the response, such as timings/prompt_n.")] = None
    samplers: Annotated[list[str] | str | None, about("Accepted; other fields say how tokens are chosen.")] = None
    n_indent: Annotated[int | None, about("Accepted; does not end the text.")] = None
    t_max_predict_ms: Annotated[float | None, about("Accepted; n_predict bounds the text.")] = None
    t_max_prompt_ms: Annotated[float | None, about("Accepted; llama.cpp does not use it either.")] = None

    def request(self) -> GenerationRequest:
        """The text between two texts, for editors."""
        others = {
            "suffix": self.input_suffix,
            "answer_start": self.prompt,
            "max_tokens": 1 if self.n_predict == 0 else self.n_predict,
            "temperature": self.temperature or 0.0,
            **file_options(self.input_extra),
        }
        repeated = {"n_predict": self.n_predict, "response_fields": self.response_fields}
        slot = f"id_slot {self.id_slot}" if self.id_slot is not None and self.id_slot >= 0 else None
        return replace(self.generation([self.input_prefix], others, repeated=repeated), slot=slot)


class InfillObjects(GenerationObjects):
    """The objects of one completion; the last one has why it ended, counts and times."""

    def pieces(self, chunk: Chunk) -> list[dict[str, Any]]:
        """The object of what a chunk adds to the text."""
        return [{"index": 0, "content": chunk.text, "stop": False}] if chunk.text and not self._only_reads else []

    @property
    def _only_reads(self) -> bool:
        return bool(self._request.repeated["n_predict"] == 0)

    def whole(self, *replies: Reply) -> dict[str, Any]:
        """The object of the whole completion."""
        (reply,) = replies
        stats, reason = reply.stats, reply.finish_reason
        predicted = 0 if self._only_reads else stats.completion_tokens
        read = stats.prompt_tokens - stats.reused_tokens
        timings = {
            "cache_n": stats.reused_tokens,
            **_timings("prompt", read, stats.first_token_s),
            **_timings("predicted", predicted, stats.decode_s),
        }
        described: dict[str, Any] = {
            "index": 0,
            "content": "" if self._only_reads else reply.text,
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
    return [generating_route(service, LLAMACPP, "/infill", InfillBody, InfillObjects)]
