"""Hybrids, Gemma 4 and graphs of other tools from the outside: answers, prefixes, sessions, the context."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("onnx", reason="needs the export extra")

import edgerun
from edgerun import GenerateOptions, Speculation
from support.adversarial_drafters import NEARLY_FREE, FixedCost
from support.hybrid_graphs import HYBRIDS, write_hybrid
from support.layouts import HYBRID_LAYOUTS, LAYOUTS, write_layout
from support.tiny_models import HYBRID_FAMILIES, write_bundle

PROMPT = "the and of the and of to in the and of the and of to in the and of"
OPTIONS = GenerateOptions(raw=True, ignore_eos=True, max_tokens=40, speculation=Speculation.OFF)
CONTEXT = 512
EVERY_LAYOUT = {**LAYOUTS, **HYBRID_LAYOUTS}
FOREIGN = ("genai-qwen3.5", "community-qwen3.5", "optimum", "stacked-genai", "joined")
"""Layouts of other tools: states beside a cache in place, and beside one that grows; attention alone."""
CASES = [
    *((name, "float") for name in (*HYBRIDS, "gemma3_text", "gemma4_text", *FOREIGN)),
    *((name, "int8") for name in (*HYBRID_FAMILIES, "gemma3_text", "genai-qwen3.5", "community-lfm2-parts")),
]


@pytest.fixture(scope="module", params=CASES, ids=" ".join)
def load(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> partial[edgerun.Engine]:
    """Loads a model with a KV cache of a format."""
    (name, kv), folder = request.param, tmp_path_factory.mktemp("layers")
    if name in HYBRIDS:
        bundle = write_hybrid(folder, name, CONTEXT)
    elif name in EVERY_LAYOUT:
        bundle = write_layout(folder, EVERY_LAYOUT[name])
    else:
        bundle = write_bundle(folder, name, max_position_embeddings=CONTEXT)
    return partial(edgerun.load, bundle, kv=kv, device="cpu", learned=False, history=False)


@pytest.fixture(scope="module")
def engine(load: partial[edgerun.Engine]) -> Iterator[edgerun.Engine]:
    """An engine for which every draft token pays, however busy the machine is."""
    with load() as loaded:
        loaded.model.drafters._pass_cost = FixedCost(NEARLY_FREE)
        yield loaded


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_speculative_text_equals_plain_text(engine: edgerun.Engine, temperature: float) -> None:
    chosen = {"temperature": temperature, "seed": 1}
    plain = engine.generate(PROMPT, OPTIONS, **chosen)
    drafted = 0
    for sources in ("auto", "suffix,recycle", "edit"):
        reply = engine.generate(PROMPT, OPTIONS, **chosen, speculation=Speculation.parse(sources))
        assert reply.text == plain.text
        drafted += reply.stats.drafted
    assert drafted > 0


def test_exact_answers_equal_plain_ones(engine: edgerun.Engine) -> None:
    """Near ties are decided by plain passes, for which the arena is rewound to slots of plain decoding."""
    plain = engine.generate(PROMPT, OPTIONS, exact=True)
    reply = engine.generate(PROMPT, OPTIONS, exact=True, speculation=Speculation.parse("suffix,recycle"))
    assert reply.text == plain.text
    assert reply.stats.drafted > 0


def test_a_prefix_is_continued_and_branches_copy_it(load: partial[edgerun.Engine]) -> None:
    prompts = [PROMPT * 4, PROMPT * 4 + " in the", PROMPT * 2 + " to", PROMPT * 3 + " and"]
    with load(prefix_cache=0) as fresh:
        expected = [fresh.generate(prompt, OPTIONS).text for prompt in prompts]
    with load(prefix_cache=1 << 28) as engine:
        replies = [engine.generate(prompt, OPTIONS) for prompt in prompts]
    assert [reply.text for reply in replies] == expected
    assert all(reply.stats.reused_tokens > 30 for reply in replies[1:])


def test_several_answers_equal_those_one_by_one(engine: edgerun.Engine) -> None:
    chosen = {"temperature": 0.9, "max_tokens": 20}
    several = engine.generate(PROMPT, OPTIONS, **chosen, seed=5, n=3)
    single = [engine.generate(PROMPT, OPTIONS, **chosen, seed=5 + index).text for index in range(3)]
    assert [choice.text for choice in several.choices] == single


def test_a_saved_session_continues_with_the_same_text(load: partial[edgerun.Engine], tmp_path: Path) -> None:
    path, long = tmp_path / "s.kv", {"max_tokens": 40, "ignore_eos": True, "speculation": Speculation.OFF}
    with load() as engine:
        with engine.session(system=PROMPT * 2) as chat:
            chat.send("in the", **long)
            chat.save(path)
            expected = chat.send("and of", **long)
        with engine.session(resume=path) as resumed:
            reply = resumed.send("and of", **long)
            assert reply.text == expected.text
            assert reply.stats.reused_tokens > 60


def test_a_conversation_goes_on_beyond_the_context(load: partial[edgerun.Engine]) -> None:
    """Slots cannot be dropped from the middle, on which later states depend, so what is kept runs again."""
    with load(context=160) as engine:
        reply = engine.generate("the of", OPTIONS, max_tokens=250, overflow="window")
    assert reply.stats.completion_tokens == 250
    assert reply.stats.context_shifts > 0


def test_a_graph_with_a_cache_of_float16_has_an_int8_cache_too(tmp_path: Path) -> None:
    folder = write_layout(tmp_path, HYBRID_LAYOUTS["community-lfm2-float16"])
    with edgerun.load(folder, kv="int8", threads=1, cache=False) as engine:
        plain = engine.generate(PROMPT, OPTIONS, max_tokens=60)
        reply = engine.generate(PROMPT, OPTIONS, max_tokens=60, speculation=Speculation.parse("suffix,recycle"))
        assert reply.text == plain.text
