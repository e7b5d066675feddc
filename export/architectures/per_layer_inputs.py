"""Layers that read a small embedding of their own beside the hidden states (Gemma 3n and 4).

One table holds the embeddings of all layers. A projection of the token embedding, normed, is added to each of them. At
its end, a layer gates its part of the sum by the hidden states, projects it back and adds it to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import CheckpointError
from ..checkpoint.json_fields import count


@dataclass(frozen=True)
class PerLayerInputs:
    """The per-layer inputs of a family, by the names of its settings in config.json and of its modules."""

    width: str = "hidden_size_per_layer_input"
    """Channels for each layer; 0 for a model without them."""
    vocabulary: str = "vocab_size_per_layer_input"
    """Number of tokens in the table."""
    table: str = "embed_tokens_per_layer"
    projection: str = "per_layer_model_projection"
    projection_norm: str = "per_layer_projection_norm"
    gate: str = "per_layer_input_gate"
    """Module of a layer, as the two that follow."""
    output: str = "per_layer_projection"
    output_norm: str = "post_per_layer_input_norm"

    def read(self, config: Mapping[str, Any]) -> int:
        """Return the number of channels for each layer, 0 for none, for a parsed config.json.

        Raises:
            CheckpointError: a setting is malformed, or some tokens are not in the table.
        """
        width = count(config, self.width, default=0, minimum=0)
        tokens = count(config, "vocab_size")
        if width and count(config, self.vocabulary, default=tokens) != tokens:
            raise CheckpointError(
                f"config.json: {self.vocabulary} {config[self.vocabulary]} differs from vocab_size {tokens}",
                "supported is a table with every token",
            )
        return width
