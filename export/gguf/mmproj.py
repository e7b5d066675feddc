"""Vision towers in GGUF files of their own (mmproj), as llama.cpp's converter writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ...errors import CheckpointError
from ...models.gguf_header import AGAIN, GgufHeader, read_gguf_header
from ..architectures.vision import GEMMA3, IDEFICS3, LFM2_VL, QWEN2_5_VL, QWEN3_VL, VisionFamily

_LAYER: Final = re.compile(r"v\.(blk|deepstack)\.(0|[1-9]\d{0,3})\.(\w+)")
_DEEPSTACK: Final = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}
_TEMPORAL: Final = 2
"""Number of kernels of a patch in towers of Qwen-VL, which take an image as two frames."""


@dataclass(frozen=True)
class Projector:
    """A kind of projector, and the model that has it."""

    architecture: str
    """The general.architecture of the language model beside it."""
    model_type: str
    text_type: str
    """The model_type of the language model in config.json."""
    placeholder: str
    family: VisionFamily
    """How tower and projector are called in a Hugging Face checkpoint."""
    modules: Mapping[str, str]
    """Modules of the projector, by their names in the file."""

    @property
    def outer(self) -> dict[str, str]:
        """Modules in a checkpoint, except those of layers, by their names in the file."""
        family = self.family
        tower = {"patch_embd": family.patches, "position_embd": family.positions, "post_ln": "post_layernorm"}
        own = {f"v.{name}": f"{family.towers[0]}.{module}" for name, module in tower.items() if module}
        return own | {name: f"{family.projectors[0]}.{module}" for name, module in self.modules.items()}

    @property
    def layer(self) -> dict[str, str]:
        """Modules of a layer in a checkpoint, by their names in the file."""
        family = self.family
        apart = family.qkv if len(family.qkv) == 3 else ("attn.q", "attn.k", "attn.v")
        names = ["ln1", "ln2", "attn_q", "attn_k", "attn_v", "attn_out", "ffn_down", "ffn_up", "ffn_gate"]
        found = dict(zip(names, (*family.norms, *apart, family.output, *reversed(family.mlp)), strict=False))
        return found if apart is family.qkv else {**found, "attn_qkv": family.qkv[0]}


_QWEN_MERGER: Final = ("v.post_ln", "mm.0", "mm.2")
PROJECTORS: Final[Mapping[str, Projector]] = {
    "idefics3": Projector(
        architecture="llama",
        model_type="smolvlm",
        text_type="llama",
        placeholder="<image>",
        family=IDEFICS3,
        modules={"mm.model.fc": "modality_projection.proj"},
    ),
    "gemma3": Projector(
        architecture="gemma3",
        model_type="gemma3",
        text_type="gemma3_text",
        placeholder="<image_soft_token>",
        family=GEMMA3,
        modules={"mm.input_projection": "mm_input_projection", "mm.soft_emb_norm": "mm_soft_emb_norm"},
    ),
    "qwen2.5vl_merger": Projector(
        architecture="qwen2vl",
        model_type="qwen2_5_vl",
        text_type="qwen2_5_vl_text",
        placeholder="<|image_pad|>",
        family=QWEN2_5_VL,
        modules=dict(zip(_QWEN_MERGER, QWEN2_5_VL.merger, strict=True)),
    ),
    "qwen3vl_merger": Projector(
        architecture="qwen3vl",
        model_type="qwen3_vl",
        text_type="qwen3_vl_text",
        placeholder="<|image_pad|>",
        family=QWEN3_VL,
        modules=dict(zip(_QWEN_MERGER, QWEN3_VL.merger, strict=True)),
    ),
    "lfm2": Projector(
        architecture="lfm2",
        model_type="lfm2_vl",
        text_type="lfm2",
        placeholder="<image>",
        family=LFM2_VL,
        modules=dict(zip(("mm.input_norm", "mm.1", "mm.2"), LFM2_VL.merger, strict=True)),
    ),
}
"""By clip.projector_type."""


class Mmproj:
    """The header of a vision tower's file."""

    def __init__(self, header: GgufHeader) -> None:
        """Find out what kind of tower it is.

        Raises:
            CheckpointError: its projector is not supported.
        """
        self.header: Final = header
        kind = header.text("clip.projector_type") or header.text("clip.vision.projector_type")
        if kind is None or kind not in PROJECTORS:
            what = f"the vision tower has a projector of the kind {str(kind)[:40]!r}"
            hint = f"supported are {', '.join(PROJECTORS)}: export the model's checkpoint, or move the file away"
            raise header.wrong(what, hint)
        self.kind: Final[str] = kind
        self.projector: Final = PROJECTORS[kind]
        flags = header.metadata.get("clip.vision.is_deepstack_layers")
        self.deepstack: Final = [number for number, flag in enumerate(flags if isinstance(flags, list) else []) if flag]
        """Layers that give features too."""

    def checkpoint_name(self, name: str) -> str:
        """The name of a tensor in a Hugging Face checkpoint.

        Raises:
            CheckpointError: it is not part of such a tower.
        """
        frame = ".1" if name == "v.patch_embd.weight.1" else ""
        module, _, kind = name.removesuffix(frame).rpartition(".")
        layer, found = _LAYER.fullmatch(module), self.projector.outer.get(module)
        if layer is not None and layer[1] == "blk" and layer[3] in self.projector.layer:
            family = self.projector.family
            found = f"{family.towers[0]}.{family.layers}.{layer[2]}.{self.projector.layer[layer[3]]}"
        elif layer is not None and int(layer[2]) in self.deepstack and layer[3] in _DEEPSTACK:
            number = self.deepstack.index(int(layer[2]))
            found = f"{self.projector.family.towers[0]}.deepstack_merger_list.{number}.{_DEEPSTACK[layer[3]]}"
        if found is None:
            raise self.header.wrong(f"{name[:60]!r} is not part of a vision tower of the kind {self.kind}", AGAIN)
        return f"{found}_weight" if module == "mm.input_projection" else f"{found}.{kind}{frame}"

    def seeing_config(self, text: Mapping[str, Any], image_token: int | None) -> dict[str, Any]:
        """The config.json of a model with that tower and a language model.

        Raises:
            CheckpointError: the file lacks a setting or a tensor, or the vocabulary has no image token.
        """
        header = self.header
        if image_token is None:
            what = f"the language model has no token {self.projector.placeholder}"
            raise header.wrong(what, "the files belong to different models")
        is_qwen, vision = self.projector.text_type.endswith("_vl_text"), self._vision_settings()
        if not is_qwen:
            vision["layer_norm_eps"] = header.required(header.positive, "clip.vision.attention.layer_norm_epsilon")
        side = vision["image_size"] // vision["patch_size"]
        default = {"gemma3": 4, "idefics3": None}.get(self.kind, _TEMPORAL)
        factor = header.count("clip.vision.projector.scale_factor", 1) or default
        if factor is None:
            raise header.missing("clip.vision.projector.scale_factor")
        merged: dict[str, Any] = {"scale_factor": factor, "downsample_factor": factor}
        if self.kind == "gemma3":
            merged = {"mm_tokens_per_image": (side // factor) ** 2}
        elif self.kind == "lfm2":
            merged |= {"projector_hidden_size": self._rows("mm.1.weight")}
        return {
            "model_type": self.projector.model_type,
            "text_config": {**text, "model_type": self.projector.text_type},
            "vision_config": vision,
            "image_token_id": image_token,
            "tie_word_embeddings": text["tie_word_embeddings"],
            **({} if is_qwen else merged),
        }

    def _vision_settings(self) -> dict[str, Any]:
        header, is_qwen = self.header, self.projector.text_type.endswith("_vl_text")
        counts = {
            "hidden_size": "embedding_length",
            "intermediate_size": "feed_forward_length",
            "depth" if is_qwen else "num_hidden_layers": "block_count",
            "num_heads" if is_qwen else "num_attention_heads": "attention.head_count",
            "image_size": "image_size",
            "patch_size": "patch_size",
        }
        vision: dict[str, Any] = {name: header.required_count(f"clip.vision.{key}") for name, key in counts.items()}
        if self.kind == "qwen2.5vl_merger":
            period = header.required_count("clip.vision.n_wa_pattern")
            vision["fullatt_block_indexes"] = list(range(period - 1, vision["depth"], period))
            vision["window_size"] = header.count("clip.vision.window_size", 1) or 112
        elif self.kind == "qwen3vl_merger":
            vision["num_position_embeddings"] = self._rows("v.position_embd.weight")
            vision["deepstack_visual_indexes"] = self.deepstack
            vision["spatial_merge_size"] = header.count("clip.vision.spatial_merge_size", 1) or 2
        elif self.kind == "lfm2":
            vision["num_patches"] = self._rows("v.position_embd.weight")
        return vision

    def processor_settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The preprocessor_config.json of such a model; errors as for `seeing_config`."""
        header, vision = self.header, config["vision_config"]
        side, patch = vision["image_size"], vision["patch_size"]
        channels = {
            name: header.required(header.numbers, f"clip.vision.{name}") for name in ("image_mean", "image_std")
        }
        if self.kind == "gemma3":
            tokens = config["mm_tokens_per_image"]
            return {"size": {"height": side, "width": side}, "image_seq_length": tokens, **channels}
        if self.kind == "lfm2":
            return {"encoder_patch_size": patch, "downsample_factor": config["downsample_factor"], **channels}
        if self.kind != "idefics3":
            limits = {name: header.count(f"clip.vision.image_{name}", 1) for name in ("min_pixels", "max_pixels")}
            merge = {"patch_size": patch, "merge_size": vision.get("spatial_merge_size", 2)}
            return {**merge, "temporal_patch_size": _TEMPORAL, **{k: v for k, v in limits.items() if v}, **channels}
        longest = header.count("clip.vision.preproc_image_size", 1) or side
        return {
            "max_image_size": {"longest_edge": side},
            "size": {"longest_edge": longest},
            "do_image_splitting": longest > side,
            "image_seq_len": (side // patch // config["scale_factor"]) ** 2,
            **channels,
        }

    def _rows(self, name: str) -> int:
        """Rows of a tensor."""
        if name not in self.header.tensors:
            raise self.header.missing(name, AGAIN)
        return self.header.tensors[name].shape[0]


def find_mmproj(model: Path, architecture: str) -> Mmproj | None:
    """The vision tower beside a GGUF model: the only file in its folder with mmproj in its name; None for none.

    Raises:
        CheckpointError: there are several, or it is damaged or of another family.
    """
    found = sorted(each for each in model.parent.glob("*.gguf") if "mmproj" in each.name.lower() and each != model)
    if not found or all(each.architecture != architecture for each in PROJECTORS.values()):
        return None
    if len(found) > 1:
        names = ", ".join(each.name for each in found[:4])
        raise CheckpointError(f"{model.parent} has several vision towers: {names}", "keep one of them beside the model")
    tower = Mmproj(read_gguf_header(found[0]))
    if tower.projector.architecture != architecture:
        what = f"its projector ({tower.kind}) is not one for models of the architecture {architecture}"
        raise tower.header.wrong(what, "the files belong to different models: move one of them away")
    return tower
