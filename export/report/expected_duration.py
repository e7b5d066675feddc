"""How long an export that reads text will take, from the model's size and the speed of products here."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

import numpy as np
from threadpoolctl import threadpool_limits

from ...runtime.devices.processor import default_threads
from ..allocation.allocate import DEFAULT_SECONDS, SENSITIVITY_WORK, formats_of, measured_tokens
from ..allocation.format_candidates import allowed_formats
from ..allocation.plan_costs import weight_count
from ..calibration.calibration_text import default_tokens
from ..checkpoint.config import read_config
from ..gguf.gguf_model import is_gguf
from ..optimum_path import needs_optimum
from ..recipe import ExportRecipe
from ..upgrade.describe import holds_graph

_PASSES: Final = 20
"""Passes of the float model over the calibration text that take as long as all that an export does with it."""
_TOKEN_PRODUCTS: Final = 2_000_000
"""Products that take as long as what a pass computes for a token beside those of the weights; small models feel it."""
_LEARNING_TOKENS: Final = 600_000
"""Tokens whose pass through the float model takes as long as learning to round it, and reading more text for that."""
_FIXED_SECONDS: Final = 10.0
_SPREAD: Final = 2.0
"""Measured exports took from this part to this multiple of the estimate (docs/log.md)."""
_SIZE: Final = 256
_TRIALS: Final = 50


def expected_duration(source: Path, recipe: ExportRecipe) -> str | None:
    """How long the export of a checkpoint takes, in words; None where it reads no text, and takes seconds.

    Raises:
        CheckpointError: The config.json of the checkpoint is damaged.
    """
    if not recipe.calibrated or is_gguf(source) or holds_graph(source) or needs_optimum(source):
        return None
    config = read_config(source)
    work, tokens = weight_count(config) + _TOKEN_PRODUCTS, recipe.calibration_tokens or default_tokens(config)
    products, search = _PASSES * work * tokens, 0.0
    if recipe.learns:
        products = work * (_PASSES * min(tokens, default_tokens(config)) + _LEARNING_TOKENS)
    if recipe.budget is not None:
        measurements = len(allowed_formats(config, formats_of(recipe)))
        # A measurement begins at the linear that it changes, half way through the model on average.
        products += measurements * min(tokens, measured_tokens(config, SENSITIVITY_WORK)) * work // 2
        search = DEFAULT_SECONDS if recipe.time_limit is None else 60 * recipe.time_limit
    seconds = _FIXED_SECONDS + products * _seconds_per_product()
    least, most = _minutes(seconds / _SPREAD), _minutes(_SPREAD * seconds + search)
    return f"expected to take {least} to {most} minutes, longer beside other programs"


def _seconds_per_product() -> float:
    """Seconds of a multiplication and addition in float32 on all cores.

    It is the least of several short products on one core: threads on busy cores would wait for each other.
    """
    matrix, seconds = np.ones((_SIZE, _SIZE), np.float32), []
    with threadpool_limits(1, user_api="blas"):
        for _ in range(_TRIALS):
            began = time.perf_counter()
            matrix @ matrix
            seconds.append(time.perf_counter() - began)
    return min(seconds) / _SIZE**3 / default_threads()


def _minutes(seconds: float) -> str:
    return f"{max(seconds / 60, 0.1):.2g}" if seconds < 600 else f"{seconds / 60:.0f}"
