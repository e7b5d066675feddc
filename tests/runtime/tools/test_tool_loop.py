"""A model calls Python functions in a loop, and reads what they return or raise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Dict, List, Literal  # noqa: UP035  -- as callers write them

import pytest

import edgerun
from edgerun import FunctionTool, InputError, run_tools
from support.scripted_model import write_calling_bundle


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[edgerun.Engine]:
    with edgerun.load(write_calling_bundle(tmp_path_factory.mktemp("calling"))) as engine:
        yield engine


def get_weather(city: str) -> dict[str, Any]:
    """The weather in a city."""
    if city == "Rome":
        raise LookupError("no such station")
    return {"sky": "sunny", "city": city}


def results(run: edgerun.ToolRun) -> list[str]:
    return [message["content"] for message in run.messages if message["role"] == "tool"]


def test_functions_are_called_until_there_is_an_answer(engine: edgerun.Engine) -> None:
    pieces: list[edgerun.Chunk] = []
    run = run_tools(engine, "Weather in Paris and Rome?", [get_weather], on_chunk=pieces.append)
    assert run.reply.text == "It is sunny in both."
    assert run.rounds == 1
    assert results(run) == ['{"sky": "sunny", "city": "Paris"}', "error: LookupError: no such station"]
    assert [message["role"] for message in run.messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert "".join(piece.text for piece in pieces) == "I look.It is sunny in both."


def test_a_call_that_is_not_approved_is_not_made(engine: edgerun.Engine) -> None:
    run = run_tools(engine, "Weather?", [get_weather], approve=lambda call: call.values["city"] == "Paris")
    assert results(run)[1] == "error: this call was declined"


def test_the_number_of_rounds_has_a_limit(engine: edgerun.Engine) -> None:
    conversation = [{"role": "user", "content": "a"}]
    run = run_tools(engine, conversation, [get_weather], max_rounds=1)
    assert (run.rounds, run.reply.tool_calls) == (1, ())
    with pytest.raises(InputError, match="max_rounds is 0; it must be 1 or more"):
        run_tools(engine, conversation, [get_weather], max_rounds=0)


def test_a_loop_can_be_cancelled(engine: edgerun.Engine) -> None:
    seen: list[str] = []
    run = run_tools(
        engine, "Weather?", [get_weather], cancelled=lambda: bool(seen), on_chunk=lambda c: seen.append(c.text)
    )
    assert run.reply.finish_reason is edgerun.FinishReason.CANCELLED
    assert (run.rounds, results(run)) == (0, [])


def test_two_tools_of_one_name_are_refused(engine: edgerun.Engine) -> None:
    with pytest.raises(InputError, match="two tools have the same name"):
        run_tools(engine, "a", [get_weather, FunctionTool.of(get_weather)])


def search(
    query: str,
    limit: int = 5,
    *,
    kind: Literal["web", "news"] = "web",
    tags: list[str] | None = None,
    weights: Annotated[dict[str, float], "weights by tag"] | None = None,
) -> list[str]:
    """Search the
    archive.

    More about it.

    Args:
        query: what to search for.
        limit: largest number of results.

    Returns:
        Titles.
    """
    return [query, str(limit), kind, *(tags or ()), *(weights or ())]


def test_a_definition_comes_from_type_hints_and_the_docstring() -> None:
    assert FunctionTool.of(search).definition == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the archive.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "what to search for."},
                    "limit": {"type": "integer", "description": "largest number of results."},
                    "kind": {"enum": ["web", "news"]},
                    "tags": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
                    "weights": {
                        "anyOf": [
                            {
                                "type": "object",
                                "additionalProperties": {"type": "number"},
                                "description": "weights by tag",
                            },
                            {"type": "null"},
                        ]
                    },
                },
                "required": ["query"],
                "additionalProperties": False,
            },
        },
    }


@pytest.mark.parametrize(
    ("values", "result"),
    [
        ({"query": "a", "weights": {"x": 1}}, '["a", "5", "web", "x"]'),
        ({}, "error: the arguments: query is missing"),
        ({"query": 3}, "error: the arguments.query: 3 is not of the type string"),
        ({"query": "a", "limit": True}, "error: the arguments.limit: True is not of the type integer"),
        ({"query": "a", "kind": "tv"}, "error: the arguments.kind: 'tv' is not one of ['web', 'news']"),
        ({"query": "a", "tags": [1]}, "error: the arguments.tags: [1] has none of the types that it may have"),
        ({"query": "a", "more": 1}, "error: the arguments: there is no more"),
    ],
)
def test_arguments_that_do_not_fit_are_told_to_the_model(values: dict[str, Any], result: str) -> None:
    assert FunctionTool.of(search).result(values) == result


def untyped(city):  # type: ignore[no-untyped-def]
    return city


def many(*names: str) -> None: ...


def strange(value: complex) -> None: ...


def any_list(values: List) -> None: ...  # type: ignore[type-arg]  # noqa: UP006


def any_dict(values: Dict) -> None: ...  # type: ignore[type-arg]  # noqa: UP006


def missing(value: edgerun.nothing) -> None: ...  # type: ignore[name-defined]


def unclosed(value: "list[") -> None: ...  # type: ignore[valid-type]  # noqa: F722


async def later(city: str) -> None: ...


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (untyped, r"untyped\(city\) cannot be an argument of a tool; name it, and give it a type hint"),
        (many, r"many\(names\) cannot be an argument of a tool"),
        (strange, r"strange\(value\) has the type hint <class 'complex'>; use str, int"),
        (any_list, r"any_list\(values\) has the type hint typing.List; use"),
        (any_dict, r"any_dict\(values\) has the type hint typing.Dict; use"),
        (missing, "the type hints of missing cannot be read: .*nothing"),
        (unclosed, "the type hints of unclosed cannot be read"),
        (max, "the type hints of max cannot be read: no signature found"),
        (later, "later at .* cannot be a tool; give a function with a name that is not async"),
        (lambda: 1, "<lambda> at .* cannot be a tool"),
    ],
)
def test_what_cannot_be_a_tool_is_refused(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        FunctionTool.of(function)
