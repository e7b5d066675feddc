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

from collections.abc import Iterator
from typing import Final

import numpy as np

from ...models.manifest import Method
from ...models.progress import Progress
from ..allocation.quantized_weights import QuantizedLinearStore, Target
from ..bundle_content import SourceModel
from ..checkpoint.layer_weights import FusedLinear, QuantPlan
from ..checkpoint.layout import embedding_layout, head_layout, layer_layout
from ..checkpoint.source import Float32Array, in_order
from ..quantization.codes import InputStatistics, second_moments
from .calibration_text import CalibrationText
from .collect_statistics import InputSums
from .layer_runner import LayerRunner
from .output_moments import OutputMoments
from .text_batches import pack_texts

STAGE: Final = "quantizing"
_DAMPING: Final = 0.05
"""Damping relative to the mean of the moments' diagonal: directions that are rare in the text are left alone."""
_TARGET_SHARE: Final = 0.5
"""Share of the way from W to T."""


def quantize_sequentially(
    model: SourceModel,
    text: CalibrationText,
    plan: QuantPlan,
    store: QuantizedLinearStore,
    progress: Progress,
    outputs: OutputMoments | None = None,
) -> None:
    """Quantize all linears of a plan in the order of the graph; linears of GPTQ are quantized to target weights.

    Args:
        model: The model, AWQ scaling applied.
        text: The calibration text.
        plan: Format of each linear, by its name.
        store: Receives the linears. It is for this plan alone; linears that an interrupted run has quantized are kept.
        progress: Receives the stage "quantizing".
        outputs: Second moments of the gradients at the linears' outputs, by which rows compensate for each other too;
            None for columns alone.

    Raises:
        CheckpointError: A tensor cannot be read.
        OSError: The disk refused a write.
    """
    quantizer, layers = _SequentialQuantizer(LayerRunner(model), text, store, plan, outputs), model.config.layers
    for index in range(layers):
        progress(STAGE, index / (layers + 1))
        quantizer.quantize_half(index, mixes=True)
        quantizer.quantize_half(index, mixes=False)
    quantizer.quantize_head()
    progress(STAGE, 1.0)


class _SequentialQuantizer:
    """Runs the text through the float and the quantized model side by side, up to the linear to quantize next."""

    def __init__(
        self,
        runner: LayerRunner,
        text: CalibrationText,
        store: QuantizedLinearStore,
        plan: QuantPlan,
        outputs: OutputMoments | None,
    ) -> None:
        """Quantize the embedding, and compute the hidden states after it."""
        self._runner, self._store, self._plan, self._outputs = runner, store, plan, outputs
        self._batches = pack_texts(text.calibration)
        quantized = self._made(embedding_layout(runner.config))
        self._exact = [runner.embed(batch) for batch in self._batches]
        self._changed = [runner.embed(batch, quantized) for batch in self._batches]

    def quantize_half(self, index: int, *, mixes: bool) -> None:
        """Quantize the linears of the first or the second half of a layer, and compute the hidden states after it."""
        matrices = self._runner.half_matrices(index, mixes)
        linears = [each for each in layer_layout(self._runner.config, index).linears if each.name in matrices]

        def run(
            states: list[Float32Array], weights: dict[str, Float32Array]
        ) -> Iterator[tuple[Float32Array, dict[str, Float32Array]]]:
            def one(number: int) -> tuple[Float32Array, dict[str, Float32Array]]:
                return self._runner.half(
                    index, mixes, states[number], self._batches[number], lambda each: weights[each.name], capture=True
                )[:2]

            return in_order(one, range(len(states)))

        exact, current = list(run(self._exact, matrices)), dict(matrices)
        for linear in linears:
            inputs = (
                [found[linear.name][batch.filled] for _, found in pair]
                for *pair, batch in zip(exact, run(self._changed, current), self._batches, strict=True)
            )
            current[linear.name] = self._made(linear, inputs)
        self._exact = [states for states, _ in exact]
        self._changed = [states for states, _ in run(self._changed, current)]

    def quantize_head(self) -> None:
        """Quantize the head, the last linear."""
        inputs = (
            [self._runner.head_inputs(states[batch.filled]) for states in pair]
            for *pair, batch in zip(self._exact, self._changed, self._batches, strict=True)
        )
        self._make(head_layout(self._runner.config), None if self._runner.config.tied_head else inputs)

    def _make(self, linear: FusedLinear, inputs: Iterator[list[Float32Array]] | None) -> None:
        """Quantize a linear, to a target if its inputs in both models are given and GPTQ rounds it."""
        weight_format, target = self._plan[linear.name], None
        # Quantized experts get other tokens too. Each is quantized by the statistics of its tokens in the float model.
        if inputs is not None and weight_format.method is Method.GPTQ and not linear.experts:
            outputs_of = self._outputs.of if self._outputs is not None else lambda _: None
            target = Target(*_target(self._runner.matrix(linear), inputs), outputs_of)
        self._store.make(linear, weight_format, target)

    def _made(self, linear: FusedLinear, inputs: Iterator[list[Float32Array]] | None = None) -> Float32Array:
        """Quantize a linear; returns its dequantized matrix."""
        self._make(linear, inputs)
        return self._store.weights(linear, self._plan[linear.name])


def _target(weights: Float32Array, inputs: Iterator[list[Float32Array]]) -> tuple[Float32Array, InputStatistics]:
    """A linear's target weights from its inputs in both models, a pair [tokens, K] for each batch."""
    columns = weights.shape[1]
    sums, mixed = InputSums(columns, second_moments=True), np.zeros((columns, columns), np.float32)
    for exact, changed in inputs:
        sums.add(changed)
        mixed += exact.T @ changed
    known = sums.averages()
    moments = second_moments(known, columns)
    mixed = mixed / np.float32(sums.tokens) - moments
    damped = moments.astype(np.float64)
    damped[np.diag_indices(columns)] += _DAMPING * np.diagonal(damped).mean() + np.finfo(np.float64).tiny
    shift = _TARGET_SHARE * np.linalg.solve(damped, (weights @ mixed).T.astype(np.float64))
    return weights + shift.T.astype(np.float32), known
