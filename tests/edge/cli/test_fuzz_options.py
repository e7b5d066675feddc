"""Random options and damaged bundles: exit code 0, 1 or 2, one line of error, and bounded time and memory."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgerun.edge.cli.command_line import _command_line
from edgerun.models.find import bundled_folder
from support import command_worker
from support.command_worker import CommandWorker, Outcome, needs_limits
from support.commands import Patch
from support.random_damage import Damage, fresh_copy, recompute_digests

pytestmark = needs_limits
NAMES = ("bench", "devices", "export", "inspect", "models", "pull", "run", "tune", "verify")
PARTS = 4
CASES = 125
VALUES = (
    *("0", "1", "-1", "2", "7", "1024", "3000000000", str(1 << 63), str(10**40), "1" * 5000, "0x10", "1e3", "٣"),
    *("0.5", "nan", "inf", "-inf", "1e400", "1e-400", "", " ", "x", "auto", "none", "off", "all", "cpu", "gpu", "npu"),
    *("suffix", "suffix,model", "suffix,,", "model", "chain", "tree", "int4", "fp32", "mixed", "3.5bpw", "self"),
    *("\x1b[31m", "é", "\ud800", "a" * 5000, "{", "org/name", "org/name:q4@main", "../..", "/", "/dev/zero"),
    *("/dev/null", "~nobody/x"),
    *("FOLDER", "MODEL", "FILE", "MISSING", "PIPE", "-", "--", "-p", "1-2", "2-", "9-1", "--help"),
)
ALWAYS: dict[str, list[str]] = {
    "bench": ["-n", "2", "--limit", "1", "--turns", "1"],
    "verify": ["-n", "2", "--limit", "1"],
    "tune": ["--context", "64"],
    "run": ["-n", "2"],
    "export": ["--calibration-tokens", "64", "--time-limit", "0"],
}
"""Options that come last, so that a combination that is right does not take long."""

GOOD: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("max_tokens", "context", "threads", "top_k", "seed", "limit", "calibration_tokens"), ("2", "64")),
    **dict.fromkeys(("temperature", "top_p", "min_p", "repeat_penalty", "time_limit", "bandwidth"), ("0.5", "0.9")),
    **dict.fromkeys(("weights", "head", "draft_weights"), ("int8", "int4", "fp32", "int2")),
    **dict.fromkeys(("prompts", "replay", "text", "calibration", "plan", "resume", "prefix"), ("FILE",)),
    **dict.fromkeys(("draft", "tokenizer", "work"), ("MODEL", "FOLDER")),
    "spec": ("off", "suffix", "model", "history", "auto"),
    "prompt": ("list files", "a"),
    "method": ("rtn", "k-quant"),
    "draft_sampling": ("chain", "tree", "ngram"),
    "lossy": ("bild:0.6,3", "typical:0.1", "entropy:1", "lead:4"),
    "power": ("auto", "performance", "saver"),
    **dict.fromkeys(("prefix_cache", "prefix_disk"), ("0", "2MB", "1.5GiB")),
    "logit_bias": ("5=1", "0=-100"),
    "presence_penalty": ("1.5", "-2"),
    "frequency_penalty": ("0.5", "2"),
}
"""Values that an option takes, by its name, so that some combinations get far."""


DAMAGE = (
    ("flip", ()),
    ("flip", (".onnx",)),
    ("truncate", ()),
    *((("change_json", (".json",)),) * 6),
    ("write_nonsense", (".json", ".jinja")),
    ("write_nonsense", ()),
    ("replace_file", ()),
    ("put_nan", (".data",)),
)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[CommandWorker]:
    with CommandWorker(tmp_path) as worker:
        yield worker


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(PARTS))
def test_random_options(worker: CommandWorker, tiny_bundle: Path, tmp_path: Path, part: int) -> None:
    commands = {name: _command_line(name).commands[name] for name in NAMES}
    file = tmp_path / "file.txt"
    file.write_text("some text\n\nmore text\n", encoding="utf-8")
    os.mkfifo(tmp_path / "pipe")
    places = {"FOLDER": tmp_path, "MODEL": tiny_bundle, "FILE": file, "PIPE": tmp_path / "pipe"}
    faults = []
    for seed in range(part * CASES, (part + 1) * CASES):
        choice = random.Random(seed)
        name = choice.choice(NAMES)
        words = [name] if name != "run" or choice.random() < 0.5 else []
        words += _words(choice, commands[name])
        words += ALWAYS.get(name, []) if choice.random() < 0.97 or name in ("bench", "verify", "tune") else []
        given = [str(places.get(word, word)) for word in words]
        outcome = worker.run(given, choice.choice((b"", b"list files\r\n", b"\xff\xfe", b"\0")))
        if outcome.fault:
            faults.append(f"seed {seed}: {outcome}")
    assert not faults, f"{len(faults)} of {CASES}\n\n" + "\n\n".join(faults)


def _words(choice: random.Random, command: Any) -> list[str]:
    """Arguments and options of a command, most of them its own."""
    options = [each for each in command.params if each.param_type_name == "option" and each.name != "debug"]
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    words = [choice.choice((*VALUES, "MODEL", "MODEL", "MODEL")) for _ in arguments if choice.random() < 0.8]
    for option in choice.sample(options, min(len(options), choice.choice((0, 1, 1, 2, 3, 5)))):
        words.append(choice.choice(option.opts))
        if not option.is_flag or choice.random() < 0.05:
            words.append(choice.choice((*VALUES, *GOOD.get(option.name, ()) * 15)))
    if choice.random() < 0.05:
        words.insert(choice.randrange(len(words) + 1), choice.choice(VALUES))
    return words


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(PARTS))
def test_damaged_bundles(worker: CommandWorker, tiny_bundle: Path, tmp_path: Path, part: int) -> None:
    faults = []
    for seed in range(part * CASES, (part + 1) * CASES):
        choice = random.Random(seed)
        source = bundled_folder() if choice.random() < 0.25 else tiny_bundle
        model = fresh_copy(source, tmp_path / "model")
        damage = Damage(model, seed)
        damage.apply(DAMAGE, choice.choice((1, 1, 2, 4)))
        manifest = choice.random()
        if manifest < 0.5:
            recompute_digests(model)
            recompute_digests(model / "draft")
        elif manifest < 0.75 and (model / "edge.json").is_file():
            (model / "edge.json").unlink()
        outcome = worker.run(_answer_or_inspect(choice, str(model)), choice.choice((b"", b"list files")))
        if outcome.fault:
            faults.append(f"seed {seed}, {', '.join(damage.done)}: {outcome}")
    assert not faults, f"{len(faults)} of {CASES}\n\n" + "\n\n".join(faults)


def _answer_or_inspect(choice: random.Random, model: str) -> list[str]:
    kind = choice.random()
    if kind < 0.2:
        return ["inspect", model, *choice.choice(([], ["--json"]))]
    options = [["--raw"], [], ["-t", "1", "--seed", "1"], ["--json"], ["--draft", "none"], ["--stats"]]
    drafting = ["--spec", choice.choice((*(("off",) * 9), "suffix", "auto"))]
    return ["run", model, "-p", "a list", "-n", "3", "--no-cache", *choice.choice(options), *drafting]


def test_good_and_bad_commands_are_told_apart(worker: CommandWorker, tiny_bundle: Path) -> None:
    answer = worker.run([str(tiny_bundle), "-n", "2", "--spec", "off"], b"the")
    assert (answer.code, answer.err, answer.fault) == (0, "", "")
    assert answer.out
    refused = worker.run(["--nonsense"])
    assert (refused.code, refused.fault) == (2, "")
    assert worker.run(["nothing", "-p", "a", "--debug"]).fault == "a traceback"
    for code, err, fault in (
        (1, "a\n", "1 lines of error"),
        (2, "edge-run: warning: b\nedge-run: error: a\nb\n", "2 lines of error"),
        (1, "edge-run: error: not enough memory\n", "too much memory"),
        (130, "", "exit code 130"),
    ):
        assert Outcome((), code, "", err).fault == fault


@pytest.mark.nightly
def test_a_process_that_hangs_or_ends_is_replaced(worker: CommandWorker, monkeypatch: Patch) -> None:
    monkeypatch.setattr(command_worker, "MAX_SECONDS", 0.001)  # no interpreter starts so fast
    assert "over 0 s" in worker.run(["--version"]).fault
    monkeypatch.undo()
    assert worker.run(["--version"]).code == 0
    worker.end_process()
    assert "the process ended with -9" in worker.run(["--version"]).fault
    assert worker.run(["--version"]).code == 0
