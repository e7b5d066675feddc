"""Locks for devices that one thread may use at a time.

All WebGPU sessions of a process share one queue and one pool of buffers, which have no lock: two sessions that run in
two threads, or one that frees memory while the other runs, end the process. So whatever touches such a device holds its
lock: loading, binding (which copies to the device), running, and freeing. Sessions on other devices go on meanwhile.
"""

from __future__ import annotations

import threading
from typing import Any, Final, TypeAlias

DeviceMemory: TypeAlias = tuple[str, int]
"""ONNX Runtime's name of a device's memory, such as `webgpu`, and the number of the device."""


class DeviceLock:
    """A context in which the calling thread may use a device; one thread may enter it several times."""

    def __init__(self) -> None:
        self._lock: Final = threading.RLock()
        self._unused: Final[list[Any]] = []

    def __enter__(self) -> None:
        self._lock.acquire()
        self._unused.clear()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def free(self, values: list[Any]) -> None:
        """Empty a list of values of the device: they are freed now, or when the device is used next.

        It never waits: the garbage collector calls it in any thread, whatever locks that thread holds.
        """
        self._unused.extend(values)
        values.clear()
        if self._lock.acquire(blocking=False):
            try:
                self._unused.clear()
            finally:
                self._lock.release()


_locks: Final[dict[DeviceMemory, DeviceLock]] = {}
_registry: Final = threading.Lock()


def device_lock(memory: DeviceMemory | None) -> DeviceLock:
    """The lock of a device by its memory, None for the CPU's: one for all who use a WebGPU device, else a new one."""
    if memory is None or memory[0] != "webgpu":
        return DeviceLock()
    with _registry:
        return _locks.setdefault(memory, DeviceLock())
