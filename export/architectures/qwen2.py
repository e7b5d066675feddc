"""Qwen2 and Qwen2.5: biases on the query, key and value projections only."""

from typing import Final

from ..family import Always, Family

FAMILY: Final = Family(
    qkv_bias=Always(True),
    output_bias=Always(False),
    mlp_bias=Always(False),
)
