"""Ministral 3: queries grow with their position behind the context that the model was first trained with."""

from typing import Final

from .family import Family
from .sliding_windows import EveryLayer

FAMILY: Final = Family(
    windows=EveryLayer(),
    query_scaling=True,
    defaults={"rms_norm_eps": 1e-5},
)
