"""Startup time: import of edgerun, and the bundled model's first character from process start.

Example: python benchmarks/startup.py --runs 9

Every run is a new process. Prints medians, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

import edgerun

_IMPORT = "import time; t = time.perf_counter(); import edgerun; edgerun.load; print(time.perf_counter() - t)"
_ANSWER = [sys.executable, "-c", "import sys; from edgerun.edge.cli.main import main; sys.exit(main())"]
_REQUEST = ["-p", "find files larger than 100 MB"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=9, help="processes of each kind")
    runs = parser.parse_args().runs
    imports, first, whole = [], [], []
    for _ in range(runs):
        imports.append(float(subprocess.run([sys.executable, "-c", _IMPORT], capture_output=True, check=True).stdout))
        started = time.perf_counter()
        with subprocess.Popen([*_ANSWER, *_REQUEST], stdout=subprocess.PIPE) as process:
            if process.stdout is None or not process.stdout.read(1):
                raise RuntimeError("the bundled model gave no answer")
            first.append(time.perf_counter() - started)
            process.stdout.read()
        whole.append(time.perf_counter() - started)
    result = {
        "import_s": statistics.median(imports),
        "first_character_s": statistics.median(first),
        "whole_answer_s": statistics.median(whole),
    }
    for name, seconds in result.items():
        print(f"{name.removesuffix('_s').replace('_', ' '):16} {seconds:6.3f} s")
    print(json.dumps({"benchmark": "startup", "edgerun": edgerun.__version__, "runs": runs, **result}))


if __name__ == "__main__":
    main()
