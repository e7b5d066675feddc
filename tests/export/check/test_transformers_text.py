"""Export and decoding of a checkpoint give the text of transformers (needs the oracle extra)."""

from __future__ import annotations

from pathlib import Path

import pytest

import edgerun
from support.shared_data import data_path
from support.tiny_models import exported, write_checkpoint

torch = pytest.importorskip("torch", reason="needs the oracle extra")
transformers = pytest.importorskip("transformers", reason="needs the oracle extra")

FAMILIES = [(family, "the other", 100) for family in ("llama", "qwen2", "qwen3")]


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


@pytest.mark.parametrize(("family", "prompt", "count"), [("", "Once upon a time", 180), *FAMILIES])
def test_text_is_that_of_transformers(tmp_path: Path, family: str, prompt: str, count: int) -> None:
    source = write_checkpoint(tmp_path / "tiny", family) if family else data_path("weights/stories260K-hf")
    expected = transformers_text(source, prompt, count)
    with edgerun.load(exported(source, tmp_path / "bundle")) as llm:
        actual = llm.generate(prompt, raw=True, temperature=0, max_tokens=count).text
    assert expected.startswith(actual)
    assert actual == expected if not family else actual
