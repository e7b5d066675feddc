"""Adapters and control vectors: on the command line, over HTTP and rpc, by names given when the model is loaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("support.tiny_models", reason="needs the export extra")

import edgerun
from support.adapters import write_adapter, write_control_vector
from support.commands import Capture, fails, output_of
from support.rpc_client import rpc
from support.serving import CHAT, chat_body, served
from support.tiny_models import exported, write_checkpoint

ASKED = ("-p", "the sea", "-n", "12", "-t", "0", "--threads", "1")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a bundle, an adapter `a` and a control vector `v.gguf`."""
    folder = tmp_path_factory.mktemp("steering")
    checkpoint = write_checkpoint(folder / "checkpoint")
    exported(checkpoint, folder / "bundle")
    write_adapter(folder / "a", checkpoint)
    vector = np.random.default_rng(1).standard_normal(64).astype(np.float32)
    write_control_vector(folder / "v.gguf", {1: vector})
    return folder


@pytest.fixture(scope="module")
def expected(files: Path) -> list[str]:
    """The answers to "the sea" of the model, with the adapter, and with the vector twice."""
    options = {"max_tokens": 12, "temperature": 0.0}
    with edgerun.load(
        files / "bundle", threads=1, lora=[f"a={files / 'a'}"], control_vectors=[f"v={files / 'v.gguf'}"]
    ) as llm:
        texts = [llm.generate("the sea", **options).text, llm.generate("the sea", **options, adapter="a").text]
        texts.append(llm.generate("the sea", **options, control="v", control_strength=2.0).text)
    assert len(set(texts)) == 3
    return texts


def named(files: Path) -> tuple[str, ...]:
    return "--lora", f"a={files / 'a'}", "--control-vector", f"v={files / 'v.gguf'}"


def test_options_of_the_command_line(files: Path, expected: list[str], capsys: Capture) -> None:
    given = (files / "bundle", *ASKED, *named(files))
    choices: list[tuple[str, ...]] = [(), ("--adapter", "a"), ("--control", "v", "--control-strength", "2")]
    assert [output_of(capsys, *given, *choice).removesuffix("\n") for choice in choices] == expected
    assert "adapter is 'b'; the model was loaded with: a" in fails(capsys, *given, "--adapter", "b")
    assert "--lora is 'a'; give NAME=PATH" in fails(capsys, files / "bundle", *ASKED, "--lora", "a")
    assert "the model was loaded without" in fails(capsys, files / "bundle", *ASKED, "--adapter", "a")


def test_fields_of_requests(files: Path, expected: list[str]) -> None:
    pytest.importorskip("starlette", reason="needs the serve extra")
    body = chat_body("the sea", max_tokens=12, temperature=0)
    fields = [{}, {"adapter": "a"}, {"control": "v", "control_strength": 2}]
    with served([files / "bundle"], "--threads", "1", *named(files)) as server:
        found = [server.post(CHAT, {**body, **each})["choices"][0]["message"]["content"] for each in fields]
        assert found == expected
        # Clients name what is loaded; a path is a name that is not known.
        refused = server.request("POST", CHAT, {**body, "adapter": str(files / "a")})
        assert refused.status == 400
        assert "the model was loaded with: a" in refused.json()["error"]["message"]


def test_parameters_of_rpc(files: Path, expected: list[str]) -> None:
    with rpc(str(files / "bundle"), "--threads", "1", *named(files)) as client:
        options = {"max_tokens": 12, "temperature": 0}
        found = [client.text("the sea", **options), client.text("the sea", **options, adapter="a")]
        found.append(client.text("the sea", **options, control="v", control_strength=2))
        assert found == expected
        assert client.end() == (0, "")
