"""Qwen2 and Qwen2.5: biases on the query, key and value projections only."""

from typing import Final

from .family import Always, Family
from .sliding_windows import LayersFrom

FAMILY: Final = Family(
    qkv_bias=Always(True),
    windows=LayersFrom(),
)
