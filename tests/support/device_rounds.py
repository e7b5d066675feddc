"""A program: random token trees on a GPU, and what the arena on the device holds after them.

It is started by `support.devices.run_json_script` with a bundle, a number of rounds and a device. Every round proposes
a random tree and accepts a random path of it; now and then the sequence is rewound, copied, or saved and restored. It
prints how far the slots and logits are from those of the CPU, which ran the accepted tokens alone, in a line of JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgerun.models.bundle import Bundle, open_bundle
from edgerun.models.onnx_file.graph_editor import GraphEditor
from edgerun.runtime.devices.providers import choose_device, cpu_device
from edgerun.runtime.gpu_graph.expanded_codes import compute_in_float
from edgerun.runtime.graph.bound_graph import BoundGraph
from edgerun.runtime.graph.bound_session import BoundSession
from edgerun.runtime.graph.graph_choice import ChosenSession
from edgerun.runtime.graph.model_metadata import metadata_of
from edgerun.runtime.graph.open_graph import open_graph
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from edgerun.runtime.kv import arena as arena_module
from edgerun.runtime.kv.device_buffers import DeviceBuffers
from edgerun.runtime.speculation.tree import Source, Tree


def random_tree(random: np.random.Generator, vocab_size: int) -> Tree:
    """A tree of two to six nodes."""
    parents = [-1, *(int(random.integers(0, node)) for node in range(1, int(random.integers(2, 7))))]
    tokens = random.choice(np.arange(5, vocab_size), len(parents), replace=False).tolist()
    return Tree.of(tokens, parents, [1.0] * len(parents), [Source.ANCHOR] * len(parents))


def in_float(bundle: Bundle) -> GraphSession:
    """The bundle's graph on the CPU at accuracy level 0, which is that of GPUs."""
    editor = GraphEditor(bundle.graph)
    compute_in_float(editor)
    return GraphSession(bundle.graph, SessionConfig(cpu_device(), 1), metadata_of(bundle), model=editor.serialized())


def sequential(graph: GraphSession, tokens: list[int], limit: int) -> BoundSession:
    """The CPU's session after the tokens, one pass each."""
    bound = graph.bind(graph.arena(limit))
    for token in tokens:
        bound.forward([token])
        bound.arena.commit(1)
    return bound


def host_bytes(bound: BoundGraph) -> int:
    """Bytes that came from the device, of all graphs that the session is made of."""
    parts = [bound._base, *bound._bound.values()] if isinstance(bound, ChosenSession) else [bound]
    return sum(part.host_bytes for part in parts if isinstance(part, BoundSession))


def difference(one: tuple[npt.NDArray[np.float32], ...], other: tuple[npt.NDArray[np.float32], ...]) -> float:
    """The largest difference of two snapshots; infinite if their shapes differ."""
    if [each.shape for each in one] != [each.shape for each in other]:
        return float("inf")
    return max(float(np.abs(a - b).max(initial=0)) for a, b in zip(one, other, strict=True))


def main(bundle_path: str, rounds: str, device_name: str) -> None:
    """Run the rounds and print what was found."""
    arena_module._FIRST_CAPACITY = 16  # so that a few rounds make the arena grow several times
    bundle = open_bundle(Path(bundle_path))
    config = SessionConfig(choose_device(device_name))
    device = open_graph(bundle, config, cache=False)
    cpu = in_float(bundle)
    vocab_size, limit = device.graph_io.vocab_size, bundle.context or 256
    random = np.random.default_rng(1)
    bound = device.bind(device.arena(limit))
    tokens: list[int] = [7, 8, 9]
    bound.forward(tokens, logits_for=[2])
    bound.arena.commit(3)
    moves, slots, logits, capacities = 0, 0.0, 0.0, {bound.arena.capacity}
    for number in range(int(rounds)):
        arena = bound.arena
        assert isinstance(arena.buffers, DeviceBuffers)
        if arena.length + 10 > limit:
            arena.rewind_to(int(random.integers(1, 20)))
            del tokens[arena.length :]
        tree = random_tree(random, vocab_size)
        base = arena.length
        bound.forward(tree.tokens, logits_for=[0], positions=base + tree.depths, tree_mask=tree.mask)
        path = list(tree.path_to(int(random.integers(0, len(tree)))))  # from the anchor to any node
        arena.compact(base, path)
        moves += path[-1] >= len(path)
        tokens += tree.tokens[path].tolist()
        capacities.add(arena.capacity)
        if number % 10 == 3:
            arena.rewind_to(arena.length - int(random.integers(0, 4)))
            del tokens[arena.length :]
        if number % 25 == 7:
            alone = sequential(cpu, tokens, limit)
            slots = max(slots, difference(arena.snapshot(), alone.arena.snapshot()))
            # From the device to the CPU, and back into a new arena of the device.
            alone.arena.restore(arena.snapshot())
            restored = device.arena(limit)
            restored.restore(alone.arena.snapshot())
            slots = max(slots, difference(arena.snapshot(), restored.snapshot()))
            copied = device.arena(limit)
            copied.copy_from(arena, arena.length)
            for used in (restored, copied):
                bound.use(used)
                logits = max(logits, float(np.abs(bound.forward([5])[0] - alone.forward([5])[0]).max()))
    bound.whole_logits = False
    before = host_bytes(bound)
    best = bound.forward([5], logits_for=[0])[0].copy()
    few = host_bytes(bound) - before
    bound.whole_logits = True
    whole = bound.forward([5], logits_for=[0])[0].copy()
    kept = np.flatnonzero(best > np.finfo(np.float32).min)
    found = {
        "rounds": int(rounds),
        "moves": moves,
        "slots": slots,
        "logits": logits,
        "capacities": sorted(capacities),
        "on_cpu": dict(device.assignments.on_cpu),
        "few_bytes": few,
        "whole_bytes": host_bytes(bound) - before - few,
        "best_equal": bool((best[kept] == whole[kept]).all() and whole[kept].min() >= np.delete(whole, kept).max()),
        "best": kept.size,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
