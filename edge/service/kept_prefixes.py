"""Beginnings of requests that a server reads before they come, and whose KV caches are kept on disk."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ...errors import ContextError, InputError, TemplateError
from ...models.user_text import read_text
from ...runtime.engine import Engine
from ...runtime.options import GenerateOptions
from .request_error import RequestError
from .text_bodies import ChatBody

_log: Final = logging.getLogger("edgerun")
_HINT: Final = "give a text file with a system message, or a .json file with the body of a chat completion"


@dataclass(frozen=True)
class KeptPrefix:
    """What requests begin with."""

    path: Path
    """The file that it was read from."""
    messages: Sequence[Mapping[str, Any]]
    options: GenerateOptions
    """Tools and template variables, which a prompt depends on too."""

    @classmethod
    def read(cls, path: Path) -> KeptPrefix:
        """Read a file: the text of a system message or, where its name ends in `.json`, the body of a chat completion.

        Raises:
            InputError: it cannot be read, is blank, or is not such a body.
        """
        text = read_text(path, _HINT)
        if path.suffix.lower() != ".json":
            return cls(path, [{"role": "system", "content": text}], GenerateOptions())
        try:
            request = ChatBody.parse(text)
        except RequestError as error:
            raise InputError(f"{path} is not the body of a chat completion: {error.what}", error.hint) from None
        options = GenerateOptions(tools=request.options.tools, template_variables=request.options.template_variables)
        return cls(path, request.messages, options)


def keep_prefixes(engine: Engine, prefixes: Sequence[KeptPrefix]) -> None:
    """Read beginnings with a model, or take what an earlier process kept of them; those that do not fit are logged.

    Raises:
        EdgeError: the model failed, or loading it was cancelled.
    """
    for prefix in prefixes:
        try:
            engine.keep_prefix(prefix.messages, prefix.options)
        except (ContextError, TemplateError, InputError) as error:
            _log.warning("%s is not read in advance by %s: %s", prefix.path, engine.bundle.folder.name, error.what)
