"""Divergence of a model with any matrices in place of its own: what `format_error.py` and `column_orders.py` share.

Every linear of the layers is quantized alone, from its inputs in the float model; embedding and head stay as they are.
A row of a table has the error of the outputs, E H ET relative to W H WT, averaged over linears; the divergence that is
expected to second order, trace(G E H ET) summed over linears, relative to the first row of a block; the mean KL on
held-out text, and its ratio to the first row's, with an interval of 95 % from 2,000 samples of texts with replacement.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from edgerun.export import ExportRecipe, WeightFormat
from edgerun.export.bundle_content import SourceModel
from edgerun.export.calibration.collect_statistics import StatisticsStore
from edgerun.export.calibration.divergence import Divergence, PlanEvaluator
from edgerun.export.calibration.gradients import collect_gradients
from edgerun.export.calibration.prepare import calibrate
from edgerun.export.checkpoint.config import DecoderConfig
from edgerun.export.checkpoint.layer_weights import FusedLinear
from edgerun.export.checkpoint.layout import layer_layout
from edgerun.export.checkpoint.source import ModelSource, in_order
from edgerun.export.quantization.codes import InputStatistics, second_moments
from edgerun.export.quantization.gptq import _factorize
from edgerun.models.progress import silent

Floats = npt.NDArray[np.float64]
Matrix = npt.NDArray[np.float32]
Order = npt.NDArray[np.intp]
Weights = Mapping[str, Matrix]

_SAMPLES: Final = 2000


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of both scripts."""
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--text", type=Path, help="calibration text; without it, text that the model generates")
    parser.add_argument("--work", type=Path, required=True, help="folder that keeps the text and the statistics")
    parser.add_argument("--tokens", type=int, default=24576, help="tokens of text, of which a quarter is held out")


class Linear(NamedTuple):
    """A linear with what is known about its inputs and outputs."""

    layout: FusedLinear
    weights: Matrix
    inputs: InputStatistics
    outputs: Sequence[tuple[slice, Matrix | None]]
    """Rows that are quantized together, and the second moments of the gradients there."""
    order: Order
    upper: Floats
    importance: Matrix
    """D of GPTQ: see `gptq._factorize`."""

    @property
    def row_importance(self) -> Floats:
        """Mean square of the gradient at each output."""
        parts = (
            np.ones(part.stop - part.start) if known is None else np.diagonal(known) for part, known in self.outputs
        )
        return np.concatenate([np.asarray(each, np.float64) for each in parts])


class TextDivergence(PlanEvaluator):
    """Measures the KL of each text with given matrices."""

    def __init__(self, model: SourceModel, text: Sequence[npt.NDArray[np.int64]], folder: Path) -> None:
        super().__init__(model, text, lambda linear, _: self._given[linear.name], folder)
        self._given: Weights = {}
        self._number = count(1)
        self._sums: Floats = np.zeros(0)
        self._counts: Floats = np.zeros(0)

    def of(self, weights: Weights) -> Floats:
        """Sums of KL and numbers of positions, [2, texts]."""
        self._given = weights
        own = WeightFormat(4, next(self._number))  # a new name, since results are kept by the formats
        self.divergence(dict.fromkeys(weights, own))
        return np.stack([self._sums, self._counts])

    def _summary(self, differences: Any, numbers: Any) -> Divergence:
        kl = np.concatenate([each[0] for each in differences])
        batches = [self._batches[number] for number in numbers]
        texts = np.concatenate([batch.texts[batch.counted] for batch in batches])
        self._sums = np.bincount(texts, kl).astype(np.float64)
        self._counts = np.bincount(texts).astype(np.float64)
        return super()._summary(differences, numbers)


class Simulation:
    """One model, its text, and the divergence of simulated weights."""

    def __init__(self, options: argparse.Namespace, config: DecoderConfig, source: ModelSource) -> None:
        work, text = options.work, options.text or Path("self")
        work.mkdir(parents=True, exist_ok=True)
        recipe = ExportRecipe(WeightFormat(4, 32), method="gptq", calibration=text, calibration_tokens=options.tokens)
        self.model = SourceModel(source, config, recipe.context_for(config))
        _, self.text, _ = calibrate(self.model, recipe, work, silent)
        statistics = StatisticsStore(work / "statistics", config)
        moments = collect_gradients(self.model, self.text, work / "outputs", 0, silent)
        self.config, self.linears = config, list[Linear]()
        for index in range(config.layers):
            layer = layer_layout(config, index)
            for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
                known = statistics.of(linear.name)
                if known is None:
                    raise TypeError(f"{linear.name} has no inputs")
                ranges = [rows for name in linear.weights for rows in source.row_ranges(name)]
                stops = np.cumsum([rows.stop - rows.start for rows in ranges]).tolist()
                parts = [slice(*each) for each in zip([0, *stops], stops, strict=False)]
                outputs = list(zip(parts, map(moments.of, ranges), strict=True))
                weights = np.concatenate([source.read(name) for name in linear.weights])
                factors = _factorize(second_moments(known, linear.columns))
                self.linears.append(Linear(linear, weights, known, outputs, *factors))
        self.held_out = TextDivergence(self.model, self.text.held_out, work / "held-out")
        self._first: tuple[Floats, float] | None = None
        self._whole: dict[str, float] = {}

    def all(self, quantize: Callable[[Linear], Matrix]) -> dict[str, Matrix]:
        """Every linear quantized."""
        made = in_order(quantize, self.linears)
        return {linear.layout.name: weights for linear, weights in zip(self.linears, made, strict=True)}

    def errors(self, weights: Weights) -> tuple[float, float]:
        """Mean relative error of the outputs, and the sum of trace(G E H ET) over linears: see `gptq`."""
        relative, divergence = [], 0.0
        for linear in self.linears:
            moments = second_moments(linear.inputs, linear.layout.columns)
            difference = linear.weights - weights[linear.layout.name]
            of_outputs = difference @ moments
            if linear.layout.name not in self._whole:
                self._whole[linear.layout.name] = float((linear.weights @ moments * linear.weights).sum())
            relative.append(float((of_outputs * difference).sum()) / self._whole[linear.layout.name])
            for part, gradients in linear.outputs:
                if gradients is not None:
                    divergence += float((gradients @ difference[part] * of_outputs[part]).sum())
        return float(np.mean(relative)), divergence

    def show(self, name: str, weights: Weights, *, first: bool = False, bits: float | None = None) -> dict[str, Any]:
        """Measure, print and return a row of the table."""
        found, (error, expected) = self.held_out.of(weights), self.errors(weights)
        if first or self._first is None:
            self._first = found, expected
        ratio, low, high = ratio_interval(found, self._first[0])
        kl, expected = float(found[0].sum() / found[1].sum()), expected / self._first[1]
        size, interval = "" if bits is None else f"{bits:6.3f}", f"{ratio:6.3f} ({low:.3f} to {high:.3f})"
        print(f"{name:44} {size:6} {error:9.6f} {expected:6.3f} {kl:9.5f} {interval}", flush=True)
        row = {"name": name, "bits": bits, "error": error, "expected": expected}
        return {**row, "kl": kl, "ratio": ratio, "low": low, "high": high}


def ratio_interval(found: Floats, first: Floats) -> tuple[float, float, float]:
    """Ratio of two mean KLs, and its interval of 95 % over texts."""
    texts = found.shape[1]
    samples = np.random.default_rng(0).integers(texts, size=(_SAMPLES, texts))
    ratios = found[0][samples].sum(1) / first[0][samples].sum(1)
    low, high = np.quantile(ratios, (0.025, 0.975))
    return float(found[0].sum() / first[0].sum()), float(low), float(high)
