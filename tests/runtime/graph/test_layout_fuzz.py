"""Whatever is changed in a foreign model, it gives the expected tokens or is rejected with a one-line error."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import edgerun
from edgerun import EdgeError
from edgerun.runtime.decode import DecodeLimits, decode
from edgerun.runtime.sampling.sampler import Sampler, SamplingParams
from edgerun.runtime.speculation.choice import Speculation
from edgerun.runtime.speculation.drafters.suffix import SuffixDrafter
from support.adversarial_drafters import eager
from support.graph_edits import (
    BYTE_CHANGES,
    FileEdit,
    GraphEdit,
    change_bytes,
    edit_graphs,
    exchange,
    file_edits,
    graph_edits,
)
from support.layout_kinds import (
    Attention,
    Cache,
    CacheType,
    Decoders,
    Embedding,
    Layout,
    LogitOutput,
    Mask,
    Positions,
    Settings,
    States,
    Weights,
)
from support.layout_reference import clear_prompt, greedy_tokens
from support.layouts import HYBRID_LAYOUTS, write_layout
from support.layouts import LAYOUTS as ATTENTION_LAYOUTS
from support.nightly import examples

LAYOUTS = {**ATTENTION_LAYOUTS, **HYBRID_LAYOUTS}
BASES = (
    "optimum",
    "optimum-external-many",
    "optimum-bias-mask",
    "optimum-merged",
    "stacked",
    "renamed-genai",
    "genai",
    "community-lfm2",
    "genai-qwen3.5",
)
MORE_BASES = (
    "community",
    "genai-int8-cache",
    "genai-fixed-capacity",
    "optimum-last-n",
    "optimum-open-heads",
    "community-qwen3.5",
)
CONTEXT = 70
TOKENS = 12
"""Number of tokens to the end of the context, beyond which drafts must not reach."""
MIN_MARGIN = 0.03
"""Difference between the two highest logits that float16 rounding does not exceed."""
everyday = settings(max_examples=8, suppress_health_check=list(HealthCheck))
nightly = settings(max_examples=examples(60), suppress_health_check=list(HealthCheck))


@cache
def original(name: str) -> Path:
    """Folder of the unchanged layout."""
    return write_layout(Path(tempfile.mkdtemp(prefix="layout")), LAYOUTS[name])


@contextmanager
def copied(name: str) -> Iterator[Path]:
    """A folder with a copy of the layout, for the block."""
    with tempfile.TemporaryDirectory() as where:
        yield Path(shutil.copytree(original(name), Path(where) / "model"))


def prompt_of(layout: Layout) -> list[int]:
    """58 tokens, so that buffers of 64 slots grow."""
    return clear_prompt(layout, 58, TOKENS, MIN_MARGIN)


def answers(folder: Path, layout: Layout, prompt: Sequence[int]) -> list[list[int]]:
    """Greedy tokens of the model in a folder, without and with speculation.

    Raises:
        EdgeError: the model does not run.
    """
    found = []
    with edgerun.load(folder, context=CONTEXT, threads=1, cache=False) as engine:
        for speculator in (None, eager(SuffixDrafter(), trees=engine.graph_io.supports_trees)):
            bound = engine.model.new_sequence().bound
            sampler = Sampler(SamplingParams(), engine.graph_io.vocab_size)
            steps = decode(bound, prompt, sampler, DecodeLimits(TOKENS), speculator)
            found.append([token for step in steps for token in step.tokens])
        engine.generate("the", raw=True, max_tokens=2, speculation=Speculation.OFF)
    return found


def check(folder: Path, name: str, *, same: bool) -> None:
    layout, prompt = LAYOUTS[name], prompt_of(LAYOUTS[name])
    found, message = None, "rejected"
    try:
        found = answers(folder, layout, prompt)
    except EdgeError as error:
        message = str(error)
    assert message.strip()
    assert "\n" not in message
    if same and found is not None:
        assert found == [greedy_tokens(layout, prompt, TOKENS)] * 2


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any combination of properties that can occur together."""

    def one(*choices: Any) -> Any:
        return draw(st.sampled_from(choices))

    common = Layout(
        logit_output=one(*LogitOutput),
        embedding=one(*Embedding),
        weights=one(*Weights),
        settings=one(*Settings),
        int32_ids=one(False, True),
        float16_logits=one(False, True),
        open_vocabulary=one(False, True),
        fixed_batch=one(False, True),
        shares_buffers=one(False, True),
        opset=one(14, 15, 17, 18, 20, 21),
        states=one(*States),
        operator_states=one(False, True),
    )
    if common.settings is Settings.GENAI:
        # genai_config.json names a single graph, of other parts.
        common = replace(common, embedding=Embedding.INSIDE)
    if one(False, True):
        bias = one(False, True)
        return replace(
            common,
            attention=Attention.FUSED,
            cache=one(Cache.SPLIT, Cache.NUMBERED),
            cache_type=one(*CacheType),
            mask=one(Mask.TOKENS, Mask.LENGTHS, Mask.NONE),
            positions=Positions.INPUT if bias else Positions.LENGTH,
            bias_inside=bias,
            int32_ids=common.int32_ids and not bias,  # the operator takes positions as int64
            window=one(None, 24),
            capacity=one(None, 80),
            open_heads=one(False, True),
        )
    masks = [Mask.TOKENS, Mask.NOT_CAUSAL, Mask.BIAS, Mask.BOOL_ATTENDED, Mask.NONE]
    if common.states is States.NONE:
        # In a single layer of attention it would be the mask of another model, in which every token attends to all.
        masks.append(Mask.BOOL_BLOCKED)
    alone = common.settings is Settings.GENAI or common.embedding is Embedding.APART
    # One head of keys and values does not share its state among several.
    caches = [cache for cache in Cache if cache is not Cache.JOINED or common.states is not States.RECURRENT]
    return replace(
        common,
        cache=one(*caches),
        cache_type=one(CacheType.FLOAT32, CacheType.FLOAT16),
        mask=one(*masks),
        positions=one(*Positions),
        # genai_config.json describes a single graph.
        decoders=Decoders.ONE if alone else one(*Decoders),
        open_heads=one(False, True),
    )


def may_be_rejected(layout: Layout) -> bool:
    """Whether the model lacks information without which it cannot run."""
    bare = layout.settings is Settings.NONE
    is_odd = layout.cache in (Cache.STACKED, Cache.JOINED, Cache.KEYS_TRANSPOSED)
    return (
        (layout.open_vocabulary and bare)
        or (layout.open_heads and (bare or is_odd))
        # A graph that is correct for a single new token only, without one for the prompt.
        or (layout.mask is Mask.NOT_CAUSAL and layout.decoders is Decoders.ONE)
        or layout.mask is Mask.BOOL_BLOCKED
        # Lengths are those of the inputs, so a cache of fixed size would always be full.
        or (layout.mask is Mask.NONE and layout.capacity is not None)
    )


def check_any_layout(layout: Layout) -> None:
    prompt = prompt_of(layout)
    with tempfile.TemporaryDirectory() as where:
        folder = write_layout(Path(where), layout)
        try:
            found = answers(folder, layout, prompt)
        except EdgeError:
            if not may_be_rejected(layout):
                raise
            return
        assert found == [greedy_tokens(layout, prompt, TOKENS)] * 2


def check_edited_graph(name: str, edits: list[GraphEdit]) -> None:
    with copied(name) as folder:
        edit_graphs(folder, edits)
        check(folder, name, same=all(edit.harmless for edit in edits))


def check_edited_files(name: str, edits: list[FileEdit]) -> None:
    with copied(name) as folder:
        for edit in edits:
            edit.apply(folder)
        check(folder, name, same=True)


def check_damaged_graph(name: str, changes: list[tuple[float, int]]) -> None:
    """Change bytes of the graph's file, so that the tokens may differ."""
    with copied(name) as folder:
        change_bytes(folder, changes)
        check(folder, name, same=False)


names = st.sampled_from(BASES + MORE_BASES)
any_layout = given(layout=layouts())
edited_graph = given(name=names, edits=st.lists(graph_edits(), min_size=1, max_size=3))
edited_files = given(name=names, edits=st.lists(file_edits(), min_size=1, max_size=3))
damaged_graph = given(name=st.sampled_from(BASES), changes=BYTE_CHANGES)

test_any_layout_gives_the_reference_tokens = everyday(any_layout(check_any_layout))
test_an_edited_graph_gives_the_same_tokens_or_is_rejected = everyday(edited_graph(check_edited_graph))
test_edited_files_give_the_same_tokens_or_are_rejected = everyday(edited_files(check_edited_files))
test_a_damaged_graph_is_rejected_in_one_line = everyday(damaged_graph(check_damaged_graph))
test_more_layouts = pytest.mark.nightly(nightly(any_layout(check_any_layout)))
test_more_edited_graphs = pytest.mark.nightly(nightly(edited_graph(check_edited_graph)))
test_more_edited_files = pytest.mark.nightly(nightly(edited_files(check_edited_files)))
test_more_damaged_graphs = pytest.mark.nightly(nightly(damaged_graph(check_damaged_graph)))


@pytest.mark.parametrize("name", BASES)
def test_swapped_cache_names_are_rejected(name: str) -> None:
    """With the cache inputs of two layers swapped, a graph would run and produce nonsense."""
    with copied(name) as folder:
        path = next(folder.rglob("*.onnx"))
        model = onnx.load(path, load_external_data=False)
        # The last cache input of a hybrid layout is a state.
        exchange(model, 0, -1 if LAYOUTS[name].states is States.NONE else 1, output=False)
        path.write_bytes(model.SerializeToString())
        with pytest.raises(EdgeError, match="gives other logits for the same tokens in several passes than in one"):
            edgerun.load(folder, cache=False)
