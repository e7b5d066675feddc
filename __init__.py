"""edge-run: an on-device language-model runtime on ONNX Runtime.

    import edgerun

    llm = edgerun.load()                      # the bundled model; or a path
    print(llm.generate("find files larger than 100 MB").text)

`load` returns an `Engine`, which answers prompts (`generate`, `stream`, and `agenerate`, `astream` for asyncio) and
opens conversations (`session`). All errors derive from `EdgeError`.
"""

from .errors import (
    BundleError,
    CheckpointError,
    ContextError,
    DestinationError,
    DeviceError,
    EdgeError,
    ExportError,
    HubError,
    InputError,
    TemplateError,
)
from .runtime.conversation import Session
from .runtime.decode import FinishReason
from .runtime.engine import Engine, load
from .runtime.options import GenerateOptions
from .runtime.request_queue import AnswerStream
from .runtime.result import Chunk, Reply, Stats
from .runtime.speculation.choice import Speculation
from .version import __version__

__all__ = [
    "AnswerStream",
    "BundleError",
    "CheckpointError",
    "Chunk",
    "ContextError",
    "DestinationError",
    "DeviceError",
    "EdgeError",
    "Engine",
    "ExportError",
    "FinishReason",
    "GenerateOptions",
    "HubError",
    "InputError",
    "Reply",
    "Session",
    "Speculation",
    "Stats",
    "TemplateError",
    "__version__",
    "load",
]
