"""Rotary frequencies and tables: published values, settings of config.json, the reference."""

from __future__ import annotations

import math

import numpy as np
import pytest

from edgerun.export.check.reference_positions import rotation
from edgerun.export.checkpoint.config import read_config
from edgerun.export.graph.rope import Dynamic, Linear, Llama3, LongRope, Rope, RopeScaling, Yarn
from support.tiny_models import LLAMA3, LONGROPE, YARN_FULL, tiny_config, write_json

UNSCALED = [1.0, 0.3162278, 0.1, 0.03162278, 0.01, 0.003162278, 0.001, 0.0003162278]
"""10000 ** (-2 i / 16): every other one is a power of ten."""

# Base 10000, heads of 16 channels. Frequencies and attention factors as transformers 4.57 computes them.
GOLDEN = [
    (Linear(), 256, UNSCALED, 1.0),
    (
        Linear(4.0),
        256,
        [0.25, 0.07905694, 0.025, 0.007905695, 0.0025, 0.0007905695, 0.00025, 7.905695e-05],
        1.0,
    ),
    (Dynamic(2.0, 256), 100, UNSCALED, 1.0),
    (
        Dynamic(2.0, 256),
        1024,
        [1.0, 0.2394814, 0.05735132, 0.01373457, 0.003289174, 0.0007876959, 0.0001886385, 4.517539e-05],
        1.0,
    ),
    (
        Llama3(8.0, 1.0, 4.0, 256),
        2048,
        [1.0, 0.3162278, 0.1, 0.006613107, 0.00125, 0.0003952847, 0.000125, 3.952847e-05],
        1.0,
    ),
    (
        Yarn(4.0, 256),
        1024,
        [1.0, 0.2569351, 0.0625, 0.01383497, 0.0025, 0.0007905695, 0.00025, 7.905695e-05],
        1.138629436111989,
    ),
    (
        Yarn(4.0, 256, truncate=False, beta_fast=16.0, beta_slow=2.0, mscale=0.7, mscale_all_dim=0.4),
        1024,
        [1.0, 0.2915256, 0.0506644, 0.007905695, 0.0025, 0.0007905695, 0.00025, 7.905695e-05],
        1.0394038191422568,
    ),
    (
        Yarn(4.0, 1024, attention_factor=1.5),
        1024,
        [1.0, 0.3162278, 0.08125, 0.01976424, 0.004375, 0.0007905695, 0.00025, 7.905695e-05],
        1.5,
    ),
]


@pytest.mark.parametrize(("scaling", "context", "frequencies", "factor"), GOLDEN)
def test_frequencies_equal_those_of_transformers(
    scaling: RopeScaling, context: int, frequencies: list[float], factor: float
) -> None:
    found, attention_factor = scaling.rotation(10000.0, 16, context)
    np.testing.assert_allclose(found, frequencies, rtol=3e-6)
    assert attention_factor == pytest.approx(factor, rel=1e-12)


_FACTORS = (tuple(LONGROPE["short_factor"]), tuple(LONGROPE["long_factor"]))
SETTINGS = [
    ({"type": "linear", "factor": 4.0}, Linear(4.0)),
    ({"rope_type": "dynamic", "factor": 2.0}, Dynamic(2.0, 256)),
    ({**LLAMA3, "original_max_position_embeddings": 64}, Llama3(8.0, 1.0, 4.0, 64)),
    ({"rope_type": "yarn", "factor": 4.0}, Yarn(4.0, 256)),
    ({"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64}, Yarn(4.0, 64)),
    ({**YARN_FULL, "attention_factor": 1.1}, Yarn(4.0, 64, 16.0, 2.0, False, 1.1, 0.7, 0.4)),
    ({"rope_type": "default"}, Linear()),
    ({**LONGROPE, "factor": 4.0}, LongRope(*_FACTORS, 256, math.sqrt(1.25))),  # log 4 / log 256
    ({**LONGROPE, "original_max_position_embeddings": 16}, LongRope(*_FACTORS, 16, math.sqrt(2))),
]


@pytest.mark.parametrize(("settings", "scaling"), SETTINGS)
def test_settings_of_transformers_4_and_5(tmp_path, settings, scaling) -> None:
    write_json(tmp_path / "config.json", tiny_config(rope_theta=5000.0, rope_scaling=settings))
    assert read_config(tmp_path).attention[0].rope == Rope(5000.0, scaling)
    later = tiny_config(rope_theta=None, rope_parameters={**settings, "rope_theta": 5000.0})
    write_json(tmp_path / "config.json", later)
    assert read_config(tmp_path).attention[0].rope == Rope(5000.0, scaling)


@pytest.mark.parametrize(("settings", "scaling"), SETTINGS)
@pytest.mark.parametrize("context", [64, 600])
def test_tables_equal_the_reference(settings, scaling, context: int) -> None:
    config = tiny_config(rope_theta=5000.0, rope_scaling=settings)
    cosines, sines = Rope(5000.0, scaling).table(16, context)
    expected_cosines, expected_sines = rotation(config, 0, np.arange(context), context)
    np.testing.assert_allclose(cosines, expected_cosines, atol=1e-7)
    np.testing.assert_allclose(sines, expected_sines, atol=1e-7)


def test_tables_are_accurate_at_long_positions() -> None:
    _, sines = Rope(10000.0, Linear()).table(16, 32768)
    assert sines.shape == (32768, 8)
    assert sines[32767, 0] == pytest.approx(math.sin(32767.0), abs=1e-7)
    assert sines[32767, 2] == pytest.approx(math.sin(3276.7), abs=1e-7)
