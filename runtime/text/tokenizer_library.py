"""Calls of the tokenizers library, whose failures are converted to errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer

from ...errors import EdgeError
from ...models.regular_file import MAX_TOKENIZER_BYTES, read_regular
from .panic_messages import is_panic, messages_kept_back


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


@contextmanager
def failures_as(make_error: Callable[[str], EdgeError]) -> Iterator[None]:
    """Convert what the library raises in the block, panics too, to the error that `make_error` makes of the reason."""
    with messages_kept_back():
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
