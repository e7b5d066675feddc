"""Sizes of models that see, with their vision towers, processors and the tokens of their images."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Tokenizer

from shapes import Shape

_TEMPLATE: Final = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}PLACEHOLDER{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}"
)


@dataclass(frozen=True)
class VisionShape(Shape):
    """Sizes of a model that sees."""

    vision_hidden: int = 768
    vision_layers: int = 12
    vision_intermediate: int = 3072
    vision_heads: int = 12
    patch: int = 16

    def write_processor(self, folder: Path) -> None:
        """Write the files of the image processor, and the tokens of images into the tokenizer."""
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokens = [AddedToken(text, special=True, normalized=False) for text in self.image_tokens()]
        tokenizer.add_special_tokens(tokens)
        tokenizer.save(str(folder / "tokenizer.json"))
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config["image_token_id"] = tokenizer.token_to_id(self.slot)
        _write(folder / "config.json", config)
        (folder / "chat_template.jinja").write_text(_TEMPLATE.replace("PLACEHOLDER", self.placeholder), "utf-8")
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        settings.pop("chat_template", None)
        _write(folder / "tokenizer_config.json", settings)
        for name, value in self.processor().items():
            _write(folder / name, value)

    @property
    def slot(self) -> str:
        """The token of each feature."""
        raise NotImplementedError

    @property
    def placeholder(self) -> str:
        """What the chat template writes for an image."""
        return self.slot

    def image_tokens(self) -> list[str]:
        """All tokens around and in images."""
        raise NotImplementedError

    def processor(self) -> dict[str, object]:
        """Files of the image processor by name."""
        raise NotImplementedError

    def language_tensors(self, prefix: str, *, head_norms: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Tensors of a Llama or Qwen3."""
        yield f"{prefix}embed_tokens.weight", (self.vocab, self.hidden)
        for i in range(self.layers):
            layer = f"{prefix}layers.{i}"
            yield f"{layer}.input_layernorm.weight", (self.hidden,)
            for name, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)):
                yield f"{layer}.self_attn.{name}_proj.weight", (heads * self.head_dim, self.hidden)
            if head_norms:
                yield f"{layer}.self_attn.q_norm.weight", (self.head_dim,)
                yield f"{layer}.self_attn.k_norm.weight", (self.head_dim,)
            yield f"{layer}.self_attn.o_proj.weight", (self.hidden, self.heads * self.head_dim)
            yield f"{layer}.post_attention_layernorm.weight", (self.hidden,)
            yield f"{layer}.mlp.gate_proj.weight", (self.intermediate, self.hidden)
            yield f"{layer}.mlp.up_proj.weight", (self.intermediate, self.hidden)
            yield f"{layer}.mlp.down_proj.weight", (self.hidden, self.intermediate)
        yield f"{prefix}norm.weight", (self.hidden,)


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _linear(name: str, rows: int, columns: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (rows, columns)
    yield f"{name}.bias", (rows,)


def _norm(name: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


class SmolVlmShape(VisionShape):
    """SmolVLM: tiles of 512 pixels through SigLIP, four times four patches a token."""

    slot = "<image>"

    def image_tokens(self) -> list[str]:
        """See `VisionShape.image_tokens`."""
        places = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
        # llama.cpp looks for a token of two line ends.
        return ["<image>", "<fake_token_around_image>", "<global-img>", "\n\n", *places]

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """See `Shape.tensors`."""
        tower, hidden, wide = "model.vision_model", self.vision_hidden, self.vision_intermediate
        yield f"{tower}.embeddings.patch_embedding.weight", (hidden, 3, self.patch, self.patch)
        yield f"{tower}.embeddings.patch_embedding.bias", (hidden,)
        yield f"{tower}.embeddings.position_embedding.weight", ((512 // self.patch) ** 2, hidden)
        for i in range(self.vision_layers):
            layer = f"{tower}.encoder.layers.{i}"
            for norm in ("layer_norm1", "layer_norm2"):
                yield from _norm(f"{layer}.{norm}", hidden)
            for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
                yield from _linear(f"{layer}.self_attn.{part}", hidden, hidden)
            yield from _linear(f"{layer}.mlp.fc1", wide, hidden)
            yield from _linear(f"{layer}.mlp.fc2", hidden, wide)
        yield from _norm(f"{tower}.post_layernorm", hidden)
        yield "model.connector.modality_projection.proj.weight", (self.hidden, 16 * hidden)
        yield from self.language_tensors("model.text_model.", head_norms=False)

    def config(self, dtype: str) -> dict[str, object]:
        """See `Shape.config`."""
        text = self._config("LlamaForCausalLM", "llama", dtype) | {
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "head_dim": self.head_dim,
        }
        vision = {
            "model_type": "smolvlm_vision",
            "hidden_size": self.vision_hidden,
            "intermediate_size": self.vision_intermediate,
            "num_hidden_layers": self.vision_layers,
            "num_attention_heads": self.vision_heads,
            "image_size": 512,
            "patch_size": self.patch,
            "hidden_act": "gelu_pytorch_tanh",
        }
        return {
            "architectures": ["SmolVLMForConditionalGeneration"],
            "model_type": "smolvlm",
            "text_config": text,
            "vision_config": vision,
            "scale_factor": 4,
            "tie_word_embeddings": True,
            "torch_dtype": dtype,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }

    def processor(self) -> dict[str, object]:
        """See `VisionShape.processor`."""
        images = {
            "image_processor_type": "SmolVLMImageProcessor",
            "size": {"longest_edge": 2048},
            "max_image_size": {"longest_edge": 512},
            "do_image_splitting": True,
            "resample": 1,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
        }
        processor = {"processor_class": "SmolVLMProcessor", "image_seq_len": 64}
        return {"preprocessor_config.json": images, "processor_config.json": processor}


class Qwen3VlShape(VisionShape):
    """Qwen3-VL: images in their own size, two times two patches a token, features for three layers."""

    slot = "<|image_pad|>"
    placeholder = "<|vision_start|><|image_pad|><|vision_end|>"

    def image_tokens(self) -> list[str]:
        """See `VisionShape.image_tokens`."""
        return ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """See `Shape.tensors`."""
        tower, hidden, wide = "model.visual", self.vision_hidden, self.vision_intermediate
        yield f"{tower}.patch_embed.proj.weight", (hidden, 3, 2, self.patch, self.patch)
        yield f"{tower}.patch_embed.proj.bias", (hidden,)
        yield f"{tower}.pos_embed.weight", (2304, hidden)
        for i in range(self.vision_layers):
            block = f"{tower}.blocks.{i}"
            for norm in ("norm1", "norm2"):
                yield from _norm(f"{block}.{norm}", hidden)
            yield from _linear(f"{block}.attn.qkv", 3 * hidden, hidden)
            yield from _linear(f"{block}.attn.proj", hidden, hidden)
            yield from _linear(f"{block}.mlp.linear_fc1", wide, hidden)
            yield from _linear(f"{block}.mlp.linear_fc2", hidden, wide)
        mergers = ["merger", *(f"deepstack_merger_list.{number}" for number in range(3))]
        for name in mergers:
            yield from _norm(f"{tower}.{name}.norm", hidden if name == "merger" else 4 * hidden)
            yield from _linear(f"{tower}.{name}.linear_fc1", 4 * hidden, 4 * hidden)
            yield from _linear(f"{tower}.{name}.linear_fc2", self.hidden, 4 * hidden)
        yield from self.language_tensors("model.language_model.", head_norms=True)

    def config(self, dtype: str) -> dict[str, object]:
        """See `Shape.config`."""
        text = self._config("Qwen3ForCausalLM", "qwen3_vl_text", dtype) | {
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "head_dim": self.head_dim,
            "rope_theta": 5000000.0,
            "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]},
        }
        del text["architectures"]  # llama.cpp's converter would take it for a Qwen3
        vision = {
            "model_type": "qwen3_vl",
            "depth": self.vision_layers,
            "hidden_size": self.vision_hidden,
            "intermediate_size": self.vision_intermediate,
            "num_heads": self.vision_heads,
            "patch_size": self.patch,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [5, 11, 17],
            "out_hidden_size": self.hidden,
            "hidden_act": "gelu_pytorch_tanh",
        }
        return {
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "model_type": "qwen3_vl",
            "text_config": text,
            "vision_config": vision,
            "tie_word_embeddings": True,
            "torch_dtype": dtype,
            "eos_token_id": 0,
        }

    def processor(self) -> dict[str, object]:
        """See `VisionShape.processor`."""
        images = {
            "image_processor_type": "Qwen2VLImageProcessor",
            "size": {"shortest_edge": 65536, "longest_edge": 16777216},
            "patch_size": self.patch,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "resample": 3,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
        }
        return {"preprocessor_config.json": images}


VISION_SHAPES: Final[dict[str, VisionShape]] = {
    shape.name: shape
    for shape in (
        SmolVlmShape("smolvlm-500m", 49280, 960, 32, 2560, 15, 5, 64, 8192),
        Qwen3VlShape(
            "qwen3-vl-2b",
            *(151936, 2048, 28, 6144, 16, 8, 128, 8192),
            vision_hidden=1024,
            vision_layers=24,
            vision_intermediate=4096,
            vision_heads=16,
        ),
    )
}
