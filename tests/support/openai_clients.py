"""OpenAI's clients for Python and for Node, which send the same requests and return what they read."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types import Completion
from pydantic import BaseModel

LIMIT_S = 120
DRIVER = Path(__file__).with_name("openai_driver.mjs")
NPM_FOLDER = "EDGERUN_OPENAI_NPM"
"""Environment variable with the folder in which `npm install openai` was run."""


@dataclass(frozen=True)
class ClientCall:
    """A call of a method of the clients, in their common form."""

    method: str
    """Such as `chat.completions.create`."""
    arguments: dict[str, Any]
    extra: dict[str, Any] = field(default_factory=dict)
    """Fields of the body that the client does not know."""
    api_key: str = "secret"
    retries: int = 0
    held: tuple[dict[str, Any], ...] = ()
    """Chats that are streamed, unread, while the call is made."""
    leave_after: int | None = None
    """Number of events after which a stream is left."""


@dataclass(frozen=True)
class Outcome:
    """What a client returned."""

    objects: list[dict[str, Any]] = field(default_factory=list)
    """The object, or those of a stream or a page."""
    text: str | None = None
    """The property `output_text` of a response."""
    error: dict[str, Any] | None = None
    """The exception."""


def ask_python(base: str, calls: Sequence[ClientCall]) -> list[Outcome]:
    """Make calls with the Python package."""
    with OpenAI(base_url=base, api_key="none") as client:
        return [_ask(client.with_options(api_key=call.api_key, max_retries=call.retries), call) for call in calls]


def _ask(client: OpenAI, call: ClientCall) -> Outcome:
    with ExitStack() as open_streams:
        try:
            for arguments in call.held:
                open_streams.enter_context(client.chat.completions.create(**arguments))
            if call.method == "chat.completions.stream":
                with client.chat.completions.stream(**call.arguments) as stream:
                    return Outcome([_read(stream.get_final_completion())])
            if call.method == "responses.stream":
                with client.responses.stream(**call.arguments) as events:
                    response = events.get_final_response()
                    return Outcome([_read(response)], response.output_text)
            extra = {"extra_body": call.extra} if call.extra else {}
            result: Any = attrgetter(call.method)(client)(**call.arguments, **extra)
            if not isinstance(result, openai.Stream | openai.pagination.SyncPage):
                return Outcome([_read(result)], getattr(result, "output_text", None))
            objects = []
            for item in result:
                objects.append(_read(item))
                if len(objects) == call.leave_after:
                    result.close()
                    break
            return Outcome(objects)
        except openai.APIStatusError as error:
            fields = {"code": error.code, "param": error.param, "type": error.type, "message": error.body["message"]}
            return Outcome(error={"class": type(error).__name__, "status": error.status_code, **fields})


def _read(value: Any) -> dict[str, Any]:
    """The fields of an object, which has all that its type requires, and none that it does not know."""
    fields: dict[str, Any] = value.to_dict(mode="json")
    assert list(unknown_fields(value)) == []
    # OpenAI's API streams text completions with a finish reason that is null until the end; the type does not know it.
    if not (isinstance(value, Completion) and value.choices and value.choices[0].finish_reason is None):
        type(value).model_validate(fields)
    return fields


def unknown_fields(value: Any) -> Iterator[str]:
    """Names of the fields, at any depth, that the client's types do not have."""
    if isinstance(value, BaseModel):
        yield from value.model_extra or ()
        for each in value.__dict__.values():
            yield from unknown_fields(each)
    elif isinstance(value, list):
        for each in value:
            yield from unknown_fields(each)


def require_npm_package() -> Path:
    """Return the folder with OpenAI's npm package; skip the test where no folder is named."""
    folder = os.environ.get(NPM_FOLDER)
    if folder is None:
        pytest.skip(f"needs the folder of `npm install openai` in {NPM_FOLDER}")
    modules = Path(folder, "node_modules")
    assert (modules / "openai").is_dir(), f"{modules} does not have the package openai"
    assert shutil.which("node") is not None, "node is not installed"
    return modules


def run_node(program: Path, folder: Path, *arguments: str, **environment: str) -> bytes:
    """Run a program that imports OpenAI's npm package and return what it prints.

    Args:
        program: copied to `folder`, where it finds the package.
        folder: an existing folder.
        *arguments: of the program.
        **environment: environment variables that are added.
    """
    modules = require_npm_package()
    (folder / "node_modules").symlink_to(modules, target_is_directory=True)
    return run(["node", shutil.copy(program, folder), *arguments], **environment)


def run(command: Sequence[str], **environment: str) -> bytes:
    """Run a program that ends without an error and return what it prints."""
    done = subprocess.run(command, capture_output=True, check=False, timeout=LIMIT_S, env={**os.environ, **environment})
    assert (done.returncode, done.stderr.decode()) == (0, "")
    return done.stdout


def ask_npm(base: str, calls: Sequence[ClientCall], folder: Path) -> list[Outcome]:
    """Make calls with the npm package, from a program that is copied to `folder`."""
    requests = folder / "requests.json"
    requests.write_text(json.dumps({"base": base, "requests": [asdict(call) for call in calls]}), encoding="utf-8")
    return [Outcome(**outcome) for outcome in json.loads(run_node(DRIVER, folder, str(requests)))]
