"""Half layers compute what the reference decoder does, however texts are packed."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgerun.export.bundle_content import SourceModel
from edgerun.export.calibration.layer_runner import LayerRunner, WeightsOf
from edgerun.export.calibration.text_batches import Batch, pack_texts
from edgerun.export.check.reference import reference_logits
from edgerun.export.checkpoint.config import read_config
from edgerun.export.checkpoint.layout import embedding_layout, fused_linears
from edgerun.export.checkpoint.safetensors_files import Checkpoint
from support.tiny_models import ATTENTION_FAMILIES, GRANITE_EXPERTS, write_checkpoint

PLAIN = [family for family in ATTENTION_FAMILIES if family not in ("qwen3_moe", "gpt_oss", "gemma4_text")]
BIASED = {"attention_bias": True, "mlp_bias": True}


def runner_of(folder, family: str = "llama", **overrides) -> LayerRunner:
    source = write_checkpoint(folder, family, **overrides)
    return LayerRunner(SourceModel(Checkpoint(source), read_config(source), 256))


def run_layer(runner: LayerRunner, index: int, hidden, batch: Batch, weights_of: WeightsOf):
    """Hidden states after a layer."""
    return runner.feed_forward(index, runner.mixer(index, hidden, batch, weights_of)[0], weights_of)[0]


def texts_of(*lengths: int):
    random = np.random.default_rng(3)
    return [random.integers(0, 300, length) for length in lengths]


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        *((family, {}) for family in PLAIN),
        ("llama", {**BIASED, "tie_word_embeddings": False}),
        ("qwen3_moe", {}),
        ("qwen3_moe", {"norm_topk_prob": False, "mlp_only_layers": []}),
        ("gpt_oss", {}),
        ("qwen3_5_text", {}),
        ("qwen3_5_moe_text", {}),
        ("qwen3_next", {"norm_topk_prob": False}),
        ("granitemoehybrid", {}),
        ("granitemoehybrid", GRANITE_EXPERTS),
        ("granitemoehybrid", {"mamba_n_groups": 1, "mamba_proj_bias": True}),
        ("lfm2", {}),
        ("lfm2", {"conv_L_cache": 5, "conv_bias": True}),
    ],
)
def test_logits_are_those_of_the_reference(tmp_path, family: str, overrides) -> None:
    runner = runner_of(tmp_path, family, **overrides)
    settings = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    texts = texts_of(40, 17, 33, 5, 1, 22)
    found = set()
    for batch in pack_texts(texts, slots=100):
        hidden = runner.embed(batch)
        for index in range(runner.config.layers):
            hidden = run_layer(runner, index, hidden, batch, runner.matrix)
        for number in set(batch.texts[batch.texts >= 0].tolist()):
            logits = runner.logits(hidden[batch.texts == number], runner.matrix)
            expected = reference_logits(runner.source, settings, texts[number], 256)
            np.testing.assert_allclose(logits, expected, atol=2e-4)
            found.add(number)
    assert found == set(range(len(texts)))


def test_a_layer_uses_the_given_matrices(tmp_path) -> None:
    runner = runner_of(tmp_path)
    (batch,) = pack_texts(texts_of(20))
    hidden = runner.embed(batch)
    without = run_layer(runner, 1, hidden, batch, lambda linear: np.zeros(linear.shape, np.float32))
    np.testing.assert_array_equal(without, hidden)
    doubled = runner.embed(batch, 2 * runner.matrix(embedding_layout(runner.config)))
    np.testing.assert_allclose(doubled, 2 * hidden, rtol=1e-6)


@pytest.mark.parametrize("family", ["llama", "olmo2", "gemma2", "lfm2", "qwen3_5_text", "granitemoehybrid"])
def test_captured_inputs_give_the_outputs(tmp_path, family: str) -> None:
    """The output of a half layer is its last linear applied to the captured inputs."""
    runner = runner_of(tmp_path, family)
    (batch,) = pack_texts(texts_of(20, 9))
    hidden = runner.embed(batch)
    after, inputs, _ = runner.captured(0, hidden, batch, runner.matrix)
    np.testing.assert_array_equal(after, run_layer(runner, 0, hidden, batch, runner.matrix))
    assert {name: values.shape[-1] for name, values in inputs.items()} == {
        linear.name: linear.columns for linear in fused_linears(runner.config) if linear.name.startswith("layers.0.")
    }
    if family == "llama":
        linears = {linear.name: linear for linear in fused_linears(runner.config)}
        middle, _ = runner.mixer(0, hidden, batch, runner.matrix)
        for linear, before, later in (("o", hidden, middle), ("down", middle, after)):
            product = inputs[f"layers.0.{linear}"] @ runner.matrix(linears[f"layers.0.{linear}"]).T
            np.testing.assert_allclose(later - before, product, atol=1e-4)


@given(
    texts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), min_size=1, max_size=12),
    slots=st.integers(1, 40),
)
def test_batches_hold_every_text_once(texts, slots: int) -> None:
    batches = pack_texts([np.array(text) for text in texts], slots)
    width = max(map(len, texts))
    prefixes = {tuple(text[: end + 1]) for text in texts for end in range(len(text))}
    found, counted = {}, []
    for batch in batches:
        rows, columns = batch.tokens.shape
        assert columns <= width
        assert rows <= max(1, slots // width)
        for row in range(rows):
            for number in sorted(set(batch.texts[row].tolist()) - {-1}):
                place = batch.texts[row] == number
                assert number not in found
                found[number] = batch.tokens[row, place].tolist()
                np.testing.assert_array_equal(batch.positions[row, place], np.arange(place.sum()))
                assert batch.following[row, place].tolist() == [*found[number][1:], -1]
                counted += [
                    tuple(found[number][: end + 1]) for end in np.flatnonzero(batch.counted[row, place]).tolist()
                ]
        assert not batch.counted[batch.texts < 0].any()
    assert [found[number] for number in range(len(texts))] == texts
    assert len(counted) == len(set(counted))
    assert set(counted) == prefixes


def test_a_token_attends_to_its_own_text_within_the_window() -> None:
    (batch,) = pack_texts([np.arange(4), np.arange(5, 8), np.arange(9)], slots=18)
    attended = batch.bias(3)[:, 0] == 0
    for row in range(2):
        for query, key in np.ndindex(attended.shape[1:]):
            same = batch.texts[row, query] == batch.texts[row, key]
            age = batch.positions[row, query] - batch.positions[row, key]
            assert attended[row, query, key] == (query == key or (same and 0 <= age < 3))
