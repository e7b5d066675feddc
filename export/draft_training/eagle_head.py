"""An EAGLE-3 head in PyTorch, with the tensor names of SpecForge's and SGLang's checkpoints.

At the index t of a text x the head reads the embedding of x[t + 1] and three hidden states of the target at t, and
predicts x[t + 2]. A chain goes on from its own output in place of the target's states. Training does the same for
several depths ("training-time test"; Li et al., "EAGLE-3", arXiv:2503.01840).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ...models.atomic import write_atomically
from ...models.manifest import Architecture
from ..drafts.feature_heads import (
    DRAFT_VOCAB_SIZE,
    DRAFTED_TOKENS,
    EAGLE_ARCHITECTURES,
    EAGLE_CONFIG,
    EAGLE_FEATURE_LAYERS,
    EAGLE_LAYERS,
    TARGET_ID_OFFSETS,
)
from .torch_llama import Layer, Linear, ModelShape, RMSNorm, initialize, rotary_tables
from .training_loop import write_weights


class _HeadLayer(Layer):
    """The head's only layer, which reads an embedding and a hidden state."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape, inputs=2 * shape.hidden_size)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def chained(
        self, embedded: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, chain: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """The hidden states [B, T, C] after embeddings and hidden states [B, T, C]; `chain` is as for `Attention`."""
        length = hidden.shape[1]
        mask = torch.full((length, length), -torch.inf, device=hidden.device).triu(1)
        both = torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), dim=-1)
        hidden = hidden + self.self_attn(both, cos, sin, mask, chain)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class EagleNetwork(nn.Module):
    """An EAGLE-3 head; embeddings are the target's, and not its own.

    Args:
        target: the target's numbers; the head's layer is as wide as its own.
        layers: the target's layers before which its states are read.
        target_ids: the target's token ids of the head's tokens, ascending, int64 [V].
        rope_theta: base of the rotary positions.
        eps: epsilon of the norms.
    """

    def __init__(
        self,
        target: Architecture,
        layers: Sequence[int],
        target_ids: Tensor,
        rope_theta: float = 10000.0,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.target, self.layers = target, layers
        self.shape = llama = ModelShape(
            vocab_size=len(target_ids),
            hidden_size=target.hidden_size,
            intermediate_size=target.intermediate_size,
            num_hidden_layers=1,
            num_attention_heads=target.heads,
            num_key_value_heads=target.kv_heads,
            head_dim=target.head_dim,
            max_position_embeddings=target.context,
            rms_norm_eps=eps,
            rope_theta=rope_theta,
        )
        self.fc = Linear(EAGLE_FEATURE_LAYERS * llama.hidden_size, llama.hidden_size)
        self.midlayer = _HeadLayer(llama)
        self.norm = RMSNorm(llama.hidden_size, llama.rms_norm_eps)
        self.lm_head = Linear(llama.hidden_size, llama.vocab_size)
        self.register_buffer("target_ids", target_ids, persistent=False)
        draft_ids = torch.full((target.vocab_size,), -1, dtype=torch.int64)
        draft_ids[target_ids] = torch.arange(len(target_ids))
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        cos, sin = rotary_tables(llama)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        initialize(self, 1)

    def draft_tokens(self, token_ids: Tensor) -> Tensor:
        """The head's numbers of the target's tokens; -1 for those that it does not have."""
        return self.get_buffer("draft_ids")[token_ids]

    def chains(self, embedded: Tensor, states: Tensor, depths: int) -> list[Tensor]:
        """Run chains of `depths` tokens from every index of a text at once, along the text's own tokens.

        Args:
            embedded: the target's embeddings of the text, float [B, T, C].
            states: the target's states, float [B, T, 3 C].
            depths: number of tokens of a chain.

        Returns:
            For each depth k the normed hidden states [B, T, C], which at index t predict token t + 2 + k.
        """
        hidden: Tensor = self.fc(states)
        chain: list[tuple[Tensor, Tensor]] = []
        outputs = []
        length = embedded.shape[1]
        positions = torch.arange(length, device=embedded.device)
        last = self.get_buffer("cos").shape[0] - 1
        for depth in range(depths):
            read = nn.functional.pad(embedded[:, depth + 1 :], (0, 0, 0, min(length, depth + 1)))
            at = (positions + depth).clamp(max=last)
            hidden = self.midlayer.chained(read, hidden, self.get_buffer("cos")[at], self.get_buffer("sin")[at], chain)
            outputs.append(self.norm(hidden))
        return outputs

    def write(self, folder: Path) -> None:
        """Write the checkpoint, in bfloat16; `model.safetensors` is written last."""
        config = {
            **self.shape.to_config(torch.bfloat16, []),
            "architectures": [EAGLE_ARCHITECTURES[0]],
            "vocab_size": self.target.vocab_size,
            "tie_word_embeddings": False,
            DRAFT_VOCAB_SIZE: self.shape.vocab_size,
            # SpecForge and SGLang count from the output of the layer before.
            EAGLE_CONFIG: {EAGLE_LAYERS: [layer - 1 for layer in self.layers], "use_aux_hidden_state": True},
        }
        write_atomically(folder / "config.json", json.dumps(config, indent=2).encode())
        target_ids = self.get_buffer("target_ids").cpu()
        offered = torch.zeros(self.target.vocab_size, dtype=torch.bool)
        offered[target_ids] = True
        maps = {TARGET_ID_OFFSETS: target_ids - torch.arange(len(target_ids)), DRAFTED_TOKENS: offered}
        write_weights(folder, {**dict(self.named_parameters()), **maps}, torch.bfloat16)
