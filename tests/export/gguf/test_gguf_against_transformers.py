"""GGUF files give the logits and token ids that `transformers` gives, which has its own reader."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgerun.export.check.contract_session import ContractSession
from edgerun.export.gguf.gguf_model import open_gguf
from support.gguf_files import write_gguf
from support.shared_data import data_path
from support.tiny_models import exported, write_checkpoint

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")
TOKENS = np.random.default_rng(3).integers(0, 300, 24)


def logits_of_transformers(file: Path) -> np.ndarray:
    """Logits of the model as `transformers` reads it, without the accelerate package."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = transformers.AutoConfig.for_model(**load_gguf_checkpoint(str(file))["config"])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict({name: value.float() for name, value in tensors.items()}, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    with torch.no_grad():
        return model.eval()(torch.from_numpy(TOKENS)[None]).logits[0].numpy()


@pytest.mark.parametrize("kind", ["F16", "Q4_0", "Q4_1", "Q5_0", "Q8_0"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_logits_equal_those_of_transformers(tmp_path, family: str, kind: str) -> None:
    # transformers ignores the head size and assumes 128 for qwen3.
    overrides = {"head_dim": 128} if family == "qwen3" else {}
    source = write_checkpoint(tmp_path / "checkpoint", family, tie_word_embeddings=False, **overrides)
    file = write_gguf(tmp_path / "model.gguf", source, kind)
    bundle = exported(file, tmp_path / "bundle")
    logits = ContractSession(bundle, 64).forward(TOKENS, np.arange(len(TOKENS)))
    assert np.abs(logits - logits_of_transformers(file)).max() < 1e-3


@pytest.mark.parametrize("name", ["weights/stories260K-hf", "weights/shell-helper/target"])
def test_tokenizers_encode_like_those_of_transformers(tmp_path, name: str) -> None:
    file = write_gguf(tmp_path / "model.gguf", data_path(name), "F16")
    expected = transformers.AutoTokenizer.from_pretrained(data_path(name))
    with open_gguf(file) as model:
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(model.folder / "tokenizer.json"))
    for text in ("Once upon a time", "  two  spaces\n", "naïve 🙂", "tar -xzf file.tar.gz"):
        assert tokenizer(text)["input_ids"] == expected(text)["input_ids"]
