"""Sizes of known models, and the tensors and the configuration of their checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

INITIAL_STD: Final = 0.02
"""Standard deviation of random weights."""


@dataclass(frozen=True)
class Shape(ABC):
    """Sizes of a model."""

    name: str
    vocab: int
    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int = 32768
    tied: bool = True
    """Whether the LM head is the embedding."""

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor in file order; linear weights are [out, in]."""

    @abstractmethod
    def config(self, dtype: str) -> dict[str, object]:
        """The checkpoint's config.json; `dtype` is that of its weights."""

    def _config(self, architecture: str, model_type: str, dtype: str) -> dict[str, object]:
        """The settings that all families have."""
        return {
            "architectures": [architecture],
            "model_type": model_type,
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": self.context,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": self.tied,
            "initializer_range": INITIAL_STD,
            "use_cache": True,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "torch_dtype": dtype,
        }


class Qwen2Shape(Shape):
    """Sizes of a Qwen2 model."""

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """See `Shape.tensors`."""
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        for i in range(self.layers):
            layer = f"model.layers.{i}"
            yield f"{layer}.input_layernorm.weight", (self.hidden,)
            for name, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)):
                yield f"{layer}.self_attn.{name}_proj.weight", (heads * self.head_dim, self.hidden)
                yield f"{layer}.self_attn.{name}_proj.bias", (heads * self.head_dim,)
            yield f"{layer}.self_attn.o_proj.weight", (self.hidden, self.heads * self.head_dim)
            yield f"{layer}.post_attention_layernorm.weight", (self.hidden,)
            yield f"{layer}.mlp.gate_proj.weight", (self.intermediate, self.hidden)
            yield f"{layer}.mlp.up_proj.weight", (self.intermediate, self.hidden)
            yield f"{layer}.mlp.down_proj.weight", (self.hidden, self.intermediate)
        yield "model.norm.weight", (self.hidden,)
        if not self.tied:
            yield "lm_head.weight", (self.vocab, self.hidden)

    def config(self, dtype: str) -> dict[str, object]:
        """See `Shape.config`."""
        return {
            **self._config("Qwen2ForCausalLM", "qwen2", dtype),
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "sliding_window": None,
        }


class Gemma3Shape(Shape):
    """Sizes of a Gemma 3 model for text alone: five layers of six attend to a window."""

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """See `Shape.tensors`."""
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        for i in range(self.layers):
            layer = f"model.layers.{i}"
            for norm in ("input_layernorm", "post_attention_layernorm"):
                yield f"{layer}.{norm}.weight", (self.hidden,)
            for norm in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
                yield f"{layer}.{norm}.weight", (self.hidden,)
            for name, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)):
                yield f"{layer}.self_attn.{name}_proj.weight", (heads * self.head_dim, self.hidden)
            yield f"{layer}.self_attn.o_proj.weight", (self.hidden, self.heads * self.head_dim)
            for norm in ("q_norm", "k_norm"):
                yield f"{layer}.self_attn.{norm}.weight", (self.head_dim,)
            yield f"{layer}.mlp.gate_proj.weight", (self.intermediate, self.hidden)
            yield f"{layer}.mlp.up_proj.weight", (self.intermediate, self.hidden)
            yield f"{layer}.mlp.down_proj.weight", (self.hidden, self.intermediate)
        yield "model.norm.weight", (self.hidden,)

    def config(self, dtype: str) -> dict[str, object]:
        """See `Shape.config`."""
        return {
            **self._config("Gemma3ForCausalLM", "gemma3_text", dtype),
            "head_dim": self.head_dim,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": self.head_dim,
            "rms_norm_eps": 1e-6,
            "rope_local_base_freq": 10000.0,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "attention_bias": False,
        }


@dataclass(frozen=True)
class Lfm2Shape(Shape):
    """Sizes of an LFM2 model: gated convolutions over three tokens in the layers that have no attention."""

    attention_layers: tuple[int, ...] = ()
    """Indices of the layers with attention."""
    convolution_tokens: int = 3

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """See `Shape.tensors`."""
        hidden, keys = self.hidden, self.kv_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocab, hidden)
        for i in range(self.layers):
            layer = f"model.layers.{i}"
            if i in self.attention_layers:
                yield f"{layer}.self_attn.q_proj.weight", (self.heads * self.head_dim, hidden)
                yield f"{layer}.self_attn.k_proj.weight", (keys, hidden)
                yield f"{layer}.self_attn.v_proj.weight", (keys, hidden)
                yield f"{layer}.self_attn.out_proj.weight", (hidden, self.heads * self.head_dim)
                yield f"{layer}.self_attn.q_layernorm.weight", (self.head_dim,)
                yield f"{layer}.self_attn.k_layernorm.weight", (self.head_dim,)
            else:
                yield f"{layer}.conv.in_proj.weight", (3 * hidden, hidden)
                yield f"{layer}.conv.conv.weight", (hidden, 1, self.convolution_tokens)
                yield f"{layer}.conv.out_proj.weight", (hidden, hidden)
            yield f"{layer}.feed_forward.w1.weight", (self.intermediate, hidden)
            yield f"{layer}.feed_forward.w3.weight", (self.intermediate, hidden)
            yield f"{layer}.feed_forward.w2.weight", (hidden, self.intermediate)
            yield f"{layer}.operator_norm.weight", (hidden,)
            yield f"{layer}.ffn_norm.weight", (hidden,)
        yield "model.embedding_norm.weight", (hidden,)

    def config(self, dtype: str) -> dict[str, object]:
        """See `Shape.config`."""
        types = ["full_attention" if i in self.attention_layers else "conv" for i in range(self.layers)]
        return {
            **self._config("Lfm2ForCausalLM", "lfm2", dtype),
            "block_dim": self.hidden,
            "block_ff_dim": self.intermediate,
            "block_auto_adjust_ff_dim": False,
            "conv_L_cache": self.convolution_tokens,
            "conv_bias": False,
            "conv_dim": self.hidden,
            "layer_types": types,
            "norm_eps": 1e-5,
        }


@dataclass(frozen=True)
class Qwen35Shape(Shape):
    """Sizes of Qwen3.5's language model: gated delta nets in three layers of four, gated attention in the fourth."""

    delta_heads: int = 16
    """Heads of the delta nets, for keys and for values."""
    delta_dim: int = 128
    """Channels of such a head."""
    attention_interval: int = 4

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """See `Shape.tensors`."""
        hidden, keys, wide = self.hidden, self.kv_heads * self.head_dim, self.delta_heads * self.delta_dim
        yield "model.language_model.embed_tokens.weight", (self.vocab, hidden)
        for i in range(self.layers):
            layer = f"model.language_model.layers.{i}"
            yield f"{layer}.input_layernorm.weight", (hidden,)
            yield f"{layer}.post_attention_layernorm.weight", (hidden,)
            if self._has_attention(i):
                yield f"{layer}.self_attn.q_proj.weight", (2 * self.heads * self.head_dim, hidden)
                yield f"{layer}.self_attn.k_proj.weight", (keys, hidden)
                yield f"{layer}.self_attn.v_proj.weight", (keys, hidden)
                yield f"{layer}.self_attn.o_proj.weight", (hidden, self.heads * self.head_dim)
                yield f"{layer}.self_attn.q_norm.weight", (self.head_dim,)
                yield f"{layer}.self_attn.k_norm.weight", (self.head_dim,)
            else:
                yield f"{layer}.linear_attn.in_proj_qkv.weight", (3 * wide, hidden)
                yield f"{layer}.linear_attn.in_proj_z.weight", (wide, hidden)
                yield f"{layer}.linear_attn.in_proj_b.weight", (self.delta_heads, hidden)
                yield f"{layer}.linear_attn.in_proj_a.weight", (self.delta_heads, hidden)
                yield f"{layer}.linear_attn.conv1d.weight", (3 * wide, 1, 4)
                yield f"{layer}.linear_attn.A_log", (self.delta_heads,)
                yield f"{layer}.linear_attn.dt_bias", (self.delta_heads,)
                yield f"{layer}.linear_attn.norm.weight", (self.delta_dim,)
                yield f"{layer}.linear_attn.out_proj.weight", (hidden, wide)
            yield f"{layer}.mlp.gate_proj.weight", (self.intermediate, hidden)
            yield f"{layer}.mlp.up_proj.weight", (self.intermediate, hidden)
            yield f"{layer}.mlp.down_proj.weight", (hidden, self.intermediate)
        yield "model.language_model.norm.weight", (hidden,)

    def config(self, dtype: str) -> dict[str, object]:
        """See `Shape.config`. The image part, which nothing here runs, is as small as possible."""
        text = self._config("Qwen3_5ForCausalLM", "qwen3_5_text", dtype)
        del text["rope_theta"]
        types = ["full_attention" if self._has_attention(i) else "linear_attention" for i in range(self.layers)]
        text |= {
            "head_dim": self.head_dim,
            "layer_types": types,
            "full_attention_interval": self.attention_interval,
            "linear_num_key_heads": self.delta_heads,
            "linear_num_value_heads": self.delta_heads,
            "linear_key_head_dim": self.delta_dim,
            "linear_value_head_dim": self.delta_dim,
            "linear_conv_kernel_dim": 4,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "attention_bias": False,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000000.0,
                "partial_rotary_factor": 0.25,
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
            },
        }
        image = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 1, "out_hidden_size": self.hidden}
        return {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "text_config": text,
            "vision_config": {"model_type": "qwen3_5", **image},
            "tie_word_embeddings": True,
            "torch_dtype": dtype,
        }

    def _has_attention(self, layer: int) -> bool:
        return (layer + 1) % self.attention_interval == 0


SHAPES: Final[dict[str, Shape]] = {
    shape.name: shape
    for shape in (
        Qwen2Shape("tiny", 512, 128, 2, 256, 4, 2, 32, 2048),
        Qwen2Shape("qwen2.5-0.5b", 151936, 896, 24, 4864, 14, 2, 64),
        Qwen2Shape("qwen2.5-1.5b", 151936, 1536, 28, 8960, 12, 2, 128),
        Gemma3Shape("gemma3-1b", 262144, 1152, 26, 6912, 4, 1, 256),
        Qwen2Shape("qwen2.5-7b", 152064, 3584, 28, 18944, 28, 4, 128, tied=False),
        Qwen35Shape("qwen3.5-0.8b", 248320, 1024, 24, 3584, 8, 2, 256, 262_144),
        Lfm2Shape("lfm2-350m", 65536, 1024, 16, 4608, 16, 8, 64, 128_000, attention_layers=(2, 5, 8, 10, 12, 14)),
    )
}
