"""Divergence of plans, compared with the reference decoder's."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgerun.export import FP32, ExportRecipe, Method, WeightFormat, export_checkpoint
from edgerun.export.bundle_content import SourceModel
from edgerun.export.calibration import divergence as divergence_module
from edgerun.export.calibration import logit_comparison as comparison_module
from edgerun.export.calibration.divergence import PlanEvaluator
from edgerun.export.calibration.logit_comparison import LogitComparison
from edgerun.export.check.parity import quantized_weights
from edgerun.export.check.reference import reference_logits
from edgerun.export.checkpoint.config import read_config
from edgerun.export.checkpoint.layout import fused_linears
from edgerun.export.checkpoint.safetensors_files import Checkpoint
from support.tiny_models import write_checkpoint

INT4, INT2 = WeightFormat(4, 32), WeightFormat(2, 32)
TEXTS = list(np.random.default_rng(5).integers(0, 300, (5, 24)))


def evaluator_of(folder, texts=TEXTS, family: str = "llama", **overrides) -> PlanEvaluator:
    source = Checkpoint(write_checkpoint(folder / "model", family, **overrides))
    config = read_config(source.folder)

    def weights_of(linear, weight_format):
        plan = {each.name: weight_format for each in fused_linears(config)}
        rounded = quantized_weights(source, config, plan)
        return np.concatenate([piece for name in linear.weights for piece in rounded.chunks(name)])

    return PlanEvaluator(SourceModel(source, config, 256), texts, weights_of, folder / "work")


def expected(folder, plan, texts=TEXTS):
    """Figures of a plan by the reference decoder: mean and 99th percentile of KL, agreement, both perplexities."""
    source = Checkpoint(folder / "model")
    config = read_config(source.folder)
    settings = json.loads((source.folder / "config.json").read_text(encoding="utf-8"))
    whole = {linear.name: plan.get(linear.name, FP32) for linear in fused_linears(config)}
    if config.tied_head:
        whole["head"] = whole["embedding"]
    kl, same, ours, theirs = [], [], [], []
    for text in texts:
        logits = [
            reference_logits(weights, settings, text, 256)
            for weights in (source, quantized_weights(source, config, whole))
        ]
        p, q = (each - each.max(-1, keepdims=True) for each in logits)
        p, q = (each - np.log(np.exp(each).sum(-1, keepdims=True)) for each in (p, q))
        kl.append((np.exp(p) * (p - q)).sum(-1))
        same.append(p.argmax(-1) == q.argmax(-1))
        for found, log_probs in ((ours, p), (theirs, q)):
            found.append(-np.take_along_axis(log_probs[:-1], text[1:, None], axis=1))
    divergences = np.concatenate(kl)
    perplexities = [float(np.exp(np.concatenate(each).mean())) for each in (theirs, ours)]
    return [divergences.mean(), np.quantile(divergences, 0.99), np.concatenate(same).mean(), *perplexities]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_figures_are_those_of_the_reference_decoder(tmp_path, family: str, tied: bool) -> None:
    evaluator = evaluator_of(tmp_path, family=family, tie_word_embeddings=tied)
    for plan in (
        {"layers.0.gate_up": INT2},
        {"embedding": INT4},
        {"embedding": INT4, "layers.1.qkv": INT4, "layers.1.down": INT2, "layers.0.o": INT2},
    ):
        found = evaluator.divergence(plan)
        numbers = [found.mean_kl, found.p99_kl, found.top1_agreement, found.perplexity, found.float_perplexity]
        np.testing.assert_allclose(numbers, expected(tmp_path, plan), rtol=2e-3)
        assert found.tokens == sum(map(len, TEXTS))


def test_the_head_alone(tmp_path) -> None:
    evaluator = evaluator_of(tmp_path, tie_word_embeddings=False)
    assert evaluator.divergence_alone("head", INT2) == pytest.approx(expected(tmp_path, {"head": INT2})[0], rel=2e-3)
    assert evaluator.divergence_alone("embedding", INT2) != evaluator.divergence_alone("head", INT2)


def test_a_tied_head_and_its_embedding_are_one(tmp_path) -> None:
    evaluator = evaluator_of(tmp_path)
    assert evaluator.divergence_alone("head", INT4) == evaluator.divergence_alone("embedding", INT4) > 0


def test_an_empty_plan_has_no_divergence(tmp_path) -> None:
    found = evaluator_of(tmp_path).divergence({})
    assert (found.mean_kl, found.p99_kl, found.top1_agreement) == (0, 0, 1)
    assert found.perplexity == found.float_perplexity


LINEARS = [
    "embedding",
    *(f"layers.{index}.{linear}" for index in range(2) for linear in ("qkv", "o", "gate_up", "down")),
]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Returns an evaluator shared by many examples, by the bytes of states that it keeps."""
    made = {}

    def of(states: int) -> PlanEvaluator:
        if states not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(divergence_module, "_STATE_BYTES", states)
                made[states] = evaluator_of(tmp_path_factory.mktemp("evaluator"))
        return made[states]

    return of


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    plans=st.lists(
        st.dictionaries(st.sampled_from(LINEARS), st.sampled_from([INT4, INT2, FP32])), min_size=1, max_size=4
    ),
    states=st.sampled_from([1 << 22, 60_000]),
    tokens=st.sampled_from([None, 10, 1000]),
)
def test_earlier_plans_make_no_difference(shared, plans, states: int, tokens: int | None) -> None:
    """With memory for all states, for some, and for none but the float model's, on disk."""
    for plan in plans:
        assert shared(states).divergence(plan, tokens) == shared(1).divergence(plan, tokens)


def test_released_memory_is_computed_again(tmp_path, monkeypatch) -> None:
    evaluator, requested = evaluator_of(tmp_path), []
    plan = {linear.name: INT4 for linear in fused_linears(evaluator._config)}
    weights_of = evaluator._weights_of
    monkeypatch.setattr(
        evaluator, "_weights_of", lambda linear, each: requested.append(linear.name) or weights_of(linear, each)
    )
    first = evaluator.divergence(plan)
    once = len(requested)
    assert evaluator.divergence(plan) == first
    assert len(requested) == once
    evaluator.release()
    assert evaluator.divergence(plan) == first
    assert len(requested) == 2 * once


def test_methods_of_one_format_are_distinguished(tmp_path) -> None:
    """Formats compare equal whatever their method; their divergence differs."""
    source = Checkpoint(write_checkpoint(tmp_path / "model"))

    def weights_of(linear, weight_format):
        factor = 0 if weight_format.method is Method.RTN else 1
        return np.concatenate([factor * source.read(name) for name in linear.weights])

    evaluator = PlanEvaluator(
        SourceModel(source, read_config(source.folder), 256), TEXTS, weights_of, tmp_path / "work"
    )
    assert evaluator.divergence_alone("layers.0.o", INT4) == 0
    assert evaluator.divergence_alone("layers.0.o", replace(INT4, method=Method.RTN)) > 0


def test_lossless_quantization_has_no_divergence(tmp_path) -> None:
    """For a checkpoint trained for few bits only the noise of arithmetic is left, which may even be negative."""
    source = Checkpoint(write_checkpoint(tmp_path / "model"))

    def weights_of(linear, weight_format):
        # Differs in the last digits, like sums in another order.
        return np.concatenate([source.read(name) for name in linear.weights]) * np.float32(1 + 1e-6)

    evaluator = PlanEvaluator(
        SourceModel(source, read_config(source.folder), 256), TEXTS, weights_of, tmp_path / "work"
    )
    found = evaluator.divergence(dict.fromkeys(LINEARS, INT4))
    assert found.mean_kl == 0
    assert found.p99_kl != 0


def test_part_of_the_text(tmp_path, monkeypatch) -> None:
    texts = list(np.random.default_rng(6).integers(0, 300, (40, 100)))
    evaluator = evaluator_of(tmp_path, texts)
    plan = {"layers.0.gate_up": INT2}
    few, all_ = evaluator.divergence(plan, 500), evaluator.divergence(plan)
    assert 500 <= few.tokens < 2000
    assert all_.tokens == evaluator.divergence(plan, 10**9).tokens > 3900
    first = evaluator_of(tmp_path / "other", texts[: few.tokens // 99])
    assert few.mean_kl == pytest.approx(first.divergence(plan).mean_kl, rel=1e-4)


def test_divergence_of_a_bundle(tmp_path) -> None:
    """In float32 it equals the model; in 8 bits it differs a little more than its weights, by its activations."""
    texts = [*TEXTS, TEXTS[0][:10], np.concatenate([TEXTS[1][:12], TEXTS[2]])]
    evaluator = evaluator_of(tmp_path, texts)
    exact = export_checkpoint(tmp_path / "model", tmp_path / "exact", ExportRecipe(FP32)).bundle
    found = evaluator.divergence_of_bundle(exact)
    assert found.mean_kl == pytest.approx(0, abs=1e-7)
    assert found.top1_agreement == 1
    assert found.perplexity == pytest.approx(found.float_perplexity)
    weight_format = WeightFormat(8, 32)
    rounded = export_checkpoint(tmp_path / "model", tmp_path / "rounded", ExportRecipe(weight_format)).bundle
    few = evaluator.divergence_of_bundle(rounded)
    weights_alone = evaluator.divergence(dict.fromkeys(LINEARS, weight_format))
    assert weights_alone.mean_kl < few.mean_kl < 50 * weights_alone.mean_kl
    assert few.tokens == weights_alone.tokens == found.tokens < sum(map(len, texts))


@pytest.mark.parametrize(("vocabulary", "whole"), [(50, 10), (400, 10), (400, 400)])
def test_tokens_beyond_the_likeliest_of_a_large_vocabulary_count_as_one(
    monkeypatch, vocabulary: int, whole: int
) -> None:
    monkeypatch.setattr(comparison_module, "FULL_VOCABULARY", whole)
    monkeypatch.setattr(comparison_module, "TOP_TOKENS", 60)
    random = np.random.default_rng(0)
    ours, theirs = (4 * random.standard_normal((7, vocabulary)).astype(np.float32) for _ in range(2))
    following = np.array([3, 0, -1, 49, 2, 2, -1])
    comparison = LogitComparison(vocabulary)
    reference = comparison.reference(ours, following)
    difference = comparison.compare(theirs, following, reference)
    p, q = (np.exp(each.astype(np.float64)) for each in (ours, theirs))
    p, q = (each / each.sum(-1, keepdims=True) for each in (p, q))
    order = np.argsort(-p, axis=-1)
    p_sorted, q_sorted = (np.take_along_axis(each, order, -1) for each in (p, q))
    if vocabulary > max(60, whole):
        p_sorted, q_sorted = (
            np.concatenate([each[:, :60], each[:, 60:].sum(-1, keepdims=True)], -1) for each in (p_sorted, q_sorted)
        )
    np.testing.assert_allclose(difference.kl, (p_sorted * np.log(p_sorted / q_sorted)).sum(-1), rtol=1e-3)
    assert difference.agrees.tolist() == (p.argmax(-1) == q.argmax(-1)).tolist()
    np.testing.assert_array_equal(np.isnan(difference.next_nll), following < 0)
    for nll, probabilities in ((reference.next_nll, p), (difference.next_nll, q)):
        positions = following >= 0
        np.testing.assert_allclose(nll[positions], -np.log(probabilities[positions, following[positions]]), rtol=1e-4)
