"""Arguments of wrong types are one error with the value seen; options are declared once and listed with types."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

import edgerun
from edgerun import Engine, GenerateOptions, InputError, LoadOptions, Session, Speculation
from edgerun.edge.cli.main import main
from edgerun.runtime.arguments.argument_types import options_of
from edgerun.runtime.arguments.option_keywords import GenerateKeywords, LoadKeywords
from edgerun.runtime.devices.processor import usable_cores
from support import generated_texts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": 5}, "model is 5; it must be text or a path"),
        ({"model": b"x"}, "model is b'x'; it must be text or a path"),
        ({"threads": "2"}, "threads is '2'; it must be a whole number"),
        ({"threads": True}, "threads is True; it must be a whole number"),
        ({"threads": 1.0}, "threads is 1.0; it must be a whole number"),
        ({"context": float("nan")}, "context is nan; it must be a whole number"),
        ({"device": None}, "device is None; it must be text"),
        ({"cache": 1}, "cache is 1; it must be True or False"),
        ({"draft": ["a"]}, "draft is ['a']; it must be text or a path"),
        ({"tokenizer": {}}, "tokenizer is {}; it must be text or a path"),
        ({"progress": None}, "progress is None; it must be a function"),
        ({"prefix_cache": -1}, "prefix_cache is -1; it must be a number of bytes, 0 or more"),
        ({"power": "turbo"}, "power is 'turbo'; it must be one of auto, performance, saver"),
        ({"prefill": "fast"}, "prefill is 'fast'; it must be one of auto, plain, int8"),
        ({"kv": "int2"}, "kv is 'int2'; it must be one of float, int8, int4"),
    ],
)
def test_load_refuses_wrong_types(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        edgerun.load(**arguments)
    assert str(caught.value) == message


WRONG_OPTIONS = [
    ({"max_tokens": "5"}, "max_tokens is '5'; it must be a whole number"),
    ({"stop": 5}, "stop is 5; it must be text or a list, each item text"),
    ({"stop": ["a", None]}, "stop is ['a', None]; it must be text or a list, each item text"),
    (
        {"logit_bias": [(1, 2)]},
        "logit_bias is [(1, 2)]; it must be a mapping, each key a whole number, each value a number",
    ),
    (
        {"logit_bias": {"1": 2}},
        "logit_bias is {'1': 2}; it must be a mapping, each key a whole number, each value a number",
    ),
    ({"stop": b"a"}, "stop is b'a'; it must be text or a list, each item text"),
    ({"temperature": "hot"}, "temperature is 'hot'; it must be a number"),
    ({"temperature": float("nan")}, "temperature is nan; it must be 0"),
    ({"top_k": 1.5}, "top_k is 1.5; it must be a whole number"),
    ({"logprobs": True}, "logprobs is True; it must be a whole number"),
    ({"logprobs": -1}, "logprobs is -1; it must be between 0 and 20"),
    ({"logprobs": 21}, "logprobs is 21; it must be between 0 and 20"),
    ({"seed": None, "raw": "yes"}, "raw is 'yes'; it must be True or False"),
    ({"system": 3}, "system is 3; it must be text"),
    ({"speculation": "off"}, "speculation is 'off'; it must be a Speculation"),
    ({"draft_sampling": "chain"}, "draft_sampling is 'chain'; it must be a DraftSampling, such as DraftSampling."),
]


@pytest.mark.parametrize(("options", "message"), WRONG_OPTIONS)
def test_options_refuse_wrong_types(engine: Engine, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        engine.generate("the", **options)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda engine: engine.generate(None), "prompt is None; it must be text or a list, each item a mapping"),
        (lambda engine: engine.stream(b"the"), "prompt is b'the'; it must be text or a list, each item a mapping"),
        (lambda engine: engine.generate("the", {"seed": 1}), "options is {'seed': 1}; it must be a GenerateOptions"),
        (lambda engine: engine.session(system=1), "system is 1; it must be text"),
        (lambda engine: engine.session(resume=1), "resume is 1; it must be text or a path"),
        (lambda engine: engine.session().send(None), "text is None; it must be text or a list, each item a mapping"),
        (lambda engine: engine.session().save(1), "path is 1; it must be text or a Path"),
        (lambda engine: engine.encode_chat("the"), "messages is 'the'; it must be a list, each item a mapping"),
        (lambda engine: engine.encode_chat(["the"]), "messages is ['the']; it must be a list, each item a mapping"),
    ],
)
def test_calls_refuse_wrong_types(engine: Engine, call: Callable[[Any], object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        call(engine)
    assert str(caught.value) == message


def test_values_of_the_right_meaning_are_taken(engine: Engine) -> None:
    expected = engine.generate("the", max_tokens=4).text
    assert engine.generate("the", max_tokens=np.int64(4), stop=None, temperature=np.float32(0)).text == expected
    options = GenerateOptions(max_tokens=np.int32(4), temperature=0, stop=["\0"])
    assert type(options.max_tokens) is int
    assert engine.generate("the", options).text == expected
    assert GenerateOptions(stop=None).stops == ()


def test_more_threads_than_processors_are_not_started(
    tiny_bundle: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.WARNING), edgerun.load(tiny_bundle, threads=1024) as engine:
        assert engine.threads == usable_cores()
    assert [record.getMessage() for record in caplog.records] == [
        f"threads is 1024, but this program may use {usable_cores()} processors: {usable_cores()} threads compute"
    ]
    assert main([str(tiny_bundle), "-p", "the", "-n", "2", "--threads", "1024"]) == 0
    err = capsys.readouterr().err
    assert "threads is 1024" in err
    assert err.count("\n") == 1


def test_a_choice_of_drafters_is_not_made_from_its_name_alone() -> None:
    with pytest.raises(InputError, match=r"Speculation\('off'\) is not a choice of drafters"):
        Speculation("off")  # type: ignore[arg-type]


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
    assert generated_texts.MODULE.read_text(encoding="utf-8") == generated_texts.module_text()


@pytest.mark.parametrize(("record", "keywords"), RECORDS)
def test_the_docstring_of_a_record_explains_every_option(record: type[Any], keywords: type[Any]) -> None:
    assert list(options_of(record)) == [each.name for each in dataclasses.fields(record)]
    for name, declared in options_of(record).items():
        assert f"    {name}: {declared.help}" in (record.__doc__ or "").splitlines()
