"""Answers continue from the cache slots of earlier ones, and say what a fresh engine would."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

import edgerun
from edgerun import Engine, GenerateOptions, Reply, Speculation
from support.adversarial_drafters import NEARLY_FREE, FixedCost
from support.nightly import some_nightly

CONTEXT = 200


def answer(engine: Engine, prompt: list[int], seed: int | None, max_tokens: int = 5) -> Reply:
    options = GenerateOptions(max_tokens=max_tokens, seed=seed, temperature=None if seed is None else 0.9)
    return Reply.of(engine.model.answer(None, prompt, options))


def check_interleavings(cached: Engine, fresh: Engine, rng: random.Random, interleavings: int) -> int:
    """Interleave six conversations with edits and branches over both engines; returns the number of reused tokens."""
    vocab_size = cached.graph_io.vocab_size
    reused = 0

    def tokens(most: int) -> list[int]:
        return [rng.randrange(5, vocab_size) for _ in range(rng.randint(1, most))]

    system = tokens(20)
    for _ in range(interleavings):
        conversations = [[*system, *tokens(20)] for _ in range(6)]
        for _ in range(rng.randint(3, 6)):
            number = rng.randrange(6)
            prompt = conversations[number]
            match rng.random():
                case chance if chance < 0.15:  # an earlier message is edited
                    prompt = [*prompt[: rng.randint(1, len(prompt))], *tokens(10)]
                case chance if chance < 0.3:  # another conversation goes on from this one
                    number = rng.randrange(6)
                    prompt = [*prompt, *tokens(10)]
                case _:
                    prompt = [*prompt, *tokens(10)]
            prompt = prompt[-CONTEXT + 20 :]
            seed = rng.choice([None, 1, 2])
            reply, expected = answer(cached, prompt, seed), answer(fresh, prompt, seed)
            assert reply.text == expected.text
            assert expected.stats.reused_tokens == 0
            reused += reply.stats.reused_tokens
            conversations[number] = [*prompt, *cached.tokenizer.encode(reply.text, add_special_tokens=False)]
    return reused


@pytest.mark.parametrize("seed", some_nightly(range(26), every=26))
def test_interleaved_conversations_say_what_fresh_engines_say(
    tiny_bundle_of: Callable[[str, str], Path], seed: int
) -> None:
    """The nightly cases are 500 interleavings; a small budget evicts sequences, and a draft model has a cache too."""
    target, draft = tiny_bundle_of("llama", "fp32"), tiny_bundle_of("qwen2", "fp32")
    with edgerun.load(target, threads=1, context=CONTEXT, cache=False, prefix_cache=0) as fresh:
        budget = fresh.model.new_sequence().arena.nbytes * (3, 1, 1000)[seed % 3]
        with edgerun.load(target, draft=draft, threads=1, context=CONTEXT, cache=False, prefix_cache=budget) as cached:
            for engine in (cached, fresh):
                engine.model.drafters._pass_cost = FixedCost(NEARLY_FREE)
            assert check_interleavings(cached, fresh, random.Random(seed), 20 if seed else 4) > 0
            kept = cached.model.prefixes._kept  # of the draft model too
            assert 0 < sum(each.cache.nbytes for each in kept) <= budget
            assert (len({id(each.owner) for each in kept}) == 2) == (seed % 3 != 1)


def test_the_same_prompt_is_answered_from_the_same_logits(tiny_bundle_of: Callable[[str, str], Path]) -> None:
    """With activations of 8 bits, a prompt that is read in other passes would give another text now and then."""
    rng = random.Random(0)
    with edgerun.load(tiny_bundle_of("llama", "int8"), threads=1, cache=False) as engine:
        for _ in range(40):
            prompt = [rng.randrange(5, engine.graph_io.vocab_size) for _ in range(rng.choice((20, 140)))]
            first, again = answer(engine, prompt, None, 40), answer(engine, prompt, None, 40)
            assert again.text == first.text
            assert again.stats.reused_tokens == (128 if len(prompt) == 140 else 0)


def test_exact_answers_depend_on_nothing_that_was_asked_before(tiny_bundle: Path) -> None:
    with edgerun.load(tiny_bundle, threads=1, cache=False) as engine:
        engine.model.drafters._pass_cost = FixedCost(NEARLY_FREE)
        plain = engine.generate("the other", max_tokens=30, speculation=Speculation.OFF).text
        reply = engine.generate("the other", max_tokens=30, exact=True)
        assert reply.text == plain
        assert reply.stats.reused_tokens == 0
