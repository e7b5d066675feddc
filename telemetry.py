"""Switches off the telemetry of ONNX Runtime and of the hub library.

Outside Windows the official builds of ONNX Runtime carry a telemetry client since version 1.29. It starts while
`onnxruntime` is imported: it writes a device id and a queue of events into the user's cache folder, and sends the queue
to Microsoft from a process that lives for some seconds. Only an environment variable that is set before the import
prevents that; `onnxruntime.disable_telemetry_events` comes too late. The hub library tells the hub in every request
what is installed beside it, unless its own variable is set.

Source: docs/Privacy.md of ONNX Runtime; docs/log.md has what was measured.
"""

from __future__ import annotations

import os
import sys

# No module but these two is imported here: this one runs at every start, before Ctrl-C is handled.

_ONNX_RUNTIME = "ORT_DISABLE_TELEMETRY"
_HUB_LIBRARY = "HF_HUB_DISABLE_TELEMETRY"
_FIRST_WITH_CLIENT = (1, 29)


def disable_telemetry() -> None:
    """Set the environment variables that switch telemetry off, except those that the user has set to another value.

    Warns where ONNX Runtime was imported before, because its telemetry client then runs already.
    """
    too_late = not os.environ.get(_ONNX_RUNTIME) and _client_runs()
    for name in (_ONNX_RUNTIME, _HUB_LIBRARY):
        if not os.environ.get(name):
            os.environ[name] = "1"
    if too_late:
        import warnings  # noqa: PLC0415

        warnings.warn(
            f"onnxruntime was imported before edgerun, so its telemetry is active in this process; import edgerun "
            f"first, or set the environment variable {_ONNX_RUNTIME} to 1, or to 0 if telemetry is wanted",
            RuntimeWarning,
            stacklevel=3,
        )


def telemetry_is_disabled() -> bool:
    """Return whether the environment asks ONNX Runtime for no telemetry."""
    # Any other value leaves it on, as ONNX Runtime reads the variable.
    return os.environ.get(_ONNX_RUNTIME, "").strip().lower() in {"1", "true", "yes", "on", "y", "t"}


def _client_runs() -> bool:
    """Whether an ONNX Runtime with a telemetry client has been imported. On Windows the system has that client."""
    version = getattr(sys.modules.get("onnxruntime"), "__version__", "0.0")
    numbers = tuple(int(part) if part.isdigit() else 0 for part in str(version).split(".")[:2])
    return sys.platform != "win32" and numbers >= _FIRST_WITH_CLIENT
