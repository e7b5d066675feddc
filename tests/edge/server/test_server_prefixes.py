"""`edge-run serve --prefix FILE`: requests that begin with it are answered without reading it, after a restart too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import edgerun
from support.commands import Capture, fails
from support.serving import CHAT, Served, chat_body, served

SYSTEM = "the other and the one who is at the end of it, and on to " * 4
EXAMPLES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "and one of the others is on to it " * 4},
    {"role": "assistant", "content": "there"},
]


def asked(server: Served, text: str, **fields: Any) -> tuple[str, int]:
    """The text of an answer to a request that begins with the system message, and its cached tokens."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
    reply = server.post(CHAT, chat_body(max_tokens=8, temperature=0) | {"messages": messages} | fields)
    return reply["choices"][0]["message"]["content"], reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_requests_continue_from_a_prefix_after_a_restart_too(tiny_bundle: Path, tmp_path: Path) -> None:
    document, body, long = (tmp_path / name for name in ("instructions.txt", "request.json", "long.txt"))
    document.write_text(SYSTEM, encoding="utf-8")
    body.write_text(json.dumps({"messages": EXAMPLES, "temperature": 0.5}), encoding="utf-8")
    long.write_text(SYSTEM * 20, encoding="utf-8")
    with edgerun.load(tiny_bundle, threads=1, draft=None, cache=False, prefix_cache=0) as engine:
        questions = ("in the", "there")
        expected = [engine.generate(each, system=SYSTEM, max_tokens=8, temperature=0).text for each in questions]

    def kept() -> list[Path]:
        return sorted((tmp_path / "cache" / "prefixes").glob("*/*.kv"))

    options = ["--draft", "none", "--threads", "1", "--prefix", str(document), "--prefix", str(body)]
    environment = {"EDGERUN_CACHE": str(tmp_path / "cache")}
    with served([tiny_bundle], *options, **environment) as server:
        assert server.lines[0].startswith("edge-run: serving"), "nothing was wrong with the files"
        assert len(kept()) == 2, "they are read before the first request"
        text, cached = asked(server, "in the")
        assert text == expected[0]
        assert cached >= 64
        assert asked(server, "", messages=[*EXAMPLES, {"role": "user", "content": "in the"}])[1] >= 64
    written = [file.stat().st_ino for file in kept()]
    with served([tiny_bundle], *options, "--prefix", str(long), **environment) as server:
        assert "long.txt is not read in advance by bundle: " in server.lines[0], "it costs a line, and no request"
        text, cached = asked(server, "there")
        assert text == expected[1]
        assert cached >= 64
    assert [file.stat().st_ino for file in kept()] == written, "they are not written again"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "  ", "a.txt is empty; give a text file with a system message, or a .json file with the body"),
        ("a.json", "[]", "a.json is not the body of a chat completion: "),
        ("a.json", '{"message": []}', "a.json is not the body of a chat completion: unknown field message"),
        ("a.json", '{"messages": []}', "a.json is not the body of a chat completion: there are no messages"),
        ("missing", None, "missing cannot be read"),
    ],
)
def test_a_file_without_a_prefix_is_refused(
    tiny_bundle: Path,
    tmp_path: Path,
    capsys: Capture,
    name: str,
    content: str | None,
    message: str,
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content, encoding="utf-8")
    assert message in fails(capsys, "serve", tiny_bundle, "--port", "0", "--prefix", tmp_path / name)
