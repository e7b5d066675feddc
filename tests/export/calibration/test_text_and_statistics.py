"""Calibration text, statistics of inputs, and resuming after an interruption."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgerun.errors import InputError
from edgerun.export.calibration.calibration_text import (
    MIN_TOKENS,
    CalibrationText,
    calibration_text,
    default_tokens,
    split_texts,
)
from edgerun.export.calibration.collect_statistics import collect_statistics
from edgerun.export.calibration.layer_runner import LayerRunner
from edgerun.export.calibration.text_batches import pack_texts
from edgerun.export.checkpoint.config import read_config
from edgerun.export.checkpoint.layout import fused_linears
from edgerun.export.recipe import ExportRecipe
from edgerun.models.progress import silent
from support.tiny_models import source_model, write_checkpoint


def token_count(text: CalibrationText) -> int:
    return sum(map(len, (*text.calibration, *text.held_out)))


def random_texts(count: int, length: int, seed: int = 0):
    return list(np.random.default_rng(seed).integers(0, 300, (count, length)))


@given(
    lengths=st.lists(st.integers(0, 700), min_size=1, max_size=30),
    longest=st.one_of(st.integers(2, 256), st.just(2000)),
    seed=st.integers(0, 3),
)
def test_both_parts_together_are_the_whole_text(lengths, longest: int, seed: int) -> None:
    tokens = np.arange(sum(lengths))
    texts = np.split(tokens, np.cumsum(lengths)[:-1])
    # The rest of a cut text may be a single token, which is dropped.
    kept = sum(len(text) - (len(text) % longest == 1) for text in texts)
    if kept < MIN_TOKENS:
        with pytest.raises(InputError, match=rf"has {kept} tokens; give at least {MIN_TOKENS}"):
            split_texts(texts, "a file", longest, seed)
        return
    text = split_texts(texts, "a file", longest, seed)
    parts = [*text.calibration, *text.held_out]
    assert all(1 < len(part) <= longest for part in parts)
    together = np.concatenate(parts)
    assert len(set(together.tolist())) == len(together) == token_count(text) == kept
    held_out = sum(map(len, text.held_out)) / token_count(text)
    assert 0.25 <= held_out <= 0.25 + longest / token_count(text)
    assert text.calibration


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_the_seed_selects_among_the_texts_of_a_file(tmp_path: Path, suffix: str) -> None:
    model = source_model(tmp_path / "checkpoint", context=64)
    words = np.random.default_rng(0).choice(["the", "sea", "and", "of", "other"], (150, 30))
    lines = [" ".join(line) for line in words]
    if suffix == ".jsonl":
        lines = [json.dumps({"messages": [{"role": "user", "content": line}]}) for line in lines]
    file = tmp_path / f"text{suffix}"
    file.write_text("\n".join(lines), encoding="utf-8")

    def read(name: str, seed: int) -> set[tuple[int, ...]]:
        (tmp_path / name).mkdir()
        recipe = ExportRecipe(calibration=file, calibration_tokens=MIN_TOKENS, seed=seed)
        text = calibration_text(model, recipe, tmp_path / name, silent)
        return {tuple(part.tolist()) for part in (*text.calibration, *text.held_out)}

    first = read("first", 0)
    assert read("again", 0) == first
    assert len(read("other", 1) & first) < len(first)


def test_a_model_with_narrow_linears_needs_less_text(tmp_path: Path) -> None:
    narrow, wide = (
        read_config(write_checkpoint(tmp_path / str(width), num_hidden_layers=1, intermediate_size=width))
        for width in (128, 640)
    )
    assert [default_tokens(narrow), default_tokens(wide)] == [4096, 10240]


def test_duplicates_are_dropped_and_the_seed_gives_the_split() -> None:
    texts = random_texts(20, 100)
    first, same, other = (split_texts([*texts, *texts], "a file", 64, seed) for seed in (1, 1, 2))
    assert token_count(first) == 2000
    assert [part.tolist() for part in first.calibration] == [part.tolist() for part in same.calibration]
    assert [part.tolist() for part in first.calibration] != [part.tolist() for part in other.calibration]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("tied", [True, False])
def test_statistics_are_averages_of_the_inputs(tmp_path, family: str, tied: bool) -> None:
    model = source_model(tmp_path / "model", family, tie_word_embeddings=tied)
    config = model.config
    calibration = tuple(random_texts(9, 30))
    text = CalibrationText(calibration, (), "random")
    store = collect_statistics(model, text, tmp_path / "work", True, silent)
    runner = LayerRunner(model)
    inputs = {}
    (batch,) = pack_texts(calibration)
    hidden = runner.embed(batch)
    for index in range(config.layers):
        hidden, found, _ = runner.captured(index, hidden, batch, runner.matrix)
        inputs |= {name: values[batch.filled].astype(np.float64) for name, values in found.items()}
    inputs["head"] = runner.head_inputs(hidden[batch.filled]).astype(np.float64)
    for linear in fused_linears(config):
        statistics = store.of(linear.name)
        if linear.name == "embedding" and not tied:
            assert statistics is None
            continue
        rows = inputs["head" if linear.name == "embedding" else linear.name]
        assert statistics.second_moment is not None
        assert store.tokens("head" if linear.name == "embedding" else linear.name) == len(rows) == batch.count
        np.testing.assert_allclose(statistics.mean_square, np.square(rows).mean(axis=0), rtol=1e-5)
        np.testing.assert_allclose(statistics.mean_magnitude, np.abs(rows).mean(axis=0), rtol=1e-5)
        np.testing.assert_allclose(statistics.second_moment, rows.T @ rows / len(rows), atol=1e-5 * rows.max() ** 2)


@pytest.mark.parametrize("after", [0, 1, 2])
def test_an_interrupted_pass_is_resumed(tmp_path, after: int) -> None:
    model = source_model(tmp_path / "model", num_hidden_layers=3)
    config = model.config
    text = CalibrationText(tuple(random_texts(40, 50)), (), "random")

    def breaks(_: str, fraction: float) -> None:
        if fraction * (config.layers + 1) == pytest.approx(after):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect_statistics(model, text, tmp_path / "work", False, breaks)
    collected = {file: file.stat().st_mtime_ns for file in (tmp_path / "work").iterdir()}
    assert {file.name.partition(".")[2][0] for file in collected} == set("012"[:after])
    store, whole = (collect_statistics(model, text, tmp_path / name, False, silent) for name in ("work", "other"))
    assert collected == {file: file.stat().st_mtime_ns for file in collected}
    for linear in fused_linears(config):
        resumed, once = store.of(linear.name), whole.of(linear.name)
        assert resumed.second_moment is None
        np.testing.assert_array_equal(resumed.mean_square, once.mean_square)
        np.testing.assert_array_equal(resumed.mean_magnitude, once.mean_magnitude)
    collect_statistics(model, text, tmp_path / "work", False, pytest.fail)
