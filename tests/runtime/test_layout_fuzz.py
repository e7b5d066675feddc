"""Whatever is done to a model, it runs and says what it has to, or one line says why not."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import edgerun
from edgerun import EdgeError
from edgerun.runtime.decode import DecodeLimits, decode
from edgerun.runtime.sampling import Sampler, SamplingParams
from edgerun.runtime.speculation.drafters.suffix import SuffixDrafter
from support.adversarial_drafters import eager
from support.folder_edits import FileEdit, file_edits
from support.graph_edits import GraphEdit, exchange, graph_edits
from support.layout_kinds import (
    VOCABULARY,
    Attention,
    Cache,
    CacheType,
    Decoders,
    Layout,
    Mask,
    Positions,
    Rows,
    Settings,
    Weights,
)
from support.layout_reference import closest_call, greedy_tokens
from support.layouts import LAYOUTS, write_layout

BASES = (
    "optimum",
    "optimum-external-many",
    "optimum-mask-cells",
    "optimum-merged",
    "stacked",
    "renamed-genai",
    "genai",
)
MORE_BASES = ("community", "genai-int8-cache", "genai-fixed-capacity", "optimum-chosen-rows", "optimum-open-heads")
CONTEXT = 70
TOKENS = 12
"""To the end of the context, for which guesses must not reach."""
CLEAR = 0.03
"""Distance between the two highest scores that half precision does not bridge."""
fuzzing = settings(max_examples=30, suppress_health_check=list(HealthCheck))


@cache
def original(name: str) -> Path:
    """The layout as it should be."""
    return write_layout(Path(tempfile.mkdtemp(prefix="layout")), LAYOUTS[name])


def clear_prompt(layout: Layout) -> list[int]:
    """58 tokens, so that buffers of 64 rows grow, after which every choice is clear."""
    for seed in range(200):
        prompt: list[int] = np.random.default_rng(seed).integers(5, VOCABULARY, 58).tolist()
        if closest_call(layout, prompt, TOKENS) > CLEAR:
            return prompt
    raise AssertionError("no prompt is clear enough")


def answers(folder: Path, layout: Layout, prompt: Sequence[int]) -> list[list[int]]:
    """What the model in a folder says, plainly and with guesses.

    Raises:
        EdgeError: it does not run.
    """
    found = []
    with edgerun.load(folder, context=CONTEXT, threads=1, cache=False) as engine:
        for speculator in (None, eager(SuffixDrafter(), trees=engine.graph_io.supports_trees)):
            bound = engine.model.new_sequence().bound
            sampler = Sampler(SamplingParams(), engine.graph_io.vocab_size)
            steps = decode(bound, prompt, sampler, DecodeLimits(TOKENS), speculator)
            found.append([token for step in steps for token in step.tokens])
        engine.generate("the", raw=True, max_tokens=2, speculation=edgerun.runtime.speculation.Speculation.OFF)
    return found


def check(folder: Path, name: str, *, same: bool) -> None:
    layout, prompt = LAYOUTS[name], clear_prompt(LAYOUTS[name])
    found, refusal = None, "refused"
    try:
        found = answers(folder, layout, prompt)
    except EdgeError as error:
        refusal = str(error)
    assert refusal.strip()
    assert "\n" not in refusal
    if same and found is not None:
        assert found == [greedy_tokens(layout, prompt, TOKENS)] * 2


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any combination of traits that belongs together."""

    def one(*choices: Any) -> Any:
        return draw(st.sampled_from(choices))

    common = Layout(
        rows=one(*Rows),
        weights=one(*Weights),
        settings=one(*Settings),
        narrow_ids=one(False, True),
        half_logits=one(False, True),
        open_vocabulary=one(False, True),
        fixed_batch=one(False, True),
        shares_buffers=one(False, True),
        opset=one(14, 15, 17, 18, 20, 21),
    )
    if one(False, True):
        bias = one(False, True)
        return replace(
            common,
            attention=Attention.FUSED,
            cache=one(Cache.SPLIT, Cache.NUMBERED),
            cache_type=one(*CacheType),
            mask=one(Mask.WHOLE_TEXT, Mask.LENGTHS, Mask.SHAPE),
            positions=Positions.INPUT if bias else Positions.LENGTH,
            bias_inside=bias,
            narrow_ids=common.narrow_ids and not bias,  # the operator wants positions as int64
            window=one(None, 24),
            capacity=one(None, 80),
            open_heads=one(False, True),
        )
    return replace(
        common,
        cache=one(*Cache),
        cache_type=one(CacheType.FLOAT32, CacheType.FLOAT16),
        mask=one(Mask.WHOLE_TEXT, Mask.NOT_CAUSAL, Mask.CELLS, Mask.SEEN, Mask.HIDDEN, Mask.SHAPE),
        positions=one(*Positions),
        # ONNX Runtime GenAI's settings know one graph.
        decoders=Decoders.ONE if common.settings is Settings.GENAI else one(*Decoders),
        open_heads=one(False, True),
    )


def may_be_refused(layout: Layout) -> bool:
    """Whether something is missing that nothing can make up for."""
    silent = layout.settings is Settings.NONE
    joined = layout.cache in (Cache.BOTH_STACKED, Cache.BOTH_JOINED, Cache.KEYS_TRANSPOSED)
    return (
        (layout.open_vocabulary and silent)
        or (layout.open_heads and (silent or joined))
        # A graph that is only right for one row, and nothing to read a prompt with.
        or (layout.mask is Mask.NOT_CAUSAL and layout.decoders is Decoders.ONE)
        or layout.mask is Mask.HIDDEN
        # Lengths that are those of the ports: a cache of fixed size would always be full.
        or (layout.mask is Mask.SHAPE and layout.capacity is not None)
    )


@fuzzing
@given(layout=layouts())
def test_traits_go_together(layout: Layout) -> None:
    prompt = clear_prompt(layout)
    with tempfile.TemporaryDirectory() as where:
        folder = write_layout(Path(where), layout)
        try:
            found = answers(folder, layout, prompt)
        except EdgeError:
            if not may_be_refused(layout):
                raise
            return
        assert found == [greedy_tokens(layout, prompt, TOKENS)] * 2


@fuzzing
@given(name=st.sampled_from(BASES + MORE_BASES), edits=st.lists(graph_edits(), min_size=1, max_size=3))
def test_a_changed_graph_says_the_same_or_is_refused(name: str, edits: list[GraphEdit]) -> None:
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where) / "model"
        shutil.copytree(original(name), folder)
        for path in folder.rglob("*.onnx"):
            model = onnx.load(path, load_external_data=False)
            for edit in edits:
                edit.apply(model)
            path.write_bytes(model.SerializeToString())
        check(folder, name, same=all(edit.harmless for edit in edits))


@fuzzing
@given(name=st.sampled_from(BASES + MORE_BASES), edits=st.lists(file_edits(), min_size=1, max_size=3))
def test_changed_files_say_the_same_or_are_refused(name: str, edits: list[FileEdit]) -> None:
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where) / "model"
        shutil.copytree(original(name), folder)
        for edit in edits:
            edit.apply(folder)
        check(folder, name, same=True)


@fuzzing
@given(
    name=st.sampled_from(BASES),
    flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=8),
)
def test_damaged_graphs_end_in_one_line(name: str, flips: list[tuple[float, int]]) -> None:
    """Bytes of the graph's file are changed; weights may be among them, so that other tokens are no fault."""
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where) / "model"
        shutil.copytree(original(name), folder)
        path = next(folder.rglob("*.onnx"))
        data = bytearray(path.read_bytes())
        for part, value in flips:
            data[int(part * len(data))] = value
        path.write_bytes(data)
        check(folder, name, same=False)


def test_the_original_layouts_pass_the_same_check() -> None:
    for name in BASES + MORE_BASES:
        assert (
            answers(original(name), LAYOUTS[name], clear_prompt(LAYOUTS[name]))
            == [greedy_tokens(LAYOUTS[name], clear_prompt(LAYOUTS[name]), TOKENS)] * 2
        )


@pytest.mark.parametrize("name", BASES)
def test_caches_exchanged_between_layers_are_refused(name: str) -> None:
    """A graph whose ports lie about what they keep would run, and write nonsense."""
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where) / "model"
        shutil.copytree(original(name), folder)
        path = next(folder.rglob("*.onnx"))
        model = onnx.load(path, load_external_data=False)
        exchange(0, -1, output=False)(model)
        path.write_bytes(model.SerializeToString())
        with pytest.raises(EdgeError, match="gives other logits for the same tokens in several passes than in one"):
            edgerun.load(folder, cache=False)
