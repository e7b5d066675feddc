"""edge-run: an on-device language-model runtime on ONNX Runtime.

    import edgerun

    llm = edgerun.load()                      # the bundled model; or a path
    print(llm.generate("find files larger than 100 MB").text)

`load` returns an `Engine`, which answers prompts (`generate`, `stream`, and `agenerate`, `astream` for asyncio) and
opens conversations (`session`). All errors derive from `EdgeError`.
"""

from __future__ import annotations

from .telemetry import disable_telemetry
from .version import __version__

# ONNX Runtime reads the environment while it is imported, so this precedes every other import of the package.
disable_telemetry()

# What `typing.TYPE_CHECKING` is for type checkers. Importing `typing` takes longer than all that is imported here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from .errors import (
        BundleError,
        BusyError,
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
    from .runtime.arguments.load_options import LoadOptions
    from .runtime.conversation import Session
    from .runtime.decode import FinishReason
    from .runtime.devices.processor import Power
    from .runtime.encoders.encoder import Encoder, load_encoder
    from .runtime.engine import Engine
    from .runtime.engine_loading import load
    from .runtime.options import GenerateOptions
    from .runtime.ranking import ChoiceScore, Relevance
    from .runtime.result import Chunk, Reply, Stats
    from .runtime.sampling.logit_stage import LogitStage
    from .runtime.scheduling.answer_stream import AnswerStream
    from .runtime.speculation.choice import Speculation
    from .runtime.speculation.rounds import OriginKind, TokenOrigin
    from .runtime.strategies.monitor import Monitor
    from .runtime.strategies.strategy import Strategy, strategy
    from .runtime.structure.response_format import ResponseFormat
    from .runtime.text.token_logprobs import TokenLogprob
    from .runtime.tools.calls import ToolCall
    from .runtime.tools.function_tools import FunctionTool, ToolRun, run_tools

__all__ = [
    "AnswerStream",
    "BundleError",
    "BusyError",
    "CheckpointError",
    "ChoiceScore",
    "Chunk",
    "ContextError",
    "DestinationError",
    "DeviceError",
    "EdgeError",
    "Encoder",
    "Engine",
    "ExportError",
    "FinishReason",
    "FunctionTool",
    "GenerateOptions",
    "HubError",
    "InputError",
    "LoadOptions",
    "LogitStage",
    "Monitor",
    "OriginKind",
    "Power",
    "Relevance",
    "Reply",
    "ResponseFormat",
    "Session",
    "Speculation",
    "Stats",
    "Strategy",
    "TemplateError",
    "TokenLogprob",
    "TokenOrigin",
    "ToolCall",
    "ToolRun",
    "__version__",
    "load",
    "load_encoder",
    "run_tools",
    "strategy",
]

_MODULES = {
    ".errors": (
        "BundleError",
        "BusyError",
        "CheckpointError",
        "ContextError",
        "DestinationError",
        "DeviceError",
        "EdgeError",
        "ExportError",
        "HubError",
        "InputError",
        "TemplateError",
    ),
    ".runtime.arguments.load_options": ("LoadOptions",),
    ".runtime.conversation": ("Session",),
    ".runtime.decode": ("FinishReason",),
    ".runtime.devices.processor": ("Power",),
    ".runtime.encoders.encoder": ("Encoder", "load_encoder"),
    ".runtime.engine": ("Engine",),
    ".runtime.engine_loading": ("load",),
    ".runtime.options": ("GenerateOptions",),
    ".runtime.ranking": ("ChoiceScore", "Relevance"),
    ".runtime.result": ("Chunk", "Reply", "Stats"),
    ".runtime.sampling.logit_stage": ("LogitStage",),
    ".runtime.scheduling.answer_stream": ("AnswerStream",),
    ".runtime.speculation.choice": ("Speculation",),
    ".runtime.text.token_logprobs": ("TokenLogprob",),
    ".runtime.speculation.rounds": ("OriginKind", "TokenOrigin"),
    ".runtime.strategies.strategy": ("Strategy", "strategy"),
    ".runtime.strategies.monitor": ("Monitor",),
    ".runtime.structure.response_format": ("ResponseFormat",),
    ".runtime.tools.calls": ("ToolCall",),
    ".runtime.tools.function_tools": ("FunctionTool", "ToolRun", "run_tools"),
}
"""Names by the module that defines them, which is imported when one of them is first used (PEP 562)."""


def _imported(name: str) -> object:
    """Import the module of a public name, and keep the name so that the next use finds it at once.

    Raises:
        AttributeError: the package has no such name.
    """
    from importlib import import_module  # noqa: PLC0415

    for module, names in _MODULES.items():
        if name in names:
            globals()[name] = value = getattr(import_module(module, __name__), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if not TYPE_CHECKING:
    # Type checkers would take any name for one of the package if they saw this.
    __getattr__ = _imported
