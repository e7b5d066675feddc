"""Locks for devices that one thread may use at a time.

All WebGPU sessions of a process share one queue and one pool of buffers, which have no lock: two sessions that run in
two threads, or one that frees memory while the other runs, end the process. So whatever touches such a device holds its
lock: loading, binding (which copies to the device), running, and freeing. Sessions on other devices go on meanwhile.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, Final, TypeAlias

DeviceMemory: TypeAlias = tuple[str, int]
"""ONNX Runtime's name of a device's memory, such as `webgpu`, and the number of the device."""

_ONE_THREAD: Final = frozenset({"webgpu"})
"""Names of memory whose devices one thread may use at a time."""


class DeviceLock:
    """A context in which the calling thread may use a device; one thread may enter it several times.

    Args:
        exclusive: whether one thread may use the device at a time. If not, entering the context does nothing.
    """

    def __init__(self, *, exclusive: bool) -> None:
        self._lock: Final = threading.RLock() if exclusive else None
        self._unused: Final[list[Any]] = []

    def __enter__(self) -> None:
        if self._lock is not None:
            self._lock.acquire()
            self._unused.clear()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        if self._lock is not None:
            self._lock.release()

    def free(self, values: list[Any]) -> None:
        """Empty a list of values of the device: they are freed now, or when the device is used next.

        It never waits: the garbage collector calls it in any thread, whatever locks that thread holds.
        """
        if self._lock is not None:
            self._unused.extend(values)
        values.clear()
        if self._lock is None:
            return
        if self._lock.acquire(blocking=False):
            try:
                self._unused.clear()
            finally:
                self._lock.release()


_locks: Final[dict[DeviceMemory, DeviceLock]] = {}
_registry: Final = threading.Lock()


def device_lock(memory: DeviceMemory | None) -> DeviceLock:
    """The lock of a device, by its memory; None for the CPU's."""
    if memory is None or memory[0] not in _ONE_THREAD:
        return DeviceLock(exclusive=False)
    with _registry:
        return _locks.setdefault(memory, DeviceLock(exclusive=True))
