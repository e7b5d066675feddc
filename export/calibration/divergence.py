"""What a plan costs in quality, without writing a bundle: KL from the float model on text.

The float model runs once; its hidden states before every half layer and its log-probabilities are kept. A plan then
runs from the first half layer in which it differs from what ran before: the float model, or a plan of late. Weights are
rounded, activations are not; `divergence_of_bundle` is for the graph as shipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from ...models.manifest import WeightFormat
from ...runtime.text.turn_markers import TokenArray
from ..check.contract_session import ContractSession
from ..checkpoint.config import DecoderConfig
from ..checkpoint.layout import FusedLinear, fused_linears, layer_layout
from ..checkpoint.prefetch import in_order
from ..checkpoint.source import Float32Array, ModelSource
from .layer_runner import AT_ONCE, LayerRunner
from .logit_comparison import Believed, Judged, LogitsJudge
from .state_cache import PinnedArrays, RecentArrays
from .text_packing import Batch, packed

EXACT: Final = WeightFormat(32)
_STATES: Final = 1 << 28
"""Bytes of hidden states of recent plans; of the float model's own, twice that before they go to disk."""
_MATRICES: Final = 1 << 30
"""Bytes of rounded matrices."""
_NOTHING: Final = 1e-8
"""Nats that are no more than float32 arithmetic makes of itself: as if weights were rounded to what they are."""


@dataclass(frozen=True)
class Divergence:
    """How far a model is from the float one, over the tokens of some text."""

    mean_kl: float
    """Of KL(float || model) in nats; 0 where there is only the noise of float32 arithmetic."""
    p99_kl: float
    """99 of 100 tokens have less."""
    top1_agreement: float
    """Share of tokens where both prefer the same next one."""
    perplexity: float
    """Of the model on the text."""
    float_perplexity: float
    """Of the float model."""
    tokens: int
    """How many tokens these are averages of."""


class PlanEvaluator:
    """Measures plans on one text; each further one costs what it does not share with those before."""

    def __init__(
        self,
        source: ModelSource,
        config: DecoderConfig,
        text: Sequence[TokenArray],
        weights_of: Callable[[FusedLinear, WeightFormat], Float32Array],
        folder: Path,
        context: int,
    ) -> None:
        """Nothing runs yet.

        Args:
            source: the float model's tensors.
            config: its numbers.
            text: texts of at least two tokens; where only some of them are asked for, the first.
            weights_of: the matrix [N, K] that a unit computes with in a format of few bits. A tied head is asked for
                as the embedding.
            folder: takes what does not fit into memory.
            context: positions the exported graph will serve.

        Raises:
            InputError: the model has experts.
        """
        self._source = source
        self._context = context
        self._config = config
        self._weights_of = weights_of
        self._text = tuple(text)
        self._batches = packed(self._text)
        self._linears = {linear.name: linear for linear in fused_linears(config)}
        self._runner, self._judge = self._loaded()
        self._matrices = RecentArrays(_MATRICES)
        self._exact = PinnedArrays(2 * _STATES, folder)
        self._recent = RecentArrays(_STATES)
        self._believed: dict[int, list[Believed]] = {}
        self._prefixes: dict[tuple[int, tuple[object, ...]], int] = {}
        self._stages: list[tuple[FusedLinear, ...]] = [(self._linears["embedding"],)]
        for index in range(config.layers):
            layer = layer_layout(config, index)
            self._stages += [(layer.qkv, layer.output), (layer.gate_up, layer.down)]
        of_a_plan = sum(batch.tokens.size for batch in self._batches) * config.hidden_size * 4 * len(self._stages)
        self._stride = max(1, math.ceil(of_a_plan / (_STATES / 2)))
        """Of every so many half layers the states are kept, so that those of two plans fit."""

    def solo(self, linear: str, form: WeightFormat, tokens: int | None = None) -> float:
        """Mean KL with only that unit rounded; a tied head and its embedding are one.

        Args:
            unit: the unit's name.
            form: its format.
            tokens: on how many tokens at least, from the first on; None for all.
        """
        return self.divergence({linear: form}, tokens).mean_kl

    def divergence(self, plan: Mapping[str, WeightFormat], tokens: int | None = None) -> Divergence:
        """Measure a plan; units it does not name stay exact.

        Args:
            plan: formats by unit.
            tokens: on how many tokens at least, from the first on; None for all.

        Raises:
            CheckpointError: a tensor cannot be read.
            OSError: the disk refused a write.
        """
        numbers = self._enough(tokens)
        self._believe(numbers)
        chosen = self._complete(plan)
        hidden, head = self._run(chosen, numbers), self._matrix(self._linears["head"], chosen["head"])

        def judge(number: int) -> list[Judged]:
            rows = self._logits(number, hidden[number], head)
            return [self._judge.judged(*each, known) for each, known in zip(rows, self._believed[number], strict=True)]

        judged = [each for of_batch in in_order(judge, numbers) for each in of_batch]
        return _summary(judged, [each for number in numbers for each in self._believed[number]])

    def release(self) -> None:
        """Give back the memory of matrices, recent plans and passes; what is asked for again is computed again."""
        # ONNX Runtime keeps the most that a pass took for as long as a session lives.
        self._runner, self._judge = self._loaded()
        self._matrices.clear()
        self._recent.clear()

    def divergence_of_bundle(self, bundle: Path, tokens: int | None = None) -> Divergence:
        """Measure a bundle's graph as it is, 8-bit activations included.

        Args:
            bundle: a folder with a graph of edge-run's own contract.
            tokens: on how many tokens at least, from the first on; None for all.

        Raises:
            ExportError: the graph cannot be loaded or run.
        """
        numbers = self._enough(tokens)
        self._believe(numbers)
        session = ContractSession(bundle, self._config, max(map(len, self._text)))
        judged = []
        for number in numbers:
            batch = self._batches[number]
            logits = np.empty((batch.count, self._config.vocab_size), np.float32)
            places = np.cumsum(batch.counted.ravel()).reshape(batch.counted.shape) - 1
            for which in np.unique(batch.texts[batch.counted]).tolist():
                mine = batch.texts == which
                session.length = 0
                asked = np.flatnonzero(batch.counted[mine])
                logits[places[mine & batch.counted]] = session.forward(self._text[which], asked)
            following, step = batch.following[batch.counted], self._runner.rows_of_pass
            for start, believed in zip(range(0, batch.count, step), self._believed[number], strict=True):
                part = slice(start, start + step)
                judged.append(self._judge.judged(logits[part], following[part], believed))
        return _summary(judged, [each for number in numbers for each in self._believed[number]])

    def _loaded(self) -> tuple[LayerRunner, LogitsJudge]:
        """What runs the model, and what compares its logits."""
        return LayerRunner(self._source, self._config, self._context), LogitsJudge(self._config.vocab_size)

    def _enough(self, tokens: int | None) -> list[int]:
        """Numbers of the first batches that have that many counted tokens."""
        counts = np.cumsum([batch.count for batch in self._batches])
        if tokens is None or tokens >= counts[-1]:
            return list(range(len(counts)))
        needed = int(np.searchsorted(counts, tokens)) + 1
        # Those that run beside each other take no longer than one.
        return list(range(min(len(counts), -(-needed // AT_ONCE) * AT_ONCE)))

    def _complete(self, plan: Mapping[str, WeightFormat]) -> dict[str, WeightFormat]:
        """A plan with a format for every unit; a tied head has its embedding's."""
        complete = {name: plan.get(name, EXACT) for name in self._linears}
        if self._config.tied_head:
            shared = plan.get("embedding", plan.get("head", EXACT))
            complete |= {"embedding": shared, "head": shared}
        return complete

    def _believe(self, numbers: Sequence[int]) -> None:
        """Run the float model on batches that it did not yet see."""
        missing = [number for number in numbers if number not in self._believed]
        if not missing:
            return
        exact = self._complete({})
        hidden, head = self._run(exact, missing), self._matrix(self._linears["head"], EXACT)

        def believe(number: int) -> list[Believed]:
            return [self._judge.believed(*each) for each in self._logits(number, hidden[number], head)]

        self._believed.update(zip(missing, in_order(believe, missing), strict=True))

    def _run(self, plan: Mapping[str, WeightFormat], numbers: Sequence[int]) -> dict[int, Float32Array]:
        """Hidden states after the last layer, by the number of the batch."""
        keys = self._keys(plan)
        exact_until = self._exact_until(plan)
        begun = {number: self._latest(number, keys, exact_until) for number in numbers}
        hidden: dict[int, Float32Array] = {number: state for number, (_, state) in begun.items() if state is not None}
        for stage, linears in enumerate(self._stages):
            due = [number for number, (start, _) in begun.items() if start <= stage]
            if not due:
                continue
            # Rows of the exact embedding are read as they are needed.
            rounded = [linear for linear in linears if stage > 0 or plan[linear.name] != EXACT]
            weights = {linear.name: self._matrix(linear, plan[linear.name]) for linear in rounded}

            def step(number: int, stage: int = stage, weights: Mapping[str, Float32Array] = weights) -> Float32Array:
                return self._step(stage, self._batches[number], hidden.get(number), weights)

            for number, states in zip(due, in_order(step, due), strict=True):
                hidden[number] = states
                if stage < exact_until:
                    self._exact.put(f"float-{stage}-{number}", states)
                elif stage % self._stride == 0:
                    self._recent.put((number, keys[stage]), states)
        return hidden

    def _step(
        self, stage: int, batch: Batch, hidden: Float32Array | None, weights: Mapping[str, Float32Array]
    ) -> Float32Array:
        """Run one stage: the embedding, or one of a layer's halves."""
        if hidden is None or stage == 0:
            return self._runner.embed(batch, weights.get("embedding"))
        index, second = divmod(stage - 1, 2)
        if second:
            return self._runner.feed_forward(index, hidden, lambda linear: weights[linear.name])
        return self._runner.attention(index, hidden, batch, lambda linear: weights[linear.name])

    def _latest(self, number: int, keys: Sequence[int], exact_until: int) -> tuple[int, Float32Array | None]:
        """The stage to begin with, and the states before it; None before the first."""
        for stage in range(len(self._stages) - 1, -1, -1):
            name = f"float-{stage}-{number}"
            if stage < exact_until and name in self._exact:
                return stage + 1, self._exact.get(name)
            found = self._recent.get((number, keys[stage]))
            if found is not None:
                return stage + 1, found
        return 0, None

    def _keys(self, plan: Mapping[str, WeightFormat]) -> list[int]:
        """For each stage a number that stands for all formats up to and with it."""
        keys, key = [], 0
        for linears in self._stages:
            step = key, tuple(astuple(plan[linear.name]) for linear in linears)
            key = self._prefixes.setdefault(step, len(self._prefixes) + 1)
            keys.append(key)
        return keys

    def _exact_until(self, plan: Mapping[str, WeightFormat]) -> int:
        """How many stages, from the first on, round nothing."""
        exact = [all(plan[linear.name] == EXACT for linear in linears) for linears in self._stages]
        return [*exact, False].index(False)

    def _logits(
        self, number: int, hidden: Float32Array, head: Float32Array
    ) -> Iterator[tuple[Float32Array, npt.NDArray[np.int64]]]:
        """Logits of a batch's counted tokens, and the tokens that follow, some rows at a time."""
        batch, step = self._batches[number], self._runner.rows_of_pass
        rows, following = hidden[batch.counted], batch.following[batch.counted]
        for start in range(0, len(rows), step):
            part = slice(start, start + step)
            yield self._runner.logits(rows[part], lambda _: head), following[part]

    def _matrix(self, linear: FusedLinear, form: WeightFormat) -> Float32Array:
        """The matrix [N, K] that a unit computes with."""
        if linear.name == "head" and self._config.tied_head:
            linear = self._linears["embedding"]
        key = linear.name, astuple(form)
        matrix = self._matrices.get(key)
        if matrix is None:
            matrix = self._runner.matrix(linear) if form == EXACT else self._weights_of(linear, form)
            self._matrices.put(key, matrix)
        return matrix


def _summary(judged: Sequence[Judged], believed: Sequence[Believed]) -> Divergence:
    kl = np.concatenate([each.kl for each in judged])
    mean_kl = float(kl.mean())
    return Divergence(
        mean_kl=mean_kl if mean_kl > _NOTHING else 0.0,
        p99_kl=float(np.quantile(kl, 0.99)),
        top1_agreement=float(np.concatenate([each.agrees for each in judged]).mean()),
        perplexity=_perplexity(judged),
        float_perplexity=_perplexity(believed),
        tokens=len(kl),
    )


def _perplexity(rows: Sequence[Judged] | Sequence[Believed]) -> float:
    return float(np.exp(np.nanmean(np.concatenate([each.surprise for each in rows]))))
