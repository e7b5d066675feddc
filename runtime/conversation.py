"""A conversation: its messages, its cache, and a file it can be put aside in."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Callable, Generator
from io import BytesIO
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..errors import ContextError, InputError
from ..models.atomic import write_atomically
from ..models.json_file import is_whole
from .generation import CachedSequence
from .options import GenerateOptions
from .request_queue import AnswerStream
from .result import Chunk, Reply
from .text.chat_template import Message

if TYPE_CHECKING:
    from .engine import Engine

_FORMAT: Final = 2


class Session:
    """Messages in order, each turn's prompt reusing the cache rows of the turns before it."""

    def __init__(self, engine: Engine, *, system: str | None = None) -> None:
        """Start a conversation; `Engine.session` is the usual way to.

        Raises:
            TemplateError: the model has no chat template, or it takes no system message.
        """
        engine.require_template()
        self._engine = engine
        self._text: CachedSequence | None = engine.new_sequence()
        self.system: Final = system
        """The system message, or None."""
        self.messages: list[Message] = []
        self._conversation = 0
        self.reset()
        if system is not None:
            engine.encode_chat([*self.messages, {"role": "user", "content": ""}])

    @property
    def tokens(self) -> int:
        """Tokens whose cache rows are kept."""
        return self._cache().bound.arena.length

    def send(self, text: str, options: GenerateOptions | None = None, **changes: Any) -> Reply:
        """Say something and wait for the whole answer; errors as for `stream`."""
        return Reply.of(self.stream(text, options, **changes))

    def stream(self, text: str, options: GenerateOptions | None = None, **changes: Any) -> AnswerStream:
        """Say something and read the answer piece by piece.

        What was answered joins the conversation, also when the stream is closed or cancelled half-way; if nothing was
        answered because of an error, the conversation is as before.

        Raises:
            InputError: an option is out of range, unknown, or makes no sense in a conversation.
            ContextError: with the first piece: the conversation does not fit the context any more.
        """
        chosen = (options or GenerateOptions()).changed(changes)
        if chosen.raw or chosen.system is not None:
            raise InputError("raw and system belong to a single answer", "give the session its system message instead")
        return AnswerStream(self._engine.turns, lambda cancelled: self._turn(text, chosen, cancelled))

    def _turn(self, text: str, options: GenerateOptions, cancelled: Callable[[], bool]) -> Generator[Chunk, None, None]:
        conversation = self._conversation
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = self._engine.encode_chat(messages)
        try:
            self._engine.check_fits(prompt)
        except ContextError as error:
            raise ContextError(error.what, "start again with reset (/reset in the terminal)") from error
        answer: list[str] = []
        try:
            for chunk in self._engine.write(self._cache(), prompt, options, cancelled):
                answer.append(chunk.text)
                yield chunk
        finally:
            # A conversation that was reset meanwhile stays empty.
            if any(answer) and conversation == self._conversation:
                self.messages = [*messages, {"role": "assistant", "content": "".join(answer)}]

    def reset(self) -> None:
        """Forget the conversation; the system message stays."""
        self._conversation += 1
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def save(self, path: str | Path) -> None:
        """Put the conversation aside in one file, cache included; `Engine.session(resume=path)` goes on at once.

        Raises:
            OSError: the file cannot be written; an older one is untouched.
        """
        buffer = BytesIO()
        with self._engine.turns.between():
            text = self._cache()
            about = {
                "format": _FORMAT,
                "model": self._engine.fingerprint,
                "messages": self.messages,
                "plain": text.bound.arena.plain,
            }
            arrays: dict[str, Any] = {
                "about": np.frombuffer(json.dumps(about).encode(), np.uint8),
                "tokens": np.asarray(text.tokens[: text.bound.arena.length], np.int64),
                **{f"rows.{kind}": rows for kind, rows in enumerate(text.bound.arena.snapshot())},
            }
            np.savez(buffer, **arrays)
        write_atomically(Path(path), buffer.getvalue())

    @classmethod
    def resume(cls, engine: Engine, path: Path) -> Session:
        """The conversation that `save` put aside.

        Raises:
            InputError: the file is missing, damaged, or of another model.
        """
        hint = "give a file written by /save or Session.save"
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
                about = json.loads(stored["about"].tobytes())
                tokens = stored["tokens"]
                rows = tuple(stored[name] for name in sorted(stored.files) if name.startswith("rows."))
            messages = _checked_messages(about["messages"])
            format_of, model, plain = about["format"], about["model"], about.get("plain", 0)
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror or error}", hint) from error
        except (ValueError, KeyError, TypeError, EOFError, RuntimeError, zlib.error, zipfile.BadZipFile) as error:
            raise InputError(f"{path} is not a saved conversation", hint) from error
        if format_of != _FORMAT or model != engine.fingerprint:
            raise InputError(f"{path} belongs to another model or another version of edge-run", hint)
        if (
            tokens.dtype != np.int64
            or tokens.ndim != 1
            or not all(array.dtype.kind in "fiu" and np.isfinite(array).all() for array in rows)
            or not is_whole(plain, 0)
        ):
            raise InputError(f"{path} is damaged", hint)
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < engine.graph_io.vocab_size:
            raise InputError(f"{path} is damaged: it holds tokens that the model does not have", hint)
        system = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
        session = cls(engine, system=system)
        text = session._cache()
        try:
            text.bound.arena.restore(rows)
        except ValueError as error:
            raise InputError(f"{path} is damaged: {error}", hint) from error
        if text.bound.arena.length != tokens.size:
            raise InputError(f"{path} is damaged: {tokens.size} tokens, {text.bound.arena.length} rows", hint)
        text.bound.arena.plain = min(plain, tokens.size)
        text.tokens = tokens.tolist()
        session.messages = messages
        return session

    def close(self) -> None:
        """Free the conversation's cache."""
        self._text = None

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _cache(self) -> CachedSequence:
        if self._text is None:
            raise InputError("this session is closed", "open another with Engine.session")
        return self._text


def _checked_messages(value: Any) -> list[Message]:
    """The messages of a saved conversation.

    Raises:
        ValueError: they are not a list of roles and contents.
    """
    fields = ("role", "content")
    if not isinstance(value, list) or not all(
        isinstance(message, dict) and all(isinstance(message.get(field), str) for field in fields) for message in value
    ):
        raise ValueError("not a list of messages")
    return list(value)
