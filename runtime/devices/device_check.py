"""Compares a device with the CPU when a model is loaded there: one plain pass, and one token tree.

A device may load a graph and compute something else: WebGPU's attention ignores the positions of a tree where it also
rotates, some adapters lack 16-bit floats, some kernels lack zero points. The reference is the model's own graph on the
CPU, at accuracy level 0, so that nothing but float arithmetic differs. The result is kept until the device, its driver,
its plugin or ONNX Runtime change.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ...errors import DeviceError, EdgeError
from ...models.bundle import Bundle
from ...models.json_file import Count
from ...models.manifest import DeviceKind
from ...models.onnx_file.model_messages import read_model
from ...version import __version__
from ..gpu_graph.expanded_codes import compute_in_float
from ..graph.bound_graph import BoundGraph
from ..graph.device_loading import device_failure
from ..graph.model_metadata import metadata_of
from ..graph.session import DecoderGraph, GraphSession, SessionConfig
from ..measure.measurement_store import MeasurementKey, MeasurementStore, model_key
from ..speculation.tree import Tree
from .providers import cpu_device, device_identity

_log: Final = logging.getLogger(__name__)
Floats: TypeAlias = npt.NDArray[np.float32]

_PREFIX: Final = 12
"""Tokens of the prompt, fewer if the context is short."""
_TOKEN_STRIDE: Final = 7919
"""Difference between consecutive token ids, which spreads them over the vocabulary."""
_CONTEXT: Final = 64
_WIDE: Final = 40
"""Tokens of a wide pass: attention kernels for prefills begin at 32."""
_NARROW: Final = 16
"""Largest width of passes on a device that computes wide ones wrongly."""
_TREE: Final = Tree((0, 1, 2, 3), (-1, 0, 0, 1), (1.0,) * 4, (0,) * 4)
"""An anchor, two children of it, and a child of the first one."""
_FLOAT_TOLERANCE: Final = 0.01
"""Largest difference of 32-bit floats from the CPU, as the root mean square over the vocabulary in standard deviations
of the CPU's logits. Float arithmetic in another order gives less than 0.00001, TF32 about 0.001; a wrong position, mask
or weight gives 0.1 to 1.4."""
_HALF_TOLERANCE: Final = 0.1
"""The same of 16-bit floats, whose rounding gives 0.001 to 0.03."""


@dataclass(frozen=True)
class DeviceCheck:
    """How far a device is from the CPU."""

    plain: float | None
    """Largest difference of the plain passes, in standard deviations of the logits; None where the device gives NaN."""
    tree: float | None
    """The same of the tree; None also if the graph has no trees, or the device cannot load the one for trees."""
    plain_correct: bool
    tree_correct: bool
    wide_correct: bool
    """Whether a pass over many tokens is right; some attention kernels for these are wrong on some adapters."""
    on_cpu: Mapping[str, Count] = field(default_factory=dict)
    """Number of nodes that the device left to the CPU, by operator."""


DEVICE_CHECKS: Final = MeasurementStore("device-checks", 2, DeviceCheck)
"""How far devices are from the CPU, by model and device."""


def device_check_key(bundle: Bundle, config: SessionConfig) -> MeasurementKey:
    """The key of a model's check on a device; it does not depend on the number of threads."""
    alone = replace(config, threads=1, shares_cores=False)
    return model_key(bundle, alone, *device_identity(config.device), __version__)


def check_device(graph: DecoderGraph, bundle: Bundle, config: SessionConfig, *, cache: bool) -> DeviceCheck:
    """Compare a loaded graph with the CPU; trees are disabled on it where they are wrong.

    Args:
        graph: the graph as it was loaded on the device.
        bundle: its model.
        config: how the graph is run.
        cache: whether to use an earlier result, and to keep this one.

    Raises:
        DeviceError: the device cannot run the graph, or plain passes give other logits than on the CPU.
    """
    key, has_trees = device_check_key(bundle, config), graph.graph_io.supports_trees
    check = DEVICE_CHECKS.load(key) if cache else None
    if check is None:
        check = compare_with_cpu(graph, bundle, config)
        if cache:
            DEVICE_CHECKS.save(key, check)
    device = config.device
    # Graphs of fixed shapes cannot run in other parts than they were made for.
    if not check.plain_correct or (device.kind is DeviceKind.NPU and not check.wide_correct):
        raise DeviceError(
            f"{device} computes {bundle.folder.name} wrongly: logits differ from the CPU's by "
            f"{'NaN' if check.plain is None else format(check.plain, '.2g')} of their standard deviation",
            "update its driver and plugin, or run the model on the CPU: --device cpu",
        )
    if has_trees and not check.tree_correct:
        _log.warning("%s cannot compute token trees of %s correctly; drafts are chains", device, bundle.folder.name)
        graph.disable_trees()
    if not check.wide_correct:
        _log.warning("%s computes wide passes of %s wrongly; they run in parts", device, bundle.folder.name)
        graph.limit_width(_NARROW)
    return check


def compare_with_cpu(graph: DecoderGraph, bundle: Bundle, config: SessionConfig) -> DeviceCheck:
    """Run the same tokens on the device and on the CPU.

    Raises:
        BundleError: the CPU cannot run the model.
        DeviceError: the device cannot run the graph.
    """
    limit = min(_CONTEXT, bundle.context or _CONTEXT, graph.graph_io.capacity or _CONTEXT)
    tree = graph.graph_io.supports_trees
    try:
        found = _run(graph, limit, trees=1 if tree else 0)
    except EdgeError as error:
        if tree and not graph.graph_io.supports_trees:  # the device could not load the graph that trees run in
            _log.warning("%s", error)
            return replace(compare_with_cpu(graph, bundle, config), tree_correct=False)
        cause = error.__cause__
        raise device_failure(cause if isinstance(cause, Exception) else error, config.device, bundle.graph) from error
    # The trees of the CPU: the right one, one whose positions count slots, one without a mask.
    plain_passes, one_more, *trees, wide_pass = found
    expected_plain, expected_more, *expected_trees, expected_wide = _run(
        _reference(bundle, config), limit, trees=3 if tree else 0
    )
    dtypes = {tensor.tensor_type.dtype for tensor in graph.graph_io.cache} | {graph.graph_io.logits.dtype}
    is_half = np.dtype(np.float16) in dtypes or config.device.kind is DeviceKind.NPU
    tolerance = _HALF_TOLERANCE if is_half else _FLOAT_TOLERANCE
    plain = max(_distance(plain_passes, expected_plain), _distance(one_more, expected_more))
    distance, nearer = None, True
    if tree:
        distance = _distance(trees[0], expected_trees[0])
        # What a small difference means depends on the model: ignoring the positions may change little. So the device
        # must also be nearer to the right tree than to a wrong one, unless rounding hides which it is.
        nearer = all(
            distance < _distance(trees[0], wrong) or _distance(expected_trees[0], wrong) <= 2 * plain
            for wrong in expected_trees[1:]
        )
    # Comparisons with NaN, which JSON cannot hold, are false.
    return DeviceCheck(
        None if np.isnan(plain) else plain,
        None if distance is None or np.isnan(distance) else distance,
        plain_correct=plain <= tolerance,
        tree_correct=nearer and (distance is None or distance <= tolerance),
        wide_correct=_distance(wide_pass, expected_wide) <= tolerance,
        on_cpu=graph.on_cpu,
    )


def _reference(bundle: Bundle, config: SessionConfig) -> GraphSession:
    """The model's own graph on the CPU, computing with floats only."""
    model = read_model(bundle.graph)
    compute_in_float(model)
    cpu = SessionConfig(cpu_device(), config.threads, config.power)
    return GraphSession(bundle.graph, cpu, metadata_of(bundle), model=model.SerializeToString())


def _run(graph: DecoderGraph, limit: int, *, trees: int) -> list[Floats]:
    """Logits of the prompt's last token, of one more token, of as many trees, and of the last token of a wide pass.

    Returns:
        float32 `[n, V]` each.
    """
    bound = graph.bind(graph.arena(limit))
    bound.whole_logits = True
    prefix = max(min(_PREFIX, limit - 1 - len(_TREE)), 1)
    token_ids = (np.arange(prefix + 1 + len(_TREE)) * _TOKEN_STRIDE + 1) % graph.graph_io.input_vocab
    found = [_forward(bound, token_ids[:prefix], logits_for=(prefix - 1,))]
    bound.arena.commit(prefix)
    found.append(_forward(bound, token_ids[prefix : prefix + 1]))
    bound.arena.commit(1)
    mask, positions = _TREE.mask, prefix + 1 + _TREE.depths
    in_a_row = prefix + 1 + np.arange(len(_TREE))
    forms = ((positions, mask), (in_a_row, mask), (positions, np.tri(len(_TREE), dtype=np.bool_)))
    for wanted_positions, tree_mask in forms[:trees]:
        found.append(_forward(bound, token_ids[prefix + 1 :], positions=wanted_positions, tree_mask=tree_mask))
    bound.arena.rewind_to(0)
    wide = np.arange(min(_WIDE, limit)) * _TOKEN_STRIDE % graph.graph_io.input_vocab
    found.append(_forward(bound, wide, logits_for=(wide.size - 1,)))
    return found


def _forward(bound: BoundGraph, tokens: npt.NDArray[np.int64], **arguments: Any) -> Floats:
    logits: Floats = bound.forward(tokens, **arguments).copy()
    return logits


def _distance(first: Floats, second: Floats) -> float:
    """Largest root mean square over the rows, in standard deviations of `second`; NaN if either holds NaN."""
    with np.errstate(all="ignore"):  # a device may give any value
        rms = np.sqrt(np.mean(np.square(first.astype(np.float64) - second), axis=1))
        spread = second.std(axis=1, dtype=np.float64)
        return float((rms / np.maximum(spread, np.finfo(np.float64).tiny)).max())
