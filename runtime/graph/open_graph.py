"""A model's graph, loaded as quickly as what is kept about it in the cache allows."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from ...models.bundle import Bundle
from ...models.device_kind import DeviceKind
from ..measure.stored_measurements import keep_measurement, measurement_file, read_measurement
from .metadata import metadata_of
from .prepacked import prepacked_graph
from .probe import ProbeResult
from .session import RUNTIME_VERSION, GraphSession, SessionConfig, write_prepacked

_FORM: Final = 1


def open_graph(bundle: Bundle, config: SessionConfig, *, cache: bool) -> GraphSession:
    """Load the graph of a model.

    Args:
        bundle: the model.
        config: how to run it.
        cache: whether weights packed for this machine, and what running the graph showed of its ports, are kept on
            disk.

    Raises:
        BundleError: it is not a model that edge-run can decode with.
    """
    graph = packed_graph(bundle, config, cache=cache)
    metadata = metadata_of(bundle)
    known = _kept(bundle, config) if cache and metadata.operators is not None else None
    session = GraphSession(graph, config, replace(metadata, reading=known))
    if cache and session.reading is not None and session.reading != known:
        with suppress(OSError):
            keep_measurement(_file(bundle, config), session.reading.to_json(), bundle, config)
    return session


def packed_graph(bundle: Bundle, config: SessionConfig, *, cache: bool) -> Path:
    """The file to load for a model's graph: its twin packed for this machine where there is to be one."""
    packed = cache and config.device.kind is DeviceKind.CPU
    return prepacked_graph(bundle, RUNTIME_VERSION, write_prepacked) if packed else bundle.graph


def _kept(bundle: Bundle, config: SessionConfig) -> ProbeResult | None:
    try:
        return ProbeResult.from_json(read_measurement(_file(bundle, config)))
    except (OSError, ValueError):
        return None


def _file(bundle: Bundle, config: SessionConfig) -> Path:
    return measurement_file("ports", _FORM, bundle, config)
