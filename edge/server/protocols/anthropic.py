"""Anthropic's API: the next message of a conversation, and the number of its tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from ....errors import EdgeError
from ....runtime.engine import Engine
from ....runtime.result import Chunk, Reply, Stats
from ....runtime.scheduling.request_run import Cancellation
from ....runtime.tools.calls import ToolCall, joined_calls
from ...service.body_decoder import StrictStruct, about, decode_body
from ...service.generation_fields import (
    GenerationRequest,
    RequestFields,
    TokenLimit,
    generation_request,
    template_variables,
)
from ...service.message_fields import (
    FlatJsonSchemaFormat,
    FunctionDefinition,
    FunctionTool,
    checked_messages,
    tool_mappings,
)
from ...service.openai_objects import GenerationObjects
from ..endpoints import Endpoint, RequestService, generating_route
from ..http_protocol import EVENT_HEADERS, Protocol, ProtocolRoute, encode_json, error_object, named_event

NonEmpty: TypeAlias = Annotated[str, msgspec.Meta(min_length=1)]
_ERROR_TYPES: Final = {"server_error": "api_error"}
"""Types of errors whose name differs from OpenAI's."""
_CHOICES: Final[Mapping[str, Any]] = {"auto": "auto", "any": "required", "none": "none"}
_DELTAS: Final = {"text": "text", "thinking": "thinking", "input_json": "partial_json"}
"""The field of a delta, by the type of the delta."""


def _error(error: EdgeError) -> dict[str, Any]:
    described = error_object(error)["error"]
    kind = _ERROR_TYPES.get(described["type"], described["type"])
    return {"type": "error", "error": {"type": kind, "message": described["message"]}}


ANTHROPIC: Final = Protocol(_error, named_event, EVENT_HEADERS, named_event({"type": "ping"}))


class _Block(StrictStruct, kw_only=True, tag_field="type"):
    cache_control: Annotated[
        dict[str, Any] | None, about("Accepted; the prefix cache finds what it can reuse by itself.")
    ] = None


class TextBlock(_Block, tag="text"):
    """A piece of text."""

    text: str
    citations: list[Any] | None = None


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
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


Blocks: TypeAlias = str | list[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock]


class AnthropicMessage(StrictStruct):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Blocks

    def mappings(self) -> Iterator[dict[str, Any]]:
        """The messages as the runtime takes them: results of calls are messages of their own, before the text."""
        blocks = [TextBlock(text=self.content)] if isinstance(self.content, str) else self.content
        for block in blocks:
            if isinstance(block, ToolResultBlock):
                yield {"role": "tool", "content": _text(block.content or ""), "tool_call_id": block.tool_use_id}
        texts = [block for block in blocks if isinstance(block, TextBlock)]
        thoughts = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
        calls = [
            ToolCall(block.id, block.name, encode_json(block.input).decode()).message
            for block in blocks
            if isinstance(block, ToolUseBlock)
        ]
        optional = {"reasoning_content": thoughts or None, "tool_calls": calls or None}
        if texts or calls or thoughts or not blocks:
            yield {"role": self.role, "content": _text(texts), **optional}


class AnthropicTool(StrictStruct):
    """A tool that the model may call."""

    name: str
    input_schema: dict[str, Any]
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


def parse_messages(body: bytes) -> GenerationRequest:
    """Decode a body; errors as for OpenAI's."""
    fields = decode_body(body, MessagesBody)
    tools = [
        FunctionTool(FunctionDefinition(each.name, each.description, each.input_schema)) for each in fields.tools or ()
    ]
    system = [] if fields.system is None else [("system", {"role": "system", "content": _text(fields.system)})]
    placed = system + [(f"messages[{i}]", each) for i, said in enumerate(fields.messages) for each in said.mappings()]
    messages = checked_messages([each for _, each in placed], "messages", [place for place, _ in placed])
    continues = len(messages) > 1 and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    start = messages.pop()["content"] if continues else ""
    choice, output = fields.tool_choice or ToolChoice("auto"), fields.output_config or OutputConfig()
    effort = output.effort or ("medium" if fields.thinking else None)
    if fields.thinking is not None and fields.thinking.type == "disabled":
        effort = "none"
    if output.format is not None:
        fields = msgspec.structs.replace(fields, json_schema=output.format.schema)
    others = {
        "max_tokens": fields.max_tokens,
        "answer_start": start,
        "system": None,
        "stop": fields.stop_sequences,
        "tools": tool_mappings(tools) if choice.type != "none" else (),
        "tool_choice": _CHOICES.get(choice.type, {"type": "function", "function": {"name": choice.name}}),
        "parallel_tool_calls": not choice.disable_parallel_tool_use,
        "template_variables": template_variables(None, effort),
    }
    return generation_request(fields, (messages,), others)


def _text(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


class MessageObjects(GenerationObjects):
    """The objects of one message: thinking, text, and calls of tools, in blocks."""

    id_prefix = "msg_"

    def __init__(self, request: GenerationRequest, model: str) -> None:
        super().__init__(request, model)
        self._block: dict[str, Any] | None = None
        """The block that is being written."""
        self._blocks = 0
        self._called = False

    def started(self) -> list[dict[str, Any]]:
        """The event before the first chunk; the number of input tokens comes with the last one."""
        return [{"type": "message_start", "message": self._message([], None, None)}]

    def chunk(self, chunk: Chunk, _prompt_index: int = 0) -> list[dict[str, Any]]:
        """The events of one chunk of the stream."""
        events: list[dict[str, Any]] = []
        if chunk.reasoning:
            events += self._write("thinking", {"type": "thinking", "thinking": "", "signature": ""}, chunk.reasoning)
        if chunk.text:
            events += self._write("text", {"type": "text", "text": ""}, chunk.text)
        for call in joined_calls(chunk.tool_calls):
            self._called = True
            events += [*self._close(), *self._write("input_json", _call(call.id, call.name, {}), call.arguments)]
        if chunk.finish_reason is not None and chunk.stats is not None:
            reason = _stop_reason(chunk.finish_reason.value, chunk.stats, called=self._called)
            last = {"type": "message_delta", "delta": reason, "usage": _usage(chunk.stats)}
            events += [*self._close(), last, {"type": "message_stop"}]
        return events

    def whole(self, *replies: Reply) -> dict[str, Any]:
        """The object of the whole message."""
        (reply,) = replies
        thought = [{"type": "thinking", "thinking": reply.reasoning, "signature": ""}] if reply.reasoning else []
        text = [{"type": "text", "text": reply.text}] if reply.text or not reply.tool_calls else []
        calls = [_call(call.id, call.name, call.values) for call in reply.tool_calls]
        reason = _stop_reason(reply.finish_reason.value, reply.stats, called=bool(calls))
        return self._message([*thought, *text, *calls], reason, reply.stats)

    def _message(
        self, content: list[dict[str, Any]], reason: Mapping[str, Any] | None, stats: Stats | None
    ) -> dict[str, Any]:
        head = {"id": self._head["id"], "type": "message", "role": "assistant", "model": self._head["model"]}
        ended = reason or {"stop_reason": None, "stop_sequence": None}
        return {**head, "content": content, **ended, "usage": _usage(stats or Stats())}

    def _write(self, kind: str, block: dict[str, Any], text: str) -> list[dict[str, Any]]:
        """The events of a piece of a block, which begins if another one, or none, is being written."""
        begun: list[dict[str, Any]] = []
        if self._block is None or self._block["type"] != block["type"]:
            begun = [*self._close(), {"type": "content_block_start", "index": self._blocks, "content_block": block}]
            self._block = block
        delta = {"type": f"{kind}_delta", _DELTAS[kind]: text}
        return [*begun, {"type": "content_block_delta", "index": self._blocks, "delta": delta}]

    def _close(self) -> list[dict[str, Any]]:
        if self._block is None:
            return []
        self._block = None
        self._blocks += 1
        return [{"type": "content_block_stop", "index": self._blocks - 1}]


def _call(id_: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": id_, "name": name, "input": arguments}


def _stop_reason(reason: str, stats: Stats, *, called: bool) -> dict[str, Any]:
    stopped = "tool_use" if called else "stop_sequence" if stats.stop_sequence else "end_turn"
    return {"stop_reason": stopped if reason == "stop" else "max_tokens", "stop_sequence": stats.stop_sequence or None}


def _usage(stats: Stats) -> dict[str, Any]:
    return {
        "input_tokens": stats.prompt_tokens - stats.reused_tokens,
        "cache_read_input_tokens": stats.reused_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": stats.completion_tokens,
    }


def _count(request: GenerationRequest, engine: Engine, _model: str, _cancellation: Cancellation) -> Iterator[bytes]:
    yield encode_json({"input_tokens": engine.count_tokens(request.messages, request.options)})


def routes(service: RequestService) -> list[ProtocolRoute]:
    """The paths of the API."""
    about, counted = "The next message, in Anthropic's API.", "The number of tokens of a conversation."
    return [
        generating_route(service, ANTHROPIC, "/v1/messages", about, parse_messages, MessageObjects),
        ProtocolRoute(
            ANTHROPIC, "POST", "/v1/messages/count_tokens", Endpoint(service, counted, parse_messages, _count)
        ),
    ]
