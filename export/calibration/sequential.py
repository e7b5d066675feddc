"""Sequential GPTQ: each linear compensates for quantization of those before it.

GPTQ with statistics of the float model takes the inputs X as they would be without quantization. In the quantized model
a linear gets other inputs Y, and its output should still be W X. The weights whose outputs of Y are nearest to that are

    T = W + W (X YT - Y YT) (Y YT + damping) ** -1

The point half way from W to T is quantized with the second moments of Y. GPTAQ (Li et al., 2025) also stops short of T,
which is fitted to the text at hand. The result for a linear depends on the formats of all linears before it, so this is
the last step; plans are searched for with independently quantized linears.

The text runs through the float model once, and through the quantized one three times: before each linear of a half
layer, and after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from ...models.manifest import Method, WeightFormat
from ...models.progress import Progress
from ..allocation.quantized_weights import QuantizedLinearStore
from ..bundle_content import SourceModel
from ..checkpoint.layer_weights import FusedLinear, QuantPlan
from ..checkpoint.layout import embedding_layout, head_layout, layer_layout
from ..checkpoint.source import Float32Array, ModelSource, QuantizedRows, RowRange, in_order
from ..quantization.codes import CorrectionTarget, InputStatistics
from ..quantization.methods import QUANTIZERS
from .calibration_text import CalibrationText
from .layer_runner import LayerRunner, WeightsOf
from .text_batches import Batch, pack_texts

Float64Array = npt.NDArray[np.float64]

STAGE: Final = "quantizing"
_DAMPING: Final = 0.05
"""Damping relative to the mean of the moments' diagonal: directions that are rare in the text are left alone."""
_TARGET_SHARE: Final = 0.5
"""Share of the way from W to T."""

_Captured = tuple[Float32Array, dict[str, Float32Array]]
"""Hidden states after half a layer, and the inputs of its linears by their names."""
_HalfLayer = Callable[[list[Float32Array], int, WeightsOf], _Captured]
"""Runs half a layer on one of several batches of hidden states."""
_CorrectionTargets = Callable[[FusedLinear], CorrectionTarget]


class SequentialSource(ModelSource):
    """Wraps a source, and quantizes one linear at a time to target weights."""

    def __init__(self, source: ModelSource, correction_targets: _CorrectionTargets | None = None) -> None:
        """`correction_targets` gives the low-rank correction targets of linears without target weights."""
        super().__init__(source)
        self._correction_targets = correction_targets
        self._targets: dict[str, tuple[Float32Array, InputStatistics]] = {}

    def set_target(self, linear: FusedLinear, weights: Float32Array, inputs: InputStatistics) -> None:
        """Quantize this linear, and no other, to weights [N, K], by its inputs in the quantized model."""
        parts = np.split(weights, np.cumsum(linear.rows)[:-1])
        self._targets = {name: (part, inputs) for name, part in zip(linear.weights, parts, strict=True)}

    def correction_target(self, linear: FusedLinear) -> CorrectionTarget:
        """Weights and inputs that a low-rank correction approximates; the target weights if the linear has them."""
        if linear.weights[0] in self._targets:
            targets = [self._targets[name] for name in linear.weights]
            return CorrectionTarget(np.concatenate([part for part, _ in targets]), targets[0][1])
        if self._correction_targets is not None:
            return self._correction_targets(linear)
        return CorrectionTarget(np.concatenate([self._source.read(name) for name in linear.weights]), None)

    def quantized(self, rows: RowRange, weight_format: WeightFormat) -> QuantizedRows:
        """Quantize rows of a matrix, to the target weights if it has them."""
        if rows.name not in self._targets:
            return self._source.quantized(rows, weight_format)
        weights, inputs = self._targets[rows.name]
        quantizer = QUANTIZERS[weight_format.method or Method.RTN]
        return quantizer(weights[rows.start : rows.stop], weight_format, inputs)


def quantize_sequentially(
    model: SourceModel,
    text: CalibrationText,
    plan: QuantPlan,
    folder: Path,
    progress: Progress,
    correction_targets: _CorrectionTargets | None = None,
) -> QuantizedLinearStore:
    """Quantize all linears of a plan in the order of the graph; linears of GPTQ are quantized to target weights.

    Args:
        model: The model, AWQ scaling applied; its source quantizes the linears without target weights.
        text: The calibration text.
        plan: Format of each linear, by its name.
        folder: Folder of the store, for this plan alone; linears that an interrupted run has quantized are kept.
        progress: Receives the stage "quantizing".
        correction_targets: See `QuantizedLinearStore`.

    Returns:
        The store with the quantized linears.

    Raises:
        CheckpointError: A tensor cannot be read.
        OSError: The disk refused a write.
    """
    source = SequentialSource(model.source, correction_targets)
    store = QuantizedLinearStore(source, model.config, folder, source.correction_target)
    quantizer = _SequentialQuantizer(LayerRunner(model), pack_texts(text.calibration), source, store, plan)
    layers = model.config.layers
    for index in range(layers):
        progress(STAGE, index / (layers + 1))
        quantizer.quantize_layer(index)
    quantizer.quantize_head()
    progress(STAGE, 1.0)
    return store


class _SequentialQuantizer:
    """Runs the text through the float and the quantized model side by side, up to the linear to quantize next."""

    def __init__(
        self,
        runner: LayerRunner,
        batches: list[Batch],
        source: SequentialSource,
        store: QuantizedLinearStore,
        plan: QuantPlan,
    ) -> None:
        """Quantize the embedding, and compute the hidden states after it."""
        self._runner = runner
        self._batches = batches
        self._source = source
        self._store = store
        self._plan = plan
        linear = embedding_layout(runner.config)
        store.make(linear, plan[linear.name])
        quantized = self._dequantized(linear)
        self._exact = [runner.embed(batch) for batch in batches]
        self._changed = [runner.embed(batch, quantized) for batch in batches]

    def quantize_layer(self, index: int) -> None:
        """Quantize the linears of a layer, and compute the hidden states after it."""
        layer = layer_layout(self._runner.config, index)
        matrices = {linear.name: self._runner.matrix(linear) for linear in layer.linears}

        def mixer(states: list[Float32Array], number: int, weights_of: WeightsOf) -> _Captured:
            return self._runner.mixer(index, states[number], self._batches[number], weights_of, capture=True)

        def feed_forward(states: list[Float32Array], number: int, weights_of: WeightsOf) -> _Captured:
            return self._runner.feed_forward(index, states[number], weights_of, capture=True)[:2]

        self._quantize_half(mixer, layer.mixer_linears, matrices)
        self._quantize_half(feed_forward, layer.feed_forward_linears, matrices)

    def quantize_head(self) -> None:
        """Quantize the head, the last linear."""
        linear = head_layout(self._runner.config)
        if self._has_target(linear) and not self._runner.config.tied_head:
            inputs = (
                [self._runner.head_inputs(states[batch.filled]) for states in (exact, changed)]
                for exact, changed, batch in zip(self._exact, self._changed, self._batches, strict=True)
            )
            self._set_target(linear, self._runner.matrix(linear), inputs)
        self._store.make(linear, self._plan[linear.name])

    def _quantize_half(
        self, half: _HalfLayer, linears: tuple[FusedLinear, ...], matrices: dict[str, Float32Array]
    ) -> None:
        numbers = range(len(self._batches))
        exact = list(in_order(lambda number: half(self._exact, number, lambda linear: matrices[linear.name]), numbers))
        current = dict(matrices)
        for linear in linears:
            if self._has_target(linear):
                changed = in_order(lambda number: half(self._changed, number, lambda each: current[each.name]), numbers)
                inputs = (
                    [found[linear.name][batch.filled] for _, found in pair]
                    for pair, batch in zip(zip(exact, changed, strict=True), self._batches, strict=True)
                )
                self._set_target(linear, matrices[linear.name], inputs)
            self._store.make(linear, self._plan[linear.name])
            current[linear.name] = self._dequantized(linear)
        after = in_order(lambda number: half(self._changed, number, lambda each: current[each.name])[0], numbers)
        self._exact, self._changed = [states for states, _ in exact], list(after)

    def _has_target(self, linear: FusedLinear) -> bool:
        # Quantized experts get other tokens too. Each is quantized by the statistics of its tokens in the float model.
        return self._plan[linear.name].method is Method.GPTQ and not linear.experts

    def _set_target(self, linear: FusedLinear, weights: Float32Array, inputs: Iterator[list[Float32Array]]) -> None:
        """Compute a linear's target weights from its inputs in both models, a pair [tokens, K] for each batch."""
        moments, mixed = (np.zeros((linear.columns, linear.columns), np.float32) for _ in range(2))
        magnitudes, tokens = np.zeros(linear.columns), 0
        for exact, changed in inputs:
            moments += changed.T @ changed
            mixed += exact.T @ changed
            magnitudes += np.abs(changed).sum(axis=0, dtype=np.float64)
            tokens += len(changed)
        mixed -= moments
        damped = moments.astype(np.float64)
        damped[np.diag_indices(linear.columns)] += _DAMPING * np.diagonal(damped).mean() + np.finfo(np.float64).tiny
        shift = _TARGET_SHARE * np.linalg.solve(damped, (weights @ mixed).T.astype(np.float64))
        moments /= np.float32(tokens)
        known = InputStatistics(np.diagonal(moments).copy(), (magnitudes / tokens).astype(np.float32), moments)
        self._source.set_target(linear, weights + shift.T.astype(np.float32), known)

    def _dequantized(self, linear: FusedLinear) -> Float32Array:
        return self._store.weights(linear, self._plan[linear.name])
