"""Ollama's API: chats, texts and vectors as lines of JSON, and the models on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final

from msgspec.structs import replace

from ....errors import BundleError
from ....models.hub.downloaded_model import parse_hub_id
from ....models.hub.fetch import fetch_model
from ....models.json_file import shown
from ....runtime.encoders.encoder import AnyModel
from ....runtime.result import Chunk, Reply
from ....runtime.scheduling.request_run import Cancellation
from ....runtime.tools.calls import ToolCall
from ...service.body_decoder import StrictStruct, about
from ...service.generation_fields import GenerationRequest, KeepAlive, RequestFields, keep_seconds
from ...service.message_fields import FunctionTool, JsonObjectFormat, base64_image, checked_messages, tool_mappings
from ...service.model_files import describe_model, remove_model
from ...service.model_pool import ModelPool
from ...service.offered_models import ModelEntry
from ...service.openai_objects import GenerationObjects
from ...service.pooled_model import ModelState
from ...service.request_error import ErrorCode, RequestError, invalid
from ...service.text_bodies import TextsOrIds, encoded_texts
from ..endpoints import RequestService, generating_route, object_route, progress_route
from ..http_protocol import Protocol, ProtocolRoute, encode_json
from ..json_endpoint import json_routes

API_VERSION: Final = "0.12.6"
"""The version of Ollama whose API this is: clients enable functions by it."""
_NEVER: Final = "2318-01-01T00:00:00Z"
"""When a model is unloaded that stays in memory, as Ollama says it."""

_THINK: Final = (True, False, "high", "medium", "low")
_OTHER_NAMES: Final = {"thinking": "reasoning_content", "tool_name": "name"}
"""Names of fields of a message in the chat template, by Ollama's."""
OLLAMA: Final = Protocol(
    lambda _status, error: {"error": error["message"]},
    lambda value: encode_json(value) + b"\n",
    [(b"content-type", b"application/x-ndjson")],
    silence=b"",  # clients parse every line as JSON
)


class OllamaOptions(RequestFields, kw_only=True):
    """Options of an answer: those of the completions of this server, under their names, and Ollama's own."""

    num_predict: Annotated[int | None, about("Largest number of tokens; 0 or less for no limit.")] = None
    num_batch: Annotated[int | None, about("Accepted; does not change the answer.")] = None
    num_gpu: Annotated[int | None, about("Accepted; the command line chooses the device.")] = None
    num_keep: Annotated[int | None, about("Accepted; overflow says what happens to long conversations.")] = None
    num_thread: Annotated[int | None, about("Accepted; the command line chooses the threads.")] = None
    use_mmap: Annotated[bool | None, about("Accepted; does not change the answer.")] = None


class _Body(StrictStruct, kw_only=True):
    """What chats and texts have in common."""

    model: Annotated[str, about("Name of the model; the tag :latest is ignored.")]
    stream: Annotated[bool | None, about("Whether to send the answer while it is generated; true by default.")] = None
    format: Annotated[str | dict[str, Any] | None, about("json, or a JSON schema.")] = None
    options: Annotated[OllamaOptions | None, about("Options of the answer.")] = None
    keep_alive: KeepAlive = None
    think: Annotated[bool | str | None, about("Whether the model thinks, or how much.", *_THINK)] = None

    def of_prompts(self, prompts: Sequence[Any], **others: Any) -> GenerationRequest:
        """The request; without a prompt, the model is only loaded, or unloaded."""
        if isinstance(self.format, str) and self.format not in ("", "json"):
            raise invalid("format", f"format is {self.format!r:.50}", "give json, or a JSON schema")
        options, stream = self.options or OllamaOptions(), self.stream is not False and bool(prompts)
        fields = replace(options, model=self.model, stream=stream, keep_alive=self.keep_alive)
        if self.format == "json":
            fields.response_format = JsonObjectFormat()
        elif isinstance(self.format, dict):
            fields.json_schema = self.format
        effort = ("medium" if self.think else "none") if isinstance(self.think, bool) else self.think
        others["max_tokens"] = max(options.num_predict or 0, 0) or None
        repeated = {"chats": isinstance(self, OllamaChatBody)}
        return fields.generation(prompts, others, effort=effort, repeated=repeated)


class OllamaChatBody(_Body, kw_only=True):
    """Body of the next message of a conversation."""

    messages: Annotated[list[dict[str, Any]] | None, about("The conversation; none to load the model.")] = None
    tools: Annotated[list[FunctionTool] | None, about("Functions that the model may call.")] = None
    images: Annotated[list[str] | None, about("Not supported: give images with their messages.", [])] = None

    def request(self) -> GenerationRequest:
        """The next message."""
        placed = []
        for index, message in enumerate(self.messages or ()):
            place, images = f"messages[{index}]", message.pop("images", None)
            named = {_OTHER_NAMES.get(name, name): message[name] for name in message}
            placed.append((place, _with_images(named, images, f"{place}.images")))
        prompts = [checked_messages("messages", placed)] if placed else []
        return self.of_prompts(prompts, tools=tool_mappings(self.tools))


class OllamaTextBody(_Body, kw_only=True):
    """Body of an answer to one prompt."""

    prompt: Annotated[str | None, about("What is answered; without it, the model is only loaded.")] = None
    images: Annotated[list[str] | None, about("Images in base64, for a model that sees.")] = None
    system: Annotated[str | None, about("The system message.")] = None
    raw: Annotated[bool | None, about("Whether the prompt is continued as it is, without the chat template.")] = None
    suffix: Annotated[str | None, about("The text after a gap, which a model with tokens for it fills.")] = None
    template: Annotated[None, about("Not supported: the model's own template is used.")] = None
    context: Annotated[None, about("Not supported: send a conversation to /api/chat.")] = None

    def request(self) -> GenerationRequest:
        """An answer to a prompt."""
        others = {"raw": self.raw, "system": self.system, "suffix": self.suffix or None}
        if not self.images:
            return self.of_prompts([self.prompt or ""] if self.prompt or self.suffix else [], **others)
        if given := next((name for name in ("raw", "suffix") if others[name]), None):
            raise invalid("images", f"images and {given} are both given", "leave out one of them")
        asked = _with_images({"role": "user", "content": self.prompt or ""}, self.images, "images")
        system = [{"role": "system", "content": self.system}] if self.system else []
        placed = [("system", each) for each in system] + [("images", asked)]
        return self.of_prompts([checked_messages("images", placed)])


def _with_images(message: dict[str, Any], images: Any, place: str) -> dict[str, Any]:
    """A message with its images before its text.

    Raises:
        RequestError: they are not a list of texts.
    """
    if not images:
        return message
    if not isinstance(images, list) or not all(isinstance(each, str) for each in images):
        raise invalid(place, f"{place} is {shown(images)}", "it must be a list of images in base64")
    parts = [*map(base64_image, images), {"type": "text", "text": message.get("content") or ""}]
    return {**message, "content": parts}


class AnswerLines(GenerationObjects):
    """The lines of one answer; the last one has why it ended, and counts. Times are in nanoseconds."""

    def pieces(self, chunk: Chunk) -> list[dict[str, Any]]:
        """The line of what a chunk adds to the answer."""
        wanted = chunk.text or chunk.reasoning or chunk.tool_calls
        return [{**self._answer(chunk.text, chunk.reasoning, chunk.tool_calls), "done": False}] if wanted else []

    def whole(self, *replies: Reply) -> dict[str, Any]:
        """The object of the whole answer; without a prompt, that the model was loaded or unloaded."""
        if not replies:
            return {**self._answer(), "done": True, "done_reason": "load" if self._request.keep_s != 0 else "unload"}
        (reply,) = replies
        stats = reply.stats
        seconds = {"total": stats.total_s, "load": 0.0, "prompt_eval": stats.first_token_s, "eval": stats.decode_s}
        return {
            **self._answer(reply.text, reply.reasoning, reply.tool_calls),
            "done": True,
            "done_reason": "stop" if reply.finish_reason == "stop" else "length",
            **{f"{name}_duration": round(value * 1e9) for name, value in seconds.items()},
            "prompt_eval_count": stats.prompt_tokens,
            "eval_count": stats.completion_tokens,
        }

    def _answer(self, text: str = "", thinking: str = "", calls: Sequence[ToolCall] = ()) -> dict[str, Any]:
        called = [{"function": {"name": call.name, "arguments": call.values}} for call in calls]
        optional = {name: value for name, value in {"thinking": thinking, "tool_calls": called}.items() if value}
        message = {"message": {"role": "assistant", "content": text, **optional}}
        head = {"model": self._head["model"], "created_at": _time(time.time())}
        return {**head, **(message if self._request.repeated["chats"] else {"response": text, **optional})}


def _time(seconds: float | None) -> str:
    return _NEVER if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


class OllamaEmbedBody(StrictStruct):
    """Body of a request for vectors."""

    model: Annotated[str, about("Name of the model.")]
    input: Annotated[TextsOrIds, about("A text, a list of texts, token ids, or a list of token id lists.")]
    truncate: Annotated[bool | None, about("Accepted; a text that is too long is refused.")] = None
    dimensions: Annotated[None, about("Not supported: vectors are not shortened.")] = None
    options: Annotated[OllamaOptions | None, about("Accepted; does not change the vectors.")] = None
    keep_alive: KeepAlive = None

    @property
    def keep_s(self) -> float | None:
        """Seconds for which the model stays in memory afterwards."""
        return keep_seconds(self.keep_alive)


def _embed(body: OllamaEmbedBody, engine: AnyModel, model: str, cancellation: Cancellation) -> dict[str, Any]:
    """Vectors of texts."""
    started = time.perf_counter()
    prompts = encoded_texts(engine, "input", body.input)
    vectors = engine.embed(prompts, cancelled=lambda: cancellation.cancelled).tolist()
    counts = {"load_duration": 0, "prompt_eval_count": sum(map(len, prompts))}
    took = round((time.perf_counter() - started) * 1e9)
    return {"model": model, "embeddings": vectors, "total_duration": took, **counts}


class OllamaPullBody(StrictStruct):
    """Body of a download."""

    model: Annotated[str, about("Id of a model on the Hugging Face Hub: org/name, org/name:variant.")]
    stream: Annotated[bool | None, about("Whether to send the progress; true by default.")] = None
    insecure: Annotated[bool | None, about("The hub is always asked over TLS.", False)] = None

    def __post_init__(self) -> None:
        self.stream = self.stream is not False


def _described(pool: ModelPool, entry: ModelEntry) -> dict[str, Any]:
    known = describe_model(entry, pool.kind)
    details = {"format": "onnx", "family": known["architecture"], "quantization_level": entry.id.partition(":")[2]}
    names = {"name": entry.id, "model": entry.id, "digest": "", "details": details}
    about_files = {"size": known["disk_bytes"], "capabilities": known["capabilities"]}
    return {**names, "modified_at": _time(entry.created), **about_files}


def routes(service: RequestService) -> list[ProtocolRoute]:
    """The paths of the API."""
    pool = service.pool

    def pull(body: OllamaPullBody, report: Callable[[object], None], cancellation: Cancellation) -> dict[str, str]:
        """Download a model of the hub."""

        def progress(name: str, here: int, total: int) -> None:
            cancellation.check()
            report({"status": f"pulling {name}", "digest": name, "total": total, "completed": here})

        try:
            fetch_model(parse_hub_id(body.model.removesuffix(":latest")), pool.kind, newest=True, progress=progress)
        except BundleError as error:
            raise RequestError(error.what, error.hint, code=ErrorCode.MODEL_NOT_FOUND) from error
        return {"status": "success"}

    def in_memory(state: ModelState) -> dict[str, Any]:
        context, _ = pool.sizes_of(state.id) or (0, 0)
        return {"size": state.bytes, "context_length": context, "expires_at": _time(state.expires)}

    def version() -> object:
        """The version of Ollama whose API this is."""
        return {"version": API_VERSION}

    def tags() -> object:
        """The models that are offered."""
        return {"models": [_described(pool, entry) for entry in pool.offered.entries()]}

    def loaded() -> object:
        """The models in memory."""
        return {"models": [_described(pool, pool.find(state.id)) | in_memory(state) for state in pool.status()]}

    def show(model: str, verbose: bool | None = None) -> object:  # noqa: ARG001  all is told
        """What a model is."""
        entry = pool.offered.find(model)
        known, family = describe_model(entry, pool.kind), _described(pool, entry)["details"]["family"]
        info = {"general.architecture": family, f"{family}.context_length": known["context"]}
        return {**_described(pool, entry), "model_info": info}

    def delete(model: str) -> None:
        """Unload a model that was downloaded or exported here, and remove its files."""
        remove_model(pool, model)

    table = (
        ("GET", "/api/version", version),
        ("GET", "/api/tags", tags),
        ("GET", "/api/ps", loaded),
        ("POST", "/api/show", show),
        ("DELETE", "/api/delete", delete),
    )
    return [
        *json_routes(service.settings, table, protocol=OLLAMA),
        progress_route(service, OLLAMA, "/api/pull", OllamaPullBody, pull),
        object_route(service, OLLAMA, "/api/embed", OllamaEmbedBody, _embed, encoders=True),
        generating_route(service, OLLAMA, "/api/chat", OllamaChatBody, AnswerLines),
        generating_route(service, OLLAMA, "/api/generate", OllamaTextBody, AnswerLines),
    ]
