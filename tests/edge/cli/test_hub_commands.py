"""Commands that use models of the Hugging Face Hub, with a local server in its place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("onnx", reason="needs the export extra")

import edgerun
from edgerun.edge.cli.main import main
from edgerun.edge.terminal.chat.chat_conversation import local_models
from support.commands import Capture, Patch, fails, json_of, output_of
from support.encoders import write_encoder
from support.hub_server import HubServer, files_of, own_hub, sha256
from support.processes import EDGE_RUN, started

NOWHERE = "is neither a model on the hub nor a file or folder on this machine"


@pytest.fixture
def hub(tmp_path: Path, tiny_bundle: Path) -> Iterator[HubServer]:
    """A hub with a model in edge-run's layout, and the same model in that of transformers.js."""
    with own_hub(tmp_path / "hf") as server:
        files = files_of(tiny_bundle)
        server.repo("org/tiny", files)
        graphs = {f"onnx/{name}": data for name, data in files.items() if name.startswith("model.onnx")}
        others = {
            name: data for name, data in files.items() if not name.startswith("model.onnx") and name != "edge.json"
        }
        server.repo("org/js", {**others, **graphs, "onnx/model_q4f16.onnx": files["model.onnx"]})
        yield server


def run(arguments: list[str], capsys: Capture) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_model_on_the_hub_answers(hub: HubServer, tiny_bundle: Path, capsys: Capture) -> None:
    answer_options = ["-p", "ab", "-n", "12", "--spec", "off"]
    expected = run([str(tiny_bundle), *answer_options], capsys)
    assert expected[0] == 0
    for name in ("org/tiny", "org/js", "org/js:fp32", "org/tiny@main"):
        assert run([name, *answer_options], capsys) == expected
    assert run(["org/tiny", *answer_options[:4], "--draft", "org/tiny"], capsys) == expected
    assert run(["org/tiny", *answer_options, "--offline"], capsys) == expected
    assert json_of(capsys, "inspect", "org/js", "--json")["layers"] == 2
    assert "onnx/model_q4f16.onnx" not in hub.bodies()


def test_pull_prints_the_folder_of_a_model(hub: HubServer, capsys: Capture) -> None:
    facts = json_of(capsys, "pull", "org/js", "--json")
    assert facts["command"] == "edge-run org/js:fp32"
    assert facts["commit"] == hub.repos["org/js"].refs["main"]
    assert facts["bytes"] == sum(facts["files"].values())
    assert {path.name for path in Path(facts["path"]).iterdir()} == {*facts["files"], "hub.json"}
    assert output_of(capsys, "pull", "org/js:fp32@main").splitlines() == [
        f"org/js:fp32: {facts['bytes'] / 1000:.3g} kB, commit {facts['commit'][:10]}",
        f"in {facts['path']}",
        "to run it: edge-run org/js:fp32@main",
    ]


def test_a_pulled_model_is_found_despite_a_folder_of_its_owners_name(
    hub: HubServer, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    assert run(["org/tiny", "-p", "a"], capsys)[0] == 2
    assert hub.seen == []
    assert run(["pull", "org/tiny"], capsys)[0] == 0
    assert run(["org/tiny", "-p", "ab", "-n", "2", "--spec", "off"], capsys)[0] == 0


def test_pull_names_older_commits(hub: HubServer, capsys: Capture) -> None:
    repo = hub.repos["org/tiny"]
    old = repo.refs["main"]
    output_of(capsys, "pull", "org/tiny")
    repo.put({**repo.commits[old], "README.md": b"more"})
    said = output_of(capsys, "pull", "org/tiny").splitlines()
    remove = f"models --remove org/tiny@{old[:10]}"
    assert f"an older commit is still on disk; to remove it: edge-run {remove}" in said
    output_of(capsys, *remove.split())
    assert main(["org/tiny", "-p", "ab", "-n", "2"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["org/none", "-p", "a"], f"org/none {NOWHERE}"),
        (["pull", "model"], "'model' is not an id of a model on the Hugging Face Hub; write org/name"),
        (["pull", "org/tiny", "--offline"], "org/tiny is not downloaded, and edge-run is offline; run"),
        (["org/tiny", "-p", "a", "--offline"], "org/tiny is not downloaded, and edge-run is offline"),
        (["models", "--remove", "org/tiny"], "org/tiny is not downloaded; edge-run models lists what is"),
        (
            ["models", "--remove", "../tiny"],
            "'../tiny' is not an id of a model on the Hugging Face Hub; write org/name",
        ),
    ],
)
def test_failures_are_a_one_line_error(hub: HubServer, capsys: Capture, arguments: list[str], message: str) -> None:
    code, out, err = run(arguments, capsys)
    assert (code, out) == (1 if "--offline" in arguments else 2, "")
    assert err.startswith(f"edge-run: error: {message}")
    assert err.count("\n") == 1


def test_models_are_listed_and_removed(hub: HubServer, tmp_path: Path, capsys: Capture) -> None:
    assert run(["models"], capsys)[1].splitlines()[-1].startswith("no downloaded models yet; to get one: edge-run pull")
    hub.repo("org/vectors", files_of(write_encoder(tmp_path / "vectors")))
    for name in ("org/tiny", "org/js:fp32", "org/js:q4f16", "org/vectors"):
        assert main(["pull", name]) == 0
    capsys.readouterr()
    listed = [model for model in json_of(capsys, "models", "--json")["models"] if model["commit"]]
    models = [("org/js", "fp32"), ("org/js", "q4f16"), ("org/tiny", ""), ("org/vectors", "")]
    assert [(model["id"], model["variant"]) for model in listed] == models
    assert [model["capabilities"][0] for model in listed] == [*["completion"] * 3, "embedding"]
    assert all(Path(model["path"]).is_dir() and model["bytes"] > 0 and model["last_used"] for model in listed)
    shown = [line.split() for line in output_of(capsys, "models").splitlines() if "org/" in line]
    assert [words[0] for words in shown] == ["org/js:fp32", "org/js:q4f16", "org/tiny", "org/vectors"]
    assert shown[3][-1] == "embedding"
    assert [name for name in local_models() if "org/" in name] == ["org/js:fp32", "org/js:q4f16", "org/tiny"]

    fails(capsys, "models", "--remove", "org/js:q9")
    assert (
        output_of(capsys, "models", "--remove", "org/js:FP32").splitlines()[0]
        == f"removed org/js:fp32, commit {hub.repos['org/js'].refs['main'][:10]}"
    )
    assert [Path(model["path"]).is_dir() for model in listed] == [False, True, True, True]
    removed = json_of(capsys, "models", "--remove", "org/js", "--json")["removed"]
    assert [entry["variant"] for entry in removed] == ["q4f16"]
    kept = {path.name for path in (tmp_path / "hf" / "assets" / "edge-run" / "models").iterdir()}
    assert kept == {"org--tiny", "org--vectors"}


def test_export_downloads_its_checkpoint_from_the_hub(
    hub: HubServer, tiny_bundle: Path, tmp_path: Path, capsys: Capture
) -> None:
    hub.repo("org/ckpt", {**files_of(tiny_bundle.parent / "checkpoint"), "README.md": b"-"})
    no_graph = "org/ckpt holds no .onnx file; export its checkpoint: edge-run export org/ckpt OUT"
    assert no_graph in fails(capsys, "org/ckpt", "-p", "ab")
    code, _, err = run(["export", "org/ckpt", str(tmp_path / "out"), "--weights", "fp32"], capsys)
    assert (code, [line for line in err.splitlines() if not line.startswith("edge-run: progress: ")]) == (0, [])
    made_by = json.loads((tmp_path / "out" / "edge.json").read_text(encoding="utf-8"))["command"]
    assert made_by == "edge-run export org/ckpt out --weights fp32"
    answer_options = ["-p", "ab", "-n", "12", "--spec", "off"]
    assert run([str(tmp_path / "out"), *answer_options], capsys) == run([str(tiny_bundle), *answer_options], capsys)


@contextmanager
def start(arguments: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start `edge-run` in another process, with the package and the hub of this one."""
    environment = {**os.environ, "PYTHONWARNINGS": "error,ignore::EncodingWarning"}
    with started([*EDGE_RUN, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        yield process


def test_a_killed_download_is_resumed(hub: HubServer, tiny_bundle: Path, tmp_path: Path) -> None:
    files = {name: data for name, data in files_of(tiny_bundle).items() if name != "edge.json"}
    # The library writes ten million bytes at a time.
    files["model.onnx.data"] += bytes(14 << 20)
    hub.repo("org/large", files)
    hub.faults.stall["model.onnx.data"] = 12 << 20
    partial = tmp_path / "hf/assets/edge-run/models/org--large/partial" / sha256(files["model.onnx.data"])
    with start(["pull", "org/large"]) as process:
        while process.poll() is None and not (partial.is_file() and partial.stat().st_size):
            time.sleep(0.02)
        process.kill()
        assert process.communicate() == (b"", b"")
    came = partial.stat().st_size
    assert 0 < came < len(files["model.onnx.data"])
    hub.faults.stall.clear()
    hub.seen.clear()
    with start(["org/large", "-p", "ab", "-n", "12"]) as process:
        out, err = process.communicate()
    assert (process.returncode, err) == (0, b"")
    assert out.decode() == edgerun.load(tiny_bundle).generate("ab", max_tokens=12).text + "\n"
    assert [seen.range for seen in hub.seen if "/cdn/" in seen.path and seen.path.endswith(".data")] == [
        f"bytes={came}-"
    ]
    assert not partial.exists()


def test_the_hub_library_is_imported_only_when_needed(hub: HubServer, tiny_bundle: Path, tmp_path: Path) -> None:
    program = (
        "import sys, edgerun; edgerun.load(sys.argv[1]); from edgerun.edge.cli.main import main; main(['models']);"
        "sys.exit('huggingface_hub' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(tiny_bundle)], check=True, capture_output=True)
