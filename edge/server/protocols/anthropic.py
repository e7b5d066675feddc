"""Anthropic's API: the next message of a conversation, and the number of its tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from http import HTTPStatus
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

import msgspec

from ....runtime.engine import Engine
from ....runtime.result import Chunk, Reply, Stats
from ....runtime.scheduling.request_run import Cancellation
from ....runtime.tools.calls import ToolCall, assistant_message
from ...service.body_decoder import StrictStruct, about
from ...service.generation_fields import GenerationRequest, RequestFields, TokenLimit
from ...service.message_fields import FlatJsonSchemaFormat, base64_image, checked_messages, function_tools
from ...service.openai_objects import GenerationObjects
from ...service.request_error import invalid
from ..endpoints import RequestService, generating_route, object_route
from ..http_protocol import EVENT_HEADERS, Protocol, ProtocolRoute, encode_json, named_event

_Kind = TypeVar("_Kind")
NonEmpty: TypeAlias = Annotated[str, msgspec.Meta(min_length=1)]
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
_THINKING: Final = {"type": "thinking", "thinking": "", "signature": ""}
_TEXT: Final = {"type": "text", "text": ""}
_DELTAS: Final = {"thinking": "thinking", "text": "text", "tool_use": "partial_json"}
"""The field of the deltas of a block, by its type."""


def _error(_status: HTTPStatus, error: dict[str, Any]) -> dict[str, Any]:
    kind = error["type"].replace("server_error", "api_error")
    return {"type": "error", "error": {"type": kind, "message": error["message"]}}


ANTHROPIC: Final = Protocol(_error, named_event, EVENT_HEADERS, named_event({"type": "ping"}))


class _Block(StrictStruct, kw_only=True, tag_field="type"):
    cache_control: dict[str, Any] | None = None


class TextBlock(_Block, tag="text"):
    """A piece of text."""

    text: str
    citations: list[Any] | None = None


class ImageSource(StrictStruct, tag_field="type", tag="base64"):
    """The bytes of an image."""

    media_type: str
    data: Annotated[str, about("The image in base64.")]


class ImageBlock(_Block, tag="image"):
    """An image, for a model that was exported with its vision tower."""

    source: ImageSource


class ThinkingBlock(_Block, tag="thinking"):
    """What the model thought."""

    thinking: str
    signature: str | None = None


class ToolUseBlock(_Block, tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = None


class ToolResultBlock(_Block, tag="tool_result"):
    """The result of a call."""

    tool_use_id: str
    content: str | list[TextBlock | ImageBlock] | None = None
    is_error: bool | None = None


class AnthropicMessage(StrictStruct):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[TextBlock | ImageBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock]

    def mappings(self) -> Iterator[dict[str, Any]]:
        """The messages as the runtime takes them: results of calls are messages of their own, before the text."""
        blocks = [TextBlock(text=self.content)] if isinstance(self.content, str) else self.content

        def of(kind: type[_Kind]) -> list[_Kind]:
            return [block for block in blocks if isinstance(block, kind)]

        for each in of(ToolResultBlock):
            yield {"role": "tool", "content": _content(each.content or ""), "tool_call_id": each.tool_use_id}
        thoughts = "".join(each.thinking for each in of(ThinkingBlock))
        calls = [ToolCall(each.id, each.name, encode_json(each.input).decode()) for each in of(ToolUseBlock)]
        said = [block for block in blocks if isinstance(block, (TextBlock, ImageBlock))]
        if said or calls or thoughts or not blocks:
            yield assistant_message("", thoughts, calls) | {"role": self.role, "content": _content(said)}


class AnthropicTool(StrictStruct, rename={"parameters": "input_schema"}):
    """A tool that the model may call."""

    name: str
    parameters: dict[str, Any]
    description: str | None = None
    type: Annotated[str | None, about("Tools of the server's own are not supported.", "custom")] = None
    cache_control: dict[str, Any] | None = None
    strict: bool | None = None
    input_examples: list[Any] | None = None
    eager_input_streaming: bool | None = None


class ToolChoice(StrictStruct):
    """Whether and which tool is called."""

    type: Literal["auto", "any", "none", "tool"]
    name: str = ""
    disable_parallel_tool_use: bool | None = None


class Thinking(StrictStruct):
    """Whether the model thinks."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    display: str | None = None


class OutputConfig(StrictStruct):
    """How much the model thinks, and what the answer has to look like."""

    effort: str | None = None
    format: FlatJsonSchemaFormat | None = None


class MessagesBody(RequestFields, kw_only=True):
    """Body of the next message of a conversation, and of a count of its tokens."""

    messages: Annotated[list[AnthropicMessage], about("The conversation.")]
    max_tokens: Annotated[TokenLimit | None, about("Largest number of tokens to generate.")] = None
    system: Annotated[str | list[TextBlock] | None, about("The system message.")] = None
    stop_sequences: Annotated[list[NonEmpty] | None, about("Texts before which the answer ends.")] = None
    tools: Annotated[list[AnthropicTool] | None, about("Tools that the model may call.")] = None
    tool_choice: Annotated[ToolChoice | None, about("auto, any, none, or a tool by its name.")] = None
    thinking: Annotated[Thinking | None, about("Whether the model thinks, where its chat template says so.")] = None
    output_config: Annotated[OutputConfig | None, about("The effort of thinking, and a format with a schema.")] = None
    metadata: Annotated[dict[str, Any] | None, about("Accepted; does not change the answer.")] = None
    context_management: Annotated[dict[str, Any] | None, about("Accepted; overflow says what is left out.")] = None
    cache_control: Annotated[dict[str, Any] | None, about("Accepted; the prefix cache works by itself.")] = None
    diagnostics: Annotated[dict[str, Any] | None, about("Accepted; there are none.")] = None
    inference_geo: Annotated[str | None, about("Accepted; answers are computed on this machine.")] = None
    speed: Annotated[str | None, about("Accepted; there is one speed.")] = None
    user_profile_id: Annotated[str | None, about("Accepted; does not change the answer.")] = None
    workspace_id: Annotated[str | None, about("Accepted; does not change the answer.")] = None
    container: Annotated[None, about("Not supported: there are no tools of the server's own.")] = None
    mcp_servers: Annotated[None, about("Not supported: the program calls tools itself.")] = None

    def request(self) -> GenerationRequest:
        """The next message, in Anthropic's API."""
        system = [] if self.system is None else [("system", {"role": "system", "content": _content(self.system)})]
        said = [(f"messages[{i}]", each) for i, message in enumerate(self.messages) for each in message.mappings()]
        messages = checked_messages("messages", system + said)
        continues = len(messages) > 1 and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
        if continues and not isinstance(messages[-1]["content"], str):
            param = said[-1][0]
            raise invalid(param, f"{param} is an answer with an image", "an answer that is continued has text alone")
        choice, output = self.tool_choice or ToolChoice("auto"), self.output_config or OutputConfig()
        thinking = self.thinking and self.thinking.type
        others = {
            "answer_start": messages.pop()["content"] if continues else "",
            "system": None,
            "stop": self.stop_sequences,
            "tools": function_tools(self.tools) if choice.type != "none" else (),
            "tool_choice": _CHOICES.get(choice.type, {"type": "function", "function": {"name": choice.name}}),
            "parallel_tool_calls": not choice.disable_parallel_tool_use,
        }
        effort = "none" if thinking == "disabled" else output.effort or ("medium" if thinking else None)
        fields = self if output.format is None else msgspec.structs.replace(self, json_schema=output.format.schema)
        return fields.generation((messages,), others, effort=effort)


def _content(content: str | Sequence[TextBlock | ImageBlock]) -> str | list[dict[str, Any]]:
    """Blocks of text and images as the runtime takes them."""
    if isinstance(content, str):
        return content
    return [
        base64_image(block.source.data) if isinstance(block, ImageBlock) else {"type": "text", "text": block.text}
        for block in content
    ]


class MessageObjects(GenerationObjects):
    """The objects of one message: thinking, text, and calls of tools, in blocks."""

    id_prefix = "msg_"

    def __init__(self, request: GenerationRequest, model: str) -> None:
        super().__init__(request, model)
        self._head = {"id": self._head["id"], "type": "message", "role": "assistant", "model": model}
        self._types: list[str] = []
        """Types of the blocks of a stream so far, of which the last one is being written."""

    def started(self) -> list[dict[str, Any]]:
        """The event before the first chunk; the number of input tokens comes with the last one."""
        begun: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(Stats())}
        return [{"type": "message_start", "message": {**self._head, **begun}}]

    def pieces(self, chunk: Chunk) -> Iterator[dict[str, Any]]:
        """The events of what a chunk adds to the message."""
        if chunk.reasoning:
            yield from self._written(_THINKING, chunk.reasoning)
        if chunk.text:
            yield from self._written(_TEXT, chunk.text)
        for call in chunk.tool_calls:
            yield from self._written(_tool_use(call, {}), call.arguments)

    def _written(self, block: dict[str, Any], text: str) -> Iterator[dict[str, Any]]:
        """The events of a piece of a block, which begins with it unless one of its type is being written."""
        if self._types[-1:] != [block["type"]] or block["type"] == "tool_use":
            yield from self._closed()
            yield {"type": "content_block_start", "index": len(self._types), "content_block": block}
            self._types.append(block["type"])
        field = _DELTAS[block["type"]]
        delta = {"type": "input_json_delta" if field == "partial_json" else f"{field}_delta", field: text}
        yield {"type": "content_block_delta", "index": len(self._types) - 1, "delta": delta}

    def _closed(self) -> Iterator[dict[str, Any]]:
        if self._types:
            yield {"type": "content_block_stop", "index": len(self._types) - 1}

    def ended(self, reply: Reply) -> Iterator[dict[str, Any]]:
        """The last events of a stream."""
        yield from self._closed()
        reason = _stop_reason(reply, called="tool_use" in self._types)
        yield {"type": "message_delta", "delta": reason, "usage": _usage(reply.stats)}
        yield {"type": "message_stop"}

    def whole(self, *replies: Reply) -> dict[str, Any]:
        """The object of the whole message."""
        (reply,) = replies
        thought = [_THINKING | {"thinking": reply.reasoning}] if reply.reasoning else []
        text = [_TEXT | {"text": reply.text}] if reply.text or not reply.tool_calls else []
        calls = [_tool_use(call, call.values) for call in reply.tool_calls]
        ended = {**_stop_reason(reply, called=bool(calls)), "usage": _usage(reply.stats)}
        return {**self._head, "content": [*thought, *text, *calls], **ended}


def _tool_use(call: ToolCall, values: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": values}


def _stop_reason(reply: Reply, *, called: bool) -> dict[str, Any]:
    sequence = reply.stats.stop_sequence or None
    stopped = "tool_use" if called else "stop_sequence" if sequence else "end_turn"
    reason = stopped if reply.finish_reason == "stop" else "max_tokens"
    return {"stop_reason": reason, "stop_sequence": sequence}


def _usage(stats: Stats) -> dict[str, int]:
    cached = {"cache_read_input_tokens": stats.reused_tokens, "cache_creation_input_tokens": 0}
    new = stats.prompt_tokens - stats.reused_tokens
    return {"input_tokens": new, **cached, "output_tokens": stats.completion_tokens}


def _count(request: GenerationRequest, engine: Engine, _model: str, _cancellation: Cancellation) -> dict[str, int]:
    """The number of tokens of a conversation."""
    return {"input_tokens": engine.count_tokens(request.messages, request.options)}


def routes(service: RequestService) -> list[ProtocolRoute]:
    """The paths of the API."""
    return [
        generating_route(service, ANTHROPIC, "/v1/messages", MessagesBody, MessageObjects),
        object_route(service, ANTHROPIC, "/v1/messages/count_tokens", MessagesBody, _count),
    ]
