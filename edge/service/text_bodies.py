"""The bodies of requests: chat and text completions, embeddings, tokens, and the parameters of a function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta

from ...runtime.encoders.encoder import AnyModel
from ...runtime.engine import Engine
from ...runtime.options import GenerateOptions
from ...runtime.text.chat_template import Message
from .body_decoder import MAX_CHARACTERS, StrictStruct, about, decode_body
from .generation_fields import (
    Alternatives,
    BestOfField,
    ChoicesField,
    ConversationFields,
    EarlyStopField,
    GenerationRequest,
    PositiveInt,
    ReasoningEffort,
    RequestFields,
    StreamOptions,
    TokenLimit,
    Verbosity,
    check_option,
    check_token_ids,
    option_meta,
    same,
    wanted_logprobs,
)
from .message_fields import AnyMessage, FunctionTool, check_count, conversation, tool_mappings
from .request_error import ErrorCode, RequestError, invalid, unsupported

_DEFAULT_TOKENS: Final = 16
"""Largest number of tokens of a text completion that asks for none, as in OpenAI's API."""
_MAX_INPUTS: Final = 2048
"""Largest number of prompts or texts of one request."""
TextsOrIds: TypeAlias = str | list[str | int | list[int]]
"""A text, token ids, or several of one kind, as bodies have them."""


def texts_or_ids(param: str, given: TextsOrIds) -> tuple[str | tuple[int, ...], ...]:
    """The texts or token ids of a field that has one or several of them.

    Raises:
        RequestError: there are none or too many, one is empty, or they are of several kinds.
    """
    one = isinstance(given, str) or (given and all(isinstance(each, int) for each in given))
    several: list[Any] = [given] if one else list(given)
    check_count(param, len(several), _MAX_INPUTS)
    if not several:
        raise invalid(param, f"{param} is empty", "give a text or token ids")
    if len({type(each) for each in several}) > 1:
        raise invalid(param, f"{param} has items of several types", "give texts, or token ids, or lists of token ids")
    for index, each in enumerate(several):
        place = param if each is given else f"{param}[{index}]"
        if not each:
            raise invalid(place, f"{place} is empty", "give a text or token ids")
        if not isinstance(each, str) and any(token < 0 for token in each):
            raise invalid(place, f"{place} has the token id {min(each)}", "token ids are 0 or more")
    return tuple(each if isinstance(each, str) else tuple(each) for each in several)


def encoded_texts(engine: AnyModel, param: str, given: Any) -> list[list[int]]:
    """The token ids of a field that has one or several texts or lists of token ids; errors as for `texts_or_ids`.

    Raises:
        RequestError: the model does not have one of the token ids.
    """
    texts = texts_or_ids(param, given)
    encode = engine.tokenizer.encode
    prompts = [encode(each, add_special_tokens=True) if isinstance(each, str) else list(each) for each in texts]
    for index, tokens in enumerate(prompts):
        check_token_ids(engine, tokens, param if len(prompts) == 1 else f"{param}[{index}]")
    return prompts


class ChatBody(ConversationFields, kw_only=True):
    """Body of a chat completion."""

    messages: Annotated[list[AnyMessage], about("The conversation.")]
    max_tokens: Annotated[TokenLimit | None, about("Largest number of tokens; -1, the default, for no limit.")] = None
    max_completion_tokens: Annotated[PositiveInt | None, about("Another name of max_tokens.")] = None
    n: ChoicesField = None
    best_of: BestOfField = None
    early_stop: EarlyStopField = None
    logprobs: Annotated[bool | None, about("Whether to return the log-probabilities of the tokens.")] = None
    top_logprobs: Annotated[Alternatives | None, about("Number of likely tokens at each position, 0 to 20.")] = None
    stream_options: Annotated[StreamOptions | None, about("What a stream contains; needs stream.")] = None
    tools: Annotated[list[FunctionTool] | None, about("Functions that the model may call.")] = None
    reasoning_effort: ReasoningEffort = None
    verbosity: Verbosity = None
    continue_final_message: Annotated[bool | None, about("Extension. Whether the last message is continued.")] = None
    add_generation_prompt: Annotated[bool | None, about("Extension. The opposite of continue_final_message.")] = None

    prediction: Annotated[dict[str, Any] | None, about("Accepted; drafting needs no prediction.")] = None
    modalities: Annotated[list[str] | None, about("Answers are text.", ["text"])] = None

    audio: Annotated[None, about("Not supported: answers are text.")] = None
    function_call: Annotated[None, about("Not supported: use tool_choice.")] = None
    functions: Annotated[None, about("Not supported: use tools.")] = None
    moderation: Annotated[None, about("Not supported.")] = None
    web_search_options: Annotated[None, about("Not supported: edge-run does not search the web.")] = None

    def request(self) -> GenerationRequest:
        """The next message of a conversation."""
        tools = tool_mappings(self.tools)
        messages, answer_start = self._continued(conversation(self.messages))
        others = {
            "logprobs": wanted_logprobs(self.top_logprobs, "logprobs", wanted=bool(self.logprobs)),
            "max_tokens": same(self, "max_tokens", "max_completion_tokens"),
            "tools": tools if self.tool_choice != "none" else (),
            "answer_start": answer_start,
        }
        return self.generation((messages,), others, effort=self.reasoning_effort, stream_options=self.stream_options)

    def _continued(self, messages: list[Message]) -> tuple[list[Message], str]:
        """The messages without the one that the answer continues, and the text of that one; empty if there is none.

        Raises:
            RequestError: the last message cannot be continued, or the fields that say so contradict each other.
        """
        continues = bool(self.continue_final_message)
        if self.add_generation_prompt == continues:
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


class OtherFile(StrictStruct):
    """Another file of a project."""

    text: str
    filename: str | None = None


def file_options(given: Sequence[OtherFile] | None) -> dict[str, Any]:
    """The option `extra`."""
    return {"extra": [{"filename": each.filename or "", "text": each.text} for each in given or ()]}


class CompletionBody(RequestFields, kw_only=True):
    """Body of a text completion."""

    prompt: Annotated[TextsOrIds, about("A text, a list of texts, token ids, or a list of token id lists.")]
    max_tokens: Annotated[TokenLimit | None, about("Largest number of tokens; 16 by default, -1 for no limit.")] = None
    n: ChoicesField = None
    best_of: BestOfField = None
    early_stop: EarlyStopField = None
    logprobs: Annotated[Alternatives | None, about("Return log-probabilities, also of so many likely tokens.")] = None
    stream_options: Annotated[StreamOptions | None, about("What a stream contains; needs stream.")] = None
    echo: Annotated[bool | None, about("Answers do not repeat the prompt.", False)] = None
    suffix: Annotated[str | None, option_meta("suffix")] = None
    suffix_first: Annotated[bool | None, option_meta("suffix_first", extension=True)] = None
    extra: Annotated[list[OtherFile] | None, option_meta("extra", extension=True)] = None
    document: Annotated[str | None, option_meta("document", extension=True)] = None

    def request(self) -> GenerationRequest:
        """The continuation of a text, or of token ids; several prompts are answered one after the other."""
        max_tokens, fills = _DEFAULT_TOKENS if self.max_tokens is None else self.max_tokens, self.suffix is not None
        others = {"max_tokens": max_tokens, "logprobs": self.logprobs, "raw": True, "branch": fills}
        prompts = ("",) if self.prompt == "" and fills else texts_or_ids("prompt", self.prompt)
        if fills and not isinstance(prompts[0], str):
            raise invalid("suffix", "suffix is given with token ids", "give the prompt as text, or leave suffix out")
        return self.generation(prompts, others | file_options(self.extra), stream_options=self.stream_options)


class EmbeddingBody(StrictStruct):
    """Body of a request for embeddings."""

    input: Annotated[TextsOrIds, about("A text, a list of texts, token ids, or a list of token id lists.")]
    model: Annotated[str | None, about("Name of the model; null for the first one that the server offers.")] = None
    encoding_format: Annotated[str | None, about("Numbers, or little-endian float32.", "float", "base64")] = None
    dimensions: Annotated[PositiveInt | None, about("The model's own number: vectors are not shortened.")] = None
    user: Annotated[str | None, about("Accepted; does not change the answer.")] = None

    def request(self) -> EmbeddingBody:
        """The body, whose texts are checked."""
        texts_or_ids("input", self.input)
        return self

    def check_dimensions(self, length: int) -> None:
        """Check that vectors of this length are what the request asks for.

        Raises:
            RequestError: it asks for another length.
        """
        if self.dimensions not in (None, length):
            raise unsupported(
                "dimensions",
                f"dimensions is {self.dimensions}, and this model's vectors have {length}",
                "vectors are not shortened: leave dimensions out",
            )


class TokenizeBody(StrictStruct):
    """Body of a request for token ids."""

    content: Annotated[str | None, about("The text, as llama.cpp names it.")] = None
    prompt: Annotated[str | None, about("The text, as vLLM names it.")] = None
    messages: Annotated[
        Annotated[list[AnyMessage], Meta(min_length=1)] | None, about("A conversation instead of a text.")
    ] = None
    model: Annotated[str | None, about("Name of the model; null for the first one that the server offers.")] = None
    add_special: Annotated[bool | None, about("Whether a text gets special tokens; not by default.")] = None
    add_special_tokens: Annotated[bool | None, about("Another name of add_special.")] = None
    with_pieces: Annotated[bool | None, about("Whether to return the text of each token too.")] = None
    return_token_strs: Annotated[bool | None, about("Another name of with_pieces.")] = None
    tools: Annotated[list[FunctionTool] | None, about("Functions, for the chat template.")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, about("What the chat template reads besides.")] = None

    def request(self) -> TokenizeBody:
        """The body, with one name for what has two."""
        text = self.content = same(self, "content", "prompt")
        self.add_special = same(self, "add_special", "add_special_tokens")
        self.with_pieces = same(self, "with_pieces", "return_token_strs")
        if (text is None) == (self.messages is None):
            raise RequestError(
                "there is neither a text nor messages" if text is None else "there are a text and messages",
                "give content, or messages",
                code=ErrorCode.MISSING_FIELD if text is None else ErrorCode.INVALID_VALUE,
                param="content",
            )
        check_option("template_variables", self.chat_template_kwargs, "chat_template_kwargs")
        return self

    def encode(self, engine: Engine) -> list[int]:
        """The token ids.

        Raises:
            RequestError: there are too many tools or messages, or fields of a message do not fit together.
            TemplateError: the model has no chat template, or it refuses the messages.
        """
        if self.messages is None:
            return engine.tokenizer.encode(self.content or "", add_special_tokens=bool(self.add_special))
        options = GenerateOptions(tools=tool_mappings(self.tools), template_variables=self.chat_template_kwargs)
        return engine.chat_prompt(conversation(self.messages), options).ids


class DetokenizeBody(StrictStruct):
    """Body of a request for the text of token ids."""

    tokens: Annotated[list[Annotated[int, Meta(ge=0)]], about("Token ids.")]
    model: Annotated[str | None, about("Name of the model; null for the first one that the server offers.")] = None


class Parameters:
    """What a function takes of a body: the whole as `body`, or else the fields, of which none other is allowed.

    `elsewhere` has the names of parameters that come from elsewhere; its docstring, and `name`, are the struct's.
    """

    def __init__(self, function: Callable[..., object], elsewhere: Collection[str], name: str = "Body") -> None:
        signature = inspect.signature(function, eval_str=True)
        self.function: Final = function
        self.result: Final = signature.return_annotation
        self.elsewhere: Final = [name for name in signature.parameters if name in elsewhere]
        fields = [each for each in signature.parameters.values() if each.name not in elsewhere]
        self._whole: Final = [each.name for each in fields] == ["body"]
        defaults = [dict(each.default) if isinstance(each.default, Mapping) else each.default for each in fields]
        declared = [
            (each.name, each.annotation, msgspec.NODEFAULT if default is each.empty else default)
            for each, default in zip(fields, defaults, strict=True)
        ]
        text = {"__doc__": function.__doc__}
        made = (
            None
            if self._whole
            else msgspec.defstruct(name, declared, bases=(StrictStruct,), namespace=text, kw_only=True)
        )
        self.kind: Final[type[msgspec.Struct]] = made or fields[0].annotation
        """The struct that a body is decoded into."""

    def read(self, body: bytes, max_characters: int = MAX_CHARACTERS) -> dict[str, Any]:
        """The arguments that a body gives; errors as for `decode_body`."""
        decoded = decode_body(body, self.kind, max_characters)
        return {"body": decoded} if self._whole else msgspec.structs.asdict(decoded)
