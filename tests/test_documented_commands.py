"""The commands and programs of the documents run as they are written, beginning with an empty home folder."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import httpx
import numpy as np
import pytest

pytest.importorskip("onnx", reason="needs the export extra")
pytest.importorskip("gguf", reason="needs the gguf extra")
pytest.importorskip("llguidance", reason="needs the structured extra")
pytest.importorskip("PIL", reason="needs the images extra")

import edgerun
from edgerun.edge.cli.main import main
from edgerun.export import FP32, INT8, ExportRecipe, export_checkpoint
from support.adapters import write_adapter, write_control_vector
from support.encoders import write_encoder
from support.gguf_files import write_gguf
from support.hub_server import HubServer, files_of, own_hub
from support.infill_models import write_suggesting_bundle
from support.layouts import LAYOUTS, write_layout
from support.processes import EDGE_RUN, started_until
from support.rerankers import write_reranker
from support.rpc_client import rpc
from support.scripted_model import write_calling_bundle
from support.serving import PATIENCE_S, chat_body
from support.terminal_screen import terminal_screen
from support.tiny_heads import write_medusa_heads, write_mtp_checkpoint
from support.tiny_models import write_bundle, write_checkpoint, write_json
from support.vision_models import random_image, write_vision_checkpoint

ROOT = Path(__file__).resolve().parent.parent
GUIDE = sorted(path.stem for path in (ROOT / "docs/guide").glob("*.md"))
PAGES = (*(f"guide/{name}" for name in GUIDE), "app", "devices", "structured-output", "tools", "rpc", "server")
TEXTS = [
    path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *(ROOT / f"docs/{name}.md" for name in PAGES))
]
BLOCKS = [block for text in TEXTS for block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)]

PERSON: Final = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "born": {"type": "integer", "maximum": 2000}},
    "required": ["name", "born"],
    "additionalProperties": False,
}
LINEARS: Final = (*(f"layers.{n}.{name}" for n in range(2) for name in ("qkv", "o", "gate_up", "down")), "head")

NOT_RUN: Final = {
    "python3 -m venv": "makes an environment; .ci/run does so with the README's own line",
    "pip install": "downloads packages",
    ".venv/bin/pip install": "downloads packages",
    ".venv/bin/pytest": "runs these tests",
    "edge-run app --window": "opens a window",
    "edge-run my-model --tools servers.json": "needs servers; tests/edge/terminal/test_chat_tools.py has some",
    "edge-run my-model --device gpu": "needs a GPU; tests of devices have one in software",
    "edge-run export CHECKPOINT OUT --method yaqa": "needs PyTorch; tests/export/calibration/test_gradients.py has it",
    "edge-run export CHECKPOINT OUT --method learned": "needs PyTorch; test_learned_rounding.py beside it has it",
    "edge-run train-draft TARGET OUT": "needs PyTorch; tests/edge/cli/test_train_draft_command.py trains",
    "edge-run export CHECKPOINT MODEL --draft OUT": "needs what training writes; tests/export/drafts has such drafts",
    "curl": "tests/edge/server/test_guide.py runs these lines",
    "python examples/ray_serve.py": "needs Ray; tests/edge/server/test_ray_serve.py runs it",
}
"""Beginnings of commands that do not run here, and why."""
NIGHTLY: Final = (
    *("verify my-model", "bench my-model", "tune my-model", "--overflow window", "--clients 1 2 4 8"),
    *("--weights mixed --budget 3.5bpw", "--plan plan.toml", "--method gptq"),
    "--draft SMALL_CHECKPOINT",
)
"""Ends of commands that take long; tests of the command line and of the export run them every day, with less text."""
ONE_SHOT: Final = (
    *("complete", "export", "pull", "models", "inspect", "tune", "bench", "verify", "devices", "doctor"),
    *("ps", "control-vector"),
)


def is_run(command: str) -> bool:
    return not any(command.startswith(beginning) for beginning in NOT_RUN)


def commands_of(block: str) -> list[str]:
    """The commands of a block of shell lines, without comments."""
    lines = (re.sub(r"\s+# .*", "", line) for line in block.splitlines())
    return [part.strip() for line in lines for part in line.split(" && ") if part.strip()]


def shell_blocks() -> Iterator[object]:
    """The commands of each block, without those that another block has; they run one after another."""
    seen: set[str] = set()
    for language, block in BLOCKS:
        if language == "sh" and not block.startswith("curl"):
            commands = [command.removeprefix(".venv/bin/") for command in commands_of(block) if is_run(command)]
            new = [command for command in commands if command not in seen]
            seen.update(new)
            for nightly in (False, True):
                if chosen := [command for command in new if command.endswith(NIGHTLY) is nightly]:
                    yield pytest.param(chosen, id=chosen[0][:60], marks=[pytest.mark.nightly] if nightly else [])


def write_files(folder: Path) -> None:
    """Write what the commands find in the working folder: models, checkpoints, texts and settings."""
    for name, seed in (("CHECKPOINT", "0"), ("SMALL_CHECKPOINT", "1")):
        arguments = ["tiny", str(folder / name), "--seed", seed]
        subprocess.run(
            [sys.executable, str(ROOT / "benchmarks" / "checkpoints.py"), *arguments], check=True, capture_output=True
        )
        config = json.loads((folder / name / "config.json").read_text(encoding="utf-8"))
        write_json(folder / name / "config.json", config | {"max_position_embeddings": 8192})
    write_medusa_heads(folder / "HEAD", config)
    scratch = folder / "scratch"
    write_calling_bundle(scratch / "calling", context=8192)
    export_checkpoint(scratch / "calling" / "checkpoint", folder / "my-model", ExportRecipe(INT8))
    for name in ("sql-adapter", "polite-adapter"):
        write_adapter(folder / name, scratch / "calling" / "checkpoint")
    hidden_size = json.loads((scratch / "calling" / "checkpoint" / "config.json").read_bytes())["hidden_size"]
    write_control_vector(folder / "calm.gguf", {1: np.ones(hidden_size, np.float32)})
    shutil.copytree(folder / "my-model", folder / "other-model")
    recipe = ExportRecipe(FP32, hidden_states=True)
    shutil.copytree(write_bundle(scratch / "hidden", weights=recipe), folder / "my-embedding-model")
    shutil.copytree(write_reranker(scratch / "reranker").with_name("bundle"), folder / "my-reranker")
    write_encoder(folder / "my-encoder", "sentence_embedding")
    write_encoder(folder / "my-cross-encoder", "logits")
    write_gguf(folder / "model.gguf", write_checkpoint(scratch / "gguf"))
    write_layout(folder / "some-folder", LAYOUTS["optimum-two-decoders"])
    # With its tokenizer and config.json beside it.
    (write_layout(folder, LAYOUTS["optimum"]) / "model.onnx").rename(folder / "MODEL.onnx")
    graph = write_layout(folder / "my-models", LAYOUTS["community"]) / "onnx" / "model.onnx"
    shutil.copy(graph, graph.with_stem("model_int8"))
    graph.rename(graph.with_stem("model_q4"))
    write_suggesting_bundle(scratch / "coder").rename(folder / "my-coder")
    export_checkpoint(write_vision_checkpoint(folder / "SMOLVLM"), folder / "my-seeing-model", ExportRecipe(INT8))
    for number, name in enumerate(("photo.png", "before.png", "after.png")):
        (folder / name).write_bytes(random_image(number))
    shutil.rmtree(scratch)
    for name, text in {"before.py": "def add(a, b):\n", "after.py": "\n", "other.py": "X = 1\n"}.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "report.txt").write_text("The report says that all is well. " * 20, encoding="utf-8")
    for name in ("calm", "excited"):
        (folder / f"{name}.txt").write_text(f"Be {name}.\nI am {name}.\n", encoding="utf-8")
    (folder / "notes").mkdir()
    (folder / "notes" / "lease.md").write_text("The lease of the house ends in May.", encoding="utf-8")
    (folder / "instructions.txt").write_text("Answer in one line.", encoding="utf-8")
    texts = [
        [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": f"{n * n}."}]
        for n in range(200)
    ]
    write_json(folder / "examples.json", {"messages": texts[0]})
    write_json(folder / "person.json", PERSON)
    lines = [json.dumps({"messages": messages}) for messages in texts]
    (folder / "conversations.jsonl").write_text("\n".join(lines), encoding="utf-8")
    plan = "".join(f'"{name}" = "int4/64 k-quant"\n' for name in LINEARS)
    (folder / "plan.toml").write_text(f"[linears]\n{plan}", encoding="utf-8")


def fill_hub(hub: HubServer, folder: Path) -> None:
    """Give a test hub the repositories that the documents name; `folder` is that of `write_files`."""
    model = files_of(folder / "my-model")
    named = hub.repo("org/name", model)
    named.put(files_of(folder / "my-model", "cpu-int4/"), "v1.0")
    hub.repo("onnx-community/Qwen2.5-0.5B-Instruct", files_of(folder / "my-models"))
    hub.repo("Qwen/Qwen2.5-0.5B-Instruct", files_of(folder / "CHECKPOINT"))
    hub.repo("Qwen/Qwen3.5-0.8B", files_of(write_mtp_checkpoint(folder / "mtp")))
    shutil.rmtree(folder / "mtp")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with all that the documents name; the home folder is empty and a test hub has the hub's models."""
    folder, home = tmp_path_factory.mktemp("documented"), tmp_path_factory.mktemp("home")
    write_files(folder)
    with own_hub(home / "hf") as hub, pytest.MonkeyPatch.context() as patch:
        fill_hub(hub, folder)
        for name in ("EDGERUN_CACHE", "EDGERUN_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"):
            patch.delenv(name, raising=False)
        patch.setenv("HOME", str(home))
        patch.setenv("BROWSER", "true")
        patch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        yield folder


@pytest.fixture
def working_folder(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that commands run in."""
    folder = tmp_path / "work"
    shutil.copytree(prepared, folder)
    monkeypatch.chdir(folder)
    return folder


def answers_over_http(arguments: list[str]) -> None:
    """Start the app or the server, and ask it for an answer."""
    addresses: list[str] = []

    def take(line: str) -> bool:
        addresses.extend(re.findall(r"(http://127\.0\.0\.1:\d+)(?:/open| ?/v1)", line))
        return bool(addresses)

    with started_until([*EDGE_RUN, *arguments, "--port", "0"], take, PATIENCE_S):
        body = chat_body(max_tokens=4)
        answer = httpx.post(f"{addresses[0]}/v1/chat/completions", json=body, timeout=PATIENCE_S, trust_env=False)
        assert answer.json()["choices"][0]["message"]["content"]


def answers_over_pipes(arguments: list[str]) -> None:
    with rpc(*arguments) as client:
        assert client.text("list files")
        assert client.end() == (0, "")


def answers_on_a_terminal(arguments: list[str]) -> None:
    """Open a chat, say something and leave."""
    with terminal_screen([*EDGE_RUN, *arguments]) as chat:
        chat.until_prompt()
        chat.type("list files\r")
        chat.until("> list files")
        assert "error" not in chat.until_prompt()
        chat.type("/quit\r")
        assert chat.end() == 0


def run(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    program, *arguments = shlex.split(command)
    if any(sign in command for sign in ("|", "$(", " < ")):
        done = subprocess.run(["sh", "-c", command], check=True, capture_output=True, timeout=PATIENCE_S)
        assert done.stdout.strip()
        return
    assert program == "edge-run", command
    if arguments[:1] in (["app"], ["serve"]):
        answers_over_http(arguments)
    elif arguments[:1] == ["rpc"]:
        answers_over_pipes(arguments[1:])
    elif "-p" not in arguments and not {*arguments[:1]} & {*ONE_SHOT}:
        answers_on_a_terminal(arguments)
    else:
        code = main(arguments)
        out, err = capsys.readouterr()
        assert code == 0, f"{command}\n{err}"
        assert "-p" not in arguments or out, command


@pytest.mark.skipif(os.name == "nt", reason="needs a POSIX shell")
@pytest.mark.parametrize("commands", list(shell_blocks()))
def test_commands_run(commands: list[str], working_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in commands:
        run(command, capsys)


@pytest.mark.parametrize(
    "program", [pytest.param(block, id=str(n)) for n, (name, block) in enumerate(BLOCKS) if name == "python"]
)
def test_programs_run(program: str, working_folder: Path) -> None:
    if "127.0.0.1:8080" in program or "edgerun.server" in program:
        pytest.skip("tests/edge/server/test_guide.py runs it")
    with edgerun.load("my-embedding-model") as llm:  # its answers are random, with alternatives
        exec(program, {"edgerun": edgerun, "llm": llm, "report": "All is well."})  # noqa: S102  the documents' own


def test_what_does_not_run_is_in_the_documents() -> None:
    commands = [command for language, block in BLOCKS if language == "sh" for command in commands_of(block)]
    for beginning in NOT_RUN:
        assert any(command.startswith(beginning) for command in commands), beginning
    for end in NIGHTLY:
        assert any(command.endswith(end) for command in commands), end


def test_blocks_say_what_language_they_are_in() -> None:
    assert {language for language, _ in BLOCKS} == {
        "sh",
        "python",
        "json",
        "toml",
        "text",
        "console",
        "powershell",
        "js",
    }
