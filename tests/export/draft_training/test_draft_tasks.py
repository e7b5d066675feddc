"""Losses of drafts against enumerations in NumPy, and acceptance figures against a count, chain by chain."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from edgerun.export.draft_training import training_loop  # noqa: E402
from edgerun.export.draft_training.draft_tasks import (  # noqa: E402
    CHAIN,
    Labels,
    chain_passes,
    draft_loss,
    model_acceptance,
    total_variation,
)
from edgerun.export.draft_training.torch_llama import CausalLM, ModelShape  # noqa: E402
from edgerun.export.draft_training.training_batches import Example  # noqa: E402
from edgerun.export.draft_training.training_options import LossKind  # noqa: E402

VOCABULARY = 5


def distributions(seed: int, rows: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Logits of a draft [rows, V], and probabilities of a target [rows, V]."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, VOCABULARY)) * 2, rng.dirichlet(np.ones(VOCABULARY) * 0.5, size=rows)


def labels(target: npt.NDArray[np.float64], kept: int = VOCABULARY) -> Labels:
    order = np.argsort(-target, axis=1, kind="stable")[:, :kept]
    return Labels(
        torch.from_numpy(order[:, 0].copy()),
        torch.from_numpy(order.copy()),
        torch.from_numpy(np.take_along_axis(target, order, axis=1)),
    )


def softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    exponent = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exponent / exponent.sum(axis=1, keepdims=True)


@given(st.integers(0, 10_000), st.integers(1, 6))
def test_the_gradient_of_tvd_is_the_enumerated_policy_gradient(seed: int, rows: int) -> None:
    logits, target = distributions(seed, rows)
    given_logits = torch.tensor(logits, requires_grad=True)
    total_variation(given_logits.log_softmax(-1), labels(target)).backward()
    draft = softmax(logits)
    reward = (target > draft).astype(np.float64)
    mean = np.mean([draft[row] @ reward[row] for row in range(rows)])
    variance = np.mean([draft[row] @ (reward[row] - mean) ** 2 for row in range(rows)])
    deviation = max(np.sqrt(variance), 1e-4)
    expected = np.zeros_like(logits)
    for row in range(rows):
        for token in range(VOCABULARY):
            score = np.eye(VOCABULARY)[token] - draft[row]  # the gradient of log q(token)
            expected[row] -= draft[row, token] * (reward[row, token] - mean) / deviation * score / rows
    np.testing.assert_allclose(given_logits.grad.numpy(), expected, atol=1e-12)
    # It is the gradient of the distance, divided by the deviation.
    distance = torch.tensor(logits, requires_grad=True)
    (torch.from_numpy(target) - distance.softmax(-1)).abs().sum(-1).mul(0.5).mean().backward()
    np.testing.assert_allclose(given_logits.grad.numpy() * deviation, distance.grad.numpy(), atol=1e-12)


@given(st.integers(0, 10_000), st.integers(1, VOCABULARY))
def test_kl_and_cross_entropy_are_those_of_numpy(seed: int, kept: int) -> None:
    logits, target = distributions(seed, 4)
    some = labels(target, kept)
    draft = np.log(softmax(logits))
    probs = np.zeros_like(target)
    for row, best in enumerate(some.top_ids.numpy()):
        probs[row, best] = target[row, best] / target[row, best].sum()
    divergence = np.mean(
        [
            sum(p * (np.log(p) - q) for p, q in zip(*each, strict=True) if p > 0)
            for each in zip(probs, draft, strict=True)
        ]
    )
    entropy = -np.mean([draft[row, token] for row, token in enumerate(some.tokens.tolist())])
    found = {hard: float(draft_loss(LossKind.KL, torch.from_numpy(logits), some, hard)) for hard in (0.0, 0.25, 1.0)}
    for hard, value in found.items():
        assert value == pytest.approx((1 - hard) * divergence + hard * entropy, abs=1e-5)
    assert float(draft_loss(LossKind.CROSS_ENTROPY, torch.from_numpy(logits), some)) == pytest.approx(entropy, abs=1e-5)


def test_tokens_that_a_head_does_not_have_do_not_count() -> None:
    logits, target = distributions(3, 2)
    some = labels(target)
    lacking = Labels(torch.tensor([int(some.tokens[0]), -1]), some.top_ids, some.top_probs)
    alone = Labels(some.tokens[:1], some.top_ids[:1], some.top_probs[:1])
    both = draft_loss(LossKind.CROSS_ENTROPY, torch.from_numpy(logits), lacking)
    assert float(both) == pytest.approx(
        float(draft_loss(LossKind.CROSS_ENTROPY, torch.from_numpy(logits[:1]), alone)), abs=1e-6
    )


SHAPE = ModelShape(
    vocab_size=7,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    max_position_embeddings=64,
)


@given(st.integers(1, 5), st.integers(1, 30), st.integers(0, 10_000))
def test_passes_are_those_of_a_decoder(depths: int, length: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    matches = rng.random((depths, length)) < 0.6
    written, passes = 1, 0
    while written < length:
        chain = [bool(matches[depth, written + depth]) for depth in range(min(depths, length - written))]
        written += (chain.index(False) if False in chain else len(chain)) + 1
        passes += 1
    assert chain_passes(matches) == passes


def example(model: CausalLM, rng: np.random.Generator) -> Example:
    prompt, answer = int(rng.integers(1, 6)), int(rng.integers(1, 12))
    target = rng.dirichlet(np.ones(SHAPE.vocab_size), size=answer)
    best = np.argsort(-target, axis=1)[:, :3]
    ids = [*rng.integers(0, SHAPE.vocab_size, prompt).tolist(), *best[:, 0].tolist()]
    probs = np.take_along_axis(target, best, axis=1).astype(np.float32)
    return Example(ids, [False] * prompt + [True] * answer, best, probs)


def predicted(model: CausalLM, ids: list[int]) -> npt.NDArray[np.float64]:
    logits = model(torch.tensor([ids]))[0, -1].double()
    found: npt.NDArray[np.float64] = logits.softmax(-1).detach().numpy()
    return found


def test_the_figures_of_a_draft_model_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    # Near ties are decided alike in float32.
    monkeypatch.setattr(training_loop, "native_bfloat16", lambda kind: False)
    torch.manual_seed(4)
    model = CausalLM(SHAPE).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(12.0)
    rng = np.random.default_rng(0)
    examples = [example(model, rng) for _ in range(40)]
    passes = positions = agreeing = 0
    overlap = 0.0
    for each in examples:
        start = len(each.ids) - sum(each.answer)
        place = start + 1
        while place < len(each.ids):  # drafts a chain token by token, as a decoder does
            text = each.ids[:place]
            for _ in range(CHAIN):
                token = int(predicted(model, text).argmax())
                if len(text) >= len(each.ids) or token != each.ids[len(text)]:
                    break
                text = [*text, token]
            place = len(text) + 1
            passes += 1
        for index in range(1, sum(each.answer)):
            probs = predicted(model, each.ids[: start + index])
            agreeing += int(probs.argmax()) == each.ids[start + index]
            overlap += float(np.minimum(probs[each.top_ids[index]], each.top_probs[index]).sum())
            positions += 1
    assert 0 < agreeing < positions
    found = model_acceptance(model, examples, pad=0)
    assert found["tokens_per_pass"] == positions / passes
    assert found["agreement"] == agreeing / positions
    assert found["acceptance"] == pytest.approx(overlap / positions, abs=1e-6)
