"""Adapters that PEFT has written, against transformers with PEFT's merged weights (the oracle extra)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgerun
from support.commands import Capture, output_of
from support.tiny_models import exported, write_checkpoint

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
torch.set_num_threads(1)

pytestmark = pytest.mark.filterwarnings("ignore")
PROMPT = "the sea and the sand"
COUNT = 40
PATTERNS = {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {"o_proj": 3}, "use_rslora": True}


@pytest.mark.parametrize(
    ("family", "settings"), [("llama", {}), ("qwen2", PATTERNS), ("gemma2", PATTERNS), ("phi3", {}), ("phi3", PATTERNS)]
)
def test_an_adapter_gives_the_tokens_and_logits_of_merged_weights(
    tmp_path: Path, capsys: Capture, family: str, settings: dict[str, Any]
) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", family, tie_word_embeddings=False)
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager").float().eval()
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", init_lora_weights=False, **settings)
    adapted = peft.get_peft_model(model, config)
    adapted.save_pretrained(tmp_path / "adapter")
    adapter, merged = f"a={tmp_path / 'adapter'}", adapted.merge_and_unload()
    bundle = exported(checkpoint, tmp_path / "bundle")
    with edgerun.load(bundle, threads=1, lora=[adapter]) as engine:
        prompt = engine.tokenizer.encode(PROMPT, add_special_tokens=True)
        options = edgerun.GenerateOptions(max_tokens=COUNT, temperature=0, ignore_eos=True, adapter="a")
        sequence = engine.new_sequence()
        text = edgerun.Reply.of(engine.answer(prompt, options, sequence)).text
        tokens = sequence.token_ids
        sequence.arena.rewind_to(0)
        logits = sequence.bound.forward(tokens).copy()
        plain = engine.new_sequence().bound.forward(tokens)
        assert np.abs(logits - plain).max() > 0.1
    with torch.no_grad():
        greedy = merged.generate(torch.tensor([prompt]), max_new_tokens=COUNT, do_sample=False, eos_token_id=None)
        expected = merged(torch.tensor([tokens])).logits[0].numpy()
    assert greedy[0].tolist()[: len(tokens)] == tokens
    assert len(tokens) >= len(prompt) + COUNT - 1  # the last token need not be in the cache
    np.testing.assert_allclose(logits, expected, atol=2e-4)
    command = [bundle, "--raw", "-p", PROMPT, "-t", 0, "--max-tokens", COUNT, "--ignore-eos", "--threads", 1]
    assert output_of(capsys, *command, "--lora", adapter, "--adapter", "a").removesuffix("\n") == text
