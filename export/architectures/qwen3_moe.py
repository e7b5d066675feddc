"""Qwen3 with experts: a feed-forward chosen for each token, otherwise Qwen3."""

from dataclasses import replace
from typing import Final

from . import qwen3
from .family import Experts

FAMILY: Final = replace(qwen3.FAMILY, experts=Experts(), defaults={})
