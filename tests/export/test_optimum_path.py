"""Checkpoints of other families are exported with Optimum, or a fake of it, and upgraded."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

import edgerun
from edgerun import CheckpointError, GenerateOptions
from edgerun.edge.cli.main import main
from edgerun.export import FP32, ExportRecipe, export_model
from edgerun.export.optimum_path import needs_optimum
from edgerun.runtime.result import Reply
from support.layout_reference import greedy_tokens
from support.layouts import LAYOUTS, write_layout
from support.tiny_models import tiny_tokenizer, write_json

PROMPT = [5, 17, 40, 8, 99]

FAKE_OPTIMUM = """
import shutil, sys
source, folder = sys.argv[sys.argv.index("--model") + 1], sys.argv[-1]
print("progress messages", file=sys.stderr)
if "refused" in source:
    raise ValueError("Trying to export a refused model")
shutil.copytree(source + "-exported", folder, dirs_exist_ok=True)
"""


@pytest.fixture
def optimum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package named optimum whose command copies the folder `<source>-exported`."""
    package = tmp_path / "packages" / "optimum" / "exporters" / "onnx"
    package.mkdir(parents=True)
    for folder in (package, *package.parents[:2]):
        (folder / "__init__.py").touch()
    (package / "__main__.py").write_text(FAKE_OPTIMUM, encoding="utf-8")
    for name in [name for name in sys.modules if name.split(".")[0] == "optimum"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))


def checkpoint(folder: Path, model_type: str = "novel") -> Path:
    folder.mkdir()
    write_json(folder / "config.json", {"model_type": model_type})
    return folder


@pytest.mark.usefixtures("optimum")
def test_a_graph_exported_by_optimum_is_upgraded(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "novel")
    layout = LAYOUTS["optimum"]
    write_layout(tmp_path / "novel-exported", layout)
    before = set(tmp_path.iterdir())
    stages: list[str] = []
    report = export_model(source, tmp_path / "out", ExportRecipe(FP32), lambda stage, _: stages.append(stage))
    assert set(tmp_path.iterdir()) - before == {tmp_path / "out"}
    assert set(stages) == {"exporting with Optimum", "reading", "writing weights", "checking"}
    with edgerun.load(report.bundle) as llm:
        text = llm.model.new_sequence()
        Reply.of(llm.model.answer(text, PROMPT, GenerateOptions(max_tokens=20, temperature=0)))
    assert text.token_ids[len(PROMPT) :][:19] == greedy_tokens(layout, PROMPT, 20)[:19]


@pytest.mark.usefixtures("optimum")
def test_the_error_quotes_optimums_last_message(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "refused")
    before = set(tmp_path.iterdir())
    with pytest.raises(CheckpointError) as refused:
        export_model(source, tmp_path / "new" / "out", ExportRecipe(FP32))
    assert str(refused.value) == (
        f"Optimum cannot export {source}: ValueError: Trying to export a refused model; "
        "export another checkpoint, or use a model that is already exported"
    )
    assert set(tmp_path.iterdir()) == before
    assert needs_optimum(source)
    assert not needs_optimum(checkpoint(tmp_path / "own", "llama"))
    assert not needs_optimum(tmp_path / "nowhere")


def test_without_optimum_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("edgerun.export.optimum_path._MODULE", "optimum_that_is_not_there.exporters.onnx")
    assert main(["export", str(checkpoint(tmp_path / "novel")), str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("edge-run: error: model_type 'novel' is not a supported architecture; supported are ")
    assert line.endswith('; Optimum exports more: pip install "edge-run[optimum]"')
    assert not (tmp_path / "out").exists()


SETTINGS = {
    # Partial rotation, parallel attention and feed-forward, biases everywhere.
    "gpt_neox": {"rotary_pct": 0.5, "num_attention_heads": 4, "intermediate_size": 96},
    # Learned positions, no rotation, scaled queries.
    "opt": {"num_attention_heads": 4, "ffn_dim": 96, "word_embed_proj_dim": 64},
    # A single key-value head.
    "gpt_bigcode": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256},
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("model_type", SETTINGS)
def test_other_families_decode_like_transformers(model_type: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("optimum.exporters.onnx")
    common = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 256}
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(model_type, **{**common, **ids, **SETTINGS[model_type]})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    source = tmp_path / "checkpoint"
    model.save_pretrained(source)
    tiny_tokenizer(300).save(str(source / "tokenizer.json"))
    write_json(source / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    bundle = export_model(source, tmp_path / "out", ExportRecipe(FP32)).bundle
    assert json.loads((bundle / "edge.json").read_text(encoding="utf-8"))["architecture"]["family"] == model_type
    with torch.no_grad():
        expected = model.generate(
            torch.tensor([PROMPT]), do_sample=False, max_new_tokens=100, attention_mask=torch.ones(1, len(PROMPT))
        )[0, len(PROMPT) :].tolist()
    with edgerun.load(bundle) as llm:
        text = llm.model.new_sequence()
        Reply.of(llm.model.answer(text, PROMPT, GenerateOptions(max_tokens=100, temperature=0)))
        generated = text.token_ids[len(PROMPT) :]
    assert len(generated) > 10
    np.testing.assert_array_equal(generated, expected[: len(generated)])
