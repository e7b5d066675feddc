"""A program: greedy text on a GPU and on the CPU, plain and with token trees.

It is started by `support.devices.run_json_script` with a bundle, a number of tokens and a device. The CPU computes at
accuracy level 0, as GPUs do. It prints, as a line of JSON, how many tokens are equal, and what passes took.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from edgerun.models.bundle import open_bundle
from edgerun.runtime.decode import DecodeLimits, decode
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph.bound_graph import BoundGraph
from edgerun.runtime.graph.open_graph import open_graph
from edgerun.runtime.graph.session import SessionConfig
from edgerun.runtime.sampling.sampler import Sampler, SamplingParams
from edgerun.runtime.speculation.drafters.recycling import RecycledTable, RecyclingDrafter
from edgerun.runtime.speculation.drafters.suffix import SuffixDrafter
from edgerun.runtime.speculation.speculator import Speculator
from support.adversarial_drafters import eager
from support.device_rounds import host_bytes, in_float

PROMPT = [1, 403, 407, 261, 378]


def text(bound: BoundGraph, count: int, speculator: Speculator | None) -> dict[str, Any]:
    """Greedy tokens after a prompt, and what they took."""
    vocab_size = bound.graph_io.vocab_size
    prompt = [token % vocab_size for token in PROMPT]
    bound.arena.rewind_to(0)
    before, started = host_bytes(bound), time.perf_counter()
    steps = list(decode(bound, prompt, Sampler(SamplingParams(), vocab_size), DecodeLimits(count), speculator))
    passes = sum(step.target_passes for step in steps)
    return {
        "tokens": [token for step in steps for token in step.tokens],
        "passes": passes,
        "trees": sum(step.round is not None and step.round.width != 1 for step in steps),
        "bytes": (host_bytes(bound) - before) / passes,
        "ms": 1000 * (time.perf_counter() - started) / passes,
    }


def equal_tokens(one: list[int], other: list[int]) -> int:
    """Number of equal tokens at the beginning of both texts."""
    return int(np.cumprod(np.array(one) == np.array(other)).sum()) if len(one) == len(other) else 0


def main(bundle_path: str, count: str, device_name: str) -> None:
    """Decode on both devices and print what was found."""
    bundle, tokens = open_bundle(Path(bundle_path)), int(count)
    device = open_graph(bundle, SessionConfig(choose_device(device_name)), cache=False)
    cpu, limit = in_float(bundle), bundle.context or 512
    expected = text(cpu.bind(cpu.arena(limit)), tokens, None)
    bound = device.bind(device.arena(limit))
    bound.whole_logits = False
    table = RecycledTable(device.graph_io.vocab_size)
    plain = text(bound, tokens, None)
    drafted = text(bound, tokens, eager(SuffixDrafter(), RecyclingDrafter(table)))
    found = {
        "on_cpu": dict(device.assignments.on_cpu),
        "plain_equal": equal_tokens(plain.pop("tokens"), expected["tokens"]),
        "drafted_equal": equal_tokens(drafted.pop("tokens"), expected["tokens"]),
        "plain": plain,
        "drafted": drafted,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
