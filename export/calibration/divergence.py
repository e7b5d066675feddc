"""Divergence of quantization plans from the float model, without writing bundles.

The float model runs once, and its hidden states before every half layer and its log-probabilities are kept. A plan runs
from the first half layer in which it differs from the float model or a recent plan. Weights are quantized, activations
are not; `divergence_of_bundle` measures the graph as it is shipped.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from ...models.array_file import read_array
from ...models.manifest import WeightFormat
from ...runtime.text.turn_markers import TokenArray
from ..bundle_content import SourceModel
from ..check.contract_session import ContractSession
from ..checkpoint.layer_weights import FusedLinear, QuantPlan
from ..checkpoint.layout import fused_linears, layer_layout
from ..checkpoint.source import Float32Array, in_order
from .layer_graphs import CONCURRENT_PASSES
from .layer_runner import LayerRunner
from .logit_comparison import Float64Array, LogitComparison, LogitDifference, ReferenceLogits, owned
from .text_batches import pack_texts
from .work_folder import KeptNumbers

EXACT: Final = WeightFormat(32)
_STATE_BYTES: Final = 1 << 28
"""Memory for hidden states of recent plans; states of the float model may take twice as much before they go to disk."""
_MATRIX_BYTES: Final = 1 << 30
"""Memory for dequantized matrices."""
_NOISE_KL: Final = 1e-8
"""KL in nats below which a difference is the noise of float32 arithmetic, and counts as 0."""
_MOST_NLL: Final = 700.0
"""Mean -log p up to which perplexities are computed: JSON, and so a manifest, has no infinite number."""


@dataclass(frozen=True)
class Divergence:
    """Distance of a model from the float model, averaged over the tokens of some text."""

    mean_kl: float
    """Mean of KL(float || model) in nats; 0 where there is only the noise of float32 arithmetic."""
    p99_kl: float
    """99th percentile of that KL."""
    top1_agreement: float
    """Share of positions at which both models prefer the same next token."""
    perplexity: float
    """Perplexity of the model, at most e ** 700."""
    float_perplexity: float
    """Perplexity of the float model."""
    tokens: int
    """Number of tokens."""

    @classmethod
    def of(
        cls, kl: Float64Array, agrees: npt.NDArray[np.bool_], next_nll: Float64Array, float_nll: Float64Array
    ) -> Divergence:
        """Average over positions, each array [n]: KL, agreement, and -log p of the next token of model and float model.

        There is no next token where -log p is NaN.
        """
        mean_kl = float(kl.mean())
        perplexity, of_float = (
            float(np.exp(np.minimum(np.nanmean(each), _MOST_NLL))) for each in (next_nll, float_nll)
        )
        noiseless = mean_kl if mean_kl > _NOISE_KL else 0.0
        return cls(noiseless, float(np.quantile(kl, 0.99)), float(agrees.mean()), perplexity, of_float, len(kl))

    def as_mapping(self) -> dict[str, float]:
        """The numbers by name, as stored in `Manifest.quality`."""
        return {field.name: float(getattr(self, field.name)) for field in fields(self) if field.name != "tokens"}


class PlanEvaluator:
    """Measures quantization plans on one text; each plan computes only what recent ones did not."""

    def __init__(
        self,
        model: SourceModel,
        text: Sequence[TokenArray],
        weights_of: Callable[[FusedLinear, WeightFormat], Float32Array],
        folder: Path,
    ) -> None:
        """Prepare an evaluator; nothing runs yet.

        Args:
            model: The float model.
            text: Token ids, int64 [n] each, of at least two tokens; a part of the text is its first batches.
            weights_of: Returns the dequantized matrix [N, K] of a linear in a format. A tied head is requested as the
                embedding.
            folder: Folder for the hidden states of the float model, and for what `mean_kl` measures; it belongs to one
                model, text and way to quantize.
        """
        self._model = model
        self._config = config = model.config
        self._weights_of = weights_of
        self._text = tuple(text)
        self.tokens: Final = sum(map(len, text))
        self._batches = pack_texts(self._text)
        self._linears = {linear.name: linear for linear in fused_linears(config)}
        self._folder = folder
        self._kept = KeptNumbers(folder / "mean-kl.json")
        self._exact: set[Path] = set()
        """Files of the float model's hidden states."""
        self.release()
        self._references: dict[int, list[ReferenceLogits]] = {}
        self._prefixes: dict[tuple[int, tuple[object, ...]], int] = {}
        self._stages: list[tuple[FusedLinear, ...]] = [(self._linears["embedding"],)]
        for index in range(config.layers):
            layer = layer_layout(config, index)
            self._stages += [layer.mixer_linears, layer.feed_forward_linears]
        plan_bytes = sum(batch.tokens.size for batch in self._batches) * config.hidden_size * 4 * len(self._stages)
        self._stride = max(1, math.ceil(plan_bytes / (_STATE_BYTES / 2)))
        """States are kept after every `_stride`-th stage, so that the states of two plans fit."""

    def divergence_alone(self, linear: str, weight_format: WeightFormat, tokens: int | None = None) -> float:
        """Mean KL in nats with only one linear quantized; a tied head and its embedding are one.

        Args:
            linear: The linear's name.
            weight_format: Its format.
            tokens: Smallest number of tokens to measure on, from the beginning; None for all.
        """
        return self.mean_kl({linear: weight_format}, tokens)

    def mean_kl(self, plan: QuantPlan, tokens: int | None = None) -> float:
        """Mean KL in nats, measured as by `divergence` unless an interrupted export has measured it."""
        formats = sorted((name, astuple(each)) for name, each in plan.items())
        key = hashlib.sha256(repr((formats, tokens)).encode()).hexdigest()[:32]
        return self._kept.get(key, lambda: self.divergence(plan, tokens).mean_kl)

    def divergence(self, plan: QuantPlan, tokens: int | None = None) -> Divergence:
        """Measure a plan; linears that it does not name stay in float32.

        Args:
            plan: Format of each linear, by its name.
            tokens: Smallest number of tokens to measure on, from the beginning; None for all.

        Raises:
            CheckpointError: A tensor cannot be read.
            OSError: The disk refused a write.
        """
        numbers = self._first_batches(tokens)
        self._run_reference(numbers)
        complete = self._completed(plan)
        hidden, head = self._run(complete, numbers), self._matrix(self._linears["head"], complete["head"])

        def compare(number: int) -> list[LogitDifference]:
            parts = zip(self._logits(number, hidden[number], head), self._references[number], strict=True)
            return [self._comparison.compare(*logits, reference) for logits, reference in parts]

        return self._summary([each for batch in in_order(compare, numbers) for each in batch], numbers)

    def release(self) -> None:
        """Free the memory of matrices, recent plans and sessions; they are recomputed when needed."""
        # ONNX Runtime keeps the largest memory of a pass for as long as a session lives.
        self._runner, self._comparison = LayerRunner(self._model), LogitComparison(self._config.vocab_size)
        self._matrices, self._recent = RecentArrays(_MATRIX_BYTES), RecentArrays(_STATE_BYTES)

    def divergence_of_bundle(self, bundle: Path) -> Divergence:
        """Measure a bundle's graph as it is, with activations in 8 bits.

        Args:
            bundle: Folder with a graph of edge-run's own contract.

        Raises:
            ExportError: The graph cannot be loaded or run.
        """
        session = ContractSession(bundle, max(map(len, self._text)))

        def logits_of(tokens: TokenArray, rows: npt.NDArray[np.int64]) -> Float32Array:
            session.reset()
            return session.forward(tokens, rows)

        return self.divergence_of(logits_of)

    def divergence_of(self, logits_of: Callable[[TokenArray, npt.NDArray[np.int64]], Float32Array]) -> Divergence:
        """Measure a graph by the logits that it computes at some positions of a text, float32 [r, vocabulary]."""
        numbers = self._first_batches(None)
        self._run_reference(numbers)
        differences = []
        for number in numbers:
            batch = self._batches[number]
            logits = np.empty((batch.count, self._config.vocab_size), np.float32)
            rows = np.cumsum(batch.counted.ravel()).reshape(batch.counted.shape) - 1
            for which in np.unique(batch.texts[batch.counted]).tolist():
                own = batch.texts == which
                counted = np.flatnonzero(batch.counted[own])
                logits[rows[own & batch.counted]] = logits_of(self._text[which], counted)
            following, step = batch.following[batch.counted], self._runner.logits_batch
            for start, reference in zip(range(0, batch.count, step), self._references[number], strict=True):
                part = slice(start, start + step)
                differences.append(self._comparison.compare(logits[part], following[part], reference))
        return self._summary(differences, numbers)

    def _first_batches(self, tokens: int | None) -> list[int]:
        """Indices of the first batches that have that many counted tokens."""
        counts = np.cumsum([batch.count for batch in self._batches])
        if tokens is None or tokens >= counts[-1]:
            return list(range(len(counts)))
        needed = int(np.searchsorted(counts, tokens)) + 1
        # Batches that run concurrently take no longer than one.
        return list(range(min(len(counts), -(-needed // CONCURRENT_PASSES) * CONCURRENT_PASSES)))

    def _completed(self, plan: QuantPlan) -> dict[str, WeightFormat]:
        """The plan with a format for every linear; a tied head has its embedding's."""
        complete = {name: plan.get(name, EXACT) for name in self._linears}
        for linear in self._linears.values():
            if linear.paired is not None:
                complete[linear.paired.name] = complete[linear.name]
        if self._config.tied_head:
            shared = plan.get("embedding", plan.get("head", EXACT))
            complete |= {"embedding": shared, "head": shared}
        return complete

    def _run_reference(self, numbers: Sequence[int]) -> None:
        """Run the float model on those batches that it has not run on yet."""
        missing = [number for number in numbers if number not in self._references]
        if not missing:
            return
        hidden, head = self._run(self._completed({}), missing), self._matrix(self._linears["head"], EXACT)

        def reference(number: int) -> list[ReferenceLogits]:
            return [self._comparison.reference(*each) for each in self._logits(number, hidden[number], head)]

        self._references.update(zip(missing, in_order(reference, missing), strict=True))

    def _run(self, plan: QuantPlan, numbers: Sequence[int]) -> dict[int, Float32Array]:
        """Hidden states after the last layer, by the index of the batch."""
        keys = self._keys(plan)
        exact = [all(plan[linear.name] == EXACT for linear in linears) for linears in self._stages]
        exact_stages = [*exact, False].index(False)
        begun = {number: self._latest(number, keys, exact_stages) for number in numbers}
        hidden: dict[int, Float32Array] = {number: state for number, (_, state) in begun.items() if state is not None}
        for stage, linears in enumerate(self._stages):
            due = [number for number, (start, _) in begun.items() if start <= stage]
            if not due:
                continue
            # Rows of the exact embedding are read as they are needed.
            needed = [linear for linear in linears if stage > 0 or plan[linear.name] != EXACT]
            weights = {linear.name: self._matrix(linear, plan[linear.name]) for linear in needed}

            def step(number: int, stage: int = stage, weights: Mapping[str, Float32Array] = weights) -> Float32Array:
                batch, states = self._batches[number], hidden.get(number)
                if states is None or stage == 0:
                    return self._runner.embed(batch, weights.get("embedding"))
                index, second = divmod(stage - 1, 2)
                return self._runner.half(index, not second, states, batch, lambda each: weights[each.name])[0]

            for number, states in zip(due, in_order(step, due), strict=True):
                hidden[number] = states
                if stage < exact_stages:
                    self._folder.mkdir(parents=True, exist_ok=True)
                    np.save(file := self._exact_file(stage, number), states, allow_pickle=False)
                    self._exact.add(file)
                elif stage % self._stride == 0:
                    self._recent.put((number, keys[stage]), states)
        return hidden

    def _latest(self, number: int, keys: Sequence[int], exact_stages: int) -> tuple[int, Float32Array | None]:
        """The stage to begin with, and the states before it; None before the first."""
        for stage in range(len(self._stages) - 1, -1, -1):
            if stage < exact_stages and (file := self._exact_file(stage, number)) in self._exact:
                return stage + 1, read_array(file)
            found = self._recent.get((number, keys[stage]))
            if found is not None:
                return stage + 1, found
        return 0, None

    def _exact_file(self, stage: int, number: int) -> Path:
        """The file with the float model's hidden states of a batch after a stage."""
        return self._folder / f"float-{stage}-{number}.npy"

    def _keys(self, plan: QuantPlan) -> list[int]:
        """For each stage a number that identifies all formats up to and including it."""
        keys, key = [], 0
        for linears in self._stages:
            step = key, tuple(astuple(plan[linear.name]) for linear in linears)
            key = self._prefixes.setdefault(step, len(self._prefixes) + 1)
            keys.append(key)
        return keys

    def _logits(
        self, number: int, hidden: Float32Array, head: Float32Array
    ) -> Iterator[tuple[Float32Array, npt.NDArray[np.int64]]]:
        """Logits at a batch's counted tokens and the next tokens of the text, some positions at a time."""
        batch, step = self._batches[number], self._runner.logits_batch
        states, following = hidden[batch.counted], batch.following[batch.counted]
        for start in range(0, len(states), step):
            part = slice(start, start + step)
            yield self._runner.logits(states[part], lambda _: head), following[part]

    def _matrix(self, linear: FusedLinear, weight_format: WeightFormat) -> Float32Array:
        """The matrix [N, K] that a linear multiplies by."""
        if linear.name == "head" and self._config.tied_head:
            linear = self._linears["embedding"]
        key = linear.name, astuple(weight_format)
        matrix = self._matrices.get(key)
        if matrix is None:
            exact = weight_format == EXACT
            matrix = self._runner.matrix(linear) if exact else self._weights_of(linear, weight_format)
            self._matrices.put(key, matrix)
        return matrix

    def _summary(self, differences: Sequence[LogitDifference], numbers: Sequence[int]) -> Divergence:
        kl, agrees, next_nll = (np.concatenate(each) for each in zip(*differences, strict=True))
        float_nll = [each.next_nll for number in numbers for each in self._references[number]]
        return Divergence.of(kl, agrees, next_nll, np.concatenate(float_nll))


class RecentArrays:
    """A least-recently-used cache of arrays."""

    def __init__(self, limit: int) -> None:
        """`limit` is the largest total size in bytes."""
        self.limit = limit
        self._bytes = 0
        self._arrays: OrderedDict[Hashable, Float32Array] = OrderedDict()

    def get(self, key: Hashable) -> Float32Array | None:
        """The array with that key, or None."""
        if key not in self._arrays:
            return None
        self._arrays.move_to_end(key)
        return self._arrays[key]

    def put(self, key: Hashable, array: Float32Array) -> None:
        """Cache an array, unless it is larger than the limit."""
        if key in self._arrays or array.nbytes > self.limit:
            return
        self._bytes += array.nbytes
        self._arrays[key] = owned(array)
        while self._bytes > self.limit:
            _, oldest = self._arrays.popitem(last=False)
            self._bytes -= oldest.nbytes
