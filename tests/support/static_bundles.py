"""Bundles with graphs of fixed shapes, the graph that theirs have to agree with, and what runs on NPUs.

The last functions run in a process of their own, where Qualcomm's plugin is registered. Their results are plain values.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import edgerun
from edgerun import Speculation
from edgerun.export import INT4, ExportRecipe
from edgerun.export.check.parity import with_float_activations
from edgerun.models.bundle import open_bundle
from edgerun.models.user_folders import cache_folder
from edgerun.runtime.decode import DecodeLimits, decode
from edgerun.runtime.devices.providers import choose_device, cpu_device
from edgerun.runtime.graph.compiled import CompiledGraphs
from edgerun.runtime.graph.model_metadata import metadata_of
from edgerun.runtime.graph.packed_files import write_record
from edgerun.runtime.graph.session import DecoderGraph, GraphSession, SessionConfig
from edgerun.runtime.graph.static_variants import StaticGraphs
from edgerun.runtime.kv.arena import KVArena
from edgerun.runtime.measure.measurement_store import model_key
from edgerun.runtime.measure.pass_timing import PASS_COSTS
from edgerun.runtime.prefill import prefill
from edgerun.runtime.sampling.sampler import Sampler, SamplingParams
from edgerun.runtime.speculation.pass_cost import PassCost
from edgerun.runtime.speculation.speculator import Speculator
from support.tiny_models import write_bundle

CPU = SessionConfig(cpu_device(), 1)


def write_static_bundle(
    folder: Path,
    family: str = "llama",
    widths: Sequence[int] = (1, 4),
    contexts: Sequence[int] = (64, 256),
    **overrides: Any,
) -> Path:
    """Export a tiny random model with graphs of these widths and contexts; 300 tokens, context 256, int4."""
    recipe = ExportRecipe(INT4, device="npu", widths=tuple(widths), contexts=tuple(contexts))
    return write_bundle(folder, family, weights=recipe, **overrides)


def static_graphs(bundle: Path) -> StaticGraphs:
    """The graphs of fixed shapes, on ONNX Runtime's CPU provider."""
    return StaticGraphs(open_bundle(bundle), CPU, cache=False)


def float_graph(bundle: Path) -> GraphSession:
    """The bundle's own graph with activations that are not rounded to 8 bits, as those of graphs for an NPU are not."""
    graph = bundle / "float.onnx"
    model = onnx.load(bundle / "model.onnx", load_external_data=False)
    graph.write_bytes(with_float_activations(model).SerializeToString())
    return GraphSession(graph, CPU, metadata_of(open_bundle(bundle)))


def greedy_text(
    graph: DecoderGraph, prompt: list[int], count: int, speculator: Speculator | None = None
) -> tuple[list[int], int]:
    """A greedy text after a prompt, and the number of its rounds."""
    bound = graph.bind(graph.arena(graph.graph_io.capacity or 256))
    sampler = Sampler(SamplingParams(), graph.graph_io.vocab_size)
    steps = list(decode(bound, prompt, sampler, DecodeLimits(count), speculator))
    return [token for step in steps for token in step.tokens], len(steps)


MESSAGES = ("What is a tree?", "And a graph?")


def compare_text(bundle: str, prompt: Sequence[int], count: int) -> dict[str, Any]:
    """Follow the CPU's greedy text on the NPU, in passes of width 1 and of width 4; then one tree.

    Where the NPU would choose another token, the margin of the CPU's choice says whether that was a near tie.
    """
    config = SessionConfig(choose_device("npu"), 1)
    graphs, cpu = StaticGraphs(open_bundle(Path(bundle)), config, cache=True), float_graph(Path(bundle))
    limit = graphs.capacities[-1]
    bound = cpu.bind(cpu.arena(limit))
    logits = prefill(bound, prompt).logits
    rows = [logits.copy()]
    text = [int(logits.argmax())]
    while len(text) <= count:
        rows.append(bound.forward(text[-1:])[0].copy())
        bound.arena.commit(1)
        text.append(int(rows[-1].argmax()))
    expected = np.stack(rows[1:])
    result: dict[str, Any] = {"entries": dict(config.device.session_entries), "on_cpu": dict(graphs.on_cpu)}
    second, best = np.sort(expected)[:, -2:].T
    for width in (1, 4):
        npu = graphs.bind(graphs.arena(limit))
        prefill(npu, prompt)
        capacities, found = set(), []
        for start in range(0, count, width):
            tokens = text[start : min(start + width, count)]
            found.append(npu.forward(tokens).copy())
            npu.arena.commit(len(tokens))
            capacities.add(npu.arena.capacity)
        differing = np.flatnonzero(np.concatenate(found).argmax(axis=1) != expected.argmax(axis=1))
        result[f"width {width}"] = {
            "capacities": sorted(capacities),
            "margins": ((best - second)[differing] / expected.std()).tolist(),
            "difference": float(np.abs(np.concatenate(found) - expected).max() / expected.std()),
        }
    parents = (-1, 0, 0, 1)
    mask = np.eye(4, dtype=np.bool_)
    for node, parent in enumerate(parents[1:], 1):
        mask[node] |= mask[parent]
    base = len(prompt)
    tree = []
    for each in (npu, bound):
        each.arena.rewind_to(base)
        tree.append(each.forward(text[:4], positions=base + np.array((0, 1, 1, 2)), tree_mask=mask).copy())
    result["tree"] = float(np.abs(tree[0] - tree[1]).max() / tree[1].std())
    return result


def load_contexts(bundle: str) -> list[tuple[str, bool]]:
    """Load a graph again and again while its compiled context is changed; whether the context was used each time."""
    config = SessionConfig(choose_device("npu"), 1)
    opened = open_bundle(Path(bundle))
    name = opened.manifest.variants[0].file
    found = []

    def load(what: str) -> None:
        graphs = CompiledGraphs(opened, config, cache=True)
        graphs.load(name)
        found.append((what, graphs.loaded[name]))

    def folder() -> Path:
        (only,) = (each for each in (cache_folder() / "compiled").iterdir() if not each.name.startswith("."))
        return only

    load("new")
    load("compiled")
    binary = next(folder().glob("*.bin"))
    binary.write_bytes(binary.read_bytes()[:-100])
    load("truncated")
    load("compiled again")
    binary = next(folder().glob("*.bin"))
    binary.write_bytes(bytes(len(binary.read_bytes())))
    write_record(folder())
    load("refused by the plugin")
    load("compiled once more")
    (folder() / "context.onnx").unlink()
    load("without its graph")
    return found


def cached(engine: edgerun.Engine, session: edgerun.Session) -> KVArena:
    """What the prefix cache has of a conversation."""
    found = engine.model.prefixes.longest(session._token_ids())
    return found[0]


def converse(bundle: str, folder: str) -> dict[str, Any]:
    """Begin a conversation on the CPU, continue it on the NPU and end it on the CPU; then plain and drafted texts."""
    path = Path(folder) / "conversation.npz"
    options: dict[str, Any] = {"max_tokens": 3, "temperature": 0.0, "speculation": Speculation.OFF, "ignore_eos": True}
    with edgerun.load(bundle, device="cpu", threads=1) as engine, engine.session() as session:
        session.send(MESSAGES[0], **options)
        session.save(path)
    config = SessionConfig(choose_device("npu"), 1)
    PASS_COSTS.save(model_key(open_bundle(Path(bundle)), config), PassCost({64: {1: 1.0, 4: 1.01}}, stairs=True))
    with edgerun.load(bundle, device="npu", threads=1) as engine:
        result: dict[str, Any] = {"context": engine.model.context}
        with engine.session(resume=path) as session:
            arena = cached(engine, session)
            result["resumed"] = arena.length
            result["plain"] = arena.plain_length
            answer = session.send(MESSAGES[1], **options)
            result["reused"] = answer.stats.reused_tokens
            session.save(path)
        prompt = "the rain in the town on the rain in the town on the"
        raw: dict[str, Any] = {**options, "max_tokens": 24, "raw": True}
        plain = engine.generate(prompt, **raw)
        drafted = engine.generate(prompt, **{**raw, "speculation": Speculation.AUTO})
        result["texts"] = [plain.text, drafted.text]
        result["prefix"] = drafted.stats.reused_tokens
        result["passes"] = [plain.stats.decode_passes, drafted.stats.decode_passes]
        result["accepted"] = drafted.stats.accepted
        table = engine.model.drafters._load_resources().recycled
        learned = [table.candidates(token) for token in range(engine.model.graph_io.vocab_size)]
        result["margins"] = sorted({candidates[0].bucket for candidates in learned if candidates})
    with edgerun.load(bundle, device="cpu", threads=1) as engine, engine.session(resume=path) as session:
        result["back"] = cached(engine, session).length
        result["answer"] = len(session.send("Thanks", **options).text) > 0
    return result
