"""Models whose layers differ, hybrids and Gemma 4, from the outside: answers, prefixes, sessions, the context."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("onnx", reason="needs the export extra")

import edgerun
from edgerun import GenerateOptions, Speculation
from support.adversarial_drafters import NEARLY_FREE, FixedCost
from support.hybrid_graphs import HYBRIDS, write_hybrid
from support.tiny_models import write_bundle

PROMPT = "the and of the and of to in the and of the and of to in the and of"
CONTEXT = 512


@pytest.fixture(scope="module", params=[*HYBRIDS, "gemma4_text"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layers")
    if request.param in HYBRIDS:
        return write_hybrid(folder, request.param, CONTEXT)
    return write_bundle(folder, request.param, max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def engine(bundle: Path) -> Iterator[edgerun.Engine]:
    """An engine for which every draft token pays, however busy the machine is."""
    with edgerun.load(bundle, device="cpu", learned=False, history=False) as loaded:
        loaded.model.drafters._pass_cost = FixedCost(NEARLY_FREE)
        yield loaded


@pytest.fixture(scope="module")
def options() -> GenerateOptions:
    return GenerateOptions(raw=True, ignore_eos=True, max_tokens=100, speculation=Speculation.OFF)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_speculative_text_equals_plain_text(
    engine: edgerun.Engine, options: GenerateOptions, temperature: float
) -> None:
    drafted = 0
    for seed in range(2):
        chosen = {"temperature": temperature, "seed": seed}
        plain = engine.generate(PROMPT, options, **chosen)
        for sources in ("auto", "suffix,recycle", "edit"):
            reply = engine.generate(PROMPT, options, **chosen, speculation=Speculation.parse(sources))
            assert reply.text == plain.text
            drafted += reply.stats.drafted
    assert drafted > 0


def test_a_prefix_is_continued_and_branches_copy_it(bundle: Path, options: GenerateOptions) -> None:
    prompts = [PROMPT * 4, PROMPT * 4 + " in the", PROMPT * 2 + " to", PROMPT * 3 + " and"]
    with edgerun.load(bundle, device="cpu", prefix_cache=0, learned=False, history=False) as fresh:
        expected = [fresh.generate(prompt, options).text for prompt in prompts]
    with edgerun.load(bundle, device="cpu", prefix_cache=1 << 28, learned=False, history=False) as engine:
        replies = [engine.generate(prompt, options) for prompt in prompts]
    assert [reply.text for reply in replies] == expected
    assert all(reply.stats.reused_tokens > 30 for reply in replies[1:])


def test_several_answers_equal_those_one_by_one(engine: edgerun.Engine, options: GenerateOptions) -> None:
    chosen = {"temperature": 0.9, "max_tokens": 20}
    several = engine.generate(PROMPT, options, **chosen, seed=5, n=3)
    single = [engine.generate(PROMPT, options, **chosen, seed=5 + index).text for index in range(3)]
    assert [choice.text for choice in several.choices] == single


def test_a_saved_session_continues_with_the_same_text(bundle: Path, tmp_path: Path) -> None:
    path, long = tmp_path / "s.kv", {"max_tokens": 60, "ignore_eos": True, "speculation": Speculation.OFF}
    with edgerun.load(bundle, device="cpu", learned=False, history=False) as engine:
        with engine.session(system=PROMPT * 2) as chat:
            chat.send("in the", **long)
            chat.save(path)
            expected = chat.send("and of", **long)
        with engine.session(resume=path) as resumed:
            reply = resumed.send("and of", **long)
            assert reply.text == expected.text
            assert reply.stats.reused_tokens > 60


def test_a_conversation_goes_on_beyond_the_context(bundle: Path) -> None:
    with edgerun.load(bundle, device="cpu", context=160, learned=False) as engine:
        reply = engine.generate(
            "the of", raw=True, ignore_eos=True, max_tokens=250, overflow="window", speculation=Speculation.OFF
        )
    assert reply.stats.completion_tokens == 250
    assert reply.stats.context_shifts > 0
