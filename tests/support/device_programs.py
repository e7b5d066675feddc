"""Programs that compare a GPU with the CPU: `python device_programs.py FUNCTION ARGUMENTS`.

They are started by `support.devices.run_json_script`, with a bundle and the name of a device among the arguments. Each
prints what it found as a line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import edgerun
from edgerun import Engine, GenerateOptions, Speculation
from edgerun.models.bundle import Bundle, open_bundle
from edgerun.models.onnx_file.graph_editor import GraphEditor
from edgerun.runtime.decode import DecodeLimits, decode
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
from edgerun.runtime.sampling.sampler import Sampler, SamplingParams
from edgerun.runtime.speculation.drafters.recycling import RecycledTable, RecyclingDrafter
from edgerun.runtime.speculation.drafters.suffix import SuffixDrafter
from edgerun.runtime.speculation.speculator import Speculator
from edgerun.runtime.speculation.tree import Source, Tree
from support.adversarial_drafters import NEARLY_FREE, FixedCost, eager


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


def compare_rounds(bundle_path: str, rounds: str, device_name: str) -> None:
    """Accept random paths of random trees on the device, and compare its slots and logits with the CPU's.

    The CPU runs the accepted tokens alone. Now and then the sequence is rewound, copied, or saved and restored.
    """
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
        "on_cpu": dict(device.on_cpu),
        "few_bytes": few,
        "whole_bytes": host_bytes(bound) - before - few,
        "best_equal": bool((best[kept] == whole[kept]).all() and whole[kept].min() >= np.delete(whole, kept).max()),
        "best": kept.size,
    }
    print(json.dumps(found))


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


def compare_text(bundle_path: str, count: str, device_name: str) -> None:
    """Compare greedy text, plain and with token trees, with the CPU's at accuracy level 0, which is that of GPUs."""
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
        "on_cpu": dict(device.on_cpu),
        "plain_equal": equal_tokens(plain.pop("tokens"), expected["tokens"]),
        "drafted_equal": equal_tokens(drafted.pop("tokens"), expected["tokens"]),
        "plain": plain,
        "drafted": drafted,
    }
    print(json.dumps(found))


TEXT = "the other and the thing in the other " * 2
MANY = 100
"""Number of tokens from which answers are exact too, for which wide passes are measured first."""
TURNS = ("one in the other", "and another")


def every_answer(engine: Engine, tokens: int) -> dict[str, Any]:
    """Answers of every kind of request: the best logits suffice for some, others need all of them."""
    plain = GenerateOptions(raw=True, max_tokens=tokens, ignore_eos=True, speculation=Speculation.OFF)
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {},
        "drafted": {"speculation": Speculation.AUTO},
        "best of 20": {"temperature": 0.9, "top_k": 20, "seed": 5},
        "all": {"temperature": 0.9, "seed": 5},
        "penalized": {"repeat_penalty": 1.3},
        "logprobs": {"logprobs": 2},
    }
    if tokens >= MANY:
        kinds["exact"] = {"speculation": Speculation.AUTO, "exact": True}
    return {name: engine.generate(TEXT, plain, **changes) for name, changes in kinds.items()}


def conversation(first: Engine, second: Engine, file: Path, tokens: int) -> list[str]:
    """A conversation that begins on one engine, is saved, and goes on with another."""
    options = GenerateOptions(max_tokens=tokens, speculation=Speculation.OFF)
    with first.session() as session:
        begun = session.send(TURNS[0], options)
        session.save(file)
    with second.session(resume=file) as session:
        reply = session.send(TURNS[1], options)
    assert reply.stats.reused_tokens > begun.stats.prompt_tokens
    return [begun.text, reply.text]


def at_the_same_time(engines: list[Engine], tokens: int) -> list[str]:
    """The greedy text of every engine, all of them in threads."""

    def run(engine: Engine) -> str:
        options = GenerateOptions(raw=True, max_tokens=tokens, ignore_eos=True, speculation=Speculation.OFF)
        for _ in range(2):  # the first arena is freed while others run
            text = engine.generate(TEXT, options).text
            engine.model.prefixes.clear()
        return text

    with ThreadPoolExecutor(len(engines)) as pool:
        return list(pool.map(run, engines))


def compare_answers(bundle: str, folder: str, count: str, device_name: str) -> None:
    """Compare answers of engines on both devices, one after another and side by side."""
    tokens = int(count)
    settings: dict[str, Any] = {"cache": False, "threads": 1, "draft": None}
    cpu, device = edgerun.load(bundle, device="cpu", **settings), edgerun.load(bundle, device=device_name, **settings)
    for engine in (cpu, device):
        engine.model.drafters._pass_cost = FixedCost(NEARLY_FREE)
    expected, replies = every_answer(cpu, tokens), every_answer(device, tokens)
    stats = {name: reply.stats for name, reply in replies.items()}
    other = edgerun.load(bundle, device=device_name, **settings)
    file = Path(folder) / "conversation"
    found = {
        "cpu": {name: reply.text for name, reply in expected.items()},
        "device": {name: reply.text for name, reply in replies.items()},
        "reused": [each.reused_tokens for each in stats.values()],
        "drafted": stats["drafted"].drafted,
        "conversations": [
            conversation(one, another, file, tokens)
            for one, another in ((cpu, cpu), (device, cpu), (cpu, device), (device, device))
        ],
        "side by side": at_the_same_time([device, cpu, other], tokens),
    }
    for engine in (cpu, device, other):
        engine.close()
    print(json.dumps(found))


def compare_images(bundle: str, image: str, device_name: str) -> None:
    """Log-probabilities of the first token of answers about an image and about text, and of one behind an image."""
    found: dict[str, list[float]] = {}
    for name in ("cpu", device_name):
        with edgerun.load(bundle, device=name, threads=1, draft=None) as engine:
            seen = [{"type": "image", "image": Path(image)}, {"type": "text", "text": "what is it?"}]
            said: list[dict[str, Any]] = [
                {"role": "user", "content": seen},
                {"role": "assistant", "content": "a"},
                {"role": "user", "content": "and?"},
            ]
            asked: list[list[dict[str, Any]]] = [said[:1], said, [{"role": "user", "content": "what is it?"}]]
            replies = [engine.generate(each, max_tokens=1, temperature=0, logprobs=1) for each in asked]
            found[name] = [reply.logprobs[0].logprob for reply in replies]
    print(json.dumps({"cpu": found["cpu"], "device": found[device_name]}))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
