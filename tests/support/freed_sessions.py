"""Sessions of ONNX Runtime that are in memory."""

from __future__ import annotations

import gc
from collections.abc import Callable

import onnxruntime

from edgerun import Engine


def require_freed_sessions(opened: Callable[[], Engine]) -> None:
    """Close an engine: its sessions are freed, while it is still referred to, without collecting cycles."""
    gc.collect()
    gc.disable()
    try:
        before = _sessions()
        engine = opened()
        assert _sessions() > before
        engine.close()
        assert _sessions() == before
    finally:
        gc.enable()


def _sessions() -> int:
    return sum(isinstance(each, onnxruntime.InferenceSession) for each in gc.get_objects())
