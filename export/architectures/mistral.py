"""Mistral 7B, Nemo and Small (text); the first 7B uses a sliding window in every layer."""

from typing import Final

from .family import Family
from .sliding_windows import EveryLayer

FAMILY: Final = Family(
    windows=EveryLayer(),
    defaults={"sliding_window": 4096},
)
