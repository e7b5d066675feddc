"""The command line: answers, JSON, one-line errors, exit codes."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgerun
from edgerun.edge.cli import run as run_module
from edgerun.edge.cli.command_line import COMMANDS
from edgerun.edge.cli.main import main
from edgerun.edge.service.offered_models import OfferedModels
from edgerun.edge.terminal.chat.chat_conversation import local_models
from support.commands import Capture, Patch, Screen, fails, json_of, output_of, standard_input
from support.processes import EDGE_RUN, started
from support.scripted_model import write_calling_bundle


def test_one_answer_is_streamed_to_stdout(tiny_bundle: Path, capsys: Capture) -> None:
    with edgerun.load(tiny_bundle) as engine:
        expected = engine.generate("the other", max_tokens=12).text
    assert main([str(tiny_bundle), "-p", "the other", "-n", "12", "--stats"]) == 0
    out, err = capsys.readouterr()
    assert out == expected if expected.endswith("\n") else expected + "\n"
    assert "12 tokens at" in err
    assert re.search(r", \d+ threads?, loaded in ", err)
    assert output_of(capsys, "run", tiny_bundle / "model.onnx", "--prompt", "the other", "--max-tokens", "12") == out


def test_typed_special_tokens_are_text_unless_an_option_allows_them(tiny_bundle: Path, capsys: Capture) -> None:
    with edgerun.load(tiny_bundle) as engine:
        prompt = f"the{engine.tokenizer.token_text('eos_token')}"
    text, special = (
        json_of(capsys, tiny_bundle, "-p", prompt, "-n", "1", "--json", *options)["usage"]["prompt_tokens"]
        for options in ([], ["--special-tokens-in-messages"])
    )
    assert text > special


def test_json_is_one_object_with_the_documented_fields(tiny_bundle: Path, capsys: Capture) -> None:
    assert main([str(tiny_bundle), "-p", "the", "-n", "5", "--json"]) == 0
    out, err = capsys.readouterr()
    reply = json.loads(out)
    assert out.count("\n") == 1
    assert err == ""
    fields = "text finish_reason usage timing speculation prompt_graphs model device on_cpu threads power"
    assert " ".join(reply) == fields
    assert reply["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 5
    assert list(reply["usage"]) == ["prompt_tokens", "reused_tokens", "completion_tokens"]
    timing = "load_ms ttft_ms measuring_ms drafter_loading_ms prefill_ms decode_tokens_per_second total_ms"
    assert " ".join(reply["timing"]) == timing
    passes = "mode target_passes drafted accepted replayed_tokens tokens_per_pass by_source"
    assert " ".join(reply["speculation"]) == f"{passes} passes_ahead passes_kept hidden_ms"
    assert reply["speculation"]["mode"] == "auto"
    assert reply["speculation"]["target_passes"] + reply["speculation"]["accepted"] == 5
    assert reply["prompt_graphs"] == {
        "tokens": {"base": reply["usage"]["prompt_tokens"]},
        "int8_refusal": "is not needed by a model below 67.1 MB",
    }
    assert reply["device"] == "CPU"


def test_json_lists_tokens_with_their_log_probabilities(tiny_bundle: Path, capsys: Capture) -> None:
    reply = json_of(capsys, tiny_bundle, "-p", "the", "-n", "5", "--json", "--logprobs", "2")
    tokens = reply["logprobs"]
    assert len(tokens) == 5
    assert bytes(byte for token in tokens for byte in token["bytes"]).decode("utf-8", "replace") == reply["text"]
    for token in tokens:
        assert list(token) == ["token_id", "text", "bytes", "logprob", "top"]
        assert token["logprob"] == token["top"][0]["logprob"] > token["top"][1]["logprob"]
    error = fails(capsys, tiny_bundle, "-p", "the", "--logprobs", "2")
    assert "--logprobs lists tokens in the JSON of an answer; add --json, or leave" in error


def test_streamed_json_is_a_line_for_each_piece_and_the_whole_object_last(tiny_bundle: Path, capsys: Capture) -> None:
    arguments = [str(tiny_bundle), "-p", "the", "-n", "20", "--spec", "off"]
    whole = json_of(capsys, *arguments, "--json", "--logprobs", "1")
    assert main([*arguments, "--json-stream", "--logprobs", "1"]) == 0
    out, err = capsys.readouterr()
    *pieces, last = map(json.loads, out.splitlines())
    assert err == ""
    assert len(pieces) > 1
    assert "".join(piece["delta"] for piece in pieces) == last["text"] == whole["text"]
    assert [token for piece in pieces for token in piece["logprobs"]] == last["logprobs"] == whole["logprobs"]
    assert list(last) == list(whole)
    assert not any("finish_reason" in piece for piece in pieces)
    assert "give one of them" in fails(capsys, *arguments, "--json", "--json-stream")


def test_streamed_json_reaches_a_pipe_while_the_answer_is_generated(endless_bundle: Path) -> None:
    command = [*EDGE_RUN, str(endless_bundle), "-p", "the", "-t", "1", "--json-stream"]
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
        for _ in range(3):
            assert list(json.loads(process.stdout.readline())) == ["delta"]
        process.stdout.close()
        assert process.wait(timeout=120) == 1
        assert process.stderr.read() == b""


@pytest.mark.parametrize(
    ("word", "command"),
    [
        *(("serv", "serve"), ("servr", "serve"), ("modles", "models"), ("Bench", "bench"), ("exprot", "export")),
        *(("chat", "run"), ("remove", "models --remove"), ("download", "pull"), ("help", "--help"), ("gui", "app")),
        *(("aap", "app"), ("rnu", "run")),
    ],
)
def test_a_mistyped_command_gets_a_suggestion(
    capsys: Capture, monkeypatch: Patch, tmp_path: Path, word: str, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    expected = f"'{word}' is neither a command nor a model; did you mean edge-run {command}?"
    assert fails(capsys, word) == expected
    assert fails(capsys, word, "-p", "a") == expected
    (tmp_path / word).mkdir()
    assert "neither a command" not in fails(capsys, word, "-p", "a")


def test_a_word_that_is_neither_a_command_nor_a_model_is_refused_before_a_prompt_is_read(
    capsys: Capture, monkeypatch: Patch
) -> None:
    class Unread(io.BytesIO):
        def read(self, *_arguments: Any) -> bytes:
            pytest.fail("standard input was read")

    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(Unread(b"a prompt"), encoding="utf-8"))
    for arguments in (["whoami"], ["signin", "mistral"], ["copy", "a", "b"], ["mistral", "-n", "5"], ["run", "m.onnx"]):
        word = arguments[arguments[0] == "run"]
        said = fails(capsys, *arguments)
        assert said.startswith(f"'{word}' is neither a command nor a model; commands: app, run, complete, export, ")
        assert said.endswith(", rpc")
    assert fails(capsys, "create", "mistral").endswith("nor a model; did you mean edge-run export?")
    assert fails(capsys, "shel-helper").endswith("; did you mean edge-run shell-helper?")
    for arguments in (["-n", "5", "whoami"], ["./ps"]):
        assert fails(capsys, *arguments) == f"{arguments[-1]} does not exist; give an .onnx file or a model folder"


def test_commands_have_the_names_of_other_programs(tiny_bundle: Path, capsys: Capture) -> None:
    listed = output_of(capsys, "models")
    assert "shell-helper" in listed
    assert output_of(capsys, "list") == output_of(capsys, "ls") == listed
    assert output_of(capsys, "show", tiny_bundle) == output_of(capsys, "inspect", tiny_bundle)
    assert fails(capsys, "rm", "org/name") == fails(capsys, "models", "--remove", "org/name")
    assert fails(capsys, "rm", "--json", "org/name") == fails(capsys, "models", "--remove", "org/name")
    assert "requires an argument" in fails(capsys, "rm", "--json")
    assert fails(capsys, "rm").endswith("requires an argument; see edge-run models --help")
    assert output_of(capsys, "rm", "--help") == output_of(capsys, "models", "--help")


def test_the_bundled_model_has_a_name_and_cannot_be_removed(capsys: Capture) -> None:
    assert fails(capsys, "models", "--remove", "shell-helper") == (
        "shell-helper comes with edge-run and cannot be removed; name a model that edge-run pull downloaded"
    )
    expected = output_of(capsys, "-p", "list files", "-n", "8")
    assert output_of(capsys, "shell-helper", "-p", "list files", "-n", "8") == expected


def test_the_prompt_may_come_on_standard_input_and_be_refused(
    tiny_bundle: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    expected = output_of(capsys, tiny_bundle, "-p", "the other", "-n", "6")
    standard_input(monkeypatch, b"the other\n")
    assert output_of(capsys, tiny_bundle, "-n", "6") == expected
    standard_input(monkeypatch, b"")
    assert fails(capsys, tiny_bundle) == "the prompt is empty; give -p TEXT, or text on standard input"
    standard_input(monkeypatch, b"\xff\xfe")
    assert fails(capsys, tiny_bundle) == "standard input is not UTF-8 text; convert it first"
    monkeypatch.setattr("sys.stdin", None)
    assert "the prompt is empty" in fails(capsys, tiny_bundle)


def test_sampling_penalties_biases_and_the_end_reach_the_sampler(tiny_bundle: Path, capsys: Capture) -> None:
    with edgerun.load(tiny_bundle) as engine:
        end = next(iter(engine.tokenizer.eos))
        bias_to_end = {"logit_bias": {end: 100.0}}
        options: list[tuple[list[str], dict[str, Any]]] = [
            (["-t", "1.2", "--top-k", "50", "--seed", "1"], {"temperature": 1.2, "top_k": 50, "seed": 1}),
            (["-t", "1", "--top-p", "0.9", "--seed", "2"], {"temperature": 1.0, "top_p": 0.9, "seed": 2}),
            (["-t", "1", "--min-p", "0.01", "--seed", "3"], {"temperature": 1.0, "min_p": 0.01, "seed": 3}),
            (["--repeat-penalty", "1.1"], {"repeat_penalty": 1.1}),
            (["--presence-penalty", "1.5"], {"presence_penalty": 1.5}),
            (["--frequency-penalty", "-0.5"], {"frequency_penalty": -0.5}),
            (["--logit-bias", "70=100", "--logit-bias", "71=99.5"], {"logit_bias": {70: 100, 71: 99.5}}),
            (["--ignore-eos", "--logit-bias", f"{end}=100"], {"ignore_eos": True, **bias_to_end}),
        ]
        for arguments, changes in options:
            expected = engine.generate("the", max_tokens=12, **changes)
            assert expected != engine.generate("the", max_tokens=12)
            reply = json_of(capsys, tiny_bundle, "-p", "the", "-n", "12", "--json", *arguments)
            assert reply["text"] == expected.text
            assert reply["usage"]["completion_tokens"] == expected.stats.completion_tokens
        assert expected.stats.completion_tokens == 12
        assert engine.generate("the", max_tokens=12, **bias_to_end).stats.completion_tokens == 1


def test_the_size_of_the_prefix_cache(tiny_bundle: Path, monkeypatch: Patch) -> None:
    sizes = []

    def opening(*arguments: Any, **options: Any) -> edgerun.Engine:
        engine = edgerun.load(*arguments, **options)
        sizes.append(engine.model.prefixes.max_bytes)
        return engine

    monkeypatch.setattr(run_module, "open_model", opening)
    for option in ("0", "1.5MB"):
        assert main([str(tiny_bundle), "-p", "the", "-n", "2", "--spec", "off", "--prefix-cache", option]) == 0
    assert sizes == [0, 1_500_000]


def test_stop_may_be_repeated(tiny_bundle: Path, capsys: Capture) -> None:
    asked = (tiny_bundle, "-p", "the", "-n", "30")
    text = output_of(capsys, *asked)
    stopped = output_of(capsys, *asked, "--stop", "\x00never", "--stop", text[5:8])
    assert stopped == text[: text.index(text[5:8])] + "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-p", "a", "-n", "0"], "greater than or equal to 1"),
        (["-p", "a", "-n", "many"], "--max-tokens"),
        (["-p", "a", "-t", "nan"], "'--temperature'"),
        (["-p", "a", "--top-p", "0"], "top-p is 0.0; it must be above 0 and at most 1"),
        (["-p", "a", "--logit-bias", "12"], "--logit-bias is '12'; give a token id and what to add, such as 42=-1.5"),
        (["-p", "a", "--prefix-cache", "2000"], "--prefix-cache is '2000'; write a number and a unit, such as 512MB"),
        (["-p", "a", "--context", "9999"], "allows at most 256, unless it is exported with a longer --context"),
        (["-p", "a", "--stop", ""], "it must be a non-empty string, or several"),
        (["-p", "a", "--device", "abacus"], "this machine has no device 'abacus'; available: "),
        (["-p", "a", "--xyz"], "No such option: --xyz; see edge-run run --help"),
        (["-p", ""], "the prompt is empty"),
        (["-p", "x" * 300], "tokens and the model's context is 256; shorten it"),
        (["-p", "a", "--raw", "--system", "b"], "a raw prompt has no system message"),
        (["-p", "a", "--resume", "nothing.kv"], "nothing.kv cannot be read: No such file"),
    ],
)
def test_bad_usage_is_a_one_line_error(tiny_bundle: Path, capsys: Capture, arguments, message: str) -> None:
    assert message in fails(capsys, tiny_bundle, *arguments)


def test_bad_models_are_a_one_line_error(tmp_path: Path, capsys: Capture) -> None:
    nothing, text = tmp_path / "no", tmp_path / "text.onnx"
    assert fails(capsys, nothing, "-p", "a") == f"{nothing} does not exist; give an .onnx file or a model folder"
    text.write_text("this is\nnot a model", encoding="utf-8")
    assert f"{text} is not an ONNX model" in fails(capsys, text, "-p", "a", "--context", "64")
    assert "extra argument" in fails(capsys, tmp_path / "a", tmp_path / "b")


def test_too_little_memory_is_a_one_line_error(tiny_bundle: Path, capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setattr(run_module, "open_model", lambda *_, **__: np.empty(1 << 60, np.uint8))
    assert main([str(tiny_bundle), "-p", "a"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("edge-run: error: not enough memory: Unable to allocate 1.00 EiB for an array")
    assert line.endswith("; use a shorter --context or a smaller model, or close other programs")
    assert main([str(tiny_bundle), "-p", "a", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("missing", "arguments", "message"),
    [
        ("onnx", ("export", "model", "out"), 'export needs the package onnx; pip install "edge-run[export]"'),
        ("torch", ("train-draft", "a", "b", "--text", "c"), 'the package torch; pip install "edge-run[train]"'),
        ("uvicorn", ("serve",), 'the server needs the package uvicorn; pip install "edge-run[serve]"'),
        ("uvicorn", ("app",), 'the app needs the package uvicorn; pip install "edge-run[app]"'),
        ("webview", ("app", "--window"), 'a window needs the package pywebview; pip install "edge-run[window]"'),
    ],
)
def test_a_plain_install_shows_the_options_and_which_extra_is_missing(
    missing: str, arguments: tuple[str, ...], message: str
) -> None:
    hide = f"import sys; sys.modules[{missing!r}] = None; from edgerun.edge.cli.main import main; sys.exit(main())"

    def done(*given: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", hide, *given]
        return subprocess.run(command, capture_output=True, encoding="utf-8", check=False)

    if missing == "onnx":  # its options are those of a record of the exporter
        assert "--budget" in done(arguments[0], "--help").stdout
    refused = done(*arguments)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert refused.stderr.endswith(f"{message}\n")


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_every_command_has_help_with_an_example(command: list[str], capsys: Capture) -> None:
    assert "Example" in output_of(capsys, *command, "--help")
    assert command or output_of(capsys, "--version") == f"edge-run {edgerun.__version__}\n"


def test_inspect_describes_a_model(tiny_bundle: Path, tmp_path: Path, capsys: Capture) -> None:
    facts = json_of(capsys, "inspect", tiny_bundle, "--json")
    assert (facts["family"], facts["layers"], facts["vocabulary"], facts["context"]) == ("llama", 2, 300, 256)
    assert facts["token_trees"] is True
    assert facts["simultaneous_answers"] == "share passes"
    assert "bits per weight in file" in output_of(capsys, "inspect", tiny_bundle)
    assert "does not exist" in fails(capsys, "inspect", "nothing")
    calling = write_calling_bundle(tmp_path)
    tags = json_of(capsys, "inspect", calling, "--json")["reasoning_tags"]
    assert tags == {"opening": "<think>", "closing": "</think>"}
    assert "<think> ... </think>" in output_of(capsys, "inspect", calling)


def test_inspect_shows_all_but_the_tokens_of_a_graph_without_a_tokenizer(
    tiny_bundle: Path, tmp_path: Path, capsys: Capture
) -> None:
    for name in ("model.onnx", "model.onnx.data"):
        shutil.copy(tiny_bundle / name, tmp_path / name)
    facts = json_of(capsys, "inspect", str(tmp_path / "model.onnx"), "--json")
    assert (facts["layers"], facts["vocabulary"], facts["token_trees"]) == (2, 300, True)
    assert (facts["tokenizer"], facts["chat_template"], facts["end_tokens"]) == (False, False, [])
    assert facts["context"] is None
    assert "tokenizer" in output_of(capsys, "inspect", tmp_path)
    assert json_of(capsys, "inspect", tmp_path, "--tokenizer", tiny_bundle, "--json")["tokenizer"] is True


def test_devices_lists_the_cpu(capsys: Capture) -> None:
    described = json_of(capsys, "devices", "--json")
    assert 1 <= described["threads"]["default"] <= described["threads"]["processors"]
    devices = described["devices"]
    assert any(device["kind"] == "cpu" and device["default"] for device in devices)
    shown = output_of(capsys, "devices")
    assert "cpu" in shown
    threads = described["threads"]
    assert f"threads on the CPU: {threads['default']} by default, {threads['saver']} with --power saver" in shown


def test_export_from_the_command_line(tiny_bundle: Path, tmp_path: Path, capsys: Capture) -> None:
    source = tiny_bundle.parent / "checkpoint"
    out = tmp_path / "out"
    assert main(["export", str(source), str(out), "--weights", "int4", "--block", "64", "--head", "int8"]) == 0
    shown, err = capsys.readouterr()
    stages = [line.removeprefix("edge-run: progress: ") for line in err.splitlines()]
    assert stages[:2] == ["writing weights", "checking"], "stages as plain lines, without a terminal"
    # The head of 8 bits takes 8 + 32 / 64 bits in the file and 8 + 64 / 64 as read, the others of 64 columns 4.5 and 5.
    (both,) = re.findall(r"bits per weight: (\d+\.\d\d) as read per token, (\d+\.\d\d) in the file", shown)
    (quality,) = [line for line in shown.splitlines() if "KL" in line]
    assert quality.startswith("quality on a sample text of 64 tokens: mean KL ")
    assert "perplexity" in quality
    recorded = json.loads((out / "edge.json").read_text(encoding="utf-8"))
    assert f"mean KL {recorded['quality']['mean_kl']:#.3g}," in quality
    assert recorded["parity"].keys() == {"max_abs_diff", "mean_kl", "top1_agreement"}
    facts = json_of(capsys, "inspect", out, "--json")
    assert facts["weights"] == {"int8/64": 2, "int4/64": 6, "int4/32": 2}, "rows of 96 fill no blocks of 64"
    read, in_file = (facts[f"bits_per_weight_{place}"] for place in ("read", "in_file"))
    # Two decimals of the number beside three of it.
    assert [read, in_file] == pytest.approx([float(each) for each in both], abs=0.0056)
    assert read > in_file
    assert facts["made_by"].startswith("edge-run export")
    assert facts["quality_measured_on"] == "a short sample text"
    assert output_of(capsys, "inspect", out).count("mean KL") == 1
    assert main(["export", str(source), str(tmp_path / "exact"), "--weights", "fp32"]) == 0
    assert "KL" not in capsys.readouterr().out, "nothing was quantized"
    assert main([str(out), "-p", "the", "-n", "3"]) == 0
    capsys.readouterr()
    fails(capsys, "export", source, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"out", "exact"}, "a folder with other files stays"


def test_an_export_has_a_name_that_the_last_line_and_the_lists_say(
    tiny_bundle: Path, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("EDGERUN_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(tiny_bundle.parent / "checkpoint"), "my model", "--weights", "fp32"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last == "to run it: edge-run 'my model'"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main([*shlex.split(last.removeprefix("to run it: edge-run ")), "-p", "the", "-n", "3", "--raw"]) == 0
    capsys.readouterr()
    folder = tmp_path / "my model"
    (listed,) = [each for each in json_of(capsys, "models", "--json")["models"] if each["id"] == "my model"]
    assert (listed["path"], listed["commit"]) == (str(folder), "")
    assert listed["bytes"] == sum(path.stat().st_size for path in folder.rglob("*"))
    assert re.search(r"^my model +exported +", output_of(capsys, "models"), re.MULTILINE)
    for offered in (OfferedModels([]), OfferedModels([str(tiny_bundle)])):
        offered.local = True
        assert offered.find("my model").source == offered.find(str(folder)).source == str(folder)
    assert OfferedModels(["my model"]).find(None).source == str(folder)
    assert "my model" in local_models()
    refused = fails(capsys, "models", "--remove", "my model")
    assert refused == f"my model was not downloaded but exported; remove its folder yourself: {folder}"
    shutil.rmtree(folder)
    assert "my model" not in output_of(capsys, "models") + "".join(local_models())
    *_, last = output_of(capsys, "export", tiny_bundle.parent / "checkpoint", "serve", "--weights", "fp32").splitlines()
    assert last == f"to run it: edge-run {os.path.join('.', 'serve')}", "which is a command, too"


@pytest.mark.skipif(sys.platform == "win32", reason="a POSIX shell")
@pytest.mark.parametrize(
    ("redirection", "code", "message"),
    [("| head -c 1", 1, b""), (">/dev/full", 1, b"No space left on device"), (">&-", 1, b"standard output is closed")],
)
def test_a_broken_standard_output_ends_the_program(
    tiny_bundle: Path, redirection: str, code: int, message: bytes
) -> None:
    command = f"{shlex.join([*EDGE_RUN, str(tiny_bundle), '-p', 'the', '-n', '150'])} {redirection}"
    result = subprocess.run(
        ["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=120,
        check=False,
    )
    assert result.returncode == code
    assert message in result.stderr
    assert b"Traceback" not in result.stderr
    assert result.stderr.count(b"\n") == (1 if message else 0)


@pytest.mark.skipif(sys.platform == "win32", reason="a POSIX shell")
def test_any_character_can_be_written_whatever_the_locale(tiny_bundle: Path) -> None:
    result = subprocess.run(
        [*EDGE_RUN, str(tiny_bundle), "-p", "é", "-n", "60", "-t", "1", "--seed", "1", "--raw"],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout.decode("utf-8")


def test_the_wait_for_a_first_answer_is_shown_on_a_terminal_and_gone_with_the_answer(
    tiny_bundle: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    screen = Screen()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr("edgerun.models.progress._PATIENCE_S", 0.0)
    arguments = [str(tiny_bundle), "-p", "x" * 200, "-n", "2", "--raw", "--no-cache", "--stats"]
    with monkeypatch.context() as patch:
        patch.setattr("sys.stderr", screen)
        assert main(arguments) == 0
    bars, _, statistics = screen.getvalue().rpartition("\x1b[2K")  # erases a line
    assert "measuring the speed of this model" in bars
    assert "reading the prompt" in bars
    assert "ms measuring this model, " in statistics
    assert "%" not in statistics
    capsys.readouterr()
    assert main(arguments) == 0
    assert capsys.readouterr().err.count("\n") == 1, "nothing but the statistics where there is no terminal"
