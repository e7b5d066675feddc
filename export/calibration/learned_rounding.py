"""Rounding learned from text, one layer after the other, by PyTorch (extra `train`).

GPTQ with gradients chooses codes from second moments, one after the other and for good. Here all codes and scales of a
layer follow the gradients of the error of its output, in the quantized model, against the float model's. The error of a
token is weighted by the second moments of the gradients at that output, as `gradients` collects them, so that it stands
for the KL divergence of the whole model.

A code is a real number that is rounded wherever it is used; its gradient is that of the rounded one (straight-through
estimator, Bengio et al., 2013, arXiv:1308.3432). It begins at GPTQ's code, moved toward the exact weight by less than
half a code: a weight that compensates for others begins rounded as it was, and those near a boundary cross it first.
Part of the text is not learned from. The codes and scales with the least error there are kept, or GPTQ's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from ...models.manifest import Method, WeightFormat
from ...models.progress import Progress
from ..allocation.quantized_weights import QuantizedLinearStore
from ..bundle_content import SourceModel
from ..checkpoint.layer_weights import QuantPlan
from ..checkpoint.layout import embedding_layout, layer_layout
from ..checkpoint.source import Float32Array, QuantizedRows, in_order
from ..quantization.codes import half_precision, in_blocks, pack_codes, unpack_codes, unpack_zero_points
from .calibration_text import LEARNED_CHECK_SHARE, CalibrationText
from .gradients import half_values
from .layer_graphs import SUM
from .layer_runner import LayerRunner
from .output_moments import OutputMoments, states_after
from .text_batches import Batch, pack_texts

STAGE: Final = "learning to round"
STEPS: Final = 80
"""Steps of each layer."""
STEP_TOKENS: Final = 2048
"""Approximate number of tokens of a step."""
_CHECK_STEPS: Final = 10
"""The error on text that is not learned from is measured after so many steps."""
_INSIDE: Final = 0.45
"""Most of a code that a number begins away from GPTQ's code."""
_CODE_RATE: Final = 4e-3
"""Adam's rate at the beginning, in codes; it falls to 0 with a cosine."""
_SCALE_RATE: Final = 1e-4
"""The same of scales, relative to those at the beginning."""
_BETAS: Final = (0.9, 0.95)
_TINY: Final = 1e-20
"""Keeps a step of numbers without gradients from being 0 / 0."""
_DAMPING: Final = 0.01
"""Added to the diagonal of the moments, as a fraction of its mean, so that every error has a cost."""
Example = tuple[Batch, Float32Array, Float32Array]
"""Tokens, the hidden states before a layer in the quantized model, and those after it in the float model."""


def learn_rounding(
    model: SourceModel,
    text: CalibrationText,
    plan: QuantPlan,
    rounded: QuantizedLinearStore,
    learned: QuantizedLinearStore,
    outputs: OutputMoments,
    progress: Progress,
) -> None:
    """Learn the codes and scales of the linears inside the layers that GPTQ has rounded.

    Args:
        model: The model, AWQ scaling applied.
        text: The calibration text, of which the last texts are not learned from.
        plan: Format of each linear, by its name.
        rounded: The linears as GPTQ rounded them.
        learned: Receives those of the layers; it wraps `rounded`. Layers that an interrupted run has finished are kept.
        outputs: Second moments of the gradients.
        progress: Receives the stage "learning to round".

    Raises:
        CheckpointError: A tensor cannot be read.
        InputError: A learned scale is beyond the range of float16.
        OSError: The disk refused a write.
    """
    runner, config, embedding = LayerRunner(model), model.config, embedding_layout(model.config)
    texts = (*text.calibration, *text.more)
    checked = max(1, len(texts) // LEARNED_CHECK_SHARE)
    batches = pack_texts(texts[:-checked] or texts, STEP_TOKENS)
    taught = len(batches)
    batches += pack_texts(texts[-checked:], STEP_TOKENS)
    matrix = rounded.weights(embedding, plan[embedding.name])
    exact, changed = [runner.embed(batch) for batch in batches], [runner.embed(batch, matrix) for batch in batches]
    for index in range(config.layers):
        linears = layer_layout(config, index).linears
        weights = {linear.name: runner.matrix(linear) for linear in linears}
        _run_layer(runner, index, batches, exact, weights)
        own = [linear for linear in linears if plan[linear.name].method is Method.GPTQ]
        if not all(learned.has(linear, plan[linear.name]) for linear in own):
            # GPTQ's codes are kept where no error is a number, too.
            best, least = {each.name: rounded.whole(each, plan[each.name]) for each in own}, math.inf
            numbers = {each.name: LearnedMatrix(best[each.name], weights[each.name], plan[each.name]) for each in own}
            others = {each.name: rounded.weights(each, plan[each.name]) for each in linears if each not in own}
            layer = _Layer(runner, index, numbers, others, outputs)
            for step, error in enumerate(layer.learn(list(zip(batches, changed, exact, strict=True)), taught)):
                progress(STAGE, (index + step * _CHECK_STEPS / STEPS) / config.layers)
                if error < least:
                    best, least = {name: each.rows() for name, each in numbers.items()}, error
            for linear in own:
                learned.keep(linear, plan[linear.name], best[linear.name])
        matrices = {each.name: learned.weights(each, plan[each.name]) for each in linears}
        _run_layer(runner, index, batches, changed, matrices)
    progress(STAGE, 1.0)


def _run_layer(
    runner: LayerRunner,
    index: int,
    batches: Sequence[Batch],
    states: list[Float32Array],
    matrices: Mapping[str, Float32Array],
) -> None:
    """Replace hidden states before a layer, one after the other as they are large, by those after it."""

    def run(number: int) -> Float32Array:
        return runner.captured(index, states[number], batches[number], lambda each: matrices[each.name])[0]

    for number, after in enumerate(in_order(run, range(len(batches)))):
        states[number] = after


class LearnedMatrix:
    """The codes and scales of a linear as numbers that are learned."""

    def __init__(self, start: QuantizedRows, weights: Float32Array, weight_format: WeightFormat) -> None:
        """Begin with quantized rows, near exact weights [N, K]."""
        self._start, self._format, self._columns = start, weight_format, weights.shape[1]
        bits, blocks = weight_format.bits, start.scales.shape[1]
        self._last, zeros = (1 << bits) - 1, np.full((1, 1), 1 << (bits - 1), np.uint8)
        if start.zero_points is not None:
            zeros = unpack_zero_points(start.zero_points, blocks, bits)
        self._zeros = torch.from_numpy(zeros[..., None].astype(np.float32))
        self._scales = torch.from_numpy(np.array(start.scales))
        codes = torch.from_numpy(unpack_codes(start.packed, bits).astype(np.float32))
        steps = torch.where(self._scales == 0, 1.0, self._scales)[..., None]
        exact = torch.from_numpy(in_blocks(weights, weight_format)) / steps + self._zeros
        self.codes = (codes + (exact - codes).clamp(-_INSIDE, _INSIDE)).clamp(0, self._last).requires_grad_()
        """float32 [N, blocks, block]."""
        self.factors = torch.ones_like(self._scales).requires_grad_()
        """Factors of the scales at the beginning, float32 [N, blocks]."""

    def matrix(self) -> Tensor:
        """The weights that the numbers stand for, float32 [N, K]; gradients pass as if nothing was rounded."""
        codes, scales = self.codes.clamp(0, self._last), self._scales * self.factors
        codes = codes + (codes.round() - codes).detach()
        if self._format.half_scales:
            scales = scales + (scales.half().float() - scales).detach()
        return ((codes - self._zeros) * scales[..., None]).flatten(1)[:, : self._columns]

    def rows(self) -> QuantizedRows:
        """The linear as the numbers are now."""
        codes = self.codes.detach().clamp(0, self._last).round().numpy().astype(np.uint8)
        scales = (self._scales * self.factors.detach()).numpy()
        scales = half_precision(scales) if self._format.half_scales else scales
        return self._start._replace(packed=pack_codes(codes, self._format.bits), scales=scales)


class _Layer:
    """A layer that is learned."""

    def __init__(
        self,
        runner: LayerRunner,
        index: int,
        numbers: Mapping[str, LearnedMatrix],
        others: Mapping[str, Float32Array],
        outputs: OutputMoments,
    ) -> None:
        """Begin with a layer.

        Args:
            runner: The model.
            index: The layer's.
            numbers: What is learned, by the names of the linears.
            others: Matrices of the layer's other linears.
            outputs: Second moments of the gradients.
        """
        self._runner, self._index, self._numbers = runner, index, numbers
        self._others = {name: torch.from_numpy(matrix) for name, matrix in others.items()}
        self._moments = torch.from_numpy(np.array(outputs.of(states_after(index))))
        self._moments.diagonal().add_(_DAMPING * self._moments.diagonal().mean())

    def learn(self, examples: Sequence[Example], taught: int) -> Iterator[float]:
        """Learn from the first `taught` examples; yields the error of the others before that and every few steps."""
        checks = examples[taught:]
        groups = [
            {"params": [each.codes for each in self._numbers.values()], "lr": _CODE_RATE},
            {"params": [each.factors for each in self._numbers.values()], "lr": _SCALE_RATE},
        ]
        optimizer = torch.optim.Adam(groups, betas=_BETAS, eps=_TINY)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        for step in range(STEPS):
            if step % _CHECK_STEPS == 0:
                yield self._measured(checks)
            optimizer.zero_grad()
            torch.autograd.backward(self._error(*examples[step % taught]))
            optimizer.step()
            schedule.step()
        yield self._measured(checks)

    def _measured(self, checks: Sequence[Example]) -> float:
        with torch.no_grad():
            return sum(float(self._error(*check)) for check in checks)

    def _error(self, batch: Batch, before: Float32Array, after: Float32Array) -> Tensor:
        """The weighted squared error of the layer's output, summed over the tokens of a batch."""
        matrices = self._others | {name: each.matrix() for name, each in self._numbers.items()}
        states = torch.from_numpy(before)
        for mixes in (True, False):
            states = half_values(self._runner, self._index, mixes, states, batch, matrices)[SUM]
        errors = (states - torch.from_numpy(after))[torch.from_numpy(batch.filled)]
        return (errors @ self._moments * errors).sum()
