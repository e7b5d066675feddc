"""ONNX Runtime sessions: options, loading, and errors in one line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from ...errors import EdgeError
from ...telemetry import telemetry_is_disabled
from ..devices.processor import default_threads, physical_cores

RUNTIME_VERSION: Final[str] = ort.__version__
"""Version of ONNX Runtime."""
RUNTIME_BUILD: Final = f"{ort.__version__} {ort.get_build_info()}"
"""Version of ONNX Runtime and how it was built; packages of one version may differ."""
SILENT: Final = 4
"""Log severity at which ONNX Runtime prints nothing: every failure is raised as an exception anyway."""
VERBOSE: Final = 1
"""Log severity at which ONNX Runtime prints everything except its own debugging output."""
_CPU_PROVIDERS: Final = ("CPUExecutionProvider",)
ORT_ERRORS: Final[tuple[type[Exception], ...]] = (
    *(value for value in vars(ort_errors).values() if isinstance(value, type) and issubclass(value, Exception)),
    *(RuntimeError, TypeError, ValueError),
)
"""Exceptions that ONNX Runtime raises: its own, which have no common base, and the errors of its Python binding."""
_NODE_FAILED: Final = re.compile(
    r"(?:Error in execution: )?Non-zero status code returned while running (\S+ node)\. Name:'[^']*' Status Message: "
)
_NARROW: Final = 32
"""Tokens of the widest pass that keeps the memory of its activations: decoding and drafts."""
_SOURCE_POSITION: Final = re.compile(r"/\S+\.(cc|h):\d+ ?")

if telemetry_is_disabled():
    # On Windows, where events go to the system's event tracing, ONNX Runtime does not read the environment variable.
    ort.disable_telemetry_events()


def run_options() -> ort.RunOptions:
    """Run options without log output."""
    options = ort.RunOptions()
    options.log_severity_level = SILENT
    # No graph capture. Without this entry, every pass throws and catches an exception looking for it: 29 us.
    options.add_run_config_entry("gpu_graph_id", "-1")
    return options


class ActivationMemory:
    """The memory of the activations of all sessions of this process, which passes take in turns."""

    def __init__(self) -> None:
        self._plain, self._shrinking = run_options(), run_options()
        self._is_large = False
        where = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
        try:
            ort.create_and_register_allocator(where, ort.OrtArenaCfg({}))
        except ORT_ERRORS:  # the program that edge-run is a part of has registered one of another kind
            self._session_entries: dict[str, str] = {}
            return
        self._session_entries = {"session.use_env_allocators": "1"}
        self._shrinking.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")

    def join(self, options: ort.SessionOptions) -> None:
        """Let the activations of a session lie there."""
        for name, value in self._session_entries.items():
            options.add_session_config_entry(name, value)

    def pass_options(self, width: int) -> ort.RunOptions:
        """Run options of a pass over `width` tokens; the first narrow one after wide ones returns what those took."""
        is_large, self._is_large = self._is_large, width > _NARROW
        return self._shrinking if is_large and not self._is_large else self._plain


def session_options(threads: int = 0) -> ort.SessionOptions:
    """Session options without log output; `threads` is the number of intra-op threads, 0 for `default_threads`."""
    options = ort.SessionOptions()
    options.log_severity_level = SILENT
    ACTIVATIONS.join(options)
    threads = threads or default_threads()
    # Without a number, ONNX Runtime starts a thread for every physical core and binds it to that core, also where the
    # process may not run there or the core is a slow one.
    options.intra_op_num_threads = 0 if threads == len(physical_cores()) else threads
    options.inter_op_num_threads = 1
    return options


ACTIVATIONS: Final = ActivationMemory()


def load_session(
    model: str | bytes, options: ort.SessionOptions, providers: Sequence[str] = _CPU_PROVIDERS
) -> ort.InferenceSession:
    """Load a model.

    Args:
        model: path of the model file, or the serialized model.
        options: session options; providers that were added to them come before `providers`.
        providers: names of execution providers.

    Raises:
        Exception: one of `ORT_ERRORS`, if ONNX Runtime cannot load the model.
    """
    # The fallback would silently load the model a second time and print to standard output.
    return ort.InferenceSession(model, options, providers=list(providers), enable_fallback=0)


def error_reason(error: Exception) -> str:
    """First line of an ONNX Runtime message, without error code, source position and boilerplate."""
    lines = str(error).split(" : ", 3)[-1].strip().splitlines()
    if not lines:
        return type(error).__name__
    return _SOURCE_POSITION.sub("", _NODE_FAILED.sub(r"\1: ", lines[0]))


def run_failure(what: str, error: Exception) -> EdgeError:
    """The error about a graph, named by `what`, in which ONNX Runtime failed."""
    return EdgeError(f"{what} failed to run: {error_reason(error)}", "run again with --debug and report it")
