"""Execution providers in packages of their own: finds the installed ones and registers them.

ONNX Runtime loads such a plugin when it is registered under a name, which is possible once in a process and lasts until
it ends: a session may outlive whoever registered the plugin, so nothing is ever unregistered. The packages have no
entry points; their modules are known by name.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final

import onnxruntime as ort

from ..graph.ort import ORT_ERRORS, error_reason

SUFFIX: Final = "ExecutionProvider"
"""End of the names of all execution providers."""
_MODULES: Final = (
    "onnxruntime_ep_webgpu",
    "onnxruntime_qnn",
    "onnxruntime_ep_openvino",
    "onnxruntime_ep_nv_tensorrt_rtx",
    "onnxruntime_ep_nv_tensorrt_rtx_cu12",
    "onnxruntime_ep_nv_tensorrt_rtx_cu13",
)
"""Modules of plugins, each with a function `get_library_path`."""
_REGISTERED_BEFORE: Final = "already registered"
_PLUGIN_ERRORS: Final[tuple[type[Exception], ...]] = (*ORT_ERRORS, ImportError, OSError, AttributeError)
"""What a package that is damaged or made for another system raises; it must not keep others from being found."""
_LOCK: Final = threading.Lock()
_found: list[tuple[Plugin, ...]] = []
"""The plugins, once they are registered."""


@dataclass(frozen=True)
class Plugin:
    """An execution provider of an installed package."""

    provider: str
    """Its name, which ends with `ExecutionProvider`."""
    module: str
    """The Python module it comes with; empty for those that Windows brings."""
    version: str
    """Version of the package; empty if nothing says it."""
    error: str = ""
    """Why it cannot be used; empty if it was registered."""


def registered_plugins() -> tuple[Plugin, ...]:
    """Register the plugins of all installed packages, once in this process, and return them.

    A plugin that the program has registered itself is left as it is: one library under two names would list every
    device twice.
    """
    with _LOCK:
        if not _found:
            # Before any registration: what is listed now was registered by the program that embeds edge-run.
            known = {device.ep_name for device in ort.get_ep_devices()}
            _found.append((*_of_modules(known), *_of_windows(known)))
        return _found[0]


def _of_modules(known: set[str]) -> Iterator[Plugin]:
    """Register what installed Python packages bring."""
    for name in _MODULES:
        try:
            if find_spec(name) is None:
                continue
            module = importlib.import_module(name)
            library = str(module.get_library_path())
            providers = _provider_names(module)
        except _PLUGIN_ERRORS as error:
            yield Plugin("", name, _version(name), error_reason(error))
            continue
        for provider in providers:
            yield Plugin(provider, name, _version(name), _register(provider, library, known))


def _provider_names(module: Any) -> list[str]:
    """The names of the execution providers of a plugin's module."""
    several = getattr(module, "get_ep_names", None)
    return [str(name) for name in (several() if several is not None else [module.get_ep_name()])]


def _of_windows(known: set[str]) -> Iterator[Plugin]:
    """Register the plugins of Windows's own catalog that are present already; nothing is downloaded."""
    if find_spec("windowsml") is None:
        return
    try:
        windowsml = importlib.import_module("windowsml")
        with windowsml.EpCatalog() as catalog:
            for found in catalog.find_all_providers():
                if found.ready_state.name.replace("_", "").lower() != "notpresent":
                    found.ensure_ready()
                    failure = _register(found.name, str(found.library_path), known)
                    yield Plugin(found.name, "", str(found.version), failure)
    except _PLUGIN_ERRORS as error:
        yield Plugin("", "windowsml", _version("windowsml"), error_reason(error))


def _register(provider: str, library: str, known: set[str]) -> str:
    """Register a library; returns why it failed, or nothing."""
    if provider in known:
        return ""
    try:
        ort.register_execution_provider_library(provider, library)
    except ORT_ERRORS as error:
        return "" if _REGISTERED_BEFORE in str(error) else error_reason(error)
    return ""


def _version(module: str) -> str:
    """Version of the package of a module, which is called like the module."""
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 -- importing it takes 10 ms

    try:
        return version(module.replace("_", "-"))
    except PackageNotFoundError:
        return ""
