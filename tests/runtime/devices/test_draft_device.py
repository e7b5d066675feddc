"""The draft model on the CPU beside a target on a GPU, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

from support.devices import require_webgpu, run_edge_run, run_script
from support.tiny_models import write_bundle

COMMON = ("-p", "the other thing", "-n", "48", "--raw", "--ignore-eos", "--context", "96", "--seed", "0")


RUN = """
import os, sys
from edgerun.edge.cli.main import main
from edgerun.runtime.speculation import draft_ahead

os.dup2(1, 2)
# What pays depends on times, which vary on a busy machine: here a step is always run ahead.
draft_ahead._LEAST_SHARE = 0
draft_ahead.DraftAhead._is_worth = lambda *_: True
main()
"""
"""Runs the `edge-run` command; messages go to standard output too."""


def test_the_cpu_drafts_while_a_gpu_verifies(tmp_path: Path) -> None:
    require_webgpu()
    target = write_bundle(tmp_path / "target")
    pair = (target, "--draft", target, "--spec", "model")
    plain = run_edge_run(target, "--spec", "off", "--json", *COMMON)
    assert plain.returncode == 0, plain.stderr
    beside = run_script(
        RUN, *pair, "--device", "gpu", "--draft-device", "cpu", "--json", "--stats", "--explain", *COMMON
    )
    answer = json.loads(next(line for line in beside.splitlines() if line.startswith("{")))
    assert answer["device"] == "WebGpu"
    assert answer["text"] == json.loads(plain.stdout)["text"]
    counts = answer["speculation"]
    # The draft is the target: what runs while the slow device verifies is right, and kept.
    assert 0 < counts["passes_kept"] <= counts["passes_ahead"]
    assert counts["hidden_ms"] > 0
    assert counts["accepted"] <= counts["drafted"]
    assert "draft passes ahead kept, " in beside
    assert "hidden" in beside.split("draft passes ahead kept", maxsplit=1)[0]
