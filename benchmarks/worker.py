"""One engine in a process of its own, controlled by JSON lines (see `processes.Worker`).

It needs only NumPy, psutil and the engine's own package, so it also runs in an environment without edge-run.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil

ENGINES: Final = {
    "bare": ("bare_loop", "BareLoop"),
    "edge-run": ("edgerun_loop", "EdgeRunLoop"),
    "edge-run-vision": ("vision_loop", "EdgeRunVision"),
    "genai": ("genai_loop", "GenaiLoop"),
    "llama": ("llama_loop", "LlamaLoop"),
    "llama-vision": ("vision_loop", "LlamaVision"),
    "openvino": ("openvino_loop", "OpenvinoLoop"),
}


def memory() -> dict[str, float]:
    """Memory of this process in MiB: resident, its peak, unique to the process, and anonymous (no mapped files)."""
    info = psutil.Process().memory_full_info()
    peak = getattr(info, "peak_wset", None) or _linux_peak() or info.rss
    private = info.uss
    anonymous = _linux_status("RssAnon")
    found = {"resident": info.rss, "peak": peak, "unique": private, "anonymous": anonymous or info.uss}
    return {name: value / 2**20 for name, value in found.items()}


def reset_peak() -> None:
    """Let the peak of the resident memory begin anew (Linux)."""
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _linux_peak() -> int:
    return _linux_status("VmHWM")


def _linux_status(field: str) -> int:
    """A size from /proc/self/status in bytes; 0 on other systems."""
    status = Path("/proc/self/status")
    if not status.is_file():
        return 0
    for line in status.read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    return 0


def main() -> None:
    """Answer each JSON line with another one until standard input ends."""
    replies = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # output of libraries must not mix with the replies
    engine: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        name, arguments = request["method"], request["arguments"]
        answer: object
        if name == "load":
            module, kind = ENGINES[arguments.pop("engine")]
            make = getattr(importlib.import_module(module), kind)
            before = memory()
            started = time.perf_counter()
            engine = make(Path(arguments.pop("model")), **arguments)
            answer = {"seconds": time.perf_counter() - started, "before": before, "after": memory()}
        elif name == "memory":
            answer = memory()
            if arguments.get("reset"):
                reset_peak()
        elif name == "write_logits":
            texts = json.loads(Path(arguments["texts"]).read_text(encoding="utf-8"))
            np.save(arguments["out"], np.concatenate([engine.logits(text) for text in texts]))
            answer = len(texts)
        elif name == "cpu_seconds":
            answer = time.process_time()
        else:
            answer = getattr(engine, name)(**arguments)
        replies.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
