"""Lets a model see hostile images in a process of its own: `hostile_images_child.py COUNT BUNDLE`.

A line of JSON for each image says what came of it, its seconds of processor time, and the memory that it took.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import edgerun
from edgerun import InputError
from support.hostile_images import hostile_images


def main() -> None:
    """Command line."""
    images, engine = hostile_images(int(sys.argv[1])), edgerun.load(sys.argv[2], threads=1)
    for name, data in images:
        Path("/proc/self/clear_refs").write_text("5", "ascii")  # the peak begins anew
        before, started, said = _megabytes("VmRSS"), time.process_time(), ""
        try:
            content = [{"type": "image", "image": data}]
            engine.generate([{"role": "user", "content": content}], max_tokens=1, ignore_eos=True)
        except InputError as error:
            said = str(error)
        found = {"seconds": time.process_time() - started, "megabytes": _megabytes("VmHWM") - before}
        print(json.dumps({"name": name, "said": said, **found}), flush=True)


def _megabytes(field: str) -> float:
    """A size of this process from /proc/self/status."""
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1024


if __name__ == "__main__":
    main()
