"""The graph that a GPU loads: the bundle's own variant, one made earlier, or one that is made now."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import Final

from ...models.bundle import GRAPH_NAME, Bundle
from ...models.graph_variant import DeviceKind
from ...models.regular_file import read_regular
from ..graph.packed_files import is_intact, packed_folder, written_folder
from ..graph.session import SessionConfig
from .rewriting import REWRITING, form_of

_MAX_CACHED_BYTES: Final = 64 << 20
"""Largest graph that is cached; a larger one has its weights inside and is made again at every load."""


def variant_for(bundle: Bundle, config: SessionConfig, *, cache: bool, plain: bool = False) -> Path | bytes:
    """The graph that a GPU loads for a model.

    Args:
        bundle: the model, of any tool.
        config: the device, which decides on the form of the graph.
        cache: whether to keep a graph that is made here for the next load.
        plain: whether it is to serve passes of consecutive tokens only; see `has_plain_form`.

    Returns:
        A file beside the weights, or a model as bytes, whose weights lie in the folder of `bundle.graph`. The model's
        own graph if no variant can be made of it.

    Raises:
        BundleError: the model's graph is not an ONNX model.
    """
    provider, folder = config.device.provider, None
    form = form_of(provider)
    if bundle.manifest is not None and bundle.graph.name == GRAPH_NAME:
        for variant in bundle.manifest.variants:
            fits = variant.device is DeviceKind.GPU and variant.precision is form.precision
            if fits and variant.plain is plain and (not variant.providers or provider in variant.providers):
                return bundle.graph.parent / variant.file
    if cache and bundle.graph.stat().st_size <= _MAX_CACHED_BYTES:
        digest = hashlib.sha256(read_regular(bundle.graph, _MAX_CACHED_BYTES)).hexdigest()
        folder = packed_folder("gpu-graphs", digest, REWRITING, form, plain)
        with suppress(OSError):  # another process may remove it meanwhile
            if is_intact(folder):
                return read_regular(folder / GRAPH_NAME, 2 * _MAX_CACHED_BYTES)
    # Both import protobuf, which takes a while, and which programs on a CPU do not need.
    from ...models.onnx_file.graph_editor import CannotRewriteError  # noqa: PLC0415
    from .rewriting import gpu_graph  # noqa: PLC0415

    try:
        model = gpu_graph(bundle.graph, form, plain=plain)
    except CannotRewriteError:
        return bundle.graph
    if folder is not None:
        # With a read-only cache the graph is made again next time.
        with suppress(OSError), written_folder(folder, len(model)) as staging:
            (staging / GRAPH_NAME).write_bytes(model)
    return model


def has_plain_form(config: SessionConfig) -> bool:
    """Whether passes of consecutive tokens are faster on a graph of their own, without a bias."""
    return config.device.kind is DeviceKind.GPU and form_of(config.device.provider).has_plain_form
