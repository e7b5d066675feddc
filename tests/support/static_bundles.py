"""Bundles with graphs of fixed shapes, and the graph that theirs have to agree with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx

from edgerun.export import INT4, ExportRecipe
from edgerun.export.check.parity import with_float_activations
from edgerun.models.bundle import open_bundle
from edgerun.runtime.decode import DecodeLimits, decode
from edgerun.runtime.devices.providers import cpu_device
from edgerun.runtime.graph.model_metadata import metadata_of
from edgerun.runtime.graph.session import DecoderGraph, GraphSession, SessionConfig
from edgerun.runtime.graph.static_variants import StaticGraphs
from edgerun.runtime.sampling.sampler import Sampler, SamplingParams
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
