"""Vision towers in GGUF files of their own (mmproj), as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

from ...errors import CheckpointError
from ...models.gguf_header import AGAIN, GgufHeader, read_gguf_header
from ...runtime.images.image_processors import PROCESSORS
from ..architectures import find_family
from ..architectures.vision import LFM2_VL, QWEN2_5_VL, QWEN3_VL

_QKV: Final = ("attn_q", "attn_k", "attn_v", "attn_qkv")
_LAYER: Final = ("ln1", "ln2", "attn_out", "ffn_down", "ffn_up", "ffn_gate")
"""Other modules of a layer."""
_MOST_LAYERS: Final = 1000
_DEEPSTACK: Final = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}
_TEMPORAL: Final = 2
"""Number of kernels of a patch in towers of Qwen-VL, which take an image as two frames."""


class Projector(NamedTuple):
    """A kind of projector, and the model that has it."""

    architecture: str
    """The general.architecture of the language model beside it."""
    model_type: str
    """That of a checkpoint of such a model."""
    modules: Mapping[str, str]
    """Modules of the projector, by their names in the file."""


_QWEN_MERGER: Final = ("v.post_ln", "mm.0", "mm.2")
_LFM2_MERGER: Final = ("mm.input_norm", "mm.1", "mm.2")
_GEMMA3: Final = {"mm.input_projection": "mm_input_projection", "mm.soft_emb_norm": "mm_soft_emb_norm"}
PROJECTORS: Final[Mapping[str, Projector]] = {
    "idefics3": Projector("llama", "smolvlm", {"mm.model.fc": "modality_projection.proj"}),
    "gemma3": Projector("gemma3", "gemma3", _GEMMA3),
    "qwen2.5vl_merger": Projector("qwen2vl", "qwen2_5_vl", dict(zip(_QWEN_MERGER, QWEN2_5_VL.merger, strict=True))),
    "qwen3vl_merger": Projector("qwen3vl", "qwen3_vl", dict(zip(_QWEN_MERGER, QWEN3_VL.merger, strict=True))),
    "lfm2": Projector("lfm2", "lfm2_vl", dict(zip(_LFM2_MERGER, LFM2_VL.merger, strict=True))),
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
        self.placeholder: Final = PROCESSORS[self.projector.model_type].slot
        """The token of a feature."""
        self._traits: Final = find_family(self.projector.model_type)
        self._is_qwen: Final = self.projector.model_type.startswith("qwen")
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
        if (found := self._modules.get(module)) is None:
            raise self.header.wrong(f"{name[:60]!r} is not part of a vision tower of the kind {self.kind}", AGAIN)
        return f"{found}_weight" if module == "mm.input_projection" else f"{found}.{kind}{frame}"

    @cached_property
    def _modules(self) -> dict[str, str]:
        """The modules of a checkpoint by their names in the file."""
        family = self._traits.vision
        assert family is not None  # noqa: S101  every model here has a tower
        tower, projector = family.towers[0], family.projectors[0]
        outer = {"v.patch_embd": family.patches, "v.position_embd": family.positions, "v.post_ln": "post_layernorm"}
        qkv = family.qkv if len(family.qkv) == 3 else ("attn.q", "attn.k", "attn.v", *family.qkv)
        layer = dict(zip(_QKV, qkv, strict=False))
        layer |= dict(zip(_LAYER, (*family.norms, family.output, *reversed(family.mlp)), strict=False))
        layers = range(min(self.header.required_count("clip.vision.block_count"), _MOST_LAYERS))
        return {
            **{name: f"{tower}.{module}" for name, module in outer.items() if module},
            **{
                f"v.blk.{index}.{name}": f"{tower}.{family.layers}.{index}.{module}"
                for index in layers
                for name, module in layer.items()
            },
            **{
                f"v.deepstack.{each}.{name}": f"{tower}.deepstack_merger_list.{index}.{module}"
                for index, each in enumerate(self.deepstack)
                for name, module in _DEEPSTACK.items()
            },
            **{name: f"{projector}.{module}" for name, module in self.projector.modules.items()},
        }

    def seeing_config(self, text: Mapping[str, Any], image_token: int | None) -> dict[str, Any]:
        """The config.json of a model with that tower and a language model.

        Raises:
            CheckpointError: the file lacks a setting or a tensor, or the vocabulary has no image token.
        """
        header = self.header
        if image_token is None:
            what = f"the language model has no token {self.placeholder}"
            raise header.wrong(what, "the files belong to different models")
        is_qwen, vision = self._is_qwen, self._vision_settings()
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
            "text_config": {**text, "model_type": self._traits.nested_type},
            "vision_config": vision,
            "image_token_id": image_token,
            "tie_word_embeddings": text["tie_word_embeddings"],
            **({} if is_qwen else merged),
        }

    def _vision_settings(self) -> dict[str, Any]:
        header, is_qwen = self.header, self._is_qwen
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
            vision["fullatt_block_indexes"] = list(range(period - 1, min(vision["depth"], _MOST_LAYERS), period))
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
