"""A model of 7 billion weights in 8 GB: a long prompt and an answer in a control group, page cache included.

Linux, as a user who may make control groups. The model's files leave the page cache first, so that all that is read of
them counts. Prints a line, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

import psutil

from artifacts import bundle
from processes import Worker
from shapes import SHAPES

_GROUPS = Path("/sys/fs/cgroup")


def limit_memory(size: int) -> Path:
    """Move this process into a control group of `size` bytes; returns the file with the most that was in use."""
    is_first_version = (_GROUPS / "memory").is_dir()
    group = (_GROUPS / "memory" if is_first_version else _GROUPS) / "edge-run-benchmark"
    group.mkdir(exist_ok=True)
    (group / ("memory.limit_in_bytes" if is_first_version else "memory.max")).write_text(str(size), encoding="ascii")
    (group / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
    return group / ("memory.max_usage_in_bytes" if is_first_version else "memory.peak")


def leave_page_cache(folder: Path) -> None:
    """Let the page cache drop all files of a folder."""
    os.sync()
    for path in filter(Path.is_file, folder.rglob("*")):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: sudo python benchmarks/limited_memory.py --limit 8000000000 --prompt 4096",
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2.5-7b")
    parser.add_argument("--limit", type=int, metavar="BYTES", default=8_000_000_000)
    parser.add_argument("--prompt", type=int, metavar="N", default=4096)
    parser.add_argument("--tokens", type=int, metavar="N", default=16)
    parser.add_argument("--threads", type=int, default=psutil.cpu_count(logical=False) or 1)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edge-run-benchmarks")
    options = parser.parse_args()
    model = bundle(options.work, SHAPES[options.shape], 128)
    cache = options.work.absolute() / "cache"
    environment = {"EDGERUN_CACHE": str(cache)}
    leave_page_cache(model)
    leave_page_cache(cache)
    most = limit_memory(options.limit)
    context = options.prompt + options.tokens + 1
    with Worker(
        "edge-run", "edge-run", model, threads=options.threads, capacity=context, environment=environment
    ) as it:
        found = {
            "load_s": it.loaded["seconds"],
            "prompt_s": it.call("prefill", tokens=options.prompt),
            "token_s": it.call("decode", context=options.prompt, tokens=options.tokens),
            "anonymous_mib": it.call("memory")["anonymous"],
            "most_bytes": int(most.read_text(encoding="ascii")),
        }
    print(
        f"{options.shape} in {options.limit / 1e9:.1f} GB: loaded in {found['load_s']:.1f} s, "
        f"a prompt of {options.prompt} tokens in {found['prompt_s']:.0f} s, "
        f"then {found['token_s'] * 1000:.0f} ms a token; {found['anonymous_mib']:.0f} MiB of private memory"
    )
    print(json.dumps({"benchmark": "limited_memory", "limit": options.limit, **found}))


if __name__ == "__main__":
    main()
