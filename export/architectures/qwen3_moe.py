"""Qwen3 with experts: a feed-forward chosen for each token, otherwise Qwen3."""

from dataclasses import replace
from typing import Final

from ..family import Experts
from . import qwen3

FAMILY: Final = replace(qwen3.FAMILY, experts=Experts(), defaults={})
