"""The clients in examples/rpc, each run where its toolchain is installed."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

import edgerun
from support.nightly import some_nightly
from support.processes import EDGE_RUN

CLIENTS = Path(__file__).resolve().parents[3] / "examples" / "rpc"
TOOLS = {"node": ("node",), "csharp": ("mcs", "mono"), "rust": ("rustc",)}
LIMIT_S = 300


def built(language: str, folder: Path) -> list[str]:
    """Compile a client where that is necessary, and return the command that runs it."""
    if language == "node":
        return ["node", str(CLIENTS / "client.mjs")]
    if language == "csharp":
        run(["mcs", "-warnaserror", f"-out:{folder / 'Client.exe'}", str(CLIENTS / "Client.cs")])
        return ["mono", str(folder / "Client.exe")]
    run(["rustc", "-D", "warnings", "-o", str(folder / "client"), str(CLIENTS / "client.rs")])
    return [str(folder / "client")]


def run(command: Sequence[str], **environment: str) -> str:
    done = subprocess.run(command, capture_output=True, check=False, env={**os.environ, **environment}, timeout=LIMIT_S)
    assert (done.returncode, done.stderr.decode()) == (0, ""), done.stdout.decode()
    return done.stdout.decode()


def require_tools(language: str) -> None:
    """Skip the test without the language's tools, unless EDGERUN_RPC_CLIENTS says that they have to be there."""
    if missing := [tool for tool in TOOLS[language] if shutil.which(tool) is None]:
        if os.environ.get("EDGERUN_RPC_CLIENTS"):
            pytest.fail(f"{missing[0]} is not installed")
        pytest.skip(f"needs {missing[0]}")


@pytest.fixture(scope="session")
def expected(long_bundle: Path) -> dict[str, str]:
    """What the clients ask, answered by the library."""
    options = edgerun.GenerateOptions(max_tokens=24, temperature=0)
    with edgerun.load(long_bundle) as engine, engine.session() as chat:
        return {
            "answer": engine.generate([{"role": "user", "content": "list files"}], options).text,
            "session": chat.send("list files", options).text,
            "restored": chat.send("only hidden ones", options).text,
        }


@pytest.mark.skipif(os.name == "nt", reason="puts a shell script on the path")
@pytest.mark.parametrize("language", some_nightly(TOOLS, 3))
def test_a_client_loads_streams_cancels_saves_and_restores(
    language: str, long_bundle: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    require_tools(language)
    command = tmp_path / "bin" / "edge-run"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {shlex.join(EDGE_RUN)} "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    path = f"{command.parent}{os.pathsep}{os.environ['PATH']}"
    program = built(language, tmp_path)
    output = run([*program, str(tmp_path / "chat.session"), str(long_bundle)], PATH=path)
    assert "version 1\n" in output
    assert "progress loading the model 0" in output
    assert "progress loading the model 1" in output
    for name, text in expected.items():
        assert f"{name} {text}\n" in output, name
    assert "cancelled -32000\n" in output
    assert "from the cache true\n" in output
    assert output.count("end 0\n") == 2
