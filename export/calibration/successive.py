"""Rounding layer by layer: each unit makes up for what rounding the units before it has done to its inputs.

GPTQ by statistics of the float model takes the inputs X as they would be. In the rounded model a unit meets other
inputs Y, and what it should give is still W X. The weights that come nearest to that from Y are

    T = W + W (X YT - Y YT) (Y YT + damping) ** -1

and what lies half way from W to T is rounded, with the second moments of Y (after GPTAQ, Li et al., 2025, which also
stops short of T: it fits the text at hand). How a unit is rounded so depends on the formats of all before it; this
comes last, and plans are searched for with units that are rounded by themselves.

The text goes through the float model once, and through the rounded one three times: before each unit of a half layer,
and behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from ...models.manifest import Method, WeightFormat
from ...models.progress import Progress
from ..allocation.quantized_weights import QuantizedLinearStore
from ..checkpoint.config import DecoderConfig
from ..checkpoint.layout import FusedLinear, embedding_layout, head_layout, layer_layout
from ..checkpoint.prefetch import in_order
from ..checkpoint.source import Float32Array, ModelSource, ModelSourceWrapper, QuantizedRows, RowRange
from ..quantization.input_statistics import CorrectionTarget, InputStatistics
from ..quantization.methods import QUANTIZERS
from .layer_runner import LayerRunner, WeightsOf
from .text_packing import Batch, packed
from .text_split import CalibrationText

Float64Array = npt.NDArray[np.float64]

_DAMPING: Final = 0.05
"""Of the moments' diagonal, as a share of its mean: directions that the text hardly has are left alone."""
_SHARE: Final = 0.5
"""Of the way to what is best on this text."""

_Captured = tuple[Float32Array, dict[str, Float32Array]]
"""Hidden states after half a layer, and its units' inputs by their names."""
_Half = Callable[[list[Float32Array], int, WeightsOf], _Captured]
"""Half a layer, of one of several batches of hidden states."""


class SuccessiveSource(ModelSourceWrapper):
    """Reads like the model it is made of; a unit that has targets is rounded to those."""

    def __init__(
        self, source: ModelSource, correction_targets: Callable[[FusedLinear], CorrectionTarget] | None = None
    ) -> None:
        """`correction_targets` gives what linears without targets should compute; None weights all inputs alike."""
        super().__init__(source)
        self._aims = correction_targets
        self._targets: dict[str, tuple[Float32Array, InputStatistics]] = {}

    def correction_target(self, linear: FusedLinear, targets: Float32Array, inputs: InputStatistics) -> None:
        """From now on round this unit alone to targets [N, K], by its inputs in the rounded model."""
        parts = np.split(targets, np.cumsum(linear.rows)[:-1])
        self._targets = {name: (part, inputs) for name, part in zip(linear.weights, parts, strict=True)}

    def aim_of(self, linear: FusedLinear) -> CorrectionTarget:
        """What a unit should compute, by its targets if it has them."""
        if linear.weights[0] in self._targets:
            targets = [self._targets[name] for name in linear.weights]
            return CorrectionTarget(np.concatenate([part for part, _ in targets]), targets[0][1])
        if self._aims is not None:
            return self._aims(linear)
        return CorrectionTarget(np.concatenate([self._source.read(name) for name in linear.weights]), None)

    def quantized(self, rows: RowRange, form: WeightFormat) -> QuantizedRows:
        """Some rows of a matrix in few bits."""
        if rows.name not in self._targets:
            return self._source.quantized(rows, form)
        targets, inputs = self._targets[rows.name]
        return QUANTIZERS[form.method or Method.RTN](targets[rows.start : rows.stop], form, inputs)


def round_successively(
    source: ModelSource,
    config: DecoderConfig,
    text: CalibrationText,
    plan: Mapping[str, WeightFormat],
    folder: Path,
    context: int,
    progress: Progress,
    correction_targets: Callable[[FusedLinear], CorrectionTarget] | None = None,
) -> QuantizedLinearStore:
    """Round all units of a plan, in the order of the graph; those of GPTQ to targets.

    Args:
        source: the model, perhaps folded; what has no targets is rounded by its `quantized`.
        config: its numbers.
        text: the calibration part is read.
        plan: format by unit.
        folder: of the store, for this plan alone. Units that an interrupted run has rounded are not rounded again.
        context: positions the exported graph will serve.
        progress: hears the stage "rounding".
        aims: what repaired units without targets should compute; see `QuantizedLinearStore`.

    Returns:
        The units so rounded.

    Raises:
        CheckpointError: a tensor cannot be read.
        InputError: the model has experts.
        OSError: the disk refused a write.
    """
    aimed = SuccessiveSource(source, correction_targets)
    store = QuantizedLinearStore(aimed, config, folder, aimed.aim_of)
    passes = _Passes(LayerRunner(source, config, context), packed(text.calibration), aimed, store, plan)
    for index in range(config.layers):
        progress("rounding", index / (config.layers + 1))
        passes.round_layer(index)
    passes.round_head()
    progress("rounding", 1.0)
    return store


class _Passes:
    """The text on its way through the float and the rounded model, both as far as all units are rounded."""

    def __init__(
        self,
        runner: LayerRunner,
        batches: list[Batch],
        aimed: SuccessiveSource,
        store: QuantizedLinearStore,
        plan: Mapping[str, WeightFormat],
    ) -> None:
        """Round the embedding, and begin behind it."""
        self._runner = runner
        self._batches = batches
        self._aimed = aimed
        self._store = store
        self._plan = plan
        linear = embedding_layout(runner.config)
        store.make(linear, plan[linear.name])
        rounded = self._rounded(linear)
        self._exact = [runner.embed(batch) for batch in batches]
        self._changed = [runner.embed(batch, rounded) for batch in batches]

    def round_layer(self, index: int) -> None:
        """Round the units of a layer, and go behind it."""
        layer = layer_layout(self._runner.config, index)
        matrices = {linear.name: self._runner.matrix(linear) for linear in layer.linears}

        def attention(states: list[Float32Array], number: int, weights_of: WeightsOf) -> _Captured:
            return self._runner.attention_captured(index, states[number], self._batches[number], weights_of)

        def feed_forward(states: list[Float32Array], number: int, weights_of: WeightsOf) -> _Captured:
            return self._runner.feed_forward_captured(index, states[number], weights_of)

        self._round_half(attention, (layer.qkv, layer.output), matrices)
        self._round_half(feed_forward, (layer.gate_up, layer.down), matrices)

    def round_head(self) -> None:
        """Round the head, which nothing comes after."""
        linear = head_layout(self._runner.config)
        if self._aims(linear) and not self._runner.config.tied_head:
            inputs = (
                [self._runner.head_inputs(states[batch.filled]) for states in (exact, changed)]
                for exact, changed, batch in zip(self._exact, self._changed, self._batches, strict=True)
            )
            self._aim(linear, self._runner.matrix(linear), inputs)
        self._store.make(linear, self._plan[linear.name])

    def _round_half(self, half: _Half, linears: tuple[FusedLinear, ...], matrices: dict[str, Float32Array]) -> None:
        numbers = range(len(self._batches))
        exact = list(in_order(lambda number: half(self._exact, number, lambda linear: matrices[linear.name]), numbers))
        current = dict(matrices)
        for linear in linears:
            if self._aims(linear):
                changed = in_order(lambda number: half(self._changed, number, lambda each: current[each.name]), numbers)
                inputs = (
                    [found[linear.name][batch.filled] for _, found in pair]
                    for pair, batch in zip(zip(exact, changed, strict=True), self._batches, strict=True)
                )
                self._aim(linear, matrices[linear.name], inputs)
            self._store.make(linear, self._plan[linear.name])
            current[linear.name] = self._rounded(linear)
        behind = in_order(lambda number: half(self._changed, number, lambda each: current[each.name])[0], numbers)
        self._exact, self._changed = [states for states, _ in exact], list(behind)

    def _aims(self, linear: FusedLinear) -> bool:
        return self._plan[linear.name].method is Method.GPTQ

    def _aim(self, linear: FusedLinear, weights: Float32Array, inputs: Iterator[list[Float32Array]]) -> None:
        """Give a unit its targets, by its inputs in both models."""
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
        shift = _SHARE * np.linalg.solve(damped, (weights @ mixed).T.astype(np.float64))
        moments /= np.float32(tokens)
        known = InputStatistics(np.diagonal(moments).copy(), (magnitudes / tokens).astype(np.float32), moments, tokens)
        self._aimed.correction_target(linear, weights + shift.T.astype(np.float32), known)

    def _rounded(self, linear: FusedLinear) -> Float32Array:
        return self._store.weights(linear, self._plan[linear.name])
