"""Calls of the tokenizers library, whose failures are converted to errors."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from ...errors import EdgeError
from ...models.regular_file import MAX_TOKENIZER_BYTES, read_regular

_STANDARD_ERROR: Final = 2
_MAX_KEPT_BACK: Final = 1 << 16
_HIDDEN: Final = threading.Event()
_REDIRECTED: Final = threading.Lock()


def is_panic(error: BaseException | None) -> bool:
    """Whether an exception stands for a panic of Rust code.

    A panic reaches Python as a `PanicException`, which is not an `Exception`, after Rust has printed a message and
    perhaps a backtrace on standard error.
    """
    kind = type(error)
    return (kind.__module__, kind.__name__) == ("pyo3_runtime", "PanicException")


@contextmanager
def panic_messages_hidden() -> Iterator[None]:
    """Keep messages of panics off standard error during the block.

    For programs that own their standard error, such as the command line: it is redirected during calls of the library,
    and what else was written meanwhile is passed on after the call.
    """
    was_hidden = _HIDDEN.is_set()
    _HIDDEN.set()
    try:
        yield
    finally:
        if not was_hidden:
            _HIDDEN.clear()


@contextmanager
def messages_kept_back() -> Iterator[None]:
    """Around a call of the library: hide what it prints if it panics, where `panic_messages_hidden` says so."""
    if not _HIDDEN.is_set():
        yield
        return
    panicked, written = False, bytearray()
    try:
        with captured_stderr() as written:
            yield
    except BaseException as error:
        panicked = is_panic(error) or is_panic(error.__cause__)
        raise
    finally:
        if written and not panicked:
            with suppress(OSError):
                os.write(_STANDARD_ERROR, written[:_MAX_KEPT_BACK])


@contextmanager
def captured_stderr() -> Iterator[bytearray]:
    """Capture what any part of the process writes to standard error, instead of showing it.

    Yields a buffer that has it when the block ends: nothing if the process has no standard error.
    """
    import tempfile  # noqa: PLC0415  its import takes as long as all the others here

    captured = bytearray()
    with _REDIRECTED, tempfile.TemporaryFile() as kept_back:
        saved = None
        with suppress(OSError, ValueError):  # standard error may be closed
            _flush_stderr()
            saved = os.dup(_STANDARD_ERROR)
            os.dup2(kept_back.fileno(), _STANDARD_ERROR)
        try:
            yield captured
        finally:
            if saved is not None:
                with suppress(OSError, ValueError):
                    _flush_stderr()
                os.dup2(saved, _STANDARD_ERROR)
                os.close(saved)
                kept_back.seek(0)
                captured += kept_back.read()


def _flush_stderr() -> None:
    if sys.stderr is not None:
        sys.stderr.flush()


LONG_TEXT: Final = 1 << 14
"""Number of characters or tokens from which on a call of the library lets other threads run. It is not made so for all
texts, because the library starts threads of its own for it."""


def read_tokenizer(path: Path, make_error: Callable[[str], EdgeError]) -> Tokenizer:
    """Read a tokenizer.json.

    Args:
        path: path of the file.
        make_error: makes the error to raise from a reason in one line.

    Raises:
        EdgeError: the file cannot be read or is not a tokenizer.
    """
    try:
        data = read_regular(path, MAX_TOKENIZER_BYTES)
    except OSError as error:
        raise make_error(error.strerror or str(error)) from error
    with failures_as(make_error):
        return Tokenizer.from_buffer(data)


def encode_text(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids of a text; other threads run while a long text is encoded."""
    if len(text) < LONG_TEXT:
        encoding = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    else:
        # Of the methods of the library, those for batches release the interpreter's lock.
        (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    ids: list[int] = encoding.ids
    return ids


def decode_ids(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Text of token ids without special tokens; other threads run while many ids are decoded."""
    if len(ids) < LONG_TEXT:
        text: str = tokenizer.decode(ids, skip_special_tokens=True)
    else:
        (text,) = tokenizer.decode_batch([ids], skip_special_tokens=True)
    return text


@contextmanager
def failures_as(make_error: Callable[[str], EdgeError], text: str = "") -> Iterator[None]:
    """Convert what the library raises in the block, panics too, to the error that `make_error` makes of the reason.

    Args:
        make_error: makes the error.
        text: what is encoded in the block. While a long text is encoded, messages of panics are not kept back, because
            only one thread at a time can do that, and the others would wait for it.
    """
    with messages_kept_back() if len(text) < LONG_TEXT else nullcontext():
        try:
            yield
        except EdgeError:
            raise
        except BaseException as error:
            if not is_failure(error):
                raise
            raise make_error(reason(error)) from error


def is_failure(error: BaseException) -> bool:
    """Whether an exception is an error of the library, a panic included, and not an interrupt or an exit."""
    return isinstance(error, Exception) or is_panic(error)


def reason(error: BaseException) -> str:
    """The message of an error of the library in one short line."""
    return " ".join(str(error).split())[:200] or type(error).__name__
