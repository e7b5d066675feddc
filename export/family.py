"""What one Hugging Face model family does differently from the others.

Every family is a decoder of the same plan: RMS norm, grouped-query attention with rotary positions, RMS norm, gated
SiLU feed-forward. `architectures/<model_type>.py` holds one `Family` that says where it departs from that plan; a new
family of this plan is a new file there and nothing else.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..edge.errors import CheckpointError
from . import architectures


@dataclass(frozen=True)
class ConfigFlag:
    """A choice that config.json makes: the boolean of that name, false when absent."""

    name: str

    def read(self, config: Mapping[str, Any]) -> bool:
        """The flag's value in a parsed config.json."""
        return bool(config.get(self.name, False))


@dataclass(frozen=True)
class Always:
    """A choice the family makes for all its checkpoints."""

    value: bool

    def read(self, config: Mapping[str, Any]) -> bool:  # noqa: ARG002 -- same call as ConfigFlag.read
        """The family's value, whatever config.json says."""
        return self.value


Choice = ConfigFlag | Always


@dataclass(frozen=True)
class Family:
    """Where a family departs from the common plan."""

    qkv_bias: Choice
    """Whether the query, key and value projections add a bias."""
    output_bias: Choice
    """Whether the attention's output projection adds a bias."""
    mlp_bias: Choice
    """Whether the gate, up and down projections add a bias."""
    qk_norm: bool = False
    """Whether each head of the queries and keys is RMS-normalized before the rotation (`q_norm`, `k_norm`)."""
    default_head_dim: int | None = None
    """Channels per head when config.json does not say; None stands for hidden_size / num_attention_heads."""


def supported_families() -> list[str]:
    """The `model_type`s that have an architecture file, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(architectures.__path__))


def find_family(model_type: str) -> Family:
    """The family of that Hugging Face `model_type`.

    Raises:
        CheckpointError: there is no architecture file for it.
    """
    known = supported_families()
    if model_type not in known:
        raise CheckpointError(
            f"model_type {model_type!r} is not a supported architecture", f"supported are {', '.join(known)}"
        )
    family = importlib.import_module(f"{architectures.__name__}.{model_type}").FAMILY
    if not isinstance(family, Family):
        raise TypeError(f"architectures/{model_type}.py must define FAMILY: Family")
    return family
