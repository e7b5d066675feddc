"""Qwen3 with a mixture-of-experts feed-forward."""

from dataclasses import replace
from typing import Final

from . import qwen3
from .family import Experts

FAMILY: Final = replace(qwen3.FAMILY, experts=Experts(), defaults={})
