"""Texts sampled in shared passes equal those sampled alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import edgerun
from edgerun import Engine
from edgerun.runtime.measure.text_sampler import SelfTextSampler
from edgerun.runtime.sampling.sampler import Sampler, SamplingParams

tiny = pytest.importorskip("support.tiny_models", reason="needs the export extra")

END_TOKENS = frozenset(range(40))


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "qwen3_5_text"])
def engine(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Plain attention, sliding windows, and layers without attention."""
    bundle = tiny.write_bundle(tmp_path_factory.mktemp("model"), request.param)
    with edgerun.load(bundle, cache=False, draft=None, parallel=8) as loaded:
        yield loaded


def test_texts_of_shared_passes_are_those_of_their_seeds(engine: Engine) -> None:
    sampler = SelfTextSampler(engine.model, 30, 5)
    prompts = [[50, 60, 70], [50, 60, 80], [7], [*range(40, 68)], [50, 60, 70], [9] * 30, [50], [60], [70]]
    texts = sampler._sample(prompts, 30, END_TOKENS)
    assert len({tuple(text.tokens) for text in texts}) == len(prompts)
    seeds = (seed for seed in SelfTextSampler(engine.model, 30, 5)._seeds)
    for prompt, text in zip(prompts, texts, strict=True):
        bound = engine.model.new_sequence().bound
        found = list(prompt)
        end = None
        if len(prompt) < 30:
            sampler_alone = Sampler(SamplingParams(temperature=1.0, seed=next(seeds)), bound.graph_io.vocab_size)
            for read in range(1, 30):
                logits = bound.forward((found[read - 1],))[0]
                bound.arena.commit(1)
                if read >= len(prompt):
                    token = sampler_alone.choose(logits, read)
                    if token in END_TOKENS:
                        end = token
                        break
                    found.append(token)
        assert (text.tokens, text.end) == (found, end)
