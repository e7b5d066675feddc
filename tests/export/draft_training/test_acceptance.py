"""Acceptance figures against a count, chain by chain, in NumPy."""

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
    chain_passes,
    model_acceptance,
)
from edgerun.export.draft_training.torch_llama import CausalLM, ModelShape  # noqa: E402
from edgerun.export.draft_training.training_batches import Example  # noqa: E402

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
