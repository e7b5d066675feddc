"""Conversations in the form of OpenAI's chat API, checked and joined, and the prompts made of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final

from ...errors import InputError, TemplateError
from ...models.json_file import shown
from ..images.decoding import data_url, image_bytes
from ..kv.arena import shared_tokens
from .chat_template import SPECIAL_TOKENS, ChatTemplate, Message
from .tokenizer import TextTokenizer

if TYPE_CHECKING:
    from ..images.vision_model import VisionModel

_ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_FIELDS: Final = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
_IMAGES: Final = ("image", "image_url")
"""Types of content parts that are images."""
_MAX_IMAGES: Final = 1000
"""Largest number of images in a conversation."""
_PART_SEPARATOR: Final = "\n"
"""Between the text parts of a message: servers of other runtimes join them by line ends, too."""


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Check messages and return them as chat templates read them.

    Text parts are joined to one text unless there are images among them. Arguments of tool calls, which the API has as
    JSON text, become objects, and fields without a value are left out.

    Args:
        messages: objects with a `role` (system, developer, user, assistant or tool) and a `content`, which is text, a
            list of parts `{"type": "text", "text": ...}` and images (see `image_bytes`), or None where an assistant
            only calls tools.

    Raises:
        InputError: there are no messages, or one of them has another form; the error says which and where.
    """
    if not messages:
        raise InputError("there are no messages", "give at least one, such as {'role': 'user', 'content': 'hello'}")
    checked = [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    if (count := len(images_in(checked))) > _MAX_IMAGES:
        raise InputError(f"the messages have {count} images", f"the limit is {_MAX_IMAGES}: leave out older ones")
    return checked


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise InputError(f"{where} is {shown(message)}", "it must be an object with a role and a content")
    fields = {name: value for name, value in message.items() if value is not None}
    if unknown := [name for name in fields if name not in _FIELDS]:
        raise InputError(f"{where} has the field {shown(unknown[0])}", f"fields are: {', '.join(_FIELDS)}")
    role = fields.get("role")
    if role not in _ROLES:
        raise InputError(f"{where}: role is {shown(role)}", f"it must be one of {', '.join(_ROLES)}")
    for name in ("name", "tool_call_id", "reasoning_content"):
        if not isinstance(fields.get(name, ""), str):
            raise InputError(f"{where}: {name} is {shown(fields[name])}", "it must be text")
    if "tool_calls" in fields:
        if role != "assistant":
            raise InputError(f"{where} is of the role {role} and has tool_calls", "only an assistant calls tools")
        calls, where_calls = fields["tool_calls"], f"{where}.tool_calls"
        if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)) or not calls:
            raise InputError(f"{where_calls} is {shown(calls)}", "it must be a list of calls")
        fields["tool_calls"] = [_tool_call(call, f"{where_calls}[{index}]") for index, call in enumerate(calls)]
    elif "content" not in fields:
        raise InputError(f"{where} has no content", "give text, or a list of text parts")
    fields["content"] = joined_content(fields.get("content", ""), f"{where}.content")
    return fields


def joined_content(content: Any, where: str) -> str | list[dict[str, Any]]:
    """The content of a message as a text; with images, as the list of parts, of which images have their bytes.

    Raises:
        InputError: it has another form; the error calls it `where`.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, (bytes, bytearray)):
        raise InputError(f"{where} is {shown(content)}", "it must be text, or a list of text parts")
    parts: list[dict[str, Any]] = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in _IMAGES:
            parts.append({"type": "image", "image": image_bytes(part, f"{where}[{index}]")})
        elif kind == "text" and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        else:
            what = f"a part of the type {shown(kind)}" if isinstance(kind, str) else shown(part)
            hint = 'models here read text and images: {"type": "text", "text": ...}'
            raise InputError(f"{where}[{index}] is {what}", hint)
    if any(part["type"] == "image" for part in parts):
        return parts
    return _PART_SEPARATOR.join(part["text"] for part in parts)


def images_in(messages: Sequence[Message]) -> list[bytes]:
    """The encoded images of messages, in their order."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part["image"] for part in parts if part["type"] == "image"]


def json_messages(messages: Sequence[Message]) -> list[Message]:
    """Checked messages as JSON has them, and `template_messages` takes them: images are `data:` URLs."""

    def part_of(part: Mapping[str, Any]) -> Mapping[str, Any]:
        if part["type"] != "image":
            return part
        return {"type": "image_url", "image_url": {"url": data_url(part["image"])}}

    return [
        {**each, "content": [part_of(part) for part in each["content"]]} if isinstance(each["content"], list) else each
        for each in messages
    ]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InputError(f"{where} is {shown(call)}", 'it must have a function: {"name": ..., "arguments": ...}')
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise InputError(f"{where}: arguments are not JSON: {error}", "give a JSON object") from error
    if not isinstance(arguments, Mapping):
        raise InputError(f"{where}: arguments are {shown(arguments)}", "give a JSON object")
    return {**call, "type": "function", "function": {**function, "arguments": dict(arguments)}}


def _for_template(message: Message, *, in_parts: bool) -> Message:
    """A message without the bytes of its images, with its text as a list of parts for templates that read no other."""
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": [{"type": "image"} if "image" in part else part for part in content]}
    if in_parts and isinstance(content, str):
        return {**message, "content": [{"type": "text", "text": content}]}
    return message


@dataclass(frozen=True, eq=False)
class ChatPrompt:
    """A conversation, and how it becomes a prompt.

    Only the template writes special tokens: their texts in messages, tools and documents are plain text, unless
    `special_tokens_in_messages` says otherwise.
    """

    messages: Sequence[Message]
    template: ChatTemplate
    tokenizer: TextTokenizer
    variables: Mapping[str, Any] = field(default_factory=dict)
    """What the template reads besides; the names may be any."""
    special_tokens_in_messages: bool = False
    vision: VisionModel | None = None
    """What reads the images of messages; None for a model that reads text alone."""

    @cached_property
    def ids(self) -> list[int]:
        """Token ids of the prompt, up to the beginning of the assistant's answer; errors as for `encode`."""
        return self.encode(self.messages)

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of other messages with the same template and variables.

        Raises:
            InputError: the messages are nested too deep, or an image cannot be decoded.
            TemplateError: the template refuses them, or has no place for their images.
        """
        images = images_in(messages)
        messages = [_for_template(message, in_parts=self.template.reads_parts_alone) for message in messages]
        variables = dict(self.variables)
        own = {name: variables.pop(name) for name in SPECIAL_TOKENS if name in variables}
        written = "".join((self.template.written, *map(str, own.values())))
        inputs = {"messages": messages, **variables}
        marked = None if self.special_tokens_in_messages else self.tokenizer.marks.mark(inputs, written)
        if marked is None:
            text = self._with_images(self.template.render(messages, **self.variables), images)
            return self.tokenizer.encode(text, add_special_tokens=False)
        values, mark = marked
        text = self.template.render(values.pop("messages"), **values, **own, mark=mark)
        return self.tokenizer.encode_marked(self._with_images(text, images, mark), mark)

    def _with_images(self, text: str, images: Sequence[bytes], mark: str = "") -> str:
        """The rendered text with what stands for each image in the place that the template has for it."""
        if not images:
            return text
        if self.vision is None:
            hint = "choose a model that was exported with a vision tower, and run it on the CPU: --device cpu"
            raise InputError("the model reads text alone here, and a message has an image", hint)
        placeholder, texts, found = (
            self.vision.processor.placeholder,
            [self.vision.see(each).text for each in images],
            0,
        )

        def replaced(token: str) -> str:
            nonlocal found
            if token != placeholder:
                return token
            found += 1
            return texts[min(found, len(texts)) - 1]

        text = self.tokenizer.marks.replace_own(text, mark, replaced)
        if found != len(images):
            what = f"the chat template writes {found} places for {len(images)} images"
            raise TemplateError(what, "use the model's own chat template")
        return text

    def system(self) -> list[Message]:
        """The messages before the conversation proper, which always stay."""
        return list(takewhile(lambda message: message.get("role") in ("system", "developer"), self.messages))

    def beginning(self) -> list[int]:
        """Token ids of what every conversation with these system messages and tools begins with.

        Raises:
            TemplateError: the chat template refuses the system messages alone.
        """
        return self.before_user(self.system())

    def before_user(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of messages, up to the text of the user that follows them.

        Raises:
            TemplateError: the chat template refuses them.
        """
        first, second = (self.encode([*messages, {"role": "user", "content": text}]) for text in ("", "x"))
        return first[: shared_tokens(first, second)]
