"""Every error edge-run raises on purpose.

    EdgeError                 anything below; `exit_code` is what the command line returns
    ├── InputError            what was asked for cannot be used as given (exit code 2)
    │   ├── CheckpointError   a Hugging Face checkpoint is missing, truncated or of an unknown architecture
    │   ├── BundleError       a model folder or .onnx file is missing, corrupt or not a language model
    │   ├── TemplateError     a chat template cannot be read or rendered
    │   └── ContextError      the prompt does not fit the model's context
    ├── HubError              the Hugging Face Hub cannot be reached, or does not give what was asked for
    ├── ExportError           an export started and could not be finished; nothing was written
    │   └── DestinationError  the disk refused to take it (exit code 2)
    └── DeviceError           no execution provider can do what was asked

A message says what was wrong; `hint` says what to do about it. Together they make the one line a user sees.
"""

from __future__ import annotations

from typing import ClassVar


class EdgeError(Exception):
    """Base of all edge-run errors: `str(error)` is one line, `what; hint`."""

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, hint: str = "") -> None:
        self.what = " ".join(what.split())
        self.hint = " ".join(hint.split())
        super().__init__(f"{self.what}; {self.hint}" if self.hint else self.what)


class InputError(EdgeError):
    """What was asked for cannot be used as given."""

    exit_code: ClassVar[int] = 2


class CheckpointError(InputError):
    """A checkpoint folder is missing something, is damaged, or is of an architecture that is not supported."""


class BundleError(InputError):
    """A model folder or .onnx file is missing something, is damaged, or is not a language model."""


class TemplateError(InputError):
    """A chat template cannot be read or rendered."""


class ContextError(InputError):
    """The prompt does not fit the model's context."""


class HubError(EdgeError):
    """The Hugging Face Hub cannot be reached, or does not give what was asked for."""


class ExportError(EdgeError):
    """An export could not be finished; the destination is as it was before."""


class DestinationError(ExportError):
    """The folder an export was to be written to cannot take it: the disk is full, or refuses the write."""

    exit_code: ClassVar[int] = 2


class DeviceError(EdgeError):
    """No execution provider can do what was asked."""

    exit_code: ClassVar[int] = 2
