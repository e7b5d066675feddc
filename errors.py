"""All errors that edge-run raises on purpose.

    EdgeError                 anything below; `exit_code` is what the command line returns
    ├── InputError            an argument, option or file of the caller is not valid (exit code 2)
    │   ├── CheckpointError   a Hugging Face checkpoint is missing, damaged or of an unknown architecture
    │   ├── BundleError       a model folder or .onnx file is missing, damaged or not a language model
    │   ├── TemplateError     a chat template cannot be read or rendered
    │   ├── ContextError      the prompt does not fit the model's context
    │   └── ConversationError a stored conversation is unknown, deleted, or cannot be read or written
    │       └── UnknownIdError  nothing that is stored has the id
    ├── BusyError             the engine's queue is full
    ├── HubError              the Hugging Face Hub cannot be reached, or does not have the file
    ├── ExportError           an export failed after it had started; nothing was written
    │   └── DestinationError  the destination cannot be written (exit code 2)
    └── DeviceError           no execution provider can run the model as requested (exit code 2)

`what` says what is wrong, with the value seen; `hint` says what to do. Together they are the one line that users see.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar


class EdgeError(Exception):
    """Base class of all edge-run errors; `str(error)` is one line, `what; hint`.

    Args:
        what: what is wrong, with the value seen.
        hint: what to do about it; empty if there is nothing to say.
    """

    exit_code: ClassVar[int] = 1
    """Exit code of the command line."""

    def __init__(self, what: str, hint: str = "") -> None:
        self.what = " ".join(what.split())
        self.hint = " ".join(hint.split())
        super().__init__(f"{self.what}; {self.hint}" if self.hint else self.what)


class InputError(EdgeError):
    """An argument, option or file of the caller is not valid."""

    exit_code: ClassVar[int] = 2


class CheckpointError(InputError):
    """A checkpoint is missing, incomplete, damaged, or of an architecture that is not supported."""


class BundleError(InputError):
    """A model folder or .onnx file is missing, incomplete, damaged, or not a language model."""


class TemplateError(InputError):
    """A chat template cannot be read or rendered."""


class ContextError(InputError):
    """The prompt does not fit the model's context."""


class ConversationError(InputError):
    """A stored conversation is unknown or deleted, or the file of conversations cannot be read or written."""


class UnknownIdError(ConversationError):
    """No conversation, message or preset has an id; `id` is the one that was asked for."""

    def __init__(self, kind: str, id_: str, hint: str = "") -> None:
        super().__init__(f"there is no {kind} {id_!r}", hint)
        self.id = id_


class CancelledError(EdgeError):
    """The request was cancelled before it had a result."""


class BusyError(EdgeError):
    """The engine's queue is full: too many requests wait already."""


class HubError(EdgeError):
    """The Hugging Face Hub cannot be reached, or does not have the requested file."""


class ExportError(EdgeError):
    """An export failed; the destination is unchanged."""


class DestinationError(ExportError):
    """The destination of an export cannot be written: the disk is full, or the write failed."""

    exit_code: ClassVar[int] = 2


class DeviceError(EdgeError):
    """No execution provider can run the model as requested."""

    exit_code: ClassVar[int] = 2


@contextmanager
def missing_extra(what: str, extra: str) -> Iterator[None]:
    """Within the block, an import that fails for a package says which extra has it.

    Args:
        what: what needs the package, for the message.
        extra: the extra to install.

    Raises:
        InputError: a package is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package == "edgerun":
            raise
        raise InputError(f"{what} needs the package {package}", f'pip install "edge-run[{extra}]"') from error
