"""The process of a `CommandWorker`: runs commands one after the other, each with files as its standard streams."""

from __future__ import annotations

import io
import json
import os
import resource
import sys
import traceback
from pathlib import Path

from edgerun.edge.cli.main import main

_STREAMS = (os.O_RDONLY, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)


def run(arguments: list[str], files: list[str]) -> int:
    """Run one command with the files as standard input, output and error; what it raises goes to the last."""
    for descriptor, (file, flags) in enumerate(zip(files, _STREAMS, strict=True)):
        opened = os.open(file, flags, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8")
    try:
        return main(arguments)
    except BaseException:  # noqa: BLE001  the parent decides what it means
        traceback.print_exc()
        return 99
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def serve(requests: int, replies: int, max_bytes: int) -> None:
    """Run the commands that come as lines of JSON, and reply with exit code and peak memory."""
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with os.fdopen(requests, encoding="utf-8") as lines, os.fdopen(replies, "w", encoding="utf-8") as answers:
        print("{}", file=answers, flush=True)  # the imports are done
        for line in lines:
            request = json.loads(line)
            code = run(request["arguments"], request["files"])
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
            print(json.dumps({"code": code, "bytes": pages * resource.getpagesize()}), file=answers, flush=True)


if __name__ == "__main__":
    serve(*map(int, sys.argv[1:]))
