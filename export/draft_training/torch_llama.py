"""A small Llama-family decoder in PyTorch, with the parameter names Hugging Face gives them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

_NEGLIGIBLE: Final = 1e-30


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a Llama model; field names are the keys of Hugging Face's `config.json`."""

    vocab_size: int = 4096
    hidden_size: int = 320
    intermediate_size: int = 896
    num_hidden_layers: int = 6
    num_attention_heads: int = 5
    num_key_value_heads: int = 5
    head_dim: int = 64
    max_position_embeddings: int = 256
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ModelShape:
        """Read the shape from a Hugging Face `config.json`.

        Raises:
            ValueError: the checkpoint is not a llama model with tied embeddings.
        """
        if config.get("model_type") != "llama" or not config.get("tie_word_embeddings", False):
            raise ValueError(
                "expected a llama checkpoint with tied embeddings, "
                f"found model_type={config.get('model_type')!r}, "
                f"tie_word_embeddings={config.get('tie_word_embeddings')!r}"
            )
        sizes = {name: config[name] for name in cls.__dataclass_fields__ if config.get(name) is not None}
        heads = config["num_attention_heads"]
        return cls(**{"head_dim": config["hidden_size"] // heads, "num_key_value_heads": heads, **sizes})

    def to_config(self, dtype: torch.dtype, end_ids: list[int]) -> dict[str, Any]:
        """Return the Hugging Face `config.json` for this shape, the type of the weights, and the end tokens."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **asdict(self),
            "tie_word_embeddings": True,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": None,
            "eos_token_id": end_ids[0] if len(end_ids) == 1 else end_ids or None,
            "pad_token_id": end_ids[0] if end_ids else None,
            "torch_dtype": str(dtype).removeprefix("torch."),
        }


def rotary_tables(shape: ModelShape) -> tuple[Tensor, Tensor]:
    """Cosine and sine tables for rotary positions, each float32 [max_position_embeddings, head_dim]."""
    exponent = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angle = torch.outer(torch.arange(shape.max_position_embeddings, dtype=torch.float32), shape.rope_theta**-exponent)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions (half-split layout, as Hugging Face stores it) to x [B, H, T, D]."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm over the last axis, computed in float32."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., C]; float32 out."""
        return super().forward(x.float())


class Linear(nn.Linear):
    """A linear map without bias, whose weight [N, K] may be rounded in forward passes."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.rounding: BlockRounding | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Transform x [..., K] into [..., N]."""
        return functional.linear(x, self.weight if self.rounding is None else self.rounding(self.weight))


def drop_channels(x: Tensor, share: float) -> Tensor:
    """Dropout of x [B, T, C] with one mask [B, 1, C] for all positions of a sequence.

    It works as well as ordinary dropout here; random numbers for every element would take a tenth of a training step.
    """
    if share == 0.0:
        return x
    kept = torch.rand(x.shape[0], 1, x.shape[2], device=x.device) >= share
    return x * (kept / (1.0 - share))


class Attention(nn.Module):
    """Causal self-attention with rotary positions and optional grouped keys and values."""

    def __init__(self, shape: ModelShape, inputs: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        self.q_proj = Linear(inputs, self.heads * self.head_dim)
        self.k_proj = Linear(inputs, self.kv_heads * self.head_dim)
        self.v_proj = Linear(inputs, self.kv_heads * self.head_dim)
        self.o_proj = Linear(self.heads * self.head_dim, shape.hidden_size)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, chain: list[tuple[Tensor, Tensor]] | None = None
    ) -> Tensor:
        """Mix x [B, T, C] along T; cos, sin [T, D], mask [T, T] with 0 or minus infinity.

        In a `chain` of passes, to which keys and values [B, H, T, D] are added, the query at index t sees the text up
        to t, whose keys are the first of the chain, and its own chain: of each later pass the key at index t alone.
        """
        query, key, value = (
            projection(x).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotate(query, cos, sin).to(value.dtype), rotate(key, cos, sin).to(value.dtype)
        if (repeats := self.heads // self.kv_heads) > 1:
            key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        chain = [] if chain is None else chain
        chain.append((key, value))
        keys, values = chain[0]
        # Training sequences are short (about 40 tokens), where plain matrix products beat fused attention kernels on
        # CPUs: measured a fifth off the whole training step.
        scores = (query @ keys.transpose(2, 3)).float() * self.head_dim**-0.5 + mask
        own = [(query * key).sum(-1, keepdim=True).float() * self.head_dim**-0.5 for key, _ in chain[1:]]
        weights = torch.softmax(torch.cat([scores, *own], dim=-1) if own else scores, dim=-1).to(value.dtype)
        mixed = weights[..., : x.shape[1]] @ values
        for depth, (_, value) in enumerate(chain[1:], x.shape[1]):
            mixed = mixed + weights[..., depth : depth + 1] * value
        projected: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return projected


class MLP(nn.Module):
    """SwiGLU feed-forward block."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = Linear(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Transform x [B, T, C] position by position."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream through dropout."""

    def __init__(self, shape: ModelShape, dropout: float = 0.0, inputs: int | None = None) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape, inputs or shape.hidden_size)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)
        self.dropout = dropout

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """One layer over x [B, T, C]; the other arguments are as for `Attention`."""
        share = self.dropout if self.training else 0.0
        x = x + drop_channels(self.self_attn(self.input_layernorm(x), cos, sin, mask), share)
        out: Tensor = x + drop_channels(self.mlp(self.post_attention_layernorm(x)), share)
        return out


class Backbone(nn.Module):
    """Everything below the LM head; named `model` inside `CausalLM`, as in Hugging Face checkpoints."""

    def __init__(self, shape: ModelShape, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape, dropout) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.dropout = dropout
        self.rounding: BlockRounding | None = None
        cos, sin = rotary_tables(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def embeddings(self) -> Tensor:
        """The embedding matrix [V, C], which the LM head uses too."""
        weight = self.embed_tokens.weight
        return weight if self.rounding is None else self.rounding(weight)

    def forward(self, ids: Tensor) -> Tensor:
        """Normalized hidden states [B, T, C] for token ids int64 [B, T]."""
        length = ids.shape[1]
        cos, sin = self.get_buffer("cos")[:length], self.get_buffer("sin")[:length]
        mask = torch.full((length, length), -torch.inf, device=ids.device).triu(1)
        embedded = functional.embedding(ids, self.embeddings())
        x = drop_channels(embedded, self.dropout if self.training else 0.0)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        out: Tensor = self.norm(x)
        return out


def initialize(model: nn.Module, layers: int) -> None:
    """Draw the matrices of a model of that many layers at random."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            # Projections that write into the residual stream start smaller, so depth does not raise its variance.
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * layers) if residual else 1.0))


class CausalLM(nn.Module):
    """Llama decoder with a tied LM head.

    Sequences are padded on the right; under a causal mask padding cannot reach real tokens, so there is no
    padding mask.
    """

    def __init__(self, shape: ModelShape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        self.rounding: BlockRounding | None = None
        self.model = Backbone(shape, dropout)
        self._compiled: Callable[[Tensor], Tensor] | None = None
        initialize(self, shape.num_hidden_layers)

    def hidden(self, ids: Tensor) -> Tensor:
        """Final hidden states, float [B, T, hidden_size], for token ids int64 [B, T]."""
        if self._compiled is not None and self.training:
            return self._compiled(ids)
        out: Tensor = self.model(ids)
        return out

    def compile_training(self) -> None:
        """Compile training passes with torch.compile; evaluation, whose shapes vary more, is not compiled."""
        self._compiled = torch.compile(self.model.forward, dynamic=True)

    def round_weights(self, rounding: BlockRounding | None) -> None:
        """Round every matrix in all forward passes from now on; None uses the float weights again."""
        self.rounding = rounding
        for module in self.modules():
            if isinstance(module, Linear | Backbone):
                module.rounding = rounding

    def stored(self) -> dict[str, Tensor]:
        """The parameters by name, float32, rounded if passes round them."""
        rounding = self.rounding
        return {
            name: p.detach() if rounding is None or p.dim() != 2 else rounding.rounded(p.detach())
            for name, p in self.named_parameters()
        }

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocab_size] for hidden states [..., hidden_size]."""
        return functional.linear(hidden, self.model.embeddings())

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [B, T, vocab_size] for token ids int64 [B, T]."""
        return self.head(self.hidden(ids))

    def count(self) -> int:
        """Number of trainable parameters; the tied head counts once."""
        return sum(parameter.numel() for parameter in self.parameters())


@dataclass(frozen=True)
class BlockRounding:
    """Rounds weights as an export stores them, for quantization-aware training.

    Symmetric, to nearest, in blocks along the last axis; the last block of a row may be shorter. The weight of largest
    magnitude of a block is on the lowest code (see `export.quantization.codes`). Rounding has no useful gradient, so
    its gradient is taken to be 1 (straight-through estimator, Bengio, Leonard and Courville, arXiv:1308.3432), and the
    weights before rounding are updated.
    """

    bits: int
    block: int

    @classmethod
    def parse(cls, text: str) -> BlockRounding:
        """Read `4/128`.

        Raises:
            ValueError: the text is not bits (2, 4 or 8), a slash and a block size (32, 64 or 128).
        """
        found = re.fullmatch(r"([248])/(32|64|128)", text)
        if found is None:
            raise ValueError(f"{text!r} is not BITS/BLOCK with 2, 4 or 8 bits and blocks of 32, 64 or 128")
        return cls(int(found[1]), int(found[2]))

    def __call__(self, weight: Tensor) -> Tensor:
        """Round weight [N, K], with the gradient of the identity; returns float32."""
        return weight + (self.rounded(weight.detach()) - weight).detach()

    def rounded(self, weight: Tensor) -> Tensor:
        """Round weight float32 [N, K] as an export does; rounding the result again does not change it."""
        half = 2 ** (self.bits - 1)
        columns = weight.shape[-1]
        padded = functional.pad(weight, (0, -columns % self.block))
        blocks = padded.reshape(*padded.shape[:-1], -1, self.block)
        largest, smallest = blocks.amax(-1, keepdim=True), blocks.amin(-1, keepdim=True)
        extreme = torch.where(largest >= -smallest, largest, smallest)
        scale = extreme / -half
        usable = extreme.abs() > _NEGLIGIBLE
        codes = torch.round(blocks / torch.where(usable, scale, 1.0)).clamp(-half, half - 1)
        stored = torch.where(usable, codes * scale, 0.0)
        return stored.flatten(-2)[..., :columns]
