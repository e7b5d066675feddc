"""The decode loop on real sessions, against the naive decoder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgerun import ContextError
from edgerun.export.check.reference import reference_logits
from edgerun.export.checkpoint.config import read_config
from edgerun.export.checkpoint.safetensors_files import Checkpoint
from edgerun.runtime import prefill as prefill_module
from edgerun.runtime.decode import DecodeLimits, FinishReason, decode
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph.bound_session import BoundSession
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from edgerun.runtime.sampling.sampler import Sampler, SamplingParams, uniform_at
from edgerun.runtime.speculation.tree import Source, Tree

VOCABULARY = 300


def bind(bundle: Path, limit: int = 256) -> BoundSession:
    session = GraphSession(bundle / "model.onnx", SessionConfig(choose_device("cpu"), 1))
    return session.bind(session.arena(limit))


def run(bound: BoundSession, prompt: list[int], params: SamplingParams, limits: DecodeLimits) -> list[int]:
    steps = list(decode(bound, prompt, Sampler(params, VOCABULARY), limits))
    assert all(step.finish is None for step in steps[:-1])
    assert steps[-1].finish is not None
    return [token for step in steps for token in step.tokens]


def naive(bundle: Path, prompt: list[int], params: SamplingParams, count: int) -> list[int]:
    """The same decoding with the float64 reference, recomputed from the beginning for every token."""
    source = bundle.parent / "checkpoint"
    config = read_config(source)
    weights = Checkpoint(source)
    tokens = list(prompt)
    for _ in range(count):
        logits = reference_logits(weights, config, np.asarray(tokens), 256)[-1]
        if params.greedy:
            tokens.append(int(logits.argmax()))
            continue
        p = np.exp((logits - logits.max()) / params.temperature)
        cumulative = np.cumsum(p / p.sum())
        tokens.append(int(np.searchsorted(cumulative, uniform_at(params.seed, len(tokens)), side="right")))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0.8, seed=5)], ids=["greedy", "sampled"]
)
def test_text_equals_that_of_the_naive_decoder(tiny_bundle: Path, params: SamplingParams) -> None:
    prompt = list(range(20, 45))
    assert run(bind(tiny_bundle), prompt, params, DecodeLimits(12)) == naive(tiny_bundle, prompt, params, 12)


def test_chunked_prefill_gives_the_same_text(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = np.random.default_rng(1).integers(5, VOCABULARY, 100).tolist()
    whole = run(bind(tiny_bundle), prompt, SamplingParams(), DecodeLimits(20))
    for width in (1, 7, 99, 100):
        monkeypatch.setattr(prefill_module, "PREFILL_TOKENS", width)
        bound = bind(tiny_bundle)
        assert run(bound, prompt, SamplingParams(), DecodeLimits(20)) == whole
        assert bound.arena.length == 119


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantized_models_give_one_text_for_a_seed(tiny_bundle_of: Callable[[str, str], Path], weights: str) -> None:
    bundle = tiny_bundle_of("qwen3", weights)
    params = SamplingParams(temperature=0.9, top_k=50, top_p=0.95, min_p=0.01, repeat_penalty=1.1, seed=11)
    texts = {tuple(run(bind(bundle), [30, 31, 32], params, DecodeLimits(40))) for _ in range(3)}
    assert len(texts) == 1
    other = run(bind(bundle), [30, 31, 32], SamplingParams(temperature=0.9, seed=12), DecodeLimits(40))
    assert tuple(other) not in texts


def test_the_end_of_the_context_ends_the_text(tiny_bundle: Path) -> None:
    bound = bind(tiny_bundle, limit=32)
    steps = list(decode(bound, list(range(5, 35)), Sampler(SamplingParams(), VOCABULARY), DecodeLimits()))
    assert [len(step.tokens) for step in steps] == [1, 1]
    assert steps[-1].finish is FinishReason.LENGTH
    with pytest.raises(ContextError, match="the prompt has 32 tokens and the model's context is 32; shorten it"):
        list(decode(bound, list(range(32)), Sampler(SamplingParams(), VOCABULARY), DecodeLimits()))


@pytest.mark.parametrize("after", range(6))
def test_cancelling_leaves_a_valid_cache(tiny_bundle: Path, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_module, "PREFILL_TOKENS", 10)
    prompt = list(range(40, 65))
    expected = run(bind(tiny_bundle), prompt, SamplingParams(), DecodeLimits(8))
    bound, asked = bind(tiny_bundle), []

    def cancelled() -> bool:
        asked.append(None)
        return len(asked) > after

    steps = list(decode(bound, prompt, Sampler(SamplingParams(), VOCABULARY), DecodeLimits(8, cancelled=cancelled)))
    assert steps[-1].finish is FinishReason.CANCELLED
    tokens = [token for step in steps for token in step.tokens]
    assert tokens == expected[: len(tokens)]
    assert bound.arena.length <= len(prompt) + len(tokens)
    assert run(bound, prompt, SamplingParams(), DecodeLimits(8)) == expected


def test_logits_of_some_positions_are_those_of_the_whole_pass(tiny_bundle: Path) -> None:
    bound = bind(tiny_bundle)
    every = bound.forward(list(range(10, 20))).copy()
    for rows in ([9], [0, 9], [3, 1, 4], range(10)):
        np.testing.assert_allclose(
            bound.forward(list(range(10, 20)), logits_for=list(rows)), every[list(rows)], atol=1e-5
        )


def test_passes_in_parts_give_the_logits_of_whole_ones(tiny_bundle: Path) -> None:
    """As on devices that compute wide passes wrongly: also trees, whose parts attend to earlier ones as committed."""
    session = GraphSession(tiny_bundle / "model.onnx", SessionConfig(choose_device("cpu"), 1))
    nodes, found = Tree(range(60, 68), (-1, 0, 0, 1, 2, 2, 4, 0), [1.0] * 8, [Source.OTHER] * 8), []
    for width in (None, 3, 1):
        if width is not None:
            session.limit_width(width)
        bound = session.bind(session.arena(64))
        prompt = bound.forward(range(30, 50), logits_for=(3, 19)).copy()
        bound.arena.commit(20)
        assert bound.prefill_width(128, 500) == (width or 128)
        tree = bound.forward(nodes.tokens, positions=20 + nodes.depths, tree_mask=nodes.mask).copy()
        bound.arena.compact(20, [0, 2, 4, 6])
        found.append((prompt, tree, bound.forward([7]).copy()))
    for parts in found[1:]:
        for one, whole in zip(parts, found[0], strict=True):
            np.testing.assert_allclose(one, whole, atol=2e-4)
