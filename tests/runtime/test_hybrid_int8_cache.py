"""Hybrid models with an int8 KV cache: attention layers keep codes, and the states of the others stay floats."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import edgerun
from edgerun import GenerateOptions, Speculation
from edgerun.edge.cli.main import main
from edgerun.errors import InputError
from edgerun.runtime.kv.arena import KVArena
from edgerun.runtime.measure.logit_quality import measure_cache_quality
from support.adversarial_drafters import NEARLY_FREE, FixedCost
from support.layouts import HYBRID_LAYOUTS, write_layout
from support.tiny_models import HYBRID_FAMILIES, write_bundle

PROMPT = "the and of the and of to in the and of the and of to in the and of"
OPTIONS = GenerateOptions(raw=True, ignore_eos=True, max_tokens=60, speculation=Speculation.OFF)


@pytest.fixture(scope="module")
def bundle_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda family: write_bundle(tmp_path_factory.mktemp("hybrid"), family, max_position_embeddings=512))


@pytest.fixture(scope="module", params=HYBRID_FAMILIES)
def bundle(request: pytest.FixtureRequest, bundle_of: Callable[[str], Path]) -> Path:
    return bundle_of(request.param)


@pytest.fixture(scope="module")
def engine(bundle: Path) -> Iterator[edgerun.Engine]:
    with edgerun.load(bundle, kv="int8", device="cpu", learned=False, history=False) as loaded:
        loaded.model.drafters._pass_cost = FixedCost(NEARLY_FREE)
        yield loaded


def arena_of(engine: edgerun.Engine, session: edgerun.Session) -> KVArena:
    """What the prefix cache has of a conversation."""
    found = engine.model.prefixes.longest(session._token_ids())
    assert found is not None
    assert found[0].states is not None
    return found[0]


def test_slots_are_codes_and_states_floats(bundle: Path, engine: edgerun.Engine) -> None:
    assert {each.dtype for each in engine.graph_io.tensor_types} == {np.dtype(np.int8)}
    assert {each.dtype for each in engine.graph_io.state_types} == {np.dtype(np.float32)}
    with edgerun.load(bundle, device="cpu", learned=False) as floats:
        assert 4 * engine.graph_io.cache_bytes_per_token == floats.graph_io.cache_bytes_per_token
    text = np.random.default_rng(1).integers(5, 300, 200).tolist()
    bound = engine.model.new_sequence().bound
    quality = measure_cache_quality(bound, engine.model.with_float_cache(), [text])
    assert 0 < quality.mean_kl < 0.02
    assert quality.top1_agreement > 0.9


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_do_not_change_the_text(engine: edgerun.Engine, temperature: float) -> None:
    plain = engine.generate(PROMPT, OPTIONS, temperature=temperature, seed=1)
    reply = engine.generate(PROMPT, OPTIONS, temperature=temperature, seed=1, speculation=Speculation.parse("auto"))
    assert reply.text == plain.text
    assert reply.stats.drafted > 0


def test_a_prefix_is_continued(bundle: Path) -> None:
    prompts = [PROMPT * 4, PROMPT * 4 + " in the", PROMPT * 2 + " to"]
    texts = []
    for prefix_cache in (0, 1 << 28):
        with edgerun.load(bundle, kv="int8", device="cpu", prefix_cache=prefix_cache, learned=False) as engine:
            replies = [engine.generate(prompt, OPTIONS) for prompt in prompts]
        texts.append([reply.text for reply in replies])
    assert texts[0] == texts[1]
    assert all(reply.stats.reused_tokens > 30 for reply in replies[1:])


@pytest.mark.parametrize(("saved", "resumed"), [("float", "int8"), ("int8", "float"), ("int8", "int8")])
def test_a_conversation_is_resumed_with_a_cache_of_any_format(
    bundle_of: Callable[[str], Path], tmp_path: Path, saved: str, resumed: str
) -> None:
    bundle, path = bundle_of("qwen3_5_text"), tmp_path / "chat.kv"
    options = {"max_tokens": 20, "ignore_eos": True, "speculation": Speculation.OFF}
    with edgerun.load(bundle, kv=saved, device="cpu") as first, first.session(system=PROMPT) as chat:
        chat.send("in the", **options)
        chat.save(path)
        kept = arena_of(first, chat).snapshot()
        expected = chat.send("and of", **options)
    with edgerun.load(bundle, kv=resumed, device="cpu") as second:
        with second.session(resume=path) as chat:
            arena = arena_of(second, chat)
            found = arena.snapshot()
            assert found[0].dtype == (np.int8 if resumed == "int8" else np.float32)
            for before, after in zip(kept[1:], found[1:], strict=True):
                np.testing.assert_array_equal(before, after)
            assert arena.plain_length == (arena.length if saved == resumed else 0)
            reply = chat.send("and of", **options)
            assert reply.stats.reused_tokens == expected.stats.reused_tokens
            assert reply.text == expected.text or saved != resumed
        stored = np.load(path)
        lost = {name: stored[name] for name in stored.files if name != ("scales.0" if saved == "int8" else "rows.0")}
        np.savez(tmp_path / "damaged.npz", **lost)
        with pytest.raises(InputError, match="damaged"), second.session(resume=tmp_path / "damaged.npz"):
            pass


def test_an_answer_from_the_command_line(bundle_of: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(bundle_of("lfm2")), "-p", PROMPT, "--raw", "-n", "20", "--device", "cpu", "--kv", "int8"]
    assert main(arguments) == 0
    plain = capsys.readouterr().out
    assert main([*arguments, "--spec", "off"]) == 0
    assert capsys.readouterr().out == plain
    assert plain.strip()


@pytest.mark.parametrize("layout", ["genai-qwen3.5", "community-lfm2-float16", "community-lfm2-parts"])
def test_graphs_of_other_tools_have_one(tmp_path: Path, layout: str) -> None:
    folder = write_layout(tmp_path, HYBRID_LAYOUTS[layout])
    with edgerun.load(folder, kv="int8", threads=1, cache=False) as engine:
        assert {each.dtype for each in engine.graph_io.tensor_types} == {np.dtype(np.int8)}
        reply = engine.generate(PROMPT, OPTIONS)
        assert engine.generate(PROMPT, OPTIONS, speculation=Speculation.parse("suffix,recycle")).text == reply.text
