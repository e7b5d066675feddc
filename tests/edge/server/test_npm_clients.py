"""The npm packages of Ollama and of Anthropic, and a coding agent, against a server."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

import edgerun
from support.openai_clients import require_npm_package, run_node
from support.scripted_model import WEATHER, write_calling_bundle, write_scripted_bundle
from support.serving import PATIENCE_S, served
from support.unusual_files import needs_links

QUESTION = {"role": "user", "content": "Weather in Paris and Rome?"}
PROGRAM = Path(__file__).parents[2] / "support" / "other_clients.mjs"
KEY = "secret"


@needs_links
def test_the_npm_clients_of_ollama_and_anthropic(tmp_path: Path) -> None:
    require_npm_package()
    model = write_calling_bundle(tmp_path / "models")
    with edgerun.load(model) as engine:
        reply = engine.generate([QUESTION], tools=[WEATHER], temperature=0.0)
    with served([model], "--threads", "1", EDGERUN_API_KEY=KEY) as server:
        request = json.dumps({"question": QUESTION, "tool": WEATHER})
        read = json.loads(run_node(PROGRAM, tmp_path, server.base, KEY, request))
    calls = [{"name": call.name, "arguments": call.values} for call in reply.tool_calls]
    ollama, anthropic = read["ollama"], read["anthropic"]
    whole, pieces = ollama["whole"]["message"], [piece["message"] for piece in ollama["pieces"]]
    assert (whole["content"], whole["thinking"]) == (reply.text, reply.reasoning)
    assert [call["function"] for call in whole["tool_calls"]] == calls
    assert "".join(piece["content"] for piece in pieces) == reply.text
    assert [call["function"] for piece in pieces for call in piece.get("tool_calls", ())] == calls
    assert [each["model"] for each in ollama["models"]] == ["bundle"]
    assert "there is no model 'other'" in ollama["refused"]
    blocks = [
        {key: block.get(key) for key in ("type", "text", "name", "input")} for block in anthropic["whole"]["content"]
    ]
    assert blocks == [
        {"type": "thinking", "text": None, "name": None, "input": None},
        {"type": "text", "text": reply.text, "name": None, "input": None},
        *({"type": "tool_use", "text": None, "name": call["name"], "input": call["arguments"]} for call in calls),
    ]
    assert anthropic["streamed"]["stop_reason"] == anthropic["whole"]["stop_reason"] == "tool_use"
    assert [block.get("input") for block in anthropic["streamed"]["content"]] == [block["input"] for block in blocks]
    assert anthropic["unknown"] == [404, "not_found_error"]


AGENT = "@mariozechner/pi-coding-agent"
AGENT_TEMPLATE = (
    "{# <tool_call> #}{% for t in tools or [] %}{{ '' if t.function.name else '' }}{% endfor %}"
    "{% if messages[-1].role == 'tool' %}<|told|>{% elif tools %}<|asked|>"
    "{% else %}{% for m in messages %}{{ m.content }}{% endfor %}<|assistant|>{% endif %}"
)
AGENT_SCRIPTS = {
    "<|asked|>": ["<tool_call>", '{"name": "bash", "arguments": {"command": "echo made > made.txt"}}', "</tool_call>"],
    "<|told|>": ["The file ", "is there."],
    "<|assistant|>": [f"word{index}" for index in range(60)],
}


@needs_links
@pytest.mark.parametrize(("api", "path"), [("openai-completions", "/v1"), ("anthropic-messages", "")])
def test_a_coding_agent_from_npm_does_its_work(tmp_path: Path, api: str, path: str) -> None:
    program = require_npm_package() / AGENT / "dist" / "cli.js"
    if not program.is_file():
        pytest.skip(f"needs the npm package {AGENT}")
    model = write_scripted_bundle(tmp_path, AGENT_SCRIPTS, AGENT_TEMPLATE, ["<|asked|>", "<|told|>", "<tool_call>"])
    settings, work = tmp_path / ".pi" / "agent" / "models.json", tmp_path / "work"
    settings.parent.mkdir(parents=True)
    work.mkdir()
    with served([model], "--threads", "1") as server:
        provider = {"baseUrl": server.base + path, "api": api, "apiKey": "none", "models": [{"id": "bundle"}]}
        settings.write_text(json.dumps({"providers": {"local": provider}}), encoding="utf-8")
        command = ["node", str(program), "--provider", "local", "--model", "bundle", "-p", "Make a file."]
        environment = {**os.environ, "HOME": str(tmp_path), "PI_OFFLINE": "1"}
        done = subprocess.run(
            command, cwd=work, env=environment, capture_output=True, timeout=PATIENCE_S, check=False, encoding="utf-8"
        )
    assert done.stdout.strip() == "The file is there.", done.stderr
    assert (work / "made.txt").read_text(encoding="utf-8") == "made\n"
