"""The models and files that the commands of the documents name."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from edgerun.export import FP32, INT8, ExportRecipe, export_checkpoint
from support.gguf_files import write_gguf
from support.hub_server import HubServer, files_of
from support.layouts import LAYOUTS, write_layout
from support.scripted_model import write_calling_bundle
from support.tiny_heads import write_medusa_heads, write_mtp_checkpoint
from support.tiny_models import write_bundle, write_checkpoint, write_json

_CHECKPOINTS: Final = Path(__file__).resolve().parents[2] / "benchmarks" / "checkpoints.py"
_PERSON: Final = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "born": {"type": "integer", "maximum": 2000}},
    "required": ["name", "born"],
    "additionalProperties": False,
}
_CONVERSATION: Final = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "there"}]}
_LINEARS: Final = (*(f"layers.{n}.{name}" for n in range(2) for name in ("qkv", "o", "gate_up", "down")), "head")


def write_documented_files(folder: Path) -> None:
    """Write what the documents' commands find in the working folder: models, checkpoints, texts and settings."""
    for name, seed in (("CHECKPOINT", "0"), ("SMALL_CHECKPOINT", "1")):
        arguments = ["tiny", str(folder / name), "--seed", seed]
        subprocess.run([sys.executable, str(_CHECKPOINTS), *arguments], check=True, capture_output=True)
        config = json.loads((folder / name / "config.json").read_text(encoding="utf-8"))
        write_json(folder / name / "config.json", config | {"max_position_embeddings": 8192})
    write_medusa_heads(folder / "HEAD", config)
    scratch = folder / "scratch"
    write_calling_bundle(scratch / "calling", context=8192)
    export_checkpoint(scratch / "calling" / "checkpoint", folder / "my-model", ExportRecipe(INT8))
    shutil.copytree(folder / "my-model", folder / "other-model")
    recipe = ExportRecipe(FP32, hidden_states=True)
    shutil.copytree(write_bundle(scratch / "hidden", weights=recipe), folder / "my-embedding-model")
    write_gguf(folder / "model.gguf", write_checkpoint(scratch / "gguf"))
    write_layout(folder / "some-folder", LAYOUTS["optimum-two-decoders"])
    # With its tokenizer and config.json beside it.
    (write_layout(folder, LAYOUTS["optimum"]) / "model.onnx").rename(folder / "MODEL.onnx")
    graph = write_layout(folder / "my-models", LAYOUTS["community"]) / "onnx" / "model.onnx"
    shutil.copy(graph, graph.with_stem("model_int8"))
    graph.rename(graph.with_stem("model_q4"))
    shutil.rmtree(scratch)
    (folder / "report.txt").write_text("The report says that all is well. " * 20, encoding="utf-8")
    (folder / "instructions.txt").write_text("Answer in one line.", encoding="utf-8")
    write_json(folder / "examples.json", _CONVERSATION)
    write_json(folder / "person.json", _PERSON)
    texts = [
        [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": f"{n * n}."}]
        for n in range(200)
    ]
    lines = [json.dumps({"messages": messages}) for messages in texts]
    (folder / "conversations.jsonl").write_text("\n".join(lines), encoding="utf-8")
    plan = "".join(f'"{name}" = "int4/64 k-quant"\n' for name in _LINEARS)
    (folder / "plan.toml").write_text(f"[linears]\n{plan}", encoding="utf-8")


def fill_hub(hub: HubServer, folder: Path) -> None:
    """Give a test hub the repositories that the documents name; `folder` is that of `write_documented_files`."""
    model = files_of(folder / "my-model")
    named = hub.repo("org/name", model)
    named.put(files_of(folder / "my-model", "cpu-int4/"), "v1.0")
    hub.repo("onnx-community/Qwen2.5-0.5B-Instruct", files_of(folder / "my-models"))
    hub.repo("Qwen/Qwen2.5-0.5B-Instruct", files_of(folder / "CHECKPOINT"))
    hub.repo("Qwen/Qwen3.5-0.8B", files_of(write_mtp_checkpoint(folder / "mtp")))
    shutil.rmtree(folder / "mtp")
