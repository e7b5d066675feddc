"""`edge-run train-draft`, from the outside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import edgerun
from edgerun.edge.cli.main import main
from edgerun.export import FP32, INT4, WeightFormat
from support.commands import Capture
from support.tiny_models import write_bundle, write_checkpoint


def prompts(folder: Path, count: int = 24) -> Path:
    path = folder / "prompts.jsonl"
    rows = [{"messages": [{"role": "user", "content": f"the thing {n} of them"}]} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def train(capsys: Capture, *arguments: object) -> tuple[int, str, str]:
    pytest.importorskip("torch")
    given = ["--steps", 6, "--batch-tokens", 200, "-n", 12, "--evaluate-every", 3, "--held-out", 4, "--device", "cpu"]
    code = main(["train-draft", *map(str, arguments), *map(str, given)])
    found = capsys.readouterr()
    return code, found.out, found.err


def test_a_draft_is_trained_and_exported_with_its_target(tmp_path: Path, capsys: Capture) -> None:
    target, out, text = write_bundle(tmp_path / "target"), tmp_path / "draft", prompts(tmp_path)
    code, printed, errors = train(capsys, target, out, "--text", text, "--hidden-size", 64, "--json")
    assert (code, errors) == (0, "")
    record = json.loads(printed)
    assert record["step"] == 6
    assert [each["step"] for each in record["history"]] == [3, 6]
    assert record["best"] == max(each["tokens_per_pass"] for each in record["history"]) >= 1
    # The same command finds the work done.
    assert json.loads(train(capsys, target, out, "--text", text, "--hidden-size", 64, "--json")[1]) == record
    checkpoint = tmp_path / "target" / "checkpoint"
    arguments = ["--draft", str(out), "--calibration-tokens", "1200"]
    assert main(["export", str(checkpoint), str(tmp_path / "pair"), *arguments]) == 0
    capsys.readouterr()
    with edgerun.load(tmp_path / "pair", device="cpu") as engine:
        assert engine.model.drafters.draft_model() is not None
        answers = [
            engine.generate("the thing", temperature=0.0, max_tokens=20, speculation=speculation).text
            for speculation in (edgerun.Speculation.parse("model"), edgerun.Speculation.OFF)
        ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("loss", ["ce", "tvd++"])
def test_other_losses_continue_a_draft(tmp_path: Path, capsys: Capture, loss: str) -> None:
    target, text = write_bundle(tmp_path / "target"), prompts(tmp_path)
    assert train(capsys, target, tmp_path / "first", "--text", text, "--hidden-size", 64)[0] == 0
    code, printed, errors = train(
        capsys, target, tmp_path / "second", "--text", text, "--init", tmp_path / "first", "--loss", loss
    )
    assert (code, errors) == (0, "")
    assert printed.splitlines()[-1].endswith("of 6")
    config = json.loads((tmp_path / "second" / "config.json").read_text(encoding="utf-8"))
    assert (config["hidden_size"], config["vocab_size"], config["eos_token_id"]) == (64, 300, 0)


@pytest.mark.parametrize("weights", [FP32, INT4], ids=str)
def test_a_head_is_trained(tmp_path: Path, capsys: Capture, weights: WeightFormat) -> None:
    target, out = write_bundle(tmp_path / "target", weights=weights, num_hidden_layers=4), tmp_path / "head"
    code, printed, errors = train(
        capsys, target, out, "--text", prompts(tmp_path), "--head", "eagle3", "--draft-vocab", 40, "--json"
    )
    assert (code, errors) == (0, "")
    assert json.loads(printed)["step"] == 6
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["draft_vocab_size"] <= 40
    assert (out / "model.safetensors").is_file()


def test_a_folder_belongs_to_one_request(tmp_path: Path, capsys: Capture) -> None:
    target, out, text = write_bundle(tmp_path / "target"), tmp_path / "draft", prompts(tmp_path)
    assert train(capsys, target, out, "--text", text, "--hidden-size", 64)[0] == 0
    code, _, errors = train(capsys, target, out, "--text", text, "--hidden-size", 32, "-t", 1)
    assert code == 2
    assert errors == (
        f"edge-run: error: {out} has a run with other settings: answers, size; give the same options to continue it, "
        "or another folder\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--round", "3/7"], "--round: '3/7' is not BITS/BLOCK"),
        (["--hidden-size", "50"], "--hidden-size is 50; give a multiple of 32"),
        (["--head", "eagle3"], "an EAGLE-3 head reads three layers of its target, which has 2"),
        (["--limit", "4"], "4 prompts are too few with 4 held out"),
        (["--init", "nowhere"], "nowhere is not a draft model to start from"),
    ],
)
def test_what_cannot_be_trained_is_one_line(
    tmp_path: Path, capsys: Capture, arguments: list[str], message: str
) -> None:
    target = write_bundle(tmp_path / "target")
    code, _, errors = train(capsys, target, tmp_path / "out", "--text", prompts(tmp_path), *arguments)
    assert code == 2
    assert errors.startswith(f"edge-run: error: {message}")
    assert errors.count("\n") == 1


@pytest.mark.parametrize("damage", ["a list", "a text for a number", "cut off"])
def test_a_damaged_draft_to_start_from_is_refused(tmp_path: Path, capsys: Capture, damage: str) -> None:
    target, text = write_bundle(tmp_path / "target"), prompts(tmp_path)
    initial = write_checkpoint(tmp_path / "initial", tie_word_embeddings=True)
    if damage == "cut off":
        (initial / "model.safetensors").write_bytes(b"x" * 100)
    else:
        config = json.loads((initial / "config.json").read_bytes()) | {"hidden_size": "wide"}
        (initial / "config.json").write_text("[]" if damage == "a list" else json.dumps(config), encoding="utf-8")
    code, _, errors = train(capsys, target, tmp_path / "draft", "--text", text, "--init", initial)
    assert code == 2
    assert "is not a draft model to start from" in errors


def test_a_time_limit_of_nothing_is_refused(tmp_path: Path, capsys: Capture) -> None:
    target, text = write_bundle(tmp_path / "target"), prompts(tmp_path)
    code, _, errors = train(capsys, target, tmp_path / "draft", "--text", text, "--minutes", 0)
    assert code == 2
    assert "above 0" in errors
