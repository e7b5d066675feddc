"""Runs a program that the kernel ends when it, or a library that it loads, opens a socket. Linux only."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import subprocess
import sys

_SOCKET_CALLS = {"x86_64": 41, "aarch64": 198}
"""Number of the system call `socket`."""
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_KILL_PROCESS, _ALLOW = 0x80000000, 0x7FFF0000
_SET_NO_NEW_PRIVILEGES, _SET_SECCOMP, _SECCOMP_FILTER = 38, 22, 2

KILLED = -getattr(signal, "SIGSYS", 0)
"""Return code of a program that opened a socket."""


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_ushort),
        ("then", ctypes.c_ubyte),
        ("otherwise", ctypes.c_ubyte),
        ("k", ctypes.c_uint),
    )


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(_Instruction)))


def without_network(*command: str) -> list[str]:
    """The command line that runs `command` without network."""
    return [sys.executable, __file__, *command]


def network_can_be_forbidden() -> bool:
    """Whether this machine can run programs without network."""
    if sys.platform != "linux" or platform.machine() not in _SOCKET_CALLS:
        return False
    opens = without_network(sys.executable, "-c", "import socket; socket.socket()")
    return subprocess.run(opens, check=False, capture_output=True).returncode == KILLED


def _forbid_sockets(call: int) -> None:
    """Install a seccomp filter that ends the process at the given system call; children inherit it."""
    instructions = (_Instruction * 4)(
        _Instruction(_LOAD_WORD, 0, 0, 0),  # the number of the system call is the first field of seccomp_data
        _Instruction(_JUMP_IF_EQUAL, 0, 1, call),
        _Instruction(_RETURN, 0, 0, _KILL_PROCESS),
        _Instruction(_RETURN, 0, 0, _ALLOW),
    )
    control = ctypes.CDLL(None, use_errno=True).prctl
    for arguments in (
        (_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0),
        (_SET_SECCOMP, _SECCOMP_FILTER, ctypes.byref(_Filter(len(instructions), instructions)), 0, 0),
    ):
        if control(*arguments):
            raise OSError(ctypes.get_errno(), "the kernel takes no seccomp filter")


if __name__ == "__main__":
    _forbid_sockets(_SOCKET_CALLS[platform.machine()])
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606
