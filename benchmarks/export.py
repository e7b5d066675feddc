"""Time and peak resident memory of exports, each in a process of its own.

Example: python benchmarks/export.py --shape qwen2.5-0.5b --dtype float32

Exports a checkpoint of random weights (made once in --work, nothing is downloaded) to 4 and 8 bits, including checksums
and the check against the reference decoder, as `edge-run export` does. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import edgerun
from checkpoints import write_checkpoint
from shapes import SHAPES

_EXPORT = """
import resource, sys, time
from edgerun.edge.cli.main import main
started = time.perf_counter()
code = main(["export", *sys.argv[1:]])
print(time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, file=sys.stderr)
sys.exit(code)
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2.5-0.5b")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="type of the checkpoint")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edge-run-benchmarks")
    options = parser.parse_args()
    source = options.work / options.shape / f"checkpoint-{options.dtype}"
    if not source.is_dir():
        write_checkpoint(SHAPES[options.shape], source, dtype=options.dtype)
    plans = {"int4/128": ["int4", "--block", "128"], "int8/32": ["int8", "--block", "32"]}
    results = {}
    print(f"{options.shape}, {options.dtype} checkpoint of {size_of(source) / 1e9:.2f} GB")
    print(f"{'weights':10} {'seconds':>8} {'peak GB':>8} {'bundle GB':>10}")
    for name, arguments in plans.items():
        seconds, peaks, sizes = [], [], []
        for _ in range(options.runs):
            with tempfile.TemporaryDirectory(dir=options.work) as folder:
                out = Path(folder) / "bundle"
                command = [sys.executable, "-c", _EXPORT, str(source), str(out), "--weights", *arguments]
                done = subprocess.run(command, capture_output=True, encoding="utf-8", check=True)
                taken, peak = map(float, done.stderr.splitlines()[-1].split())
                seconds.append(taken)
                peaks.append(peak)
                sizes.append(size_of(out))
        results[name] = {"seconds": statistics.median(seconds), "peak_bytes": max(peaks), "bundle_bytes": sizes[0]}
        print(f"{name:10} {results[name]['seconds']:8.1f} {max(peaks) / 1e9:8.2f} {sizes[0] / 1e9:10.3f}")
    conditions = {"shape": options.shape, "dtype": options.dtype, "runs": options.runs}
    print(json.dumps({"benchmark": "export", "edgerun": edgerun.__version__, **conditions, "exports": results}))


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(file.stat().st_size for file in folder.iterdir())


if __name__ == "__main__":
    main()
