"""SmoothQuant: outliers of activations move into weights, so that both fit integers (Xiao et al., 2023).

Inputs of a linear are divided by factors where they are computed, and its columns multiplied, as for AWQ. The factors
are max|x_j| ** a / max|w_j| ** (1 - a), with the `a` of each linear whose predicted error is the least; in the original
all linears have one. Integers of 16 bits have no factors: there, they only make the weights worse.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Final

import numpy as np

from ...models.progress import Progress
from ..bundle_content import SourceModel
from ..checkpoint.layer_weights import FusedLinear
from ..checkpoint.layout import head_layout, layer_layout
from ..checkpoint.source import Float32Array
from ..npu.npu_weights import IntegerLinears
from ..quantization.codes import StatisticsOf
from .awq import AwqScales, AwqSource, scalable_linears, scaled_statistics
from .calibration_text import CalibrationText
from .layer_runner import LayerRunner
from .text_batches import pack_texts

_EXPONENTS: Final = tuple(step / 10 for step in range(1, 10))
"""Candidates of a."""
_STAGE: Final = "collecting ranges"


def smoothed_linears(
    model: SourceModel, text: CalibrationText, statistics: StatisticsOf, bits: int, progress: Progress
) -> IntegerLinears:
    """Measure the ranges of the inputs and outputs of linears, and move outliers into the weights.

    Args:
        model: The float model; its layers are dense.
        text: Its calibration text.
        statistics: Statistics of the linears' inputs.
        bits: Bits of inputs and outputs.
        progress: Receives the stage "collecting ranges".

    Raises:
        CheckpointError: A tensor cannot be read.
    """
    config, ranges, scales = model.config, _ranges(model, text, progress), AwqScales()
    for candidate in scalable_linears(config) if bits == 8 else ():
        weights = np.concatenate([model.source.read(name) for name in candidate.linear.weights])
        name, known = candidate.linear.name, statistics(candidate.linear.name)
        of_inputs, of_weights = (_by_group(each, candidate.shared) for each in (ranges[name], weights))
        factors = [of_inputs**exponent / of_weights ** (1 - exponent) for exponent in _EXPONENTS]
        if known is not None:
            error = partial(_predicted_error, weights, ranges[name], known.mean_square)
            candidate.enter(scales, min([np.ones_like(of_inputs), *factors], key=error))
    source, applied = AwqSource(model.source, config, scales), {**scales.inputs, **scales.rows}
    smoothed = {name: each * applied.get(name, np.float32(1)) for name, each in ranges.items()}
    return IntegerLinears(bits, source, scaled_statistics(statistics, scales), smoothed)


def _predicted_error(
    weights: Float32Array, ranges: Float32Array, mean_square: Float32Array, factors: Float32Array
) -> float:
    """Sum of squared errors of the outputs, up to a factor: rounding to steps of d is noise of variance d * d / 12.

    Args:
        weights: [N, K].
        ranges: Of the inputs, [2, K].
        mean_square: E[x_j ** 2], [K].
        factors: Of the columns, [K].
    """
    scaled, input_step = weights * factors, np.ptp(ranges / factors) / 255
    weight_steps = np.abs(scaled).max(axis=1) / 127
    of_weights = np.square(weight_steps).sum() * (mean_square / factors**2).sum()
    return float(np.square(scaled).sum() * input_step**2 + of_weights)


def _by_group(values: Float32Array, shared: tuple[int, int]) -> Float32Array:
    """The largest magnitude of values [n, K] in the channels that share a factor, for each channel [K]."""
    groups = np.abs(values).max(axis=0).reshape(-1, *shared).max(axis=1, keepdims=True)
    # Channels of less than a thousandth of the largest one are noise.
    floored = np.maximum(groups, np.float32(1e-3) * groups.max() + np.float32(1e-6))
    return np.broadcast_to(floored, (len(groups), *shared)).reshape(-1)


def _ranges(model: SourceModel, text: CalibrationText, progress: Progress) -> dict[str, Float32Array]:
    """Run the float model over the calibration part of a text; returns ranges as in `IntegerLinears`."""
    config, runner, batches = model.config, LayerRunner(model), pack_texts(text.calibration)
    # As many matrices as a dense layer has linears are in memory.
    matrix, found = lru_cache(4)(runner.matrix), dict[str, Float32Array]()

    def add(linear: FusedLinear, inputs: Float32Array) -> None:
        outputs = np.split(inputs @ matrix(linear).T, np.cumsum(linear.rows)[:-1], axis=1)
        for name, values in zip((linear.name, *linear.weights), (inputs, *outputs), strict=True):
            least, largest = found.get(name, np.zeros((2, 1), np.float32))
            found[name] = np.stack([np.minimum(least, values.min(axis=0)), np.maximum(largest, values.max(axis=0))])

    hidden = [runner.embed(batch) for batch in batches]
    for index in range(config.layers):
        for number, batch in enumerate(batches):
            hidden[number], inputs, _ = runner.captured(index, hidden[number], batch, matrix)
            for linear in layer_layout(config, index).linears:
                add(linear, inputs[linear.name][batch.filled])
        progress(_STAGE, (index + 1) / config.layers)
    for batch, states in zip(batches, hidden, strict=True):
        # The runner divides by the soft cap before the head, the static graphs do after it.
        add(head_layout(config), runner.head_inputs(states[batch.filled]) * np.float32(config.logits_softcap or 1))
    return found
