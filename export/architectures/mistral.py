"""Mistral 7B, Nemo, Small (text) and their kin; the first one slides a window over every layer."""

from typing import Final

from .family import Family
from .sliding_windows import EveryLayer

FAMILY: Final = Family(
    windows=EveryLayer(),
    defaults={"sliding_window": 4096},
)
