"""Python functions as tools: definitions from type hints, and a loop that makes the model's calls."""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from ...errors import InputError

if TYPE_CHECKING:
    from ..engine import Engine, Prompt
    from ..options import GenerateOptions
    from ..result import Chunk, Reply
    from .calls import ToolCall

Schema: TypeAlias = dict[str, Any]
_TYPES: Final[Mapping[str, type]] = {
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": float,
    "null": type(None),
    "array": list,
    "object": dict,
}
_SIMPLE: Final[Mapping[Any, Schema]] = {Any: {}, **{kind: {"type": name} for name, kind in _TYPES.items()}}
_NAMED: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_ARGUMENT: Final = re.compile(r"\s+(\w+)(?: \([^)]*\))?:\s*(.+)")
MAX_ROUNDS: Final = 8
"""Largest number of answers whose calls are made, where no other is asked for."""
DECLINED: Final = "error: this call was declined"
"""What the model reads in place of the result of a call that was not approved."""


@dataclass(frozen=True)
class FunctionTool:
    """A function that a model may call."""

    definition: Mapping[str, Any]
    """What the chat template reads: `{"type": "function", "function": {"name": ...}}`."""
    run: Callable[..., Any]
    """Takes the arguments by name."""

    @classmethod
    def of(cls, function: Callable[..., Any]) -> FunctionTool:
        """Describe a function by its name, its docstring and its type hints.

        The first paragraph of the docstring is the description; arguments are described by a section
        `Args:`, or from `Annotated[type, "description"]`.

        Raises:
            InputError: the hints cannot be read, or an argument has none, or one that JSON has no form for.
        """
        name = getattr(function, "__name__", "")
        if not name.isidentifier() or inspect.iscoroutinefunction(function):
            raise InputError(f"{function!r:.80} cannot be a tool", "give a function with a name that is not async")
        try:
            hints, arguments = get_type_hints(function, include_extras=True), inspect.signature(function).parameters
        except Exception as error:  # evaluating hints that are texts may raise anything
            what = f"the type hints of {name} cannot be read: {error}"
            raise InputError(what, "use types that are defined") from error
        documentation = inspect.getdoc(function) or ""
        described = _argument_descriptions(documentation)
        properties: dict[str, Schema] = {}
        required = []
        for parameter in arguments.values():
            where = f"{name}({parameter.name})"
            if parameter.kind not in _NAMED or parameter.name not in hints:
                raise InputError(f"{where} cannot be an argument of a tool", "name it, and give it a type hint")
            schema = _schema(hints[parameter.name], where)
            if parameter.name in described:
                schema.setdefault("description", described[parameter.name])
            properties[parameter.name] = schema
            if parameter.default is inspect.Parameter.empty:
                required.append(parameter.name)
        parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        definition = {"name": name, "parameters": parameters}
        if about := " ".join(documentation.partition("\n\n")[0].split()):
            definition["description"] = about
        return cls({"type": "function", "function": definition}, function)

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.definition["function"]["name"])

    def result(self, values: Mapping[str, Any]) -> str:
        """Call the function; returns its result as text, or what went wrong, for the model to read."""
        schema = self.definition["function"].get("parameters", {})
        if problem := mismatch(dict(values), schema, "the arguments"):
            return f"error: {problem}"
        try:
            value = self.run(**values)
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        except Exception as error:  # noqa: BLE001  whatever it is, the model may do better
            return f"error: {type(error).__name__}: {error}"


def mismatch(value: Any, schema: Mapping[str, Any], where: str) -> str:
    """What is wrong with a value, by the keywords that `FunctionTool.of` writes; empty where nothing is."""
    return next(_mismatches(value, schema, where), "")


def _mismatches(value: Any, schema: Mapping[str, Any], where: str) -> Iterator[str]:
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where}: {value!r:.60} is not one of {schema['enum']!r:.200}"
    if "anyOf" in schema and all(mismatch(value, each, where) for each in schema["anyOf"]):
        yield f"{where}: {value!r:.60} has none of the types that it may have"
    wanted = schema.get("type")
    if isinstance(wanted, str) and wanted in _TYPES:
        kinds = (int, float) if wanted == "number" else (_TYPES[wanted],)
        if not isinstance(value, kinds) or (isinstance(value, bool) and wanted != "boolean"):
            yield f"{where}: {value!r:.60} is not of the type {wanted}"
    if isinstance(value, list) and isinstance(schema.get("items"), Mapping):
        for index, each in enumerate(value):
            yield from _mismatches(each, schema["items"], f"{where}[{index}]")
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        yield from (f"{where}: {name} is missing" for name in schema.get("required", ()) if name not in value)
        others = schema.get("additionalProperties", True)
        for name, each in value.items():
            expected = properties.get(name, others)
            if expected is False:
                yield f"{where}: there is no {name}"
            elif isinstance(expected, Mapping):
                yield from _mismatches(each, expected, f"{where}.{name}")


def _schema(hint: Any, where: str) -> Schema:
    """The JSON schema of a type hint.

    Raises:
        InputError: JSON has no form for it.
    """
    if get_origin(hint) is Annotated:
        inner, *notes = get_args(hint)
        schema = _schema(inner, where)
        if texts := [note for note in notes if isinstance(note, str)]:
            schema["description"] = texts[0]
        return schema
    if hint in _SIMPLE:
        return dict(_SIMPLE[hint])
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in {Union, types.UnionType}:
        return {"anyOf": [_schema(each, where) for each in arguments]}
    if origin in {list, Sequence} and arguments:
        return {"type": "array", "items": _schema(arguments[0], where)}
    if origin in {dict, Mapping} and arguments[:1] == (str,):
        return {"type": "object", "additionalProperties": _schema(arguments[1], where)}
    raise InputError(
        f"{where} has the type hint {hint!r:.80}", "use str, int, float, bool, list, dict, Literal or a union of them"
    )


def _argument_descriptions(documentation: str) -> dict[str, str]:
    """What the section `Args:` of a docstring says of the arguments."""
    _, found, section = documentation.partition("\nArgs:\n")
    described: dict[str, str] = {}
    for line in section.splitlines() if found else ():
        if line.strip() and not line[0].isspace():
            break
        if (argument := _ARGUMENT.fullmatch(line)) is not None:
            described[argument[1]] = argument[2].strip()
    return described


@dataclass(frozen=True)
class ToolRun:
    """How a loop of calls ended."""

    reply: Reply
    """The last answer; it has calls where the limit of rounds was reached, or the loop was cancelled."""
    messages: tuple[Mapping[str, Any], ...]
    """The whole conversation, with calls, results and the last answer."""
    rounds: int
    """Number of answers whose calls were made."""


def run_tools(
    engine: Engine,
    prompt: Prompt,
    tools: Sequence[Callable[..., Any] | FunctionTool],
    options: GenerateOptions | None = None,
    *,
    max_rounds: int = MAX_ROUNDS,
    approve: Callable[[ToolCall], bool] | None = None,
    cancelled: Callable[[], bool] | None = None,
    on_chunk: Callable[[Chunk], None] | None = None,
    **changes: Any,
) -> ToolRun:
    """Answer a prompt; call the functions that the model asks for, and give it their results, until it asks for none.

    What a function raises is given to the model as its result, as are arguments that do not fit its type hints.

    Args:
        engine: the model.
        prompt: what a user says, or the messages of a conversation.
        tools: functions with type hints, or `FunctionTool`s.
        options: options of the answers.
        max_rounds: largest number of answers whose calls are made.
        approve: asked before every call; where it returns False, the model is told that the call was declined.
        cancelled: asked with every piece of an answer and before every call; True ends the loop.
        on_chunk: receives the pieces of all answers.
        changes: options by name.

    Raises:
        EdgeError: an answer cannot be generated.
        InputError: a function cannot be a tool, two have one name, or `max_rounds` is less than 1.
    """
    from ..result import Reply  # noqa: PLC0415 -- result imports this package

    offered = [each if isinstance(each, FunctionTool) else FunctionTool.of(each) for each in tools]
    by_name = {tool.name: tool for tool in offered}
    if len(by_name) < len(offered):
        raise InputError("two tools have the same name", "give every tool a name of its own")
    if max_rounds < 1:
        raise InputError(f"max_rounds is {max_rounds}", "it must be 1 or more")
    stopped = cancelled or (lambda: False)
    messages: list[Mapping[str, Any]] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
    rounds = 0
    while True:
        chunks = []
        stream = engine.stream(messages, options, **changes, tools=[tool.definition for tool in offered])
        for chunk in stream:
            chunks.append(chunk)
            if on_chunk is not None:
                on_chunk(chunk)
            if chunk.finish_reason is None and stopped():
                stream.cancel()
        reply = Reply.of(chunks)
        messages.append(reply.message)
        if not reply.tool_calls or rounds == max_rounds or stopped():
            return ToolRun(reply, tuple(messages), rounds)
        for call in reply.tool_calls:
            if stopped():
                return ToolRun(reply, tuple(messages), rounds)
            content = by_name[call.name].result(call.values) if approve is None or approve(call) else DECLINED
            messages.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content})
        rounds += 1
