"""Export and decoding of a checkpoint give the text of transformers (needs the oracle extra)."""

from __future__ import annotations

from pathlib import Path

import pytest

import edgerun
from edgerun.export import FP32, ExportRecipe, export_checkpoint
from support.shared_data import data_path
from support.tiny_models import write_checkpoint

torch = pytest.importorskip("torch", reason="needs the oracle extra")
transformers = pytest.importorskip("transformers", reason="needs the oracle extra")


def transformers_text(checkpoint: Path, prompt: str, count: int) -> str:
    """The text with which transformers continues `prompt` in float32."""
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(checkpoint / "tokenizer.json"))
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, min_new_tokens=count
        )
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def edge_run_text(checkpoint: Path, folder: Path, prompt: str, count: int) -> str:
    bundle = export_checkpoint(checkpoint, folder, ExportRecipe(FP32)).bundle
    with edgerun.load(bundle) as llm:
        return llm.generate(prompt, raw=True, temperature=0, max_tokens=count).text


def test_a_trained_model_writes_the_text_of_transformers(tmp_path: Path) -> None:
    source = data_path("weights/stories260K-hf")
    expected = transformers_text(source, "Once upon a time", 180)
    assert edge_run_text(source, tmp_path / "bundle", "Once upon a time", 180) == expected


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_tiny_models_write_the_text_of_transformers(tmp_path: Path, family: str) -> None:
    source = write_checkpoint(tmp_path / "checkpoint", family)
    expected = transformers_text(source, "the other", 100)
    actual = edge_run_text(source, tmp_path / "bundle", "the other", 100)
    assert expected.startswith(actual)
    assert actual
