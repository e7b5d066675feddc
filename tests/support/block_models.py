"""Tiny models that fill blocks of masked tokens, and a naive decoder for them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from edgerun.export.check import reference
from edgerun.export.checkpoint.config import parse_config
from edgerun.export.checkpoint.safetensors_files import Checkpoint
from edgerun.runtime.blocks.block_decode import BlockChoices, block_decode
from edgerun.runtime.blocks.commit_rules import CommitRule
from edgerun.runtime.decode import DecodeLimits
from edgerun.runtime.graph.session import DecoderGraph
from edgerun.runtime.sampling.sampler import Sampler, SamplingParams
from support.tiny_models import exported, write_checkpoint, write_json

FAMILIES: Final = {
    "sdar": ("qwen3", {"block_size": 4}),
    "sdar_moe": ("qwen3_moe", {"block_size": 4}),
    "Fast_dLLM_Qwen": ("qwen2", {"bd_size": 8}),
    "Dream": ("qwen2", {}),
    "llada": ("llama", {}),
}
"""By family: the one with the same tensors, and settings of config.json."""
BIDIRECTIONAL: Final = ("Dream", "llada")
_LLADA_SETTINGS: Final = {
    "hidden_size": "d_model",
    "intermediate_size": "mlp_hidden_size",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "max_position_embeddings": "max_sequence_length",
    "tie_word_embeddings": "weight_tying",
    "hidden_act": "activation_type",
    "vocab_size": "vocab_size",
    "rope_theta": "rope_theta",
    "rms_norm_eps": "rms_norm_eps",
    "eos_token_id": "eos_token_id",
}
_LLADA_TENSORS: Final = {
    "embed_tokens": "wte",
    "model.norm": "model.transformer.ln_f",
    "lm_head": "model.transformer.ff_out",
    "model.layers": "model.transformer.blocks",
    "self_attn.o_proj": "attn_out",
    "self_attn.": "",
    "mlp.gate_proj": "ff_proj",
    "mlp.down_proj": "ff_out",
    "mlp.": "",
    "model.wte": "model.transformer.wte",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ff_norm",
}


def write_block_model(folder: Path, family: str = "sdar", **overrides: Any) -> Path:
    """Write a random checkpoint to `folder`/checkpoint, whose last token is the mask; returns its bundle."""
    base, settings = FAMILIES[family]
    source = write_checkpoint(folder / "checkpoint", base, **overrides)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    settings = {"model_type": family, "mask_token_id": config["vocab_size"] - 1, **settings}
    write_json(source / "config.json", {**config, **settings})
    if family != "llada":
        return exported(source, folder / "bundle")
    published = shutil.copytree(source, folder / "published")
    own = {name: config[common] for common, name in _LLADA_SETTINGS.items() if common in config}
    write_json(published / "config.json", {**own, **settings})
    tensors = load_file(source / "model.safetensors")
    for common, name in _LLADA_TENSORS.items():
        tensors = {key.replace(common, name): value for key, value in tensors.items()}
    save_file(tensors, published / "model.safetensors")
    return exported(published, folder / "bundle")


@contextmanager
def _blocks_seen(size: int) -> Iterator[None]:
    """Let the reference decoder's tokens attend to their whole block of `size`."""

    def masked(_: Any, __: int, length: int) -> npt.NDArray[np.bool_]:
        block = np.arange(length) // size
        return np.asarray(block[:, None] < block)

    with patch.object(reference, "masked_positions", masked):
        yield


class NaiveBlocks:
    """Computes every pass over the whole text, in float64 and without a cache.

    Args:
        checkpoint: a checkpoint that `write_block_model` has written.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._weights: Final = Checkpoint(checkpoint)
        self._config: Final = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
        self.bidirectional: Final = self._config["model_type"] in BIDIRECTIONAL
        self.size: Final = int(self._config.get("block_size") or self._config.get("bd_size") or 8)
        self.mask: Final = int(self._config["mask_token_id"])
        self._shifted: Final = self._config["model_type"] in ("Fast_dLLM_Qwen", "Dream")

    def logits(self, cells: Sequence[int]) -> npt.NDArray[np.float64]:
        """Logits float64 `[n, V]` of the tokens themselves, minus infinity for the mask."""
        with _blocks_seen(len(cells) if self.bidirectional else self.size):
            found = reference.reference_logits(self._weights, parse_config(self._config), np.asarray(cells), 256)
        logits = np.array(found, np.float64)
        if self._shifted:
            logits[1:] = logits[:-1].copy()
        logits[:, self.mask] = -np.inf
        return logits

    def _guided(self, cells: list[int], prompt_length: int, guidance: float) -> npt.NDArray[np.float64]:
        """Logits that are `guidance` times as far from those behind a prompt of masks."""
        logits = self.logits(cells)
        if guidance == 1:
            return logits
        others = self.logits([*[self.mask] * prompt_length, *cells[prompt_length:]])
        with np.errstate(invalid="ignore"):
            found: npt.NDArray[np.float64] = np.nan_to_num(others + guidance * (logits - others), nan=-np.inf)
        return found

    def text(
        self,
        prompt: Sequence[int],
        count: int,
        keeps: Callable[[npt.NDArray[np.float64]], npt.NDArray[np.bool_]],
        guidance: float = 1.0,
    ) -> list[int]:
        """The first `count` tokens of the answer; `keeps` says which candidates to keep, given their confidence."""
        text, end = list(prompt), len(prompt) + count
        while len(text) < end:
            first = len(text) if self.bidirectional else len(text) // self.size * self.size
            stop = min(first + self.size, end) if self.bidirectional else first + self.size
            cells = [*text, *[self.mask] * (stop - len(text))]
            behind = [self.mask] * (end - stop) if self.bidirectional else []
            while self.mask in cells:
                logits = self._guided([*cells, *behind], len(prompt), guidance)
                places = np.flatnonzero(np.asarray(cells) == self.mask)
                probabilities = np.exp(logits[places] - logits[places].max(axis=1, keepdims=True))
                probabilities /= probabilities.sum(axis=1, keepdims=True)
                confidence = probabilities.max(axis=1)
                kept = keeps(confidence)
                if not kept.any():
                    kept = confidence == confidence.max()
                for place, token in zip(places[kept], probabilities.argmax(axis=1)[kept], strict=True):
                    cells[int(place)] = int(token)
            text = cells
        return text[len(prompt) :][:count]


def answer(graph: DecoderGraph, prompt: Sequence[int], rule: str, count: int = 40) -> list[int]:
    """Greedy tokens that a graph gives by a rule."""
    bound = graph.bind(graph.arena(256))
    bound.whole_logits = True
    sampler, choices = Sampler(SamplingParams(), graph.graph_io.vocab_size), BlockChoices(CommitRule.parse(rule), 8)
    return [
        token for step in block_decode(bound, prompt, sampler, DecodeLimits(count), choices) for token in step.tokens
    ]
