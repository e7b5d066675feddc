"""Calls of functions: what a model asks for, the pieces it is streamed in, and the functions that may be called."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ...errors import InputError
from ...models.json_file import shown

_ID_LETTERS: Final = string.ascii_letters + string.digits
_ID_LENGTH: Final = 9
"""Mistral's templates take identifiers of this length alone, and others any."""


@dataclass(frozen=True)
class ToolCall:
    """A call of a function that the model asks for."""

    id: str
    """Identifier, to which the message with the result refers; empty where one is still to be made."""
    name: str
    """Name of the function: one of those that were offered."""
    arguments: str
    """The arguments: a JSON object as text."""
    index: int = field(default=0, compare=False)
    """Its place among the calls of the answer."""

    @property
    def values(self) -> dict[str, Any]:
        """The arguments by name."""
        values: dict[str, Any] = json.loads(self.arguments)
        return values

    @property
    def message(self) -> dict[str, Any]:
        """The call as a message of an assistant has it in its `tool_calls`."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def assistant_message(text: str, reasoning: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """An answer as a message of a conversation."""
    parts = {"reasoning_content": reasoning, "tool_calls": [call.message for call in calls]}
    return {"role": "assistant", "content": text, **{name: part for name, part in parts.items() if part}}


def new_call_id() -> str:
    """An identifier for a call."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))


class OfferedTools(dict[str, Mapping[str, Any]]):
    """The JSON schemas of the arguments of the functions that a model may call, by the functions' names."""

    @classmethod
    def of(cls, tools: Sequence[Mapping[str, Any]]) -> OfferedTools:
        """Read definitions: `{"type": "function", "function": {"name": ...}}`, or the inner object alone."""
        schemas: dict[str, Mapping[str, Any]] = {}
        for tool in tools:
            function = tool.get("function", tool)
            name = function.get("name") if isinstance(function, Mapping) else None
            if isinstance(name, str):
                parameters = function.get("parameters")
                schemas[name] = parameters if isinstance(parameters, Mapping) else {}
        return cls(schemas)

    def properties(self, name: str) -> Mapping[str, Any]:
        """Schemas of the arguments of a function, by their names."""
        found = self.get(name, {}).get("properties")
        return found if isinstance(found, Mapping) else {}


def check_tool_choice(choice: str | Mapping[str, Any]) -> None:
    """Check that a choice among tools is one.

    Raises:
        InputError: it is not.
    """
    if choice not in ("auto", "none", "required") and _chosen_name(choice) is None:
        raise InputError(
            f"tool_choice is {shown(choice)}",
            'it must be auto, none, required, or {"type": "function", "function": {"name": ...}}',
        )


def required_tools(choice: str | Mapping[str, Any], tools: OfferedTools) -> OfferedTools | None:
    """The functions of which one has to be called; None where none has to.

    Raises:
        InputError: there is no such function.
    """
    if choice in ("auto", "none"):
        return None
    if not tools:
        raise InputError(f"tool_choice is {shown(choice)} without tools", "give tools, or leave tool_choice out")
    name = _chosen_name(choice)
    if name is None:
        return tools
    if name not in tools:
        raise InputError(f"tool_choice names {shown(name)}", f"the tools are {', '.join(tools)}")
    return OfferedTools({name: tools[name]})


def _chosen_name(choice: str | Mapping[str, Any]) -> str | None:
    """The function that a choice names; None if it names none."""
    function = choice.get("function", choice) if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


class NotACallError(Exception):
    """A text or value is not a call of an offered function."""


def written_call(name: Any, arguments: Any, tools: OfferedTools, call_id: Any = None) -> ToolCall:
    """Check what an answer says of a call. Its identifier is the one that the model has given it, or empty.

    Raises:
        NotACallError: the function was not offered, or the arguments are not an object that JSON can hold.
    """
    if not isinstance(name, str) or name not in tools or not isinstance(arguments, dict):
        raise NotACallError
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        try:
            text.encode()
        except UnicodeEncodeError:  # half of a surrogate pair, which JSON has as an escape alone
            text = json.dumps(arguments, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise NotACallError from error
    is_id = isinstance(call_id, str) and len(call_id) == _ID_LENGTH and set(call_id) <= set(_ID_LETTERS)
    return ToolCall(call_id if is_id else "", name, text)


def read_json(text: str) -> Any:
    """Decode JSON that a model wrote; strings may have line ends in them.

    Raises:
        NotACallError: it is not JSON.
    """
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError) as error:
        raise NotACallError from error


def calls_of_json(value: Any, tools: OfferedTools) -> list[ToolCall]:
    """Read a call from an object with a name and arguments, or several from a list of them.

    Raises:
        NotACallError: one of them is not a call.
    """
    items = value if isinstance(value, list) else [value]
    calls = []
    for item in items:
        if not isinstance(item, dict):
            raise NotACallError
        fields = item["function"] if isinstance(item.get("function"), dict) else item
        arguments = fields.get("arguments", fields.get("parameters", {}))
        if isinstance(arguments, str):  # some models write the object as text once more
            arguments = read_json(arguments or "{}")
        calls.append(written_call(fields.get("name"), arguments, tools, item.get("id")))
    if not calls:
        raise NotACallError
    return calls
