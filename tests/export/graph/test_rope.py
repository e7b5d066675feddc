"""Rotary frequencies and tables: published values, settings of config.json."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edgerun.export.checkpoint.config import parse_config
from edgerun.export.checkpoint.rope import Rope
from support.tiny_models import LLAMA3, LONGROPE, YARN, YARN_FULL, tiny_config

UNSCALED = [1.0, 0.3162278, 0.1, 0.03162278, 0.01, 0.003162278, 0.001, 0.0003162278]
"""10000 ** (-2 i / 16): every other one is a power of ten."""

# Base 10000, heads of 16 channels. Frequencies and attention factors as transformers 4.57 computes them.
GOLDEN = [
    ({}, 256, UNSCALED, 1.0),
    (
        {"rope_type": "linear", "factor": 4.0},
        256,
        [0.25, 0.07905694, 0.025, 0.007905695, 0.0025, 0.0007905695, 0.00025, 7.905695e-05],
        1.0,
    ),
    ({"rope_type": "dynamic", "factor": 2.0}, 100, UNSCALED, 1.0),
    (
        {"rope_type": "dynamic", "factor": 2.0},
        1024,
        [1.0, 0.2394814, 0.05735132, 0.01373457, 0.003289174, 0.0007876959, 0.0001886385, 4.517539e-05],
        1.0,
    ),
    (
        {**LLAMA3, "original_max_position_embeddings": 256},
        2048,
        [1.0, 0.3162278, 0.1, 0.006613107, 0.00125, 0.0003952847, 0.000125, 3.952847e-05],
        1.0,
    ),
    (
        {"rope_type": "yarn", "factor": 4.0},
        1024,
        [1.0, 0.2569351, 0.0625, 0.01383497, 0.0025, 0.0007905695, 0.00025, 7.905695e-05],
        1.138629436111989,
    ),
    (
        {**YARN_FULL, "original_max_position_embeddings": 256},
        1024,
        [1.0, 0.2915256, 0.0506644, 0.007905695, 0.0025, 0.0007905695, 0.00025, 7.905695e-05],
        1.0394038191422568,
    ),
    (
        {**YARN, "original_max_position_embeddings": 1024, "attention_factor": 1.5},
        1024,
        [1.0, 0.3162278, 0.08125, 0.01976424, 0.004375, 0.0007905695, 0.00025, 7.905695e-05],
        1.5,
    ),
]


@pytest.mark.parametrize(("settings", "context", "frequencies", "factor"), GOLDEN)
def test_frequencies_equal_those_of_transformers(
    settings: dict[str, Any], context: int, frequencies: list[float], factor: float
) -> None:
    rope = parse_config(tiny_config(rope_theta=10000.0, rope_scaling=settings)).attention[0].rope
    np.testing.assert_allclose(rope.frequencies(16, context), frequencies, rtol=3e-6)
    assert rope.attention_factor == pytest.approx(factor, rel=1e-12)


_FACTORS = (tuple(LONGROPE["short_factor"]), tuple(LONGROPE["long_factor"]))
YARN_4 = Rope(5000.0, "yarn", 4.0, original_positions=64, high=32.0, attention_factor=0.1 * math.log(4) + 1)
LONG = Rope(5000.0, "longrope", short=_FACTORS[0], long=_FACTORS[1])
SETTINGS = [
    ({"type": "linear", "factor": 4.0}, Rope(5000.0, factor=4.0)),
    ({"rope_type": "dynamic", "factor": 2.0}, Rope(5000.0, "dynamic", 2.0, original_positions=256)),
    ({**LLAMA3, "original_max_position_embeddings": 64}, Rope(5000.0, "llama3", 8.0, original_positions=64)),
    ({"rope_type": "yarn", "factor": 4.0}, replace(YARN_4, original_positions=256)),
    ({"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64}, YARN_4),
    (
        {**YARN_FULL, "attention_factor": 1.1},
        replace(YARN_4, high=16.0, low=2.0, truncate=False, attention_factor=1.1),
    ),
    ({"rope_type": "default"}, Rope(5000.0)),
    # log 4 / log 256
    ({**LONGROPE, "factor": 4.0}, replace(LONG, original_positions=256, attention_factor=math.sqrt(1.25))),
    (
        {**LONGROPE, "original_max_position_embeddings": 16},
        replace(LONG, original_positions=16, attention_factor=math.sqrt(2)),
    ),
]


@pytest.mark.parametrize(("settings", "rope"), SETTINGS)
def test_settings_of_transformers_4_and_5(settings: dict[str, Any], rope: Rope) -> None:
    earlier = tiny_config(rope_theta=5000.0, rope_scaling=settings)
    later = tiny_config(rope_theta=None, rope_parameters={**settings, "rope_theta": 5000.0})
    for config in (earlier, later):
        assert parse_config(config).attention[0].rope == rope


def test_a_longer_context_has_the_other_factors() -> None:
    unscaled = Rope(5000.0).frequencies(16, 64)
    for context, factors in ((16, _FACTORS[0]), (17, _FACTORS[1])):
        found = replace(LONG, original_positions=16).frequencies(16, context)
        np.testing.assert_allclose(found, unscaled / factors, rtol=1e-12)


def test_tables_are_accurate_at_long_positions() -> None:
    _, sines = Rope(10000.0).table(16, 32768)
    assert sines.shape == (32768, 8)
    assert sines[32767, 0] == pytest.approx(math.sin(32767.0), abs=1e-7)
    assert sines[32767, 2] == pytest.approx(math.sin(3276.7), abs=1e-7)
