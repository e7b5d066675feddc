"""What the session of a device holds is freed while nothing runs on the device."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgerun.runtime.devices.providers import DeviceLock, cpu_device
from edgerun.runtime.graph.device_session import DeviceSession
from edgerun.runtime.graph.session import GraphSession, SessionConfig


class Watched(DeviceLock):
    """A lock that notes whether a binding is gone when all that was to be freed is."""

    binding: weakref.ref[Any]
    gone: bool | None = None

    def free(self, values: list[Any]) -> None:
        super().free(values)
        self.gone = self.binding() is None


@pytest.mark.parametrize("features", [False, True])
def test_the_binding_is_freed_under_the_lock(tmp_path: Path, features: bool) -> None:
    tiny = pytest.importorskip("support.tiny_models", reason="needs the export extra")
    from edgerun.export import FP32, ExportRecipe

    bundle = tiny.write_bundle(tmp_path, weights=ExportRecipe(FP32, hidden_states=True))
    graph = GraphSession(bundle / "model.onnx", SessionConfig(cpu_device(), 1))
    graph_io = replace(graph.graph_io, draft_features=graph.graph_io.hidden_states if features else None)
    lock = Watched()
    bound = DeviceSession(graph._session, graph_io, graph.arena(64), None, lock)
    bound.forward(np.arange(3))
    lock.binding = weakref.ref(bound._io)
    del bound
    assert lock.gone
