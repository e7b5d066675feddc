"""Multi-token-prediction modules, which some checkpoints bring along as their own draft.

Such a module is one more decoder layer, trained with the model. It joins the embedding of a token with the hidden
state of the token before it, each normalized, and predicts the token after; embedding and LM head are the model's.
What it computes takes the place of the next hidden state, so that it predicts any number of tokens one by one
(DeepSeek-AI: DeepSeek-V3 Technical Report, 2024; Qwen3-Next and Qwen3.5 as vLLM runs them).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MultiTokenPrediction:
    """The module of a family, by the names of its tensors and of its settings in config.json.

    The hidden states that it takes are the model's after its last norm, and its own after its own last norm.
    """

    prefix: str = "mtp."
    """Beginning of the names of all of its tensors."""
    projection: str = "mtp.fc"
    """Linear `[hidden, 2 * hidden]` over the embedding, then the hidden state, both normalized."""
    embedding_norm: str = "mtp.pre_fc_norm_embedding"
    state_norm: str = "mtp.pre_fc_norm_hidden"
    layer: str = "mtp.layers.0"
    """The decoder layer, with attention."""
    last_norm: str = "mtp.norm"
    """Norm of its output, before the LM head."""
    layers: str = "mtp_num_hidden_layers"
    """Setting with the number of its layers, 1 where it is absent."""
    own_embedding: str = "mtp_use_dedicated_embeddings"
    """Setting of whether it has an embedding of its own, which is not supported."""
