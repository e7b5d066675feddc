"""Opens a model's graph, using prepacked weights and probe results from the cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from ...models.bundle import Bundle
from ...models.device_kind import DeviceKind
from ..measure.measurement_store import MeasurementStore, model_key
from .model_metadata import metadata_of
from .prepacked import prepacked_graph
from .probe import ProbeResult
from .session import GraphSession, SessionConfig

_PROBES: Final = MeasurementStore("probes", 2, ProbeResult.from_json)


def open_graph(bundle: Bundle, config: SessionConfig, *, cache: bool) -> GraphSession:
    """Load the graph of a model.

    Args:
        bundle: the model.
        config: how to run it.
        cache: whether to keep weights packed for this machine, and the result of probing the graph, on disk.

    Raises:
        BundleError: it is not a model that edge-run can decode with.
    """
    graph = graph_to_load(bundle, config, cache=cache)
    metadata = metadata_of(bundle)
    key = model_key(bundle, config)
    stored = _PROBES.load(key) if cache and metadata.operators is not None else None
    session = GraphSession(graph, config, replace(metadata, probe_result=stored))
    if cache and session.probe_result is not None and session.probe_result != stored:
        _PROBES.save(key, session.probe_result)
    return session


def graph_to_load(bundle: Bundle, config: SessionConfig, *, cache: bool) -> Path:
    """The file to load for a model's graph: its prepacked copy on the CPU if caching is on, else the original."""
    prepack = cache and config.device.kind is DeviceKind.CPU
    return prepacked_graph(bundle) if prepack else bundle.graph
