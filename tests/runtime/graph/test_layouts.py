"""Every foreign layout gives its model's tokens: in wide and single passes, with drafts, after rewinds and restores."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import edgerun
from edgerun import BundleError, Engine, GenerateOptions, InputError
from edgerun.models.bundle import open_bundle
from edgerun.runtime.decode import DecodeLimits, Step, decode
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph.bound_session import BoundSession
from edgerun.runtime.graph.graph_io import CacheMode, LogitsMode
from edgerun.runtime.graph.model_metadata import metadata_of
from edgerun.runtime.graph.open_graph import joined_graph
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from edgerun.runtime.result import Reply
from edgerun.runtime.sampling.sampler import Sampler, SamplingParams
from edgerun.runtime.speculation.drafters.draft_model import DraftModel
from edgerun.runtime.speculation.drafters.recycling import RecycledTable, RecyclingDrafter
from edgerun.runtime.speculation.drafters.suffix import SuffixDrafter
from edgerun.runtime.speculation.pass_cost import PassCost
from edgerun.runtime.speculation.speculator import Speculator
from support.adversarial_drafters import adversaries, eager
from support.layout_kinds import CONTEXT, VOCABULARY, CacheType, Decoders, Layout, LogitOutput, Mask, Settings
from support.layout_reference import Decoder, clear_prompt, greedy_tokens, layout_weights
from support.layout_states import state_layers, state_shapes
from support.layouts import HYBRID_LAYOUTS, write_layout
from support.layouts import LAYOUTS as ATTENTION_LAYOUTS
from support.nightly import some_nightly
from support.tiny_models import tiny_config, write_json

LAYOUTS = {**ATTENTION_LAYOUTS, **HYBRID_LAYOUTS}
TOKENS = 62
MIN_MARGIN = 0.02
"""Difference between the two highest logits that float16 rounding does not exceed."""
TREES = {"optimum-bias-mask", "optimum-bool-mask"}
IN_PLACE = {name for name in LAYOUTS if name.startswith(("genai", "community", "renamed-genai"))} - {
    "renamed-genai-positions",
    "community-unfused",
    "community-qwen3.5",
    "community-qwen3.5-float16",
    "community-qwen3.5-parts",
}
DRAFTS = ["optimum", "optimum-last-token", "optimum-two-traced-at-one", "genai-float16", "genai-fixed-capacity"]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def folder(name: str) -> Path:
        return write_layout(tmp_path_factory.mktemp("layout"), LAYOUTS[name])

    return folder


@pytest.fixture(scope="module")
def graph_of(folder_of: Callable[[str], Path]) -> Callable[[str], GraphSession]:
    @cache
    def graph(name: str) -> GraphSession:
        bundle = open_bundle(folder_of(name))
        config = SessionConfig(choose_device("cpu"), 1)
        return GraphSession(bundle.graph, config, metadata_of(bundle), model=joined_graph(bundle))

    return graph


def bind(graph: GraphSession) -> BoundSession:
    return graph.bind(graph.arena(CONTEXT))


def prompt_of(layout: Layout, length: int, count: int = TOKENS, salt: int = 0) -> list[int]:
    return clear_prompt(layout, length, count, MIN_MARGIN, salt)


def steps_of(bound: BoundSession, prompt: list[int], speculator: Speculator | None = None) -> list[Step]:
    sampler = Sampler(SamplingParams(), VOCABULARY)
    return list(decode(bound, prompt, sampler, DecodeLimits(TOKENS), speculator))


def tokens_of(steps: list[Step]) -> list[int]:
    return [token for step in steps for token in step.tokens]


@pytest.mark.parametrize("name", some_nightly(LAYOUTS, every=2))
def test_greedy_tokens_match_the_reference(name: str, graph_of) -> None:
    """Prompts of one pass and of several, and answers during which every buffer grows."""
    layout, graph = LAYOUTS[name], graph_of(name)
    bound = bind(graph)
    for length in (1, 2, 130, 300):
        if length + TOKENS >= (layout.capacity or CONTEXT):
            break
        prompt = prompt_of(layout, length)
        bound.arena.rewind_to(0)
        assert tokens_of(steps_of(bound, prompt)) == greedy_tokens(layout, prompt, TOKENS), length


@pytest.mark.parametrize("name", LAYOUTS)
def test_capabilities_are_detected(name: str, graph_of) -> None:
    layout, graph_io = LAYOUTS[name], graph_of(name).graph_io
    assert graph_io.vocab_size == VOCABULARY
    assert graph_io.layers == 2 - state_layers(layout)
    assert [tensor.layer for tensor in graph_io.states] == [0] * len(state_shapes(layout))
    assert [(each.shape, each.of_every_token) for each in graph_io.state_types] == [
        (shape, False) for shape in state_shapes(layout).values()
    ]
    assert {each.dtype for each in graph_io.state_types} <= {each.dtype for each in graph_io.tensor_types}
    assert graph_io.cache_mode is (CacheMode.IN_PLACE if name in IN_PLACE else CacheMode.GROWING)
    assert graph_io.capacity == layout.capacity
    logits_modes = {
        LogitOutput.LAST: LogitsMode.LAST,
        LogitOutput.LAST_FLAT: LogitsMode.LAST,
        LogitOutput.LAST_N: LogitsMode.LAST_N,
    }
    assert graph_io.logits_mode is logits_modes.get(layout.logit_output, LogitsMode.ALL)
    assert graph_io.supports_wide_passes == (layout.mask is not Mask.NOT_CAUSAL)
    assert graph_io.supports_trees == (name in TREES)
    assert graph_io.supports_verification == (
        layout.mask is not Mask.NOT_CAUSAL and graph_io.logits_mode is not LogitsMode.LAST
    )


@pytest.mark.parametrize("name", some_nightly(LAYOUTS, every=3))
def test_drafts_do_not_change_the_text(name: str, graph_of) -> None:
    layout, graph = LAYOUTS[name], graph_of(name)
    prompt = prompt_of(layout, 40, salt=1)
    expected = greedy_tokens(layout, prompt, TOKENS)
    trees = graph.graph_io.supports_trees
    drafters = adversaries([*prompt, *expected], VOCABULARY, 0)
    bound = bind(graph)
    speculators = {
        "free drafters": eager(SuffixDrafter(), RecyclingDrafter(RecycledTable(VOCABULARY)), trees=trees),
        **{each: eager(drafters[each], trees=trees) for each in ("oracle", "nearly right")},
    }
    if trees:
        speculators["chains"] = eager(SuffixDrafter(), RecyclingDrafter(RecycledTable(VOCABULARY)), trees=False)
        speculators["wide"] = eager(drafters["wide"])
    passes = {}
    for drafter, speculator in speculators.items():
        bound.arena.rewind_to(0)
        steps = steps_of(bound, prompt, speculator)
        assert tokens_of(steps) == expected, drafter
        assert bound.arena.length == len(prompt) + TOKENS - 1
        passes[drafter] = len(steps)
    if graph.graph_io.supports_verification:
        assert passes["oracle"] < TOKENS / 3
    if trees:
        assert passes["wide"] < TOKENS


@pytest.mark.parametrize("draft_name", DRAFTS)
@pytest.mark.parametrize("name", ["optimum", "optimum-bias-mask", "genai"])
def test_a_draft_model_may_have_any_layout(name: str, draft_name: str, graph_of) -> None:
    """A draft model with the same weights: its tokens are accepted until its own context ends."""
    layout, graph = LAYOUTS[name], graph_of(name)
    draft = DraftModel(bind(graph_of(draft_name)), PassCost({0: {1: 1e-6, 2: 1e-6}}), VOCABULARY)
    prompt = prompt_of(layout, 90, salt=5)
    speculator = eager(draft, trees=graph.graph_io.supports_trees)
    steps = steps_of(bind(graph), prompt, speculator)
    assert tokens_of(steps) == greedy_tokens(layout, prompt, TOKENS)
    capacity = LAYOUTS[draft_name].capacity
    if capacity is None:
        assert len(steps) < TOKENS / 2
    else:
        assert len(prompt) + TOKENS > capacity
        assert len(steps) < TOKENS


@pytest.mark.parametrize("name", sorted(TREES))
def test_tree_logits_equal_those_of_the_paths(name: str, graph_of) -> None:
    layout, graph = LAYOUTS[name], graph_of(name)
    prompt, nodes = list(range(20, 45)), [10, 20, 30, 40, 50, 60]
    paths = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 2, 4, 5]]
    bound = bind(graph)
    bound.forward(prompt, logits_for=[0])
    bound.arena.commit(len(prompt))
    mask = np.zeros((6, 6), np.bool_)
    for node, path in enumerate(paths):
        mask[node, path] = True
    positions = [len(prompt) + len(path) - 1 for path in paths]
    logits = bound.forward(nodes, positions=positions, tree_mask=mask)

    def expected_logits(tokens: list[int]) -> np.ndarray:
        return Decoder.of(layout).forward(tokens)[-1]

    for node, path in enumerate(paths):
        np.testing.assert_allclose(logits[node], expected_logits([*prompt, *(nodes[i] for i in path)]), atol=1e-4)
    bound.arena.compact(len(prompt), paths[5])
    following = bound.forward([70])[0]
    np.testing.assert_allclose(following, expected_logits([*prompt, *(nodes[i] for i in paths[5]), 70]), atol=1e-4)


def test_a_stored_probe_result_is_ignored_once_settings_change(tmp_path: Path) -> None:
    """Settings beside the graph decide what its inputs mean, so that an earlier probe no longer applies."""
    layout = LAYOUTS["renamed-genai"]
    folder = write_layout(tmp_path, layout)
    prompt = prompt_of(layout, 40, salt=1)
    for _ in range(2):  # the second run uses what the first stored
        with edgerun.load(folder, threads=1) as engine:
            assert tokens_of(steps_of(engine.model.new_sequence().bound, prompt)) == greedy_tokens(
                layout, prompt, TOKENS
            )
    settings = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))
    names = settings["model"]["decoder"]["inputs"]
    names["past_key_names"], names["past_value_names"] = names["past_value_names"], names["past_key_names"]
    write_json(folder / "genai_config.json", settings)
    with pytest.raises(BundleError, match="gives other logits for the same tokens in several passes than in one"):
        edgerun.load(folder, threads=1)


def engine_of(folder: Path, layout: Layout) -> Engine:
    context = CONTEXT if layout.settings is Settings.NONE else None
    return edgerun.load(folder, threads=1, context=context, cache=False)


TAMPERED: dict[str, Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]] = {
    "text": lambda arrays: {"rows.0": np.array(["a"])},
    "struct": lambda arrays: {"rows.0": np.zeros(3, [("a", np.float32)])},
    "scalar": lambda arrays: {"rows.0": np.array(3.0)},
    "flat": lambda arrays: {"rows.1": np.zeros(3, np.float32)},
    "not a number": lambda arrays: {"rows.0": arrays["rows.0"] * np.float32("nan")},
    "other type": lambda arrays: {"rows.0": arrays["rows.0"].astype(np.float64)},
    "exchanged": lambda arrays: {"rows.0": arrays["rows.1"], "rows.1": arrays["rows.0"]},
    "too many": lambda arrays: {"rows.2": arrays["rows.1"]},
    "fewer rows": lambda arrays: {"rows.0": arrays["rows.0"][..., :3]},
    "fewer tokens": lambda arrays: {"tokens": arrays["tokens"][:3]},
    "one token": lambda arrays: {"tokens": np.zeros((), np.int64)},
    "no token ids": lambda arrays: {"tokens": arrays["tokens"] + 0.5},
    "a negative token": lambda arrays: {"tokens": -arrays["tokens"]},
    "an unknown token": lambda arrays: {"tokens": arrays["tokens"] + 300},
}


def test_a_tampered_conversation_is_rejected(folder_of, tmp_path: Path) -> None:
    """Uses a layout whose keys and values differ in shape."""
    name = "keys-transposed"
    with engine_of(folder_of(name), LAYOUTS[name]) as engine:
        with engine.session() as chat:
            chat.send("the", max_tokens=4)
            chat.save(tmp_path / "chat")
        with np.load(tmp_path / "chat") as stored:
            arrays = dict(stored)
        for change, tampered in TAMPERED.items():
            np.savez(tmp_path / "tampered.npz", **(arrays | tampered(arrays)))
            message = "is not a saved conversation" if change == "struct" else "is damaged"
            with pytest.raises(InputError, match=message) as caught:
                engine.session(resume=tmp_path / "tampered.npz")
            assert "\n" not in str(caught.value)


def test_the_context_is_required_without_settings(folder_of) -> None:
    folder = folder_of("optimum-bare")
    with pytest.raises(InputError) as caught:
        edgerun.load(folder)
    assert str(caught.value) == (
        f"nothing beside {folder / 'model.onnx'} says how long the context is; give it with --context"
    )
    with edgerun.load(folder, context=50, cache=False) as engine:
        assert engine.context == 50


def test_genai_config_gives_end_tokens_and_context(tmp_path: Path) -> None:
    """genai_config.json replaces three files of other folders."""
    folder = write_layout(tmp_path, LAYOUTS["genai"])
    settings = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))
    settings["model"] |= {"eos_token_id": [0, 7], "context_length": 99}
    write_json(folder / "genai_config.json", settings)
    write_json(folder / "tokenizer_config.json", {})
    with edgerun.load(folder, cache=False) as engine:
        assert engine.tokenizer.eos == {0, 7}
        assert engine.context == 99
        assert engine.template is None
    settings["model"] |= {"eos_token_id": "x"}
    write_json(folder / "genai_config.json", settings)
    with pytest.raises(BundleError) as caught:
        edgerun.load(folder, cache=False)
    assert str(caught.value) == (
        f"{folder / 'genai_config.json'}: eos_token_id is 'x'; it must be an id, or a list of ids, below 300"
    )


def test_a_graph_of_fixed_capacity_limits_the_context(folder_of) -> None:
    layout = LAYOUTS["genai-fixed-capacity"]
    with engine_of(folder_of("genai-fixed-capacity"), layout) as engine:
        assert engine.context == layout.capacity == 128
        prompt = prompt_of(layout, 100, count=28)
        reply = Reply.of(engine.model.answer(None, prompt, GenerateOptions()))
        assert reply.stats.completion_tokens <= 28


@pytest.mark.parametrize("file", ["onnx/model.onnx", ""])
def test_settings_are_found_in_the_parent_folder(file: str, folder_of) -> None:
    """In models for transformers.js, config.json and the tokenizer are in the parent folder of the graphs."""
    with edgerun.load(folder_of("community") / file, cache=False) as engine:
        assert engine.context == CONTEXT
        assert engine.template is not None


def test_the_layout_reference_equals_the_reference_decoder() -> None:
    from edgerun.export.check.reference import reference_logits
    from edgerun.export.checkpoint.config import parse_config

    layout = LAYOUTS["optimum"]

    class WeightsInMemory:
        tensors = layout_weights(layout)

        def read(self, name: str):
            return self.tensors[name]

        def read_rows(self, rows):
            return self.tensors[rows.name][rows.start : rows.stop]

        def chunks(self, name: str):
            yield self.tensors[name]

    tokens = np.random.default_rng(8).integers(0, VOCABULARY, 50)
    expected = reference_logits(
        WeightsInMemory(), parse_config(tiny_config("llama", **layout.overrides)), tokens, CONTEXT
    )
    decoder = Decoder.of(layout)
    found = np.concatenate([decoder.forward(tokens[:20].tolist()), decoder.forward(tokens[20:].tolist())])
    np.testing.assert_allclose(found, expected, atol=1e-9)
    assert CacheType.INT8 in {each.cache_type for each in LAYOUTS.values()}
    assert Decoders.TWO in {each.decoders for each in LAYOUTS.values()}
