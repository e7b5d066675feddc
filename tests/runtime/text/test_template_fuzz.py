"""Random templates that try to take time and memory, rendered in a process that is watched from outside."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from support.nightly import some_nightly
from support.processes import started
from support.shared_data import data_path
from support.template_bombs import random_template

pytest.importorskip("resource", reason="reads the memory of a process")

CHILD = Path(__file__).parents[2] / "support" / "template_child.py"
CASES = 50
LONGEST_S = 20
LARGEST_BYTES = 2_000_000_000


@pytest.mark.parametrize("batch", some_nightly(range(12), every=12))
def test_random_templates_end_in_time_within_memory_and_in_one_line(batch: int) -> None:
    """Nightly 550 templates; every day the first five."""
    folder = data_path("tokenizers/chat_templates")
    real = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jinja"))]
    cases = CASES if batch else 5
    with started([sys.executable, str(CHILD)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        stdout = child.stdout
        threading.Thread(target=lambda: [lines.put(line) for line in stdout], daemon=True).start()
        for seed in range(batch * CASES, batch * CASES + cases):
            child.stdin.write(json.dumps(random_template(seed, real)).encode() + b"\n")
            child.stdin.flush()
            problem, seconds, peak = json.loads(lines.get(timeout=10 * LONGEST_S))
            assert problem is None, (seed, problem)
            assert seconds < LONGEST_S, seed
            assert peak < LARGEST_BYTES, seed
