"""Averages of the inputs of every linear over a calibration text, taken in one pass, a layer at a time.

What a unit's file holds is written as soon as its layer is done, together with the hidden states after it, so an
interrupted pass goes on where it stopped; one layer's moments are in memory at a time.

Tokens that many texts begin with count in every one of them: all that follows attends to them. Rounded by GPTQ to 4
bits in blocks of 128, the bundled model had 6 % more KL where they counted once.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..checkpoint.config import DecoderConfig
from ..checkpoint.layout import FusedLinear, head_layout, layer_layout
from ..checkpoint.prefetch import in_order
from ..checkpoint.source import Float32Array, ModelSource
from ..quantization.input_statistics import InputStatistics
from .layer_runner import LayerRunner
from .text_packing import Batch, packed
from .text_split import CalibrationText

Float64Array = npt.NDArray[np.float64]

_HEAD: Final = "head"


class StatisticsStore:
    """Statistics by unit, in the files of a folder; second moments are mapped, not read."""

    def __init__(self, folder: Path, config: DecoderConfig) -> None:
        self._folder = folder
        self._tied = config.tied_head

    def of(self, linear: str) -> InputStatistics | None:
        """What is known of a unit's inputs.

        None for an embedding, which has none, unless the head is the same matrix: that one's count for both.
        """
        if linear == "embedding":
            return self.of(_HEAD) if self._tied else None
        rows = np.load(self._folder / f"{linear}.npy", allow_pickle=False)
        tokens = int(np.load(self._folder / f"{linear}.tokens.npy", allow_pickle=False))
        moments = self._folder / f"{linear}.moments.npy"
        second = np.load(moments, mmap_mode="r", allow_pickle=False) if moments.is_file() else None
        return InputStatistics(rows[0], rows[1], second, tokens)


def collect_statistics(
    source: ModelSource,
    config: DecoderConfig,
    text: CalibrationText,
    folder: Path,
    context: int,
    second_moments: bool,
    progress: Callable[[float], None],
) -> StatisticsStore:
    """Run the calibration part of a text through the float model.

    Args:
        source: the model's tensors.
        config: its numbers.
        text: what to read.
        folder: takes the statistics, and what is needed to go on after an interruption; made if need be. Whoever gives
            it again gives the same model, text and choice of moments with it.
        context: positions the exported graph will serve.
        second_moments: whether E[x xT] is wanted.
        progress: hears the fraction done.

    Raises:
        CheckpointError: a tensor cannot be read.
        InputError: the model has experts.
        OSError: the disk refused a write.
    """
    if (folder / f"{_HEAD}.npy").is_file():
        return StatisticsStore(folder, config)
    runner = LayerRunner(source, config, context)
    batches = packed(text.calibration)
    folder.mkdir(parents=True, exist_ok=True)
    start, hidden = _begun(runner, folder, batches)
    for index in range(start, config.layers):
        progress(index / (config.layers + 1))
        _collect_layer(runner, index, hidden, batches, folder, second_moments)
        _save(folder / _states(index + 1), np.concatenate([each.reshape(-1, config.hidden_size) for each in hidden]))
        (folder / _states(index)).unlink(missing_ok=True)
    head = _Sums(head_layout(config), second_moments)
    for batch, states in zip(batches, hidden, strict=True):
        head.add(runner.head_inputs(states[batch.filled]))
    head.save(folder)
    (folder / _states(config.layers)).unlink(missing_ok=True)
    progress(1.0)
    return StatisticsStore(folder, config)


def _collect_layer(
    runner: LayerRunner, index: int, hidden: list[Float32Array], batches: list[Batch], folder: Path, moments: bool
) -> None:
    """Take the statistics of one layer; `hidden` is then what comes after it."""
    linears = {linear.name: linear for linear in layer_layout(runner.config, index).linears}
    matrices = {name: runner.matrix(linear) for name, linear in linears.items()}
    sums = {name: _Sums(linear, moments) for name, linear in linears.items()}

    def run(number: int) -> tuple[Float32Array, dict[str, Float32Array]]:
        return runner.captured(index, hidden[number], batches[number], lambda linear: matrices[linear.name])

    numbers = range(len(batches))
    for number, (after, inputs) in zip(numbers, in_order(run, numbers), strict=True):
        hidden[number] = after
        for name, values in inputs.items():
            sums[name].add(values[batches[number].filled])
    for each in sums.values():
        each.save(folder)


class _Sums:
    """Sums over tokens of what enters a unit."""

    def __init__(self, linear: FusedLinear, moments: bool) -> None:
        self._name = linear.name
        self._tokens = 0
        self._squares: Float64Array = np.zeros(linear.columns)
        self._magnitudes: Float64Array = np.zeros(linear.columns)
        self._moments = np.zeros((linear.columns, linear.columns), np.float32) if moments else None

    def add(self, rows: Float32Array) -> None:
        """Count rows [n, K] in."""
        self._tokens += len(rows)
        self._squares += np.square(rows).sum(axis=0, dtype=np.float64)
        self._magnitudes += np.abs(rows).sum(axis=0, dtype=np.float64)
        if self._moments is not None:
            self._moments += rows.T @ rows

    def save(self, folder: Path) -> None:
        """Write the averages; the file that `StatisticsStore` looks for last comes last."""
        if self._moments is not None:
            self._moments /= np.float32(self._tokens)
            _save(folder / f"{self._name}.moments.npy", self._moments)
        averages = np.stack([self._squares, self._magnitudes]) / self._tokens
        _save(folder / f"{self._name}.tokens.npy", np.array(self._tokens))
        _save(folder / f"{self._name}.npy", averages.astype(np.float32))


def _begun(runner: LayerRunner, folder: Path, batches: list[Batch]) -> tuple[int, list[Float32Array]]:
    """The layer to go on with, and the hidden states before it, batch by batch."""
    for index in range(runner.config.layers, 0, -1):
        if (folder / _states(index)).is_file():
            saved = np.load(folder / _states(index), allow_pickle=False)
            counts = [batch.tokens.size for batch in batches]
            parts = np.split(saved, np.cumsum(counts)[:-1])
            return index, [part.reshape(*batch.tokens.shape, -1) for part, batch in zip(parts, batches, strict=True)]
    return 0, [runner.embed(batch) for batch in batches]


def _states(index: int) -> str:
    """Name of the file with the hidden states before layer `index`."""
    return f"before-layer-{index}.npy"


def _save(path: Path, values: npt.NDArray[Any]) -> None:
    """Write an array so that the file is there whole or not at all; it may be too large to have twice in memory."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        with temporary.open("xb") as file:
            np.save(file, values, allow_pickle=False)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
