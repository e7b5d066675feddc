"""`edge.json`: what a bundle says about itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from ..edge.errors import BundleError

MANIFEST_NAME: Final = "edge.json"
BUNDLE_FORMAT: Final = 1
"""Version of the folder's layout and of this file."""
GRAPH_CONTRACT: Final = 1
"""Version of the graph's inputs and outputs (docs/graph-contract.md)."""


@dataclass(frozen=True)
class Architecture:
    """The numbers of a decoder-only transformer, as the exported graph has them."""

    family: str
    """Hugging Face `model_type`: llama, qwen2, qwen3."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    """Positions the graph's rotary table covers."""
    tied_head: bool
    """Whether the LM head is the embedding."""


@dataclass(frozen=True)
class WeightFormat:
    """How one linear's weights are stored: 32 bits plain, or 4 or 8 bits in blocks along the input dimension."""

    bits: int
    block: int = 0

    def __str__(self) -> str:
        return "fp32" if self.bits == 32 else f"int{self.bits}/{self.block}"


@dataclass(frozen=True)
class FileDigest:
    """Size in bytes and SHA-256 (hexadecimal) of one file of the bundle."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The contents of `edge.json`."""

    architecture: Architecture
    weights: Mapping[str, WeightFormat]
    """Format by unit, a unit being one fused linear: `layers.0.qkv`, `layers.0.o`, `layers.0.gate_up`,
    `layers.0.down`, `embedding`, `head`."""
    bits_per_weight: float
    """Stored bits, scales included, over the number of weights in all units."""
    files: Mapping[str, FileDigest]
    """Digest by file name, for every file of the bundle but this one."""
    parity: Mapping[str, float] = field(default_factory=dict)
    """How near the graph came to the reference when it was exported: `max_abs_diff`, `mean_kl`, `top1_agreement`."""
    producer: str = ""
    command: str = ""
    format: int = BUNDLE_FORMAT
    contract: int = GRAPH_CONTRACT

    def to_json(self) -> str:
        """The text of `edge.json`."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = MANIFEST_NAME) -> Manifest:
        """Read the text of `edge.json`.

        Raises:
            BundleError: it is not JSON, lacks a field, or is of a later format than this program knows.
        """
        try:
            data: dict[str, Any] = json.loads(text)
            if data["format"] > BUNDLE_FORMAT or data["contract"] > GRAPH_CONTRACT:
                raise BundleError(
                    f"{where} is of format {data['format']}, contract {data['contract']}; this edge-run reads "
                    f"format {BUNDLE_FORMAT}, contract {GRAPH_CONTRACT}",
                    "upgrade edge-run",
                )
            data["architecture"] = Architecture(**data["architecture"])
            data["weights"] = {unit: WeightFormat(**form) for unit, form in data["weights"].items()}
            data["files"] = {name: FileDigest(**digest) for name, digest in data["files"].items()}
            return cls(**data)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BundleError(f"{where} cannot be read: {error!r}", "export the model again") from error
