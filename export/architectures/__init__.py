"""The supported families, by their Hugging Face `model_type`."""

from collections.abc import Mapping
from typing import Final

from ...errors import CheckpointError
from .family import Family
from .gemma import FAMILIES as GEMMA
from .llama import FAMILIES as LLAMA
from .other_makers import FAMILIES as OTHERS
from .qwen import FAMILIES as QWEN

FAMILIES: Final[Mapping[str, Family]] = {**GEMMA, **LLAMA, **OTHERS, **QWEN}
OPTIMUM: Final = 'pip install "edge-run[optimum]"'
"""How to install the exporter of other families."""


def supported_families() -> list[str]:
    """Return the `model_type`s that are supported, sorted."""
    return sorted(FAMILIES)


def find_family(model_type: str) -> Family:
    """Return the family of a Hugging Face `model_type`.

    Raises:
        CheckpointError: it is not supported.
    """
    if model_type not in FAMILIES:
        raise CheckpointError(
            f"model_type {model_type!r} is not a supported architecture",
            f"supported are {', '.join(supported_families())}; Optimum exports more: {OPTIMUM}",
        )
    return FAMILIES[model_type]
