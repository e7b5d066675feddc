"""Second moments of the gradients at the outputs of linears and layers, by PyTorch (extra `train`).

The Hessian of the KL divergence from a model is its Fisher information: the second moments of the gradients of a
token's negative log-probability, where tokens are sampled from the model's own softmax (Martens, 2014). One token is
sampled at every position of the calibration text. The gradients of different positions are uncorrelated then, so those
of all positions are computed together.

ONNX Runtime runs the float model forward, and the hidden states before each half layer go to disk. PyTorch goes back
half a layer at a time, so that weights and activations of only one are in memory. It runs the graphs of `layer_graphs`,
whose operators are few: families need no second description.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from onnx import GraphProto, helper, numpy_helper
from torch import Tensor
from torch.nn import functional

from ...errors import InputError
from ...models.array_file import read_array
from ...models.progress import Progress
from ..bundle_content import SourceModel
from ..checkpoint.layout import head_layout, layer_layout
from ..checkpoint.source import Float32Array, RowRange, in_order
from .calibration_text import CalibrationText
from .layer_graphs import HIDDEN, SUM
from .layer_runner import LayerRunner, head_model, norm_model
from .output_moments import OutputMoments, states_after
from .text_batches import Batch, pack_texts

STAGE: Final = "gradients"
_DONE: Final = "done"
"""Name of the file that marks all moments complete."""
_FORWARD_SHARE: Final = 0.25
"""Share of the forward pass in the time."""
Attributes = Mapping[str, Any]


def collect_gradients(
    model: SourceModel, text: CalibrationText, folder: Path, seed: int, progress: Progress
) -> OutputMoments:
    """Collect the second moments of the gradients at the outputs of layers and their linears, unless a folder has them.

    Args:
        model: The float model.
        text: The calibration text.
        folder: Folder for the moments of this model, text and seed; it holds hidden states too meanwhile.
        seed: Seed of the sampled tokens.
        progress: Receives the stage "gradients".

    Raises:
        CheckpointError: A tensor cannot be read.
        OSError: The disk refused a write.
    """
    moments, done = OutputMoments(folder), folder / _DONE
    if done.is_file():
        return moments
    folder.mkdir(parents=True, exist_ok=True)
    collector = _Collector(model, text, moments)
    halves = _halves(model)
    for number, half in enumerate(halves):
        progress(STAGE, _FORWARD_SHARE * number / len(halves))
        collector.run_forward(*half)
    collector.sample_tokens(torch.Generator().manual_seed(seed))
    for number, half in enumerate(reversed(halves)):
        progress(STAGE, _FORWARD_SHARE + (1 - _FORWARD_SHARE) * number / len(halves))
        collector.run_backward(*half)
    done.touch()
    progress(STAGE, 1.0)
    return moments


def require_gradients(model: SourceModel) -> None:
    """Refuse a model with an operator that has no gradient here.

    Raises:
        InputError: The model has experts or recurrent states.
    """
    runner = LayerRunner(model)
    nodes = (node for half in _halves(model) for node in runner.half_graph(*half).graph.node)
    if model.config.experts is not None or any(node.op_type not in _OPERATORS for node in nodes):
        raise InputError("there are no gradients of models with experts or recurrent states", "choose --method gptq")


def _halves(model: SourceModel) -> list[tuple[int, bool]]:
    """Each half layer as its layer's index and whether it mixes tokens, in the order of the graph."""
    return [(index, mixes) for index in range(model.config.layers) for mixes in (True, False)]


class _Collector:
    """Runs the calibration text forward, and its gradients back through the half layers."""

    def __init__(self, model: SourceModel, text: CalibrationText, moments: OutputMoments) -> None:
        self._runner, self._config = LayerRunner(model), model.config
        self._batches, self._moments = pack_texts(text.calibration), moments
        self._hidden = [self._runner.embed(batch) for batch in self._batches]
        self._upstream: list[Tensor] = []
        """Gradients at the hidden states after the half layer that is next, by batch."""

    def run_forward(self, index: int, mixes: bool) -> None:
        """Run half a layer; the hidden states before it go to disk."""
        matrices = self._runner.half_matrices(index, mixes)

        def run(number: int) -> Float32Array:
            hidden, batch = self._hidden[number], self._batches[number]
            np.save(self._states(index, mixes, number), hidden, allow_pickle=False)
            return self._runner.half(index, mixes, hidden, batch, lambda each: matrices[each.name])[0]

        self._hidden = list(in_order(run, range(len(self._batches))))

    def sample_tokens(self, generator: torch.Generator) -> None:
        """Sample a token at every position; computes the gradients at the hidden states after the last layer."""
        head = torch.from_numpy(self._runner.matrix(head_layout(self._config)))
        factors = torch.from_numpy(self._runner.final_norm_weight())
        norm, product = norm_model(self._config).graph, head_model(self._config).graph
        for hidden, batch in zip(self._hidden, self._batches, strict=True):
            filled, found = torch.from_numpy(batch.filled), list[Tensor]()
            for states in torch.split(torch.from_numpy(hidden)[filled], self._runner.logits_batch):
                states.requires_grad_()
                normed = run_graph(norm, {HIDDEN: states, "norm": factors})["normed"]
                logits = run_graph(product, {"inputs": normed, "head": head})["logits"]
                errors = torch.softmax(logits.detach(), dim=-1)
                tokens = torch.multinomial(errors, 1, generator=generator)
                errors.scatter_add_(1, tokens, torch.full(tokens.shape, -1.0))
                found += torch.autograd.grad(logits, states, errors)
            gradients = torch.zeros(hidden.shape)
            gradients[filled] = torch.cat(found)
            self._upstream.append(gradients)

    def run_backward(self, index: int, mixes: bool) -> None:
        """Collect the moments of half a layer, and compute the gradients before it."""
        matrices = {name: torch.from_numpy(each) for name, each in self._runner.half_matrices(index, mixes).items()}
        half = self._runner.half_graph(index, mixes)
        linears = {each.name: each for each in layer_layout(self._config, index).linears}
        sums: defaultdict[RowRange, list[Any]] = defaultdict(lambda: [0, 0])
        for number, batch in enumerate(self._batches):
            file = self._states(index, mixes, number)
            hidden = torch.from_numpy(read_array(file)).requires_grad_()
            file.unlink()
            values = half_values(self._runner, index, mixes, hidden, batch, matrices)
            products = {half.own(name, index): values[f"{name}.product"] for name in half.captured}
            after, filled = self._upstream[number], torch.from_numpy(batch.filled)
            self._upstream[number], *found = torch.autograd.grad(values[SUM], [hidden, *products.values()], after)
            if not mixes:
                sums[states_after(index)][number % 2] += after[filled].T @ after[filled]
            for linear, gradients in zip(products, found, strict=True):
                first = 0
                for name in linears[linear].weights:
                    for rows in self._runner.source.row_ranges(name):
                        own = gradients[filled][:, first : first + rows.stop - rows.start]
                        first += rows.stop - rows.start
                        sums[rows][number % 2] += own.T @ own
        for rows, halves in sums.items():
            self._moments.save(rows, shrunk(*halves).numpy())

    def _states(self, index: int, mixes: bool, number: int) -> Path:
        """The file of a batch's hidden states before half a layer."""
        return self._moments.folder / f"states-{index}-{mixes}-{number}.npy"


def shrunk(first: Tensor, second: Tensor | int) -> Tensor:
    """The sum of the moments [N, N] of two halves of the text, with what is noise taken off the covariances.

    Covariances of thousands of outputs need more text than there is. The correlation of both halves' tells how much of
    them is signal (the reliability of the sum, Spearman, 1910), and they are multiplied by that. A text of one batch
    has no second half: it is 0 then, and nothing is left of the covariances.
    """
    total = first + second
    diagonal = torch.eye(len(total))
    one, other = first * (1 - diagonal), second * (1 - diagonal)
    lengths = torch.linalg.norm(one) * torch.linalg.norm(other)
    common = ((one * other).sum() / lengths).clamp(min=0) if lengths > 0 else 0.0
    return total * diagonal + 2 * common / (1 + common) * (one + other)


def half_values(
    runner: LayerRunner, index: int, mixes: bool, hidden: Tensor, batch: Batch, matrices: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """All values of the graph of half of layer `index`, from hidden states and the matrices of its linears."""
    half, states = runner.half_graph(index, mixes), hidden.detach().numpy()
    feeds = runner.feeds(index, mixes, states, batch, lambda each: matrices[each.name].detach().numpy())
    tensors = {name: torch.from_numpy(np.asarray(each)) for name, each in feeds.items()}
    own = {name: matrices[half.own(linear.name, index)] for name, linear in half.matrices.items()}
    return run_graph(half.graph, {**tensors, HIDDEN: hidden, **own})


def run_graph(graph: GraphProto, feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All values of a graph by their names; its operators are in `_OPERATORS`."""
    values = {each.name: torch.from_numpy(numpy_helper.to_array(each).copy()) for each in graph.initializer}
    values |= feeds
    for node in graph.node:
        attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
        results = _OPERATORS[node.op_type]([values[name] if name else None for name in node.input], attributes)
        values.update(zip(node.output, results if isinstance(results, tuple) else (results,), strict=False))
    return values


def _norm(inputs: Any, attributes: Attributes) -> Tensor:
    value, factors = inputs
    return functional.rms_norm(value, value.shape[-1:], factors, attributes["epsilon"])


def _reshape(inputs: Any, _: Attributes) -> Tensor:
    value, shape = inputs[0], inputs[1].tolist()
    return value.reshape([value.shape[axis] if size == 0 else size for axis, size in enumerate(shape)])


def _rotated(heads: Tensor, positions: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate the first channels of heads [B, H, S, D] by tables [positions, channels / 2]."""
    half = cosines.shape[1]
    cosine, sine = (table[positions][:, None] for table in (cosines, sines))
    low, high, rest = torch.split(heads, [half, half, heads.shape[-1] - 2 * half], dim=-1)
    return torch.cat([low * cosine - high * sine, high * cosine + low * sine, rest], dim=-1)


def _rotary(inputs: Any, attributes: Attributes) -> Tensor:
    value, *tables = inputs
    heads = value.unflatten(-1, (attributes["num_heads"], -1)).transpose(1, 2)
    return _rotated(heads, *tables).transpose(1, 2).flatten(2)


def _attention(inputs: Any, attributes: Attributes) -> Tensor:
    query, key, value = inputs[:3]
    cosines, sines, positions, bias, sinks = [*inputs[7:], None][:5]
    heads, shared = attributes["num_heads"], attributes["kv_num_heads"]
    if key is None:
        width = query.shape[-1] // (heads + 2 * shared)
        query, key, value = query.split([heads * width, shared * width, shared * width], dim=-1)
    query, key, value = (
        each.unflatten(-1, (count, -1)).transpose(1, 2)
        for each, count in ((query, heads), (key, shared), (value, shared))
    )
    if attributes["do_rotary"]:
        query, key = (_rotated(each, positions, cosines, sines) for each in (query, key))
    key, value = (each.repeat_interleave(heads // shared, dim=1) for each in (key, value))
    scores = query @ key.transpose(2, 3) * attributes.get("scale", query.shape[-1] ** -0.5)
    if cap := attributes.get("softcap", 0.0):
        scores = cap * torch.tanh(scores / cap)
    scores = scores + bias
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    shares = torch.softmax(scores, dim=-1)[..., : key.shape[2]]
    return (shares @ value).transpose(1, 2).flatten(2)


_OPERATORS: Final[Mapping[str, Callable[[Any, Attributes], Any]]] = {
    "Add": lambda inputs, _: inputs[0] + inputs[1],
    "Mul": lambda inputs, _: inputs[0] * inputs[1],
    "Gemm": lambda inputs, _: functional.linear(inputs[0], inputs[1]),
    "Tanh": lambda inputs, _: torch.tanh(inputs[0]),
    "Sigmoid": lambda inputs, _: torch.sigmoid(inputs[0]),
    "QuickGelu": lambda inputs, attributes: inputs[0] * torch.sigmoid(attributes["alpha"] * inputs[0]),
    "Gelu": lambda inputs, _: functional.gelu(inputs[0], approximate="tanh"),
    "FusedMatMul": lambda inputs, _: functional.linear(inputs[0], inputs[1]),
    "Split": lambda inputs, attributes: inputs[0].split(inputs[1].tolist(), dim=attributes["axis"]),
    "Reshape": _reshape,
    "SimplifiedLayerNormalization": _norm,
    "RotaryEmbedding": _rotary,
    "GroupQueryAttention": _attention,
}
