"""Factors for channels with outliers, and products that are too coarse in 8 bits.

A channel whose values are far larger than the others' makes the steps of all of them coarse. Dividing the channel by a
factor and multiplying its weights with it moves a part of that range to the weights, which have scales of their own for
each output (SmoothQuant, Xiao et al., 2023, https://arxiv.org/abs/2211.10438). Factors cost nothing where the division
goes into what computes the channel: the weights of a norm, or the product that gates a feed-forward. The weights of
products in float32 that read the same channels, such as the gates of a delta net, are multiplied with the factors.
The error of some outputs of each product over a short text, computed both ways, decides; where it stays too large, the
product keeps the model's own format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np

from ...models.bundle import Bundle
from ...models.onnx_file.graph_editor import GraphEditor
from ...models.onnx_file.model_messages import Message, value_info
from ..graph.attention_edits import input_at
from ..graph.model_metadata import metadata_of
from ..graph.session import GraphSession, SessionConfig
from ..measure.exactness import SAMPLE_TEXT
from ..text.tokenizer import TextTokenizer
from .int8_graph import Int8Products, Product
from .integer_weights import OPERATOR, Floats, IntegerRange

MAX_ERROR: Final = 0.004
"""Largest error of a product in 8 bits, relative to its outputs (squares of norms): 6 % of their size, about half of
what 4 bits in blocks of 32 cost."""
_EXPONENTS: Final = (0.5, 0.75)
"""Shares of a channel's range that are moved to the weights; the paper recommends the first, and the other one for
models with larger outliers."""
_ROWS: Final = 64
"""Outputs of a product over which its error is computed."""
_LARGEST_FACTOR: Final = 256.0
"""Limit of factors in either direction, relative to their middle."""
_NORMS: Final[Mapping[str, tuple[int, ...]]] = {
    "SimplifiedLayerNormalization": (1,),
    "SkipSimplifiedLayerNormalization": (2,),
    "LayerNormalization": (1, 2),
    "SkipLayerNormalization": (2, 3),
}
"""Operators that scale channels last, and which of their inputs are multiplied with the factors' inverse."""
_WIDTH: Final = 32
"""Tokens per pass: the inputs of all products of one are in memory at once, 23 MB for a model of 0.5B."""
_PASSES: Final = 4
_KEPT: Final = 8
"""One of so many tokens is kept, the first one among them: it often has the largest outliers."""


InputSample: TypeAlias = tuple[Floats, Floats]
"""Inputs of products over a text: largest magnitude of each channel, `[channels]`; some tokens, `[n, channels]`."""


def too_coarse(
    editor: GraphEditor, found: Int8Products, samples: Mapping[str, InputSample], limits: IntegerRange
) -> frozenset[str]:
    """Choose factors for the inputs of each product, and set them in the products and in the graph.

    Args:
        editor: the graph, before its products are replaced.
        found: its products.
        samples: inputs of the products by name.
        limits: the integers of the products.

    Returns:
        Outputs (`Product.source`) that 8 bits compute too coarsely even so. If there are any, what was set is of no
        use: find the products of the graph anew without them.
    """
    coarse: set[str] = set()
    chosen: dict[str, Floats] = {}
    for inputs in found.input_names:
        products = [each for each in found.products if each.inputs == inputs]
        weights = [_sampled_rows(each) for each in products]
        largest, tokens = samples[inputs]
        candidates: list[Floats | None] = [None]
        if _can_divide(editor, found, inputs):
            candidates += [_factors(largest, weights, exponent) for exponent in _EXPONENTS]
        errors = [[_error(tokens, each, factors, limits) for each in weights] for factors in candidates]
        best = min(range(len(candidates)), key=lambda number: max(errors[number]))
        coarse.update(each.source for each, error in zip(products, errors[best], strict=True) if not error <= MAX_ERROR)
        factors = candidates[best]
        if factors is not None:
            chosen[inputs] = factors
    if not coarse:
        for inputs, factors in chosen.items():
            _divide(editor, found, inputs, factors)
    return frozenset(coarse)


def _sampled_rows(product: Product) -> Floats:
    """Weights of some outputs of a product, `[rows, columns]`."""
    first, last = product.rows.start, product.rows.stop
    places = np.unique(np.linspace(first, last - 1, _ROWS).astype(int)).tolist()
    return np.concatenate([product.matrix.decoded(place, place + 1) for place in places])


def _factors(largest_inputs: Floats, weights: Sequence[Floats], exponent: float) -> Floats:
    """SmoothQuant's factors: largest input ** exponent / largest weight ** (1 - exponent), by channel."""
    largest = np.max([np.abs(each).max(axis=0) for each in weights], axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = largest_inputs**exponent / largest ** (1 - exponent)
    usable = np.isfinite(factors) & (factors > 0)
    middle = np.median(factors[usable]) if usable.any() else 1.0
    factors = np.where(usable, factors / middle, 1.0)
    return np.clip(factors, 1 / _LARGEST_FACTOR, _LARGEST_FACTOR).astype(np.float32)


def _error(tokens: Floats, weights: Floats, factors: Floats | None, limits: IntegerRange) -> float:
    """The error of a product in integers, relative to the outputs (squares of norms); 0 for no output.

    Args:
        tokens: inputs, `[n, columns]`.
        weights: `[rows, columns]`.
        factors: what the inputs are divided by, `[columns]`; None for nothing.
        limits: the largest integers.
    """
    expected = tokens @ weights.T
    if factors is not None:
        tokens, weights = tokens / factors, weights * factors
    difference = _rounded(tokens, limits.activation) @ _rounded(weights, limits.weight).T - expected
    size = float(np.square(expected, dtype=np.float64).sum())
    return float(np.square(difference, dtype=np.float64).sum()) / size if size else 0.0


def _rounded(rows: Floats, limit: int) -> Floats:
    """Rows rounded to `limit` steps of their largest value in either direction."""
    steps = np.abs(rows).max(axis=1, keepdims=True) / np.float32(limit)
    steps[steps == 0] = 1
    rounded: Floats = np.rint(rows / steps) * steps
    return rounded


def _can_divide(editor: GraphEditor, found: Int8Products, inputs: str) -> bool:
    """Whether the inputs of products can be divided by factors where they are computed, and nothing else reads them."""
    if inputs in {each.name for each in editor.graph.output}:
        return False
    sources = {each.source for each in found.products if each.inputs == inputs}
    users = [each for each in editor.graph.node if inputs in each.input]
    others = [each for each in users if each.op_type != OPERATOR or each.output[0] not in sources]
    producer = editor.producer(inputs)
    if producer is None or producer.output[0] != inputs:
        return False
    if any(_float_weights(editor, each, inputs) is None for each in others):
        return False
    if producer.op_type in _NORMS:
        names = [input_at(producer, place) for place in _NORMS[producer.op_type]]
        return all(editor.array(name) is not None for name in names if name)
    return inputs in found.extra_steps


def _divide(editor: GraphEditor, found: Int8Products, inputs: str, factors: Floats) -> None:
    """Divide inputs by factors where they are computed, and multiply the weights of their products with them."""
    for each in found.products:
        if each.inputs == inputs:
            each.column_factors = factors
    for user in editor.graph.node:
        if (weights := _float_weights(editor, user, inputs)) is not None:
            user.input[1] = editor.constant(f"{user.output[0]}.int8.divided", weights * factors[:, None])
    producer = editor.producer(inputs)
    if producer is None:
        raise ValueError(f"{inputs} is not computed")
    if producer.op_type not in _NORMS:
        gate = next(each for each in found.products if each.name in producer.input and not each.keeps_step)
        gate.row_factors = np.reciprocal(factors)
        return
    for place in _NORMS[producer.op_type]:
        values = editor.array(input_at(producer, place)) if input_at(producer, place) else None
        if values is not None:
            name = f"{inputs}.int8.{place}"
            producer.input[place] = editor.constant(name, (values / factors).astype(np.float32))


def _float_weights(editor: GraphEditor, user: Message, inputs: str) -> Floats | None:
    """Weights `[columns, outputs]` of a product in float32 with these inputs; None for anything else."""
    if user.op_type != "MatMul" or user.input[0] != inputs:
        return None
    weights = editor.array(user.input[1])
    return weights if weights is not None and weights.ndim == 2 and weights.dtype == np.float32 else None


def sample_inputs(
    editor: GraphEditor, source: Path, bundle: Bundle, config: SessionConfig, channels: Mapping[str, int]
) -> dict[str, InputSample]:
    """Inputs of products over the sample text.

    Args:
        editor: a graph of the model, of which the values become outputs.
        source: a file in the folder of its data files.
        bundle: the model.
        config: how its graph is run.
        channels: names of the inputs, and their numbers of channels.

    Raises:
        BundleError: the graph or the tokenizer cannot be loaded.
        EdgeError: ONNX Runtime failed.
    """
    for name, size in channels.items():
        editor.graph.output.append(value_info(name, np.float32, (1, "tokens", size)))
    session = GraphSession(source, config, metadata_of(bundle), model=editor.serialized())
    vocabulary = session.graph_io.vocab_size
    text = TextTokenizer(bundle, vocabulary).encode(SAMPLE_TEXT, add_special_tokens=True) or [0]
    limit = min(_PASSES * _WIDTH, bundle.context or _PASSES * _WIDTH)
    tokens = np.resize(np.array(text), max(limit // _WIDTH, 1) * _WIDTH)
    bound = session.bind(session.arena(tokens.size))
    values = {name: np.zeros((1, _WIDTH, size), np.float32) for name, size in channels.items()}
    for name, array in values.items():
        bound.observe(name, array)
    largest = {name: np.zeros(size, np.float32) for name, size in channels.items()}
    kept: dict[str, list[np.ndarray]] = {name: [] for name in channels}
    for start in range(0, tokens.size, _WIDTH):
        bound.forward(tokens[start : start + _WIDTH], logits_for=(_WIDTH - 1,))
        bound.arena.commit(_WIDTH)
        for name, array in values.items():
            np.maximum(largest[name], np.abs(array[0]).max(axis=0), out=largest[name])
            kept[name].append(array[0, ::_KEPT].copy())
    return {name: (largest[name], np.concatenate(kept[name])) for name in channels}
