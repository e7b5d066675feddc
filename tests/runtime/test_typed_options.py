"""Options by name are typed: .ci/run checks this file with mypy, and an error that is not reported fails it."""

from __future__ import annotations

import pytest

import edgerun
from edgerun import Engine, InputError


def test_wrong_names_and_types_are_errors_of_mypy(engine: Engine) -> None:
    with pytest.raises(InputError, match="unknown option 'thread'"):
        edgerun.load(thread=1)  # type: ignore[call-arg]
    with pytest.raises(InputError, match="threads is '1'; it must be a whole number"):
        edgerun.load(threads="1")  # type: ignore[arg-type]
    for function in (engine.generate, engine.stream, engine.session().send, engine.session().stream):
        with pytest.raises(InputError, match="unknown option 'max_token'"):
            function("a", max_token=1)  # type: ignore[call-arg]
        with pytest.raises(InputError, match="max_tokens is '1'; it must be a whole number"):
            function("a", max_tokens="1")  # type: ignore[arg-type]


async def not_called(engine: Engine) -> None:
    """What mypy reads of the functions for asyncio."""
    await engine.agenerate("a", seed="1")  # type: ignore[arg-type]
    engine.astream("a", sed=1)  # type: ignore[call-arg]
