"""A conversation: its messages, and the file that keeps them with their KV cache."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from io import BytesIO
from itertools import count, takewhile
from pathlib import Path
from typing import Any, Final, TypeAlias, Unpack

import numpy as np
import numpy.typing as npt

from ..errors import ContextError, InputError
from ..models.array_file import read_arrays
from ..models.atomic import write_atomically
from ..models.bundle import Bundle
from ..models.find import model_name
from ..models.json_file import is_whole
from .arguments.argument_types import checked_arguments, lists_options
from .arguments.option_keywords import GenerateKeywords
from .devices.providers import CPU_PROVIDER
from .graph.bound_graph import keyed_ids
from .images.prompt_images import placed_images
from .kv.layer_states import largest_state_snapshot
from .kv.parked_cache import ParkedCache
from .loaded_model import LoadedModel
from .options import GenerateOptions
from .result import Chunk, Reply
from .scheduling.answer_stream import AnswerStream
from .text.chat_template import Message
from .text.detokenizer import AnswerStart
from .text.messages import json_messages, template_messages
from .tools.answer_parts import AnswerParts, joined_parts
from .tools.calls import assistant_message

_FORMAT: Final = 2
_BYTES_PER_TOKEN: Final = 1 << 10
"""Largest size of a saved conversation per token of context, without the cache: the token id and the messages' text."""
_OTHER_BYTES: Final = 16 << 20
"""Room for everything else: the headers, and cache slots that a graph keeps beyond the context."""
_IMAGE_BYTES: Final = 256 << 20
"""Room for the images of a conversation."""
Content: TypeAlias = str | Sequence[Mapping[str, Any]]
"""What a user says: a text, or parts with images as messages have them."""
_HINT: Final = "give a file written by /save or Session.save"


class Session:
    """A conversation: its messages, which every answer joins.

    The KV cache of a conversation is kept by the engine's prefix cache, as that of every prompt is. `save` writes what
    the prefix cache has of the messages, and `Engine.session(resume=path)` puts it back.
    """

    def __init__(self, model: LoadedModel, *, system: str | None = None) -> None:
        """Start a conversation; `Engine.session` is the usual way to.

        Raises:
            TemplateError: the model has no chat template, or the template takes no system message.
        """
        self._model = model
        self._chat = model.chat_prompt([], GenerateOptions())
        """The last prompt, with its tools and variables of the template."""
        self.system: Final = system
        """The system message, or None."""
        self.messages: list[Message] = []
        self._resets = 0
        self.reset()
        if system is not None:
            self._chat.encode([*self.messages, {"role": "user", "content": ""}])

    @lists_options(GenerateOptions)
    def send(self, text: Content, options: GenerateOptions | None = None, **changes: Unpack[GenerateKeywords]) -> Reply:
        """Send a user message and wait for the whole answer; errors as for `stream`."""
        return Reply.of(self.stream(text, options, **changes))

    @lists_options(GenerateOptions)
    @checked_arguments
    def stream(
        self, text: Content, options: GenerateOptions | None = None, **changes: Unpack[GenerateKeywords]
    ) -> AnswerStream:
        """Send a user message, a text or a list of parts with images, and read the answer piece by piece.

        An answer joins the conversation also when its stream is closed or cancelled half-way. If an error left no
        answer, the conversation is as before.

        Raises:
            InputError: an option is out of range, unknown, or makes no sense in a conversation.
            ContextError: with the first piece: the conversation does not fit the context any more.
        """
        chosen = (options or GenerateOptions()).changed(changes)
        if chosen.candidates > 1:
            given = f"n is {chosen.n}" if chosen.n > 1 else f"best_of is {chosen.best_of}"
            raise InputError(given, "a conversation goes on from one answer; generate gives several")
        if chosen.raw or chosen.system is not None:
            raise InputError("raw and system belong to a single answer", "give the session its system message instead")
        start = self._model.answer_start(chosen)
        said = text if isinstance(text, str) else self._chat.encode([_user(text)])
        return AnswerStream(
            self._model.queue,
            lambda ticket: self._answer(text, chosen, start, partial(self._model.queue.yield_turn, ticket)),
            self,
            # A text has not been encoded yet; few tokens are shorter than a character.
            cache_bytes=self._model.cache_bytes(len(self._chat.ids if self._chat.messages else ()) + len(said), chosen),
            start_text="" if start is None else start.text,
        )

    def _answer(
        self, text: Content, options: GenerateOptions, start: AnswerStart | None, cancelled: Callable[[], bool]
    ) -> Generator[Chunk, None, None]:
        resets = self._resets
        chat = self._model.chat_prompt([*self.messages, _user(text)], options)
        try:
            request = self._model.request(chat.ids, options, start, chat)
        except ContextError as error:
            raise ContextError(error.what, "start again with reset (/reset in the terminal)") from error
        chat = request.chat or chat
        start_text = "" if start is None else start.text
        begun = AnswerParts(start_text) if request.reading is None else request.reading.start_parts
        answer: list[Chunk] = []
        try:
            for chunk in self._model.generate(None, request, cancelled):
                answer.append(chunk)
                yield chunk
        finally:
            # A conversation that was reset in the meantime stays empty.
            message = _message(answer, begun)
            if message is not None and resets == self._resets:
                self.messages, self._chat = [*chat.messages, message], chat

    @checked_arguments
    def continue_from(self, messages: Sequence[Message]) -> None:
        """Replace the conversation by other messages; the system message stays.

        Args:
            messages: roles (user and assistant) and contents, in order.

        Raises:
            TemplateError: the template refuses the messages.
        """
        self.reset()
        self.messages += template_messages(messages) if messages else []
        self._token_ids()

    def reset(self) -> None:
        """Forget the conversation; the system message stays."""
        self._resets += 1
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    @checked_arguments
    def save(self, path: str | Path) -> None:
        """Write the messages, and what the prefix cache has of them, to one file for `Engine.session(resume=path)`.

        Only its owner can read the file. An older file of that name is replaced. With the option lossy_parking of the
        engine the cache is written in 8 bits, a quarter of its size.

        Raises:
            OSError: the file cannot be written; an older one is untouched.
        """
        buffer, token_ids, chat = BytesIO(), self._token_ids(), replace(self._chat, messages=self.messages)
        wanted = keyed_ids(token_ids, placed_images(self._model.vision, chat, token_ids, GenerateOptions()))
        with self._model.queue.turn():
            found = self._model.prefixes.longest(wanted)
            arena, tokens = (self._model.new_arena(), []) if found is None else found
            about = {
                "format": _FORMAT,
                "model": self._model.bundle.fingerprint,
                "name": model_name(self._model.bundle.folder),
                "messages": json_messages(self.messages),
                "plain": arena.plain_length,
                "kv": _slot_format(self._model),
                "device": self._model.device.provider,
            }
            slots, scales = arena.snapshot(), tuple[npt.NDArray[Any], ...]()
            if self._model.prefixes.parks:
                parked = ParkedCache.of(arena)
                slots, scales, about["parked"] = (*parked.codes, *parked.states), parked.scales, True
            arrays: dict[str, Any] = {
                "about": np.frombuffer(json.dumps(about).encode(), np.uint8),
                "tokens": np.asarray(tokens, np.int64),
                **{f"rows.{kind}": each for kind, each in enumerate(slots)},
                **{f"scales.{kind}": each for kind, each in enumerate(scales)},
            }
            np.savez(buffer, **arrays)
        write_atomically(Path(path), buffer.getvalue(), private=True)

    @classmethod
    def resume(cls, model: LoadedModel, path: Path) -> Session:
        """Open the conversation that `save` wrote. A cache of another format is computed anew.

        Raises:
            InputError: the file is missing, damaged, or of another model.
        """
        about, arrays = _read_saved(path, _largest_file(model))
        _require_model(about, path, model.bundle)
        tokens, messages = arrays["tokens"], about["messages"]
        images_only = tokens < 0 if model.vision is not None else np.False_
        if tokens.size and not (((tokens >= 0) | images_only) & (tokens < model.graph_io.vocab_size)).all():
            raise InputError(f"{path} is damaged: it holds tokens that the model does not have", _HINT)
        system = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
        session = cls(model, system=system)
        session.messages = messages
        if about["kv"] != _slot_format(model):
            return session
        arena = model.new_arena()
        rows, parked = _numbered(arrays, "rows."), _numbered(arrays, "scales.") if about["parked"] else ()
        try:
            if any(codes.size != scale.size * tokens.size for codes, scale in zip(rows, parked, strict=False)):
                raise ValueError("scales that do not fit the cache")
            arena.restore(ParkedCache(rows[: len(parked)], parked, rows[len(parked) :]).values)
        except ValueError as error:
            raise InputError(f"{path} is damaged: {error}", _HINT) from error
        if arena.length != tokens.size:
            raise InputError(f"{path} is damaged: {tokens.size} tokens, {arena.length} cache slots", _HINT)
        # Another device computes other last bits.
        is_same = not parked and about["device"] == model.device.provider
        arena.plain_length = min(about["plain"], arena.plain_length) if is_same else 0
        with model.queue.turn():
            if arena.length:
                model.prefixes.keep(arena, tokens.tolist())
        return session

    def close(self) -> None:
        """Do nothing: a session has messages alone, and their KV cache is the engine's."""

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _token_ids(self) -> list[int]:
        """Token ids of the messages, up to what the user says next; none where nothing has been said.

        Raises:
            TemplateError: the template refuses the messages.
        """
        if not self.messages:
            return []
        if self.messages[-1]["role"] == "user":
            return self._chat.encode(self.messages)
        return self._chat.before_user(self.messages)


def _read_saved(path: Path, max_bytes: int) -> tuple[dict[str, Any], Mapping[str, npt.NDArray[Any]]]:
    """Read a file that `Session.save` wrote, of at most `max_bytes` bytes, unpacked too, and check its contents' types.

    Returns:
        What it says of the conversation, and the arrays with the token ids, the cache, and the scales of a quantized
        cache.

    Raises:
        InputError: it cannot be read, or is not such a file.
    """
    try:
        arrays = read_arrays(path, max_bytes)
        tokens = arrays["tokens"]
        # Files of earlier versions have no name, and were computed on the CPU.
        about = {
            "name": "",
            "plain": 0,
            "device": CPU_PROVIDER,
            "kv": "",
            "parked": False,
            **json.loads(arrays["about"].tobytes()),
        }
        about["messages"] = template_messages(about["messages"]) if about["messages"] else []
        if not about.keys() >= {"format", "model"}:
            raise KeyError
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}", _HINT) from error
    except (InputError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{path} is not a saved conversation", _HINT) from error
    scales = _numbered(arrays, "scales.") if about["parked"] else ()
    if (
        tokens.dtype != np.int64
        or tokens.ndim != 1
        or not all(array.dtype.kind in "fiu" and np.isfinite(array).all() for array in _numbered(arrays, "rows."))
        or not all(each.dtype == np.float32 and np.isfinite(each).all() and (each > 0).all() for each in scales)
        or not is_whole(about["plain"], 0)
    ):
        raise InputError(f"{path} is damaged", _HINT)
    return about, arrays


def _numbered(arrays: Mapping[str, npt.NDArray[Any]], prefix: str) -> tuple[npt.NDArray[Any], ...]:
    return tuple(map(arrays.__getitem__, takewhile(arrays.__contains__, (f"{prefix}{number}" for number in count()))))


def _require_model(about: Mapping[str, Any], path: Path, bundle: Bundle) -> None:
    """Check that a conversation was saved with a model.

    Raises:
        InputError: it was saved with another one, or by another version of edge-run.
    """
    if about["format"] != _FORMAT:
        raise InputError(f"{path} was saved by another version of edge-run", "start a new conversation")
    if about["model"] == bundle.fingerprint:
        return
    name, current = str(about["name"]), model_name(bundle.folder)
    what, hint = f"the model {name:.100}, not {current}", f"load {name:.100}"
    if not name:
        what, hint = f"another model than {current}", "load the one it was saved with"
    elif name == current:
        what, hint = f"other files of {current}, which has changed since", "start a new conversation"
    raise InputError(f"{path} was saved with {what}", hint)


def _user(content: Content) -> Message:
    return template_messages([{"role": "user", "content": content}])[0]


def _message(answer: Sequence[Chunk], begun: AnswerParts) -> Message | None:
    """The message that the pieces of an answer make with the parts that it was begun with; None without a piece."""
    if not any(chunk.text or chunk.reasoning or chunk.tool_calls for chunk in answer):
        return None
    parts = AnswerParts(**joined_parts([begun, *answer]))
    return template_messages([assistant_message(parts.text, parts.reasoning, parts.tool_calls)])[0]


def _largest_file(model: LoadedModel) -> int:
    """Size in bytes of the largest conversation that a model can save, also with a longer context than now."""
    context = max(model.context, model.bundle.context or 0)
    # A cache of any other format may continue one that was saved in float32, at most eight times as large.
    cache_bytes = 8 * model.graph_io.cache_bytes_per_token
    types = model.graph_io.state_types
    states = largest_state_snapshot(types, context) if types else 0
    images = 0 if model.vision is None else _IMAGE_BYTES
    return context * (cache_bytes + _BYTES_PER_TOKEN) + states + images + _OTHER_BYTES


def _slot_format(model: LoadedModel) -> str:
    """What the slots of a model's quantized cache mean; empty for floats."""
    return "" if model.config.kv_scales is None else model.config.kv_scales.digest
