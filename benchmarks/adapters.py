"""What LoRA adapters cost: passes over one token, without adapters, with unused ones, and with some of several ranks.

    python benchmarks/adapters.py BUNDLE [--threads N] [--context N] [--cpu-time]

The adapters are random, for all linears of every layer of a Llama or Qwen checkpoint. Where other programs run,
`--cpu-time` counts processor time of the thread, with `--threads 1`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
from safetensors.numpy import save_file

import edgerun
from edgerun.models.manifest import Architecture, Manifest
from edgerun.runtime.graph.bound_graph import BoundGraph
from edgerun.runtime.measure.system_load import take_turns

_RANKS: Final = (4, 8, 16)
_TURNS: Final = 21
_PASSES: Final = 8
"""Passes in a turn behind two that are not timed; their median counts."""
_SETTLE_S: Final = 0.15
"""Pause before the passes of a graph, until the threads of the one before have ceased to spin."""


def main() -> None:
    """Print milliseconds and ratios of rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--cpu-time", action="store_true")
    arguments = parser.parse_args()
    clock = time.thread_time if arguments.cpu_time else time.perf_counter
    with tempfile.TemporaryDirectory() as folder, edgerun.load(arguments.bundle, threads=arguments.threads) as plain:
        manifest = Manifest.from_json((arguments.bundle / "edge.json").read_bytes())
        paths = {f"r{rank}": Path(folder, f"r{rank}") for rank in (*_RANKS, "16b")}
        for name, path in paths.items():
            write_adapter(path, manifest.architecture, int(name.strip("rb")))
        started = time.perf_counter()
        lora = [f"{name}={path}" for name, path in paths.items()]
        with edgerun.load(arguments.bundle, threads=arguments.threads, lora=lora) as steered:
            print(f"loading with {len(lora)} adapters: {time.perf_counter() - started:.2f} s")
            names = (None, *(f"r{rank}" for rank in _RANKS))
            bounds = {"no adapters": bound_to(plain, None, arguments.context)}
            bounds |= {name or "unused": bound_to(steered, name, arguments.context) for name in names}
            results, busy = take_turns([timed(each, clock) for each in bounds.values()], least=_TURNS, most=_TURNS)
            base = np.array(results[0])
            for name, seconds in zip(bounds, results, strict=True):
                low, middle, high = np.percentile(np.array(seconds) / base, (25, 50, 75))
                print(f"{name:12} {1e3 * np.median(seconds):6.2f} ms, ratio {middle:.3f} [{low:.3f}, {high:.3f}]")
            print(f"another adapter: {1e3 * np.median(swaps(steered)):.2f} ms{'; other programs ran' if busy else ''}")


def write_adapter(folder: Path, size: Architecture, rank: int) -> None:
    """Write a random adapter of all linears."""
    folder.mkdir()
    random = np.random.default_rng(rank)
    query, key, hidden = size.heads * size.head_dim, size.kv_heads * size.head_dim, size.hidden_size
    wide = size.intermediate_size
    shapes = {f"self_attn.{name}_proj": (rows, hidden) for name, rows in (("q", query), ("k", key), ("v", key))}
    shapes |= {"self_attn.o_proj": (hidden, query), "mlp.down_proj": (hidden, wide)}
    shapes |= {f"mlp.{name}_proj": (wide, hidden) for name in ("gate", "up")}
    tensors = {}
    for layer in range(size.layers):
        for module, (rows, columns) in shapes.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = 0.01 * random.standard_normal((rank, columns), np.float32)
            tensors[f"{name}.lora_B.weight"] = 0.01 * random.standard_normal((rows, rank), np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": rank}), encoding="utf-8")


def bound_to(engine: edgerun.Engine, adapter: str | None, context: int) -> BoundGraph:
    """A sequence of `context` tokens, with an adapter."""
    sequence = engine.new_sequence()
    sequence.steer(engine.model._open_graph().steering(edgerun.GenerateOptions(adapter=adapter)))
    bound = sequence.bound
    bound.forward(list(range(5, 5 + context)), logits_for=[context - 1])
    bound.arena.commit(context)
    return bound


def timed(bound: BoundGraph, clock: Callable[[], float]) -> Callable[[], float]:
    """What runs a few passes over one token, and returns the median of their seconds."""

    def run() -> float:
        time.sleep(_SETTLE_S)
        seconds = []
        for _ in range(2 + _PASSES):
            started = clock()
            bound.forward([7], logits_for=[0])
            seconds.append(clock() - started)
        return float(np.median(seconds[2:]))

    return run


def swaps(engine: edgerun.Engine) -> list[float]:
    """Seconds that it takes to give a sequence another adapter."""
    sequence, seconds = engine.new_sequence(), []
    for turn in range(20):
        started = time.perf_counter()
        options = edgerun.GenerateOptions(adapter=("r16", "r16b")[turn % 2])
        sequence.steer(engine.model._open_graph().steering(options))
        seconds.append(time.perf_counter() - started)
    return seconds


if __name__ == "__main__":
    main()
