"""Statistics of the inputs of every linear over calibration text.

They are collected layer by layer in one pass. The statistics of a layer are written as soon as it is done, and an
interrupted pass does not collect them again; the second moments of only one layer are in memory.

A beginning that many texts share counts once per text, because all that follows attends to it: with GPTQ at 4 bits in
blocks of 128, the bundled model had 6 % more KL where it was counted once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...models.array_file import map_array, read_array
from ...models.atomic import write_atomically
from ...models.progress import Progress
from ..bundle_content import SourceModel
from ..checkpoint.config import DecoderConfig
from ..checkpoint.layout import layer_layout
from ..checkpoint.source import Float32Array, in_order
from ..quantization.codes import InputStatistics
from .calibration_text import CalibrationText
from .layer_graphs import expert_of
from .layer_runner import Captured, LayerRunner
from .text_batches import Batch, pack_texts

STAGE: Final = "collecting statistics"
_HEAD: Final = "head"
MAX_MOMENT_BYTES: Final = 1 << 29
"""Largest size of the second moments of a linear's experts; beyond it they share the moments of all their tokens. The
first linears of Qwen3-30B-A3B would have 2.1 GB in each of 48 layers, its second ones have 0.3 GB."""
PRIOR_TOKENS: Final = 64
"""Weight, in tokens, that the statistics of all experts of a layer have in the statistics of each one."""


class StatisticsStore:
    """Input statistics of linears in the files of a folder; second moments are memory-mapped."""

    def __init__(self, folder: Path, config: DecoderConfig) -> None:
        self._folder = folder
        self._tied = config.tied_head

    def of(self, linear: str) -> InputStatistics | None:
        """Statistics of the inputs of a linear, or of one of its experts, which is named by `expert_of`.

        An embedding has none, unless the head shares its matrix: then it has the head's.
        """
        if linear == "embedding":
            return self.of(_HEAD) if self._tied else None
        averages = read_array(self._folder / f"{linear}.npy")
        # Large experts have the second moments of all of their layer.
        names = (linear, linear.rpartition(".")[0])
        files = (self._folder / f"{name}.moments.npy" for name in names)
        second = next((map_array(file) for file in files if file.is_file()), None)
        return InputStatistics(averages[0], averages[1], second)

    def tokens(self, linear: str) -> int:
        """Number of tokens that a linear, or one of its experts, has read."""
        return int(read_array(self._folder / f"{linear}.tokens.npy"))


def collect_statistics(
    model: SourceModel, text: CalibrationText, folder: Path, second_moments: bool, progress: Progress
) -> StatisticsStore:
    """Run the calibration part of a text through the float model and collect input statistics.

    Args:
        model: The float model.
        text: The calibration text.
        folder: Folder for the statistics; created if necessary. It belongs to one model, text and choice of second
            moments.
        second_moments: Whether to collect E[x xT].
        progress: Receives the stage "collecting statistics".

    Raises:
        CheckpointError: A tensor cannot be read.
        OSError: The disk refused a write.
    """
    config = model.config
    if (folder / f"{_HEAD}.npy").is_file():
        return StatisticsStore(folder, config)
    runner = LayerRunner(model)
    batches = pack_texts(text.calibration)
    folder.mkdir(parents=True, exist_ok=True)
    hidden = [runner.embed(batch) for batch in batches]
    for index in range(config.layers):
        progress(STAGE, index / (config.layers + 1))
        _collect_layer(runner, index, hidden, batches, folder, second_moments)
    head = InputSums(config.hidden_size, second_moments)
    for batch, states in zip(batches, hidden, strict=True):
        head.add(runner.head_inputs(states[batch.filled]))
    head.save(folder, _HEAD)
    progress(STAGE, 1.0)
    return StatisticsStore(folder, config)


def rare_experts(store: StatisticsStore, config: DecoderConfig) -> list[str]:
    """A note for the report if the text reached some experts so rarely that the statistics of all count more."""
    if config.experts is None:
        return []
    layers = (layer_layout(config, index) for index in range(config.layers))
    linears = [layer.gate_up for layer in layers if layer.router is not None]
    tokens = [store.tokens(expert_of(linear.name, expert)) for linear in linears for expert in range(linear.experts)]
    rare = [each for each in tokens if each < PRIOR_TOKENS]
    if not rare:
        return []
    return [
        f"{len(rare)} of {len(tokens)} experts read fewer than {PRIOR_TOKENS} tokens of the calibration text "
        f"({rare.count(0)} of them none), so they are quantized mostly by the inputs of all experts of their layer. "
        "More text gives them statistics of their own (--calibration-tokens)."
    ]


def _collect_layer(
    runner: LayerRunner,
    index: int,
    hidden: list[Float32Array],
    batches: list[Batch],
    folder: Path,
    second_moments: bool,
) -> None:
    """Collect the statistics of one layer unless the folder has them, and replace `hidden` by the states after it."""
    linears = {linear.name: linear for linear in layer_layout(runner.config, index).linears}
    matrices = {name: runner.matrix(linear) for name, linear in linears.items()}
    dense = {name: InputSums(linear.columns, second_moments) for name, linear in linears.items() if not linear.experts}
    of_experts: dict[str, list[InputSums]] = {}
    """Sums over the tokens of each expert, and at the end of all together, which share the moments of large experts."""
    for linear in (linear for linear in linears.values() if linear.experts):
        own = linear.experts * 4 * linear.columns**2 <= MAX_MOMENT_BYTES
        each = [InputSums(linear.columns, second_moments and own) for _ in range(linear.experts)]
        of_experts[linear.name] = [*each, InputSums(linear.columns, second_moments)]

    def run(number: int) -> Captured:
        return runner.captured(index, hidden[number], batches[number], lambda linear: matrices[linear.name])

    numbers, known = range(len(batches)), all((folder / f"{name}.npy").is_file() for name in linears)
    for number, (after, inputs, routed) in zip(numbers, in_order(run, numbers), strict=True):
        hidden[number], filled = after, batches[number].filled
        if known:
            continue
        for name, values in inputs.items():
            dense[name].add(values[filled])
        for name, (*experts, together) in of_experts.items():
            for expert, sums in enumerate(experts):
                tokens, values = routed[expert_of(name, expert)]
                kept = values[filled.reshape(-1)[tokens]]
                sums.add(kept)
                together.add(kept)
    if known:
        return
    for name, (*experts, together) in of_experts.items():
        for expert, sums in enumerate(experts):
            # As if `PRIOR_TOKENS` further tokens had come with the common averages: few tokens say little about most
            # directions of the inputs.
            sums.add_sums(together, PRIOR_TOKENS / max(together.tokens, 1))
            sums.save(folder, expert_of(name, expert), counted=PRIOR_TOKENS)
        together.save(folder, name)
    for name, sums in dense.items():
        sums.save(folder, name)


class InputSums:
    """Sums over tokens of the K inputs of a linear."""

    def __init__(self, columns: int, second_moments: bool) -> None:
        self.tokens: float = 0
        """Number of tokens, or their weight where some count less."""
        self._squares, self._magnitudes = np.zeros(columns), np.zeros(columns)
        self._moments = np.zeros((columns, columns), np.float32) if second_moments else None

    def add(self, inputs: Float32Array) -> None:
        """Add inputs, float32 [tokens, K]."""
        self.tokens += len(inputs)
        self._squares += np.square(inputs).sum(axis=0, dtype=np.float64)
        self._magnitudes += np.abs(inputs).sum(axis=0, dtype=np.float64)
        if self._moments is not None:
            self._moments += inputs.T @ inputs

    def add_sums(self, other: InputSums, weight: float) -> None:
        """Add the sums over other tokens, each of which counts as `weight` tokens."""
        self.tokens += weight * other.tokens
        self._squares += weight * other._squares
        self._magnitudes += weight * other._magnitudes
        if self._moments is not None and other._moments is not None:
            self._moments += np.float32(weight) * other._moments

    def averages(self) -> InputStatistics:
        """The averages; nothing can be added afterwards."""
        total = max(self.tokens, 1)
        if self._moments is not None:
            self._moments /= np.float32(total)  # without a second copy in memory
        square, magnitude = ((each / total).astype(np.float32) for each in (self._squares, self._magnitudes))
        return InputStatistics(square, magnitude, self._moments)

    def save(self, folder: Path, name: str, counted: float = 0.0) -> None:
        """Write the averages; the file whose presence marks them complete comes last.

        `counted` is the part of the tokens that are not the linear's own.
        """
        known = self.averages()
        if known.second_moment is not None:
            _save(folder / f"{name}.moments.npy", known.second_moment)
        _save(folder / f"{name}.tokens.npy", np.array(round(self.tokens - counted)))
        _save(folder / f"{name}.npy", np.stack([known.mean_square, known.mean_magnitude]))


def _save(path: Path, values: npt.NDArray[Any]) -> None:
    """Write an array atomically, without a second copy in memory."""
    write_atomically(path, lambda file: np.save(file, values, allow_pickle=False))
