"""Properties in which foreign layouts differ, and the `Layout` that `write_layout` writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

LAYERS: Final = 2
HEADS: Final = 4
HEAD_DIM: Final = 16
VOCABULARY: Final = 300
CONTEXT: Final = 1024


class Attention(Enum):
    """How the graph computes attention."""

    UNFUSED = "MatMul and Softmax, with keys and values repeated for the query heads that share them"
    FUSED = "one GroupQueryAttention per layer that also applies rotary positions"


class Cache(Enum):
    """Names and shapes of the cache inputs."""

    SPLIT = "past_key_values.N.key and .value [batch, heads, past, 16]"
    STACKED = "past_N [2, batch, heads, past, 16]"
    JOINED = "past_key_values.N.key_value [batch, past, 32], keys then values, one head"
    KEYS_TRANSPOSED = "past_key_values.N.key [batch, heads, 16, past]"
    NUMBERED = "past_keys_N and past_values_N"


class CacheType(Enum):
    """Element type of the cache."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    INT8 = "int8, with one scale for the keys and one for the values of a layer"


class Mask(Enum):
    """Inputs that say which tokens are attended to."""

    TOKENS = "attention_mask [batch, total] of integers; the graph adds the causal mask"
    NOT_CAUSAL = "attention_mask [batch, total] without a causal mask: correct for a single new token only"
    BIAS = "attention_mask float32 [batch, 1, new, total], added to the attention scores"
    BOOL_ATTENDED = "attention_mask bool [batch, 1, new, total]: true where a token is attended to"
    BOOL_BLOCKED = "attention_mask bool [batch, 1, new, total]: true where it is not, with the same declaration"
    LENGTHS = "past_seq_len int32 [1, 1] and total_seq_len int32 [1]"
    NONE = "no input: the lengths are those of the other inputs"


class Positions(Enum):
    """Where rotary positions come from."""

    INPUT = "position_ids [batch, new]"
    THREE = "position_ids [3, batch, new], for time, height and width"
    LENGTH = "counted from the length of the cache"


class LogitOutput(Enum):
    """Which tokens get logits."""

    ALL = "[batch, new, 300]"
    LAST = "[batch, 1, 300]"
    LAST_FLAT = "[batch, 300]"
    LAST_N = "[batch, num_logits_to_keep, 300]: the last tokens, all for 0"


class States(Enum):
    """What the first layer keeps."""

    NONE = "keys and values: all layers have attention"
    CONVOLUTION = "past_conv.N [batch, 64, 2 or 3]: the inputs of a convolution at the last tokens (LFM2)"
    RECURRENT = "the same of its queries, and past_recurrent.N [batch, 2, 16, 16] of linear attention (Qwen3.5)"


class Decoders(Enum):
    """Number of graphs and their files."""

    ONE = "model.onnx"
    MERGED = "decoder_model_merged.onnx: an If on use_cache_branch"
    TWO = "decoder_model.onnx for the first pass, decoder_with_past_model.onnx for later ones"


class Embedding(Enum):
    """What the decoder takes."""

    INSIDE = "input_ids"
    APART = "inputs_embeds [batch, new, 64], which a graph of its own makes of input_ids"


class Weights(Enum):
    """Files that hold the weights."""

    INSIDE = "the graph's file"
    ONE_FILE = "one file beside it"
    MANY_FILES = "several files beside it"


class Settings(Enum):
    """Files beside the graph that describe the model."""

    HUGGING_FACE = "config.json and generation_config.json"
    GENAI = "genai_config.json alone"
    NONE = "only the tokenizer"


@dataclass(frozen=True)
class Layout:
    """One way to write the same model as ONNX."""

    attention: Attention = Attention.UNFUSED
    cache: Cache = Cache.SPLIT
    cache_type: CacheType = CacheType.FLOAT32
    mask: Mask = Mask.TOKENS
    positions: Positions = Positions.INPUT
    logit_output: LogitOutput = LogitOutput.ALL
    states: States = States.NONE
    operator_states: bool = False
    """Whether convolutions keep the inputs that the next token needs, as ONNX Runtime's operator does, or one more."""
    decoders: Decoders = Decoders.ONE
    embedding: Embedding = Embedding.INSIDE
    weights: Weights = Weights.INSIDE
    settings: Settings = Settings.HUGGING_FACE
    int32_ids: bool = False
    """Whether token ids, masks and positions are int32."""
    float16_logits: bool = False
    """Whether logits are float16."""
    open_heads: bool = False
    """Whether the cache inputs leave heads and head size to the settings."""
    open_vocabulary: bool = False
    """Whether the last dimension of the logits is symbolic."""
    fixed_batch: bool = False
    """Whether the batch dimension is 1 instead of symbolic."""
    capacity: int | None = None
    """Number of cache slots if fixed; None if symbolic."""
    window: int | None = None
    """Sliding window of odd layers in tokens, the current one included; None for full attention."""
    window_cache: bool = False
    """Whether caches of layers with a window evict slots outside it."""
    window_slots: int | None = None
    """Number of slots of the caches that evict; None if symbolic."""
    bias_inside: bool = False
    """Whether the fused operator gets a bias computed from the mask, and the positions."""
    shares_buffers: bool = False
    """Whether genai_config.json says that past and present may share a buffer."""
    subfolder: str = ""
    """Folder of the graph, relative to that of the settings."""
    opset: int = 17
    names: Mapping[str, str] = field(default_factory=dict)
    """Names of inputs and outputs by their usual names; `{}` stands for the layer."""

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return 1 if self.cache is Cache.JOINED else 2

    @property
    def overrides(self) -> dict[str, Any]:
        """Settings that differ from those of the tiny llama (`tiny_config`)."""
        return {"max_position_embeddings": CONTEXT, "num_key_value_heads": self.kv_heads, "eos_token_id": 0}

    def name_of(self, name: str, layer: int | None = None) -> str:
        """Name of an input or output by its usual one, in which `{}` stands for the layer."""
        return self.names.get(name, name).format(layer)
