"""Half layers and divergences of plans, compared with the reference decoder's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgerun.export import FP32, Method, WeightFormat
from edgerun.export.calibration import divergence as divergence_module
from edgerun.export.calibration import logit_comparison as comparison_module
from edgerun.export.calibration.divergence import PlanEvaluator, RecentArrays
from edgerun.export.calibration.layer_runner import LayerRunner, WeightsOf
from edgerun.export.calibration.logit_comparison import LogitComparison
from edgerun.export.calibration.text_batches import Batch, pack_texts
from edgerun.export.check.parity import quantized_weights
from edgerun.export.check.reference import reference_logits
from edgerun.export.checkpoint.config import read_config
from edgerun.export.checkpoint.layout import fused_linears
from edgerun.export.checkpoint.safetensors_files import Checkpoint
from support.tiny_models import ATTENTION_FAMILIES, GRANITE_EXPERTS, exported, source_model

INT4, INT2 = WeightFormat(4, 32), WeightFormat(2, 32)
TEXTS = list(np.random.default_rng(5).integers(0, 300, (5, 24)))


def evaluator_of(folder, texts=TEXTS, family: str = "llama", **overrides) -> PlanEvaluator:
    model = source_model(folder / "model", family, **overrides)

    def weights_of(linear, weight_format):
        plan = {each.name: weight_format for each in fused_linears(model.config)}
        rounded = quantized_weights(model.source, model.config, plan)
        return np.concatenate([piece for name in linear.weights for piece in rounded.chunks(name)])

    return PlanEvaluator(model, texts, weights_of, folder / "work")


def expected(folder, plan, texts=TEXTS):
    """Figures of a plan by the reference decoder: mean and 99th percentile of KL, agreement, both perplexities."""
    source = Checkpoint(folder / "model")
    config = read_config(source.folder)
    whole = {linear.name: plan.get(linear.name, FP32) for linear in fused_linears(config)}
    if config.tied_head:
        whole["head"] = whole["embedding"]
    kl, same, ours, theirs = [], [], [], []
    for text in texts:
        logits = [
            reference_logits(weights, config, text, 256)
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


def test_head_and_embedding_are_one_where_they_are_tied(tmp_path) -> None:
    apart, tied = (evaluator_of(tmp_path / str(tied), tie_word_embeddings=tied) for tied in (False, True))
    head = expected(tmp_path / "False", {"head": INT2})[0]
    assert apart.divergence_alone("head", INT2) == pytest.approx(head, rel=2e-3)
    assert apart.divergence_alone("embedding", INT2) != apart.divergence_alone("head", INT2)
    assert tied.divergence_alone("head", INT4) == tied.divergence_alone("embedding", INT4) > 0
    nothing = tied.divergence({})
    assert (nothing.mean_kl, nothing.p99_kl, nothing.top1_agreement) == (0, 0, 1)
    assert nothing.perplexity == nothing.float_perplexity


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


def test_cached_arrays_do_not_hold_the_memory_of_a_session() -> None:
    kept, memory = RecentArrays(100), np.array([1, 2, 3], np.float32)
    kept.put("a", np.frombuffer(memory.data, np.float32))
    memory[:] = 0
    assert kept.get("a").tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("factors", "found"),
    [
        # Formats compare equal whatever their method; their divergence differs.
        ({None: 1, Method.RTN: 0}, {None: True, Method.RTN: False}),
        # For a checkpoint trained for few bits only the noise of arithmetic is left, which may even be negative.
        ({None: 1 + 1e-6, Method.RTN: 1}, {None: True, Method.RTN: True}),
    ],
)
def test_lossless_quantization_has_no_divergence(tmp_path, factors, found) -> None:
    model = source_model(tmp_path / "model")

    def weights_of(linear, weight_format):
        return np.concatenate([model.source.read(name) for name in linear.weights]) * np.float32(
            factors[weight_format.method]
        )

    evaluator = PlanEvaluator(model, TEXTS, weights_of, tmp_path / "work")
    for method, lossless in found.items():
        plan = dict.fromkeys(LINEARS, replace(INT4, method=method))
        assert (evaluator.divergence(plan).mean_kl == 0) == lossless


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
    exact = exported(tmp_path / "model", tmp_path / "exact")
    found = evaluator.divergence_of_bundle(exact)
    assert found.mean_kl == pytest.approx(0, abs=1e-7)
    assert found.top1_agreement == 1
    assert found.perplexity == pytest.approx(found.float_perplexity)
    weight_format = WeightFormat(8, 32)
    rounded = exported(tmp_path / "model", tmp_path / "rounded", weight_format)
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


PLAIN = [family for family in ATTENTION_FAMILIES if family not in ("qwen3_moe", "gpt_oss", "gemma4_text")]
BIASED = {"attention_bias": True, "mlp_bias": True}


def runner_of(folder, family: str = "llama", **overrides) -> LayerRunner:
    return LayerRunner(source_model(folder, family, **overrides))


def run_layer(runner: LayerRunner, index: int, hidden, batch: Batch, weights_of: WeightsOf):
    """Hidden states after a layer."""
    for mixes in (True, False):
        hidden, *_ = runner.half(index, mixes, hidden, batch, weights_of)
    return hidden


def texts_of(*lengths: int):
    random = np.random.default_rng(3)
    return [random.integers(0, 300, length) for length in lengths]


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        *((family, {}) for family in PLAIN),
        ("llama", {**BIASED, "tie_word_embeddings": False}),
        ("qwen3_moe", {}),
        ("qwen3_moe", {"norm_topk_prob": False, "mlp_only_layers": []}),
        ("gpt_oss", {}),
        ("qwen3_5_text", {}),
        ("qwen3_5_moe_text", {}),
        ("qwen3_next", {"norm_topk_prob": False}),
        ("granitemoehybrid", {}),
        ("granitemoehybrid", GRANITE_EXPERTS),
        ("granitemoehybrid", {"mamba_n_groups": 1, "mamba_proj_bias": True}),
        ("lfm2", {}),
        ("lfm2", {"conv_L_cache": 5, "conv_bias": True}),
    ],
)
def test_logits_are_those_of_the_reference(tmp_path, family: str, overrides) -> None:
    runner = runner_of(tmp_path, family, **overrides)
    config = read_config(tmp_path)
    texts = texts_of(40, 17, 33, 5, 1, 22)
    found = set()
    for batch in pack_texts(texts, slots=100):
        hidden = runner.embed(batch)
        for index in range(runner.config.layers):
            hidden = run_layer(runner, index, hidden, batch, runner.matrix)
        for number in set(batch.texts[batch.texts >= 0].tolist()):
            logits = runner.logits(hidden[batch.texts == number], runner.matrix)
            expected = reference_logits(runner.source, config, texts[number], 256)
            np.testing.assert_allclose(logits, expected, atol=2e-4)
            found.add(number)
    assert found == set(range(len(texts)))


@pytest.mark.parametrize("family", ["llama", "olmo2", "gemma2", "lfm2", "qwen3_5_text", "granitemoehybrid"])
def test_captured_inputs_give_the_outputs(tmp_path, family: str) -> None:
    """The output of a half layer is its last linear applied to the captured inputs."""
    runner = runner_of(tmp_path, family)
    (batch,) = pack_texts(texts_of(20, 9))
    hidden = runner.embed(batch)
    after, inputs, _ = runner.captured(0, hidden, batch, runner.matrix)
    np.testing.assert_array_equal(after, run_layer(runner, 0, hidden, batch, runner.matrix))
    assert {name: values.shape[-1] for name, values in inputs.items()} == {
        linear.name: linear.columns for linear in fused_linears(runner.config) if linear.name.startswith("layers.0.")
    }
    if family == "llama":
        linears = {linear.name: linear for linear in fused_linears(runner.config)}
        middle, *_ = runner.half(0, True, hidden, batch, runner.matrix)
        for linear, before, later in (("o", hidden, middle), ("down", middle, after)):
            product = inputs[f"layers.0.{linear}"] @ runner.matrix(linears[f"layers.0.{linear}"]).T
            np.testing.assert_allclose(later - before, product, atol=1e-4)


@given(
    texts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), min_size=1, max_size=12),
    slots=st.integers(1, 40),
)
def test_batches_hold_every_text_once(texts, slots: int) -> None:
    batches = pack_texts([np.array(text) for text in texts], slots)
    width = max(map(len, texts))
    prefixes = {tuple(text[: end + 1]) for text in texts for end in range(len(text))}
    found, counted = {}, []
    for batch in batches:
        rows, columns = batch.tokens.shape
        assert columns <= width
        assert rows <= max(1, slots // width)
        for row in range(rows):
            for number in sorted(set(batch.texts[row].tolist()) - {-1}):
                place = batch.texts[row] == number
                assert number not in found
                found[number] = batch.tokens[row, place].tolist()
                np.testing.assert_array_equal(batch.positions[row, place], np.arange(place.sum()))
                assert batch.following[row, place].tolist() == [*found[number][1:], -1]
                counted += [
                    tuple(found[number][: end + 1]) for end in np.flatnonzero(batch.counted[row, place]).tolist()
                ]
        assert not batch.counted[batch.texts < 0].any()
    assert [found[number] for number in range(len(texts))] == texts
    assert len(counted) == len(set(counted))
    assert set(counted) == prefixes
