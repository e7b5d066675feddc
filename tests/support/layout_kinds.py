"""What tells one foreign layout from another: enumerations and the `Layout` that `layouts.write_layout` writes."""

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
    """How attention is computed."""

    UNFUSED = "MatMul and Softmax, keys and values repeated for the heads that share them"
    FUSED = "one GroupQueryAttention that turns queries and keys itself"


class Cache(Enum):
    """What a cache port holds and what it is called."""

    SPLIT = "past_key_values.N.key and .value [batch, heads, past, 16]"
    BOTH_STACKED = "past_N [2, batch, heads, past, 16]"
    BOTH_JOINED = "past_key_values.N.key_value [batch, past, 32], keys before values, one head"
    KEYS_TRANSPOSED = "past_key_values.N.key [batch, heads, 16, past]"
    NUMBERED = "past_keys_N and past_values_N"


class CacheType(Enum):
    """The numbers in a cache."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    INT8 = "int8, one scale for all keys and one for all values of a layer"


class Mask(Enum):
    """What says which rows may be seen."""

    WHOLE_TEXT = "attention_mask [batch, total] of integers, causality added inside"
    NOT_CAUSAL = "attention_mask [batch, total], no causality among new rows: right for one new row only"
    CELLS = "attention_mask float32 [batch, 1, new, total] that is added to the scores"
    SEEN = "attention_mask bool [batch, 1, new, total]: what is seen"
    HIDDEN = "attention_mask bool [batch, 1, new, total]: what is not, as no one can tell from outside"
    LENGTHS = "past_seq_len int32 [1, 1] and total_seq_len int32 [1]"
    SHAPE = "nothing: lengths are those of the ports"


class Positions(Enum):
    """Where rotary positions come from."""

    INPUT = "position_ids [batch, new]"
    THREE = "position_ids [3, batch, new], one row each for time, height and width"
    LENGTH = "counted on from the cache's length"


class Rows(Enum):
    """Which rows of the text get logits."""

    ALL = "[batch, new, 300]"
    LAST = "[batch, 1, 300]"
    LAST_FLAT = "[batch, 300]"
    CHOSEN = "the last num_logits_to_keep of them, all for 0"


class Decoders(Enum):
    """Which graphs there are."""

    ONE = "model.onnx"
    MERGED = "decoder_model_merged.onnx: an If on use_cache_branch"
    TWO = "decoder_model.onnx for the prompt, decoder_with_past_model.onnx for what follows"


class Weights(Enum):
    """Where the weights lie."""

    INSIDE = "in the graph's file"
    ONE_FILE = "one file beside it"
    MANY_FILES = "several files beside it"


class Settings(Enum):
    """What describes the model beside its graph."""

    HUGGING_FACE = "config.json and generation_config.json"
    GENAI = "genai_config.json alone"
    NONE = "nothing but the tokenizer"


@dataclass(frozen=True)
class Layout:
    """One way to write the same model down."""

    attention: Attention = Attention.UNFUSED
    cache: Cache = Cache.SPLIT
    cache_type: CacheType = CacheType.FLOAT32
    mask: Mask = Mask.WHOLE_TEXT
    positions: Positions = Positions.INPUT
    rows: Rows = Rows.ALL
    decoders: Decoders = Decoders.ONE
    weights: Weights = Weights.INSIDE
    settings: Settings = Settings.HUGGING_FACE
    narrow_ids: bool = False
    """Whether ids, masks and positions are int32."""
    half_logits: bool = False
    """Whether logits are float16."""
    open_heads: bool = False
    """Whether cache ports leave heads and head size to the settings."""
    open_vocabulary: bool = False
    """Whether the logits' last dimension is a symbol."""
    fixed_batch: bool = False
    """Whether the batch dimension is 1 and not a symbol."""
    capacity: int | None = None
    """Rows of caches of a fixed size; None for a symbol."""
    window: int | None = None
    """Rows that odd layers see back, themselves included; None for all."""
    window_cache: bool = False
    """Whether the caches of layers with a window evict what has left it."""
    window_rows: int | None = None
    """Rows of the caches that evict; None for a symbol."""
    bias_inside: bool = False
    """Whether the fused operator is given a bias made from the mask, and the positions."""
    shares_buffers: bool = False
    """Whether genai_config.json says that past and present may be one buffer."""
    subfolder: str = ""
    """Folder of the graph below that of the settings."""
    opset: int = 17
    names: Mapping[str, str] = field(default_factory=dict)
    """Other names for ports, by their usual one; `{}` stands for the layer in those of caches."""

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return 1 if self.cache is Cache.BOTH_JOINED else 2

    @property
    def overrides(self) -> dict[str, Any]:
        """Settings of `tiny.tiny_config` in which the model differs from the tiny llama."""
        return {"max_position_embeddings": CONTEXT, "num_key_value_heads": self.kv_heads, "eos_token_id": 0}

    def port(self, name: str, layer: int | None = None) -> str:
        """What a port is called; `name` has `{}` where the layer stands."""
        return self.names.get(name, name).format(layer)
