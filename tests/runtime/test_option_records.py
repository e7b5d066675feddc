"""Options are declared once: functions that take them by name list them with types, defaults and help."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any, get_type_hints

import pytest

import edgerun
from edgerun import Engine, GenerateOptions, LoadOptions, Session
from edgerun.runtime.arguments.argument_types import options_of
from edgerun.runtime.arguments.option_keywords import GenerateKeywords, LoadKeywords
from support import option_keywords

RECORDS = [(LoadOptions, LoadKeywords), (GenerateOptions, GenerateKeywords)]
TAKERS = [
    (edgerun.load, LoadOptions),
    *((function, GenerateOptions) for function in (Engine.generate, Engine.stream, Engine.agenerate, Engine.astream)),
    *((function, GenerateOptions) for function in (Session.send, Session.stream)),
]


def public_functions() -> dict[str, Any]:
    """Everything that the package offers and that can be called, methods included, by name."""
    found = {name: getattr(edgerun, name) for name in edgerun.__all__}
    for name, value in list(found.items()):
        if inspect.isclass(value):
            methods = inspect.getmembers(value, inspect.isroutine)
            found |= {f"{name}.{method}": function for method, function in methods if not method.startswith("_")}
    return {name: value for name, value in found.items() if callable(value)}


@pytest.mark.parametrize("name", public_functions())
def test_signatures_show_values_and_no_addresses(name: str) -> None:
    try:
        signature = str(inspect.signature(public_functions()[name]))
    except ValueError:  # a method of a class of Python's
        return
    assert re.findall(r"<factory>|<function|<lambda>| at 0x", signature) == []


@pytest.mark.parametrize(("function", "record"), TAKERS, ids=lambda value: value.__qualname__)
def test_a_function_lists_the_options_with_their_defaults(function: Any, record: type[Any]) -> None:
    listed = inspect.signature(function).parameters
    assert {each.name: listed[each.name].default for each in dataclasses.fields(record)} == {
        each.name: each.default for each in dataclasses.fields(record)
    }
    assert not [each for each in listed.values() if each.kind is inspect.Parameter.VAR_KEYWORD]


@pytest.mark.parametrize(("record", "keywords"), RECORDS)
def test_type_checkers_read_the_types_of_the_record(record: type[Any], keywords: type[Any]) -> None:
    assert get_type_hints(keywords) == get_type_hints(record)
    assert option_keywords.MODULE.read_text(encoding="utf-8") == option_keywords.module_text()


@pytest.mark.parametrize(("record", "keywords"), RECORDS)
def test_the_docstring_of_a_record_explains_every_option(record: type[Any], keywords: type[Any]) -> None:
    assert list(options_of(record)) == [each.name for each in dataclasses.fields(record)]
    for name, declared in options_of(record).items():
        assert f"    {name}: {declared.help}" in (record.__doc__ or "").splitlines()
