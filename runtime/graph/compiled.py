"""Loads graphs that a device compiles, and keeps what it compiled on disk.

An NPU's plugin compiles a graph for one chip, which takes seconds to minutes; what it makes, ONNX Runtime calls a
compiled context, and loads in milliseconds. A context belongs to a graph with its weights, a plugin and its options, a
chip and a build of ONNX Runtime. All of them are part of its key, which its folder is named after. A damaged context,
and one that the plugin refuses, are replaced; whatever else fails, the graph itself is loaded.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

import onnxruntime as ort

from ...errors import BundleError, EdgeError
from ...models.atomic import discard_folder
from ...models.bundle import Bundle
from ...models.manifest import DeviceKind
from ...models.onnx_file.wire import external_files
from ..devices.processor import machine
from ..devices.providers import add_device
from .device_loading import load_on_device
from .ort import ORT_ERRORS, RUNTIME_BUILD, error_reason, session_options
from .packed_files import is_intact, packed_folder, written_folder
from .session import SessionConfig

_FORMAT: Final = 1
_CONTEXT_NAME: Final = "context.onnx"
_COMPILER_ERRORS: Final[tuple[type[Exception], ...]] = (OSError, *ORT_ERRORS)
_SIZE_RATIO: Final = 1.5
"""Upper estimate of the size of a context, relative to its graph and weights."""


class CompiledGraphs:
    """Loads the graphs of fixed shapes of a bundle.

    Args:
        bundle: the model.
        config: how to run its graphs.
        cache: whether contexts are kept on disk.
    """

    def __init__(self, bundle: Bundle, config: SessionConfig, *, cache: bool) -> None:
        self._bundle = bundle
        self._config = config
        device = config.device
        # The compiler takes devices of plugins; a provider that is known by its name only compiles at every load.
        self._keeps: Final = cache and device.kind is DeviceKind.NPU and device.handle is not None
        self.loaded: Final[dict[str, bool]] = {}
        """The graphs that were loaded, and whether a context that was on disk was used."""
        self.on_cpu: dict[str, int] = {}
        """Number of nodes of the first graph that the device left to the CPU, by operator; a context is one node."""

    def load(self, name: str) -> ort.InferenceSession:
        """Load one of the bundle's graphs, from its context if there is one; else its context is written now.

        Raises:
            BundleError: the file is not a model.
            DeviceError: the device cannot run the graph.
        """
        graph = self._bundle.graph.with_name(name)
        folder = packed_folder("compiled", self._key(graph) if self._keeps else "")
        session = self._open_context(folder) if self._keeps else None
        was_kept = session is not None
        if self._keeps and session is None:
            discard_folder(folder)
            # Where the device cannot make one, or the disk has no room, loading the graph itself says what is wrong.
            with suppress(*_COMPILER_ERRORS):
                size = sum(graph.with_name(each).stat().st_size for each in (graph.name, *external_files(graph)))
                with written_folder(folder, int(size * _SIZE_RATIO)) as staging:
                    options = session_options(self._config.threads)
                    add_device(options, self._config.device)
                    compiler = ort.ModelCompiler(options, str(graph), embed_compiled_data_into_model=False)
                    compiler.compile_to_file(str(staging / _CONTEXT_NAME))
            session = self._open_context(folder)
        session = session or self._open(graph)
        self.loaded[name] = was_kept
        return session

    def _open_context(self, folder: Path) -> ort.InferenceSession | None:
        """The session of a context; None if there is none that can be used."""
        with suppress(EdgeError):
            if is_intact(folder):
                return self._open(folder / _CONTEXT_NAME)
        return None

    def _open(self, graph: Path) -> ort.InferenceSession:
        options, device = session_options(self._config.threads), self._config.device
        try:
            session, on_cpu = load_on_device(str(graph), options, device, graph)
        except ORT_ERRORS as error:
            raise BundleError(
                f"{graph} cannot be loaded: {error_reason(error)}", "copy the bundle again or export the model again"
            ) from error
        if not self.loaded:
            self.on_cpu = on_cpu
        return session

    def _key(self, graph: Path) -> str:
        """Everything that a context depends on, a line each."""
        manifest, device = self._bundle.manifest, self._config.device
        files = {} if manifest is None else manifest.files
        names = [graph.name, *sorted(external_files(graph))]
        digests = [f"{name} {files[name].sha256 if name in files else ''}" for name in names]
        options = [f"{name}={value}" for name, value in sorted(device.provider_options.items())]
        lines = [f"format {_FORMAT}", *digests, device.name, f"plugin {device.plugin_version}", *options]
        return "\n".join([*lines, machine(), RUNTIME_BUILD]) + "\n"
