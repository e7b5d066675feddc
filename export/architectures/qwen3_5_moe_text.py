"""Qwen3.5 with experts: its layers, and feed-forwards of selected experts beside one with a gate."""

from dataclasses import replace
from typing import Final

from . import qwen3_5_text
from .family import Always, Experts, FeedForwardSize, SharedExpert

FAMILY: Final = replace(
    qwen3_5_text.FAMILY,
    experts=Experts(normalized=Always(True), shared=SharedExpert()),
    # No layer has a dense feed-forward, and config.json does not state its size.
    intermediate_size=FeedForwardSize(("intermediate_size", "shared_expert_intermediate_size")),
)
