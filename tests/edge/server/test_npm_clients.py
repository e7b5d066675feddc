"""The npm packages of Ollama and of Anthropic against a server."""

from __future__ import annotations

import json
from pathlib import Path

import edgerun
from support.openai_clients import require_npm_package, run_node
from support.scripted_model import WEATHER, write_calling_bundle
from support.serving import served
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
