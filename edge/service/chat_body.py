"""The body of a chat completion: OpenAI's fields and edge-run's own, decoded strictly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from ...runtime.text.chat_template import Message
from .body_decoder import about, decode_body
from .generation_fields import (
    Alternatives,
    BestOfField,
    ChoicesField,
    ConversationFields,
    EarlyStopField,
    GenerationRequest,
    PositiveInt,
    ReasoningEffort,
    StreamOptions,
    TokenLimit,
    Verbosity,
    generation_request,
    same,
    template_variables,
    wanted_logprobs,
)
from .message_fields import AnyMessage, FunctionTool, conversation, tool_mappings
from .request_error import invalid


class ChatBody(ConversationFields, kw_only=True):
    """Body of a chat completion."""

    messages: Annotated[list[AnyMessage], about("The conversation.")]
    max_tokens: Annotated[
        TokenLimit | None,
        about("Largest number of tokens to generate; the default, and -1, is the rest of the context."),
    ] = None
    max_completion_tokens: Annotated[PositiveInt | None, about("Another name of max_tokens.")] = None
    n: ChoicesField = None
    best_of: BestOfField = None
    early_stop: EarlyStopField = None
    logprobs: Annotated[bool | None, about("Whether to return the log-probabilities of the tokens.")] = None
    top_logprobs: Annotated[
        Alternatives | None, about("Number of likely tokens to return at each position, 0 to 20; needs logprobs.")
    ] = None
    stream_options: Annotated[StreamOptions | None, about("What a stream contains; needs stream.")] = None
    tools: Annotated[list[FunctionTool] | None, about("Functions that the model may call, for its chat template.")] = (
        None
    )
    reasoning_effort: ReasoningEffort = None
    verbosity: Verbosity = None
    continue_final_message: Annotated[
        bool | None, about("Extension. Whether the answer continues the last message, which is the assistant's.")
    ] = None
    add_generation_prompt: Annotated[
        bool | None, about("Extension. false with continue_final_message, as vLLM has it; else true.")
    ] = None

    prediction: Annotated[dict[str, Any] | None, about("Accepted; drafting needs no prediction.")] = None
    modalities: Annotated[list[str] | None, about("Answers are text.", ["text"])] = None

    audio: Annotated[None, about("Not supported: answers are text.")] = None
    function_call: Annotated[None, about("Not supported: use tool_choice.")] = None
    functions: Annotated[None, about("Not supported: use tools.")] = None
    moderation: Annotated[None, about("Not supported.")] = None
    web_search_options: Annotated[None, about("Not supported: edge-run does not search the web.")] = None


def parse_chat(body: bytes | str | Mapping[str, Any]) -> GenerationRequest:
    """Decode the body of a chat completion.

    Args:
        body: UTF-8 JSON, or the parsed object.

    Raises:
        RequestError: the body is not valid JSON or not a valid chat body; the error has the path of the field.
    """
    fields = decode_body(body, ChatBody)
    tools = tool_mappings(fields.tools)
    messages, answer_start = _continued(fields, conversation(fields.messages))
    return generation_request(
        fields,
        (messages,),
        {
            "logprobs": wanted_logprobs(fields.top_logprobs, "logprobs", wanted=bool(fields.logprobs)),
            "max_tokens": same(fields, "max_tokens", "max_completion_tokens"),
            "tools": tools if fields.tool_choice != "none" else (),
            "template_variables": template_variables(fields.chat_template_kwargs, fields.reasoning_effort),
            "answer_start": answer_start,
        },
        fields.stream_options,
    )


def _continued(fields: ChatBody, messages: list[Message]) -> tuple[list[Message], str]:
    """The messages without the one that the answer continues, and the text of that one; empty if there is none.

    Raises:
        RequestError: the last message cannot be continued, or the fields that say so contradict each other.
    """
    continues = bool(fields.continue_final_message)
    if fields.add_generation_prompt == continues:
        both = "add_generation_prompt and continue_final_message are both true"
        raise invalid(
            "add_generation_prompt",
            both if continues else "add_generation_prompt is false without continue_final_message",
            "an answer either follows the last message or continues it: leave add_generation_prompt out",
        )
    if not continues:
        return messages, ""
    *others, last = messages
    if not others or last["role"] != "assistant" or set(last) != {"role", "content"} or not last["content"]:
        param = f"messages[{len(others)}]"
        raise invalid(
            param,
            f"continue_final_message is true, but {param} is not an answer that can go on",
            "the last message must be the assistant's, with a text and nothing else, and follow another message",
        )
    return others, last["content"]
