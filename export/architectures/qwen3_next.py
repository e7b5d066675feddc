"""Qwen3-Next: as Qwen3.5 with experts, with all of a key head together in the projections of delta nets."""

from dataclasses import replace
from typing import Final

from . import qwen3_5_text
from .delta_net import DeltaNet
from .family import Experts, SharedExpert

FAMILY: Final = replace(
    qwen3_5_text.FAMILY,
    delta_net=DeltaNet(by_key_head=True),
    experts=Experts(shared=SharedExpert()),
    defaults={**qwen3_5_text.FAMILY.defaults, "norm_topk_prob": True},
)
