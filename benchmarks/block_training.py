"""Tasks with lists of eight letters, and tiny models trained on them; see blocks.py, which runs this file.

It runs in an environment that has torch and transformers, and need not have edge-run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

_LETTERS: Final = "abcdefghijklmnop"
TASKS: Final = ("copy", "reverse", "sort", "shuffle")
LENGTH: Final = 8
"""Letters of a list, and tokens of a block."""
_BATCH: Final = 128
"""Requests of a step of training."""
_PROMPT: Final = 2 * LENGTH
"""Tokens of a prompt: filled up in front, so that an answer is one block."""
VOCABULARY: Final = ["<end>", "<fill>", "=", *TASKS, *_LETTERS, "<mask>"]
_MASK: Final = len(VOCABULARY) - 1
_TRACES: Final = 16
"""Batches of answers from which the network of the rule `learned` is trained."""
_NETWORK_STEPS: Final = 600
_CONFIG: Final[Mapping[str, Any]] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "hidden_act": "silu",
    "eos_token_id": 0,
}


def request(task: str, random: np.random.Generator) -> tuple[list[int], list[int]]:
    """Token ids of a prompt, and of one right answer."""
    items = (random.choice(len(_LETTERS), LENGTH, replace=False) + VOCABULARY.index("a")).tolist()
    head = [VOCABULARY.index(task), *items, VOCABULARY.index("=")]
    answers = {"copy": items, "reverse": items[::-1], "sort": sorted(items)}
    answer = answers.get(task) or random.permutation(items).tolist()
    return [VOCABULARY.index("<fill>")] * (_PROMPT - len(head)) + head, answer


def train(kind: str, folder: Path, steps: int) -> None:
    """Train a model of a kind, `sdar` or `qwen3`, and write its checkpoint; runs where torch and transformers are."""
    import torch  # noqa: PLC0415 -- only here
    from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: PLC0415 -- only here

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**_CONFIG))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01, betas=(0.9, 0.98))
    random = np.random.default_rng(1)
    block = torch.arange(_PROMPT + LENGTH) // LENGTH
    seen = block[:, None] >= block if kind == "sdar" else torch.ones(len(block), len(block)).tril() > 0
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None].expand(_BATCH, 1, -1, -1)
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, step / 100) * min(1, 2.5 * (1 - step / steps))
        pairs = [request(TASKS[row % len(TASKS)], random) for row in range(_BATCH)]
        tokens = torch.tensor([prompt + answer for prompt, answer in pairs])
        answers = tokens[:, _PROMPT:]
        given = tokens.clone()
        if kind == "sdar":
            rate = torch.rand(_BATCH, 1).clamp(1 / LENGTH, 1)
            hidden = torch.rand(_BATCH, LENGTH) < rate
            given[:, _PROMPT:][hidden] = _MASK
            logits = model(input_ids=given, attention_mask=mask).logits[:, _PROMPT:]
            losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), answers.flatten(), reduction="none")
            loss = (losses.view(_BATCH, LENGTH) * hidden / rate).mean()
        else:
            logits = model(input_ids=given, attention_mask=mask).logits[:, _PROMPT - 1 : -1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 200 == 0:
            print(f"{kind}: step {step}, loss {float(loss):.4f}", file=sys.stderr, flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "sdar":
        train_network(model, mask, folder)
    model.save_pretrained(folder, safe_serialization=True)
    block_settings = {"block_size": LENGTH, "mask_token_id": _MASK} if kind == "sdar" else {}
    config = {**_CONFIG, "model_type": kind, "architectures": ["Qwen3ForCausalLM"], **block_settings}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(VOCABULARY)}, "<fill>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


def train_network(model: Any, mask: Any, folder: Path) -> None:
    """Train the network of the rule `learned`: is a candidate the token of the finished text? Learn2PD's filter."""
    import torch  # noqa: PLC0415 -- only here
    from safetensors.torch import save_file  # noqa: PLC0415 -- only here

    random, seen, right = np.random.default_rng(3), [], []
    for _ in range(_TRACES):
        prompts = [request(TASKS[row % len(TASKS)], random)[0] for row in range(_BATCH)]
        tokens = torch.tensor([[*prompt, *[_MASK] * LENGTH] for prompt in prompts])
        found = []
        for _ in range(LENGTH):
            with torch.no_grad():
                logits = model(input_ids=tokens, attention_mask=mask).logits[:, _PROMPT:]
            logits[..., _MASK] = -torch.inf
            masked = tokens[:, _PROMPT:] == _MASK
            confidence, candidate = logits.softmax(-1).max(-1)
            confidence = confidence.where(masked, torch.ones(()))
            found.append((confidence, candidate, masked))
            best = confidence.masked_fill(~masked, -1).argmax(1, keepdim=True)
            tokens[:, _PROMPT:].scatter_(1, best, candidate.gather(1, best))
        for confidence, candidate, masked in found:
            seen.append(confidence)
            right.append(torch.stack([candidate == tokens[:, _PROMPT:], masked], -1))
    inputs, labels = torch.cat(seen), torch.cat(right)
    network = torch.nn.Sequential(torch.nn.Linear(LENGTH, 64), torch.nn.ReLU(), torch.nn.Linear(64, LENGTH))
    optimizer = torch.optim.Adam(network.parameters(), 3e-3)
    for _ in range(_NETWORK_STEPS):
        rows = torch.randint(len(inputs), (_BATCH * 8,))
        each = torch.nn.functional.binary_cross_entropy_with_logits(
            network(inputs[rows]), labels[rows, :, 0].float(), reduction="none"
        )
        loss = each[labels[rows, :, 1]].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    tensors = {
        f"{name}.{part}": getattr(layer, part).detach().contiguous()
        for name, layer in (("hidden", network[0]), ("output", network[2]))
        for part in ("weight", "bias")
    }
    save_file(tensors, folder / "network.safetensors")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("sdar", "qwen3"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("steps", type=int)
    options = parser.parse_args()
    train(options.kind, options.folder, options.steps)
