"""Exports test models with other tools; run by an interpreter that has them.

    python foreign_export_script.py optimum|genai TOKENIZER OUT [FAMILY ...]
    python foreign_export_script.py decode FOLDER COUNT ID ...

TOKENIZER is a folder with tokenizer.json and tokenizer_config.json of `VOCABULARY` tokens, where token 0 is the end
of text. For each family, OUT/<family>/checkpoint gets a seeded random model of transformers, OUT/<family>/greedy.json
the tokens with which transformers continues `PROMPT` (float32), and OUT/<family> the exports:

- by optimum: `with_past` (one model.onnx), and for families in `LEGACY` two variants that Optimum wrote before 1.14:
  `separate` (decoder_model.onnx and decoder_with_past_model.onnx) and `merged` (decoder_model_merged.onnx with
  use_cache_branch);
- by genai, the model builder of onnxruntime-genai: `fp32` and `int4`, and in int4.json the tokens that
  onnxruntime-genai itself decodes from the latter.

The second command prints as JSON the COUNT tokens with which onnxruntime-genai continues the given ones.

This file imports nothing of the project, as the interpreters that run it need not have it.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from pathlib import Path
from typing import Any, Final

PROMPT: Final = "the cat and the other"
GREEDY_TOKENS: Final = 200
VOCABULARY: Final = 300
CONTEXT: Final = 256
SEED: Final = 7

_SHAPE: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "llama": _SHAPE,
    "qwen2": {**_SHAPE, "tie_word_embeddings": True},
    "gemma2": {
        **_SHAPE,
        "tie_word_embeddings": True,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 32,
    },
    "phi3": {**_SHAPE, "original_max_position_embeddings": CONTEXT},
    "gpt2": {
        "vocab_size": VOCABULARY,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": CONTEXT,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    },
    "lfm2": {
        **_SHAPE,
        "tie_word_embeddings": True,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "block_auto_adjust_ff_dim": False,
    },
    "qwen3_5": {
        "text_config": {
            **_SHAPE,
            "tie_word_embeddings": True,
            "head_dim": 32,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
                "mrope_interleaved": True,
                "mrope_section": [2, 1, 1],
            },
        },
        # The model builder exports the text part of a model that also takes images.
        "vision_config": {
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 64,
            "num_position_embeddings": 16,
        },
        "tie_word_embeddings": True,
        "eos_token_id": 0,
    },
}
"""config.json by family; gemma2 attends to the last 32 positions in every other layer."""
HYBRIDS: Final = ("lfm2", "qwen3_5")
"""Families with layers that keep a state in place of keys and values."""
EXPORTERS: Final = {
    "optimum": tuple(family for family in SETTINGS if family not in HYBRIDS),
    "genai": ("llama", "qwen2", "gemma2", "phi3", *HYBRIDS),
}
"""Families that each exporter supports."""
LEGACY: Final = ("llama", "gpt2")
"""Families that are also exported in Optimum's old variants."""
ATTENTION: Final = {"optimum": "sdpa", "genai": "eager"}
"""Attention implementation of transformers that gives the expected tokens. Optimum exports the default one, which
leaves out the soft cap of gemma2's attention; the model builder keeps it, as eager attention does."""


def write_checkpoint(folder: Path, family: str, tokenizer: Path) -> None:
    """Write a random model of transformers whose greedy tokens have a clear margin and never end the text."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(family, **SETTINGS[family])
    torch.manual_seed(SEED)
    model_class = (
        transformers.AutoModelForImageTextToText
        if "vision_config" in SETTINGS[family]
        else transformers.AutoModelForCausalLM
    )
    model = model_class.from_config(config).float()
    random = torch.Generator().manual_seed(SEED)
    table = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        # Sorted by name, as versions of transformers order the parameters differently.
        for name, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=random)
            if weight is table or weight is head:
                weight.copy_(noise * (0.03 if config.tie_word_embeddings else 0.4))
            elif weight.dim() == 2:
                weight.copy_(noise * 1.5 / math.sqrt(64))
            elif name.endswith("bias"):
                weight.copy_(0.3 * noise)
            else:
                weight.add_(0.2 * noise)  # a norm
        head[0] = 0  # a logit of 0 is not the largest of 300
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, folder / name)


def greedy_tokens(checkpoint: Path, prompt: list[int], attention: str) -> list[int]:
    """The tokens with which transformers continues `prompt`, with that attention implementation."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(checkpoint)
    model = getattr(transformers, config.architectures[0]).from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation=attention
    )
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=GREEDY_TOKENS)
    return out[0, len(prompt) :].tolist()


def export_with_optimum(folder: Path, prompt: list[int]) -> None:
    """Export `folder`/checkpoint in all variants that Optimum writes or wrote."""
    from optimum.exporters.onnx import main_export

    main_export(str(folder / "checkpoint"), folder / "with_past", task="text-generation-with-past")
    if folder.name in LEGACY:
        export_legacy(folder)


def export_legacy(folder: Path) -> None:
    """Export Optimum's old variants, with those of its functions that still exist."""
    from optimum.exporters.onnx import export
    from optimum.exporters.tasks import TasksManager
    from optimum.onnx import merge_decoders

    source = folder / "checkpoint"
    model = TasksManager.get_model_from_task("text-generation", source, framework="pt", library_name="transformers")
    config = TasksManager.get_exporter_config_constructor(
        "onnx", model=model, task="text-generation", library_name="transformers"
    )
    separate, merged = folder / "separate", folder / "merged"
    for variant in (separate, merged):
        shutil.copytree(folder / "with_past", variant, ignore=shutil.ignore_patterns("*.onnx*"))
    first, following = separate / "decoder_model.onnx", separate / "decoder_with_past_model.onnx"
    export(model, config(model.config, use_past=True, use_past_in_inputs=False), first)
    export(model, config(model.config, use_past=True, use_past_in_inputs=True), following)
    merge_decoders(first, following, save_path=merged / "decoder_model_merged.onnx")


def export_with_genai(folder: Path, prompt: list[int]) -> None:
    """Export `folder`/checkpoint in both precisions with the model builder, and write its runtime's tokens for int4."""
    from onnxruntime_genai.models.builder import create_model, parse_extra_options

    for precision in ("fp32", "int4"):
        paths = ("", str(folder / "checkpoint"), str(folder / precision))
        options = (precision, "cpu", str(folder / "cache"))
        create_model(*paths, *options, **parse_extra_options(*paths, *options, []))
    (folder / "int4.json").write_text(
        json.dumps(genai_tokens(folder / "int4", prompt, GREEDY_TOKENS)), encoding="utf-8"
    )


def genai_tokens(folder: Path, prompt: list[int], count: int) -> list[int]:
    """The greedy tokens with which onnxruntime-genai continues `prompt`."""
    import onnxruntime_genai

    model = onnxruntime_genai.Model(str(folder))
    params = onnxruntime_genai.GeneratorParams(model)
    params.set_search_options(do_sample=False, max_length=len(prompt) + count)
    generator = onnxruntime_genai.Generator(model, params)
    generator.append_tokens(prompt)
    while not generator.is_done():
        generator.generate_next_token()
    return [int(token) for token in generator.get_sequence(0)[len(prompt) :]]


def main(exporter: str, tokenizer: Path, out: Path, families: tuple[str, ...]) -> None:
    """Make all exports of one exporter."""
    import tokenizers

    prompt = tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode(PROMPT).ids
    export = {"optimum": export_with_optimum, "genai": export_with_genai}[exporter]
    for family in families or EXPORTERS[exporter]:
        folder = out / family
        write_checkpoint(folder / "checkpoint", family, tokenizer)
        tokens = greedy_tokens(folder / "checkpoint", prompt, ATTENTION[exporter])
        (folder / "greedy.json").write_text(json.dumps(tokens), encoding="utf-8")
        export(folder, prompt)


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    if sys.argv[1] == "decode":
        print(json.dumps(genai_tokens(Path(sys.argv[2]), [int(token) for token in sys.argv[4:]], int(sys.argv[3]))))
    else:
        main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), tuple(sys.argv[4:]))
