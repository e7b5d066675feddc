"""Nothing from a model's files, file names or libraries reaches the terminal except through one filter."""

from __future__ import annotations

import ast
import dataclasses
import json
import logging
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("onnx", reason="needs the export extra")

import edgerun
from edgerun.edge.cli.main import main
from edgerun.edge.cli.run import RunOptions
from edgerun.edge.terminal.chat.answer_view import MarkdownView
from edgerun.edge.terminal.chat.conversation_commands import open_chat
from edgerun.edge.terminal.output import SafeConsole, prompt_output, showing_warnings, write_json, write_line
from edgerun.models.manifest import Calibration, Manifest
from edgerun.models.progress import ProgressDisplay
from edgerun.models.user_text import for_terminal, on_one_line
from edgerun.runtime.options import GenerateOptions
from support.commands import Capture, Patch, Screen
from support.hub_server import files_of, own_hub

ROOT = Path(edgerun.__file__).parent
CONTROLS = {
    *map(chr, range(0x20)),
    *map(chr, range(0x7F, 0xA0)),
    *"\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069",
}
NAME = "\x1b[31m\x9b2J\u202e\x07[bold]x[nope] :smile:"
"""A file name with escape sequences, a bidirectional override, a bell, and markup of the display library."""
TEXT = NAME + "\x1b]0;owned\x07\x1b]8;;http://x\x1b\\[link=http://x]y[/link][/nope]"
SHOWN = "\ufffd[31m\ufffd2J\ufffd"
"""What is shown of its beginning."""
needs_such_names = pytest.mark.skipif(sys.platform == "win32", reason="file names have no control characters there")

WRITERS = {"terminal/output.py", "rpc/line_transport.py"}
"""Modules of edge/ that may print; one writes lines of JSON for programs."""


def test_the_filter_replaces_what_controls_a_terminal_and_nothing_else() -> None:
    everything = "".join(map(chr, [*range(0x3000), *range(0x1F300, 0x1F700)]))
    shown = for_terminal(everything)
    assert {char for char, kept in zip(everything, shown, strict=True) if char != kept} == CONTROLS - {"\n", "\t"}
    assert set(on_one_line("".join(CONTROLS))) == {"\ufffd"}


def test_only_one_module_of_the_command_prints() -> None:
    """Read from the source, so that a new command cannot forget the filter."""
    found = []
    for path in sorted((ROOT / "edge").rglob("*.py")):
        name = path.relative_to(ROOT / "edge").as_posix()
        if name not in WRITERS:
            found += [f"{name}:{line} {what}" for line, what in _ways_to_print(path)]
    assert found == []
    assert _ways_to_print(ROOT / "edge" / "terminal" / "output.py")


def _ways_to_print(path: Path) -> list[tuple[int, str]]:
    """Calls that write to a terminal, by line."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        words = called.split(".")
        if (
            called in {"print", "os.write", "Console", "console.Console", "Progress", "Live"}
            or words[-1] in {"echo", "secho", "print_exc", "print_exception", "print_stack"}
            or (words[-1].startswith("write") and ("stdout" in words or "stderr" in words))
        ):
            found.append((node.lineno, called))
    return found


def terminal(monkeypatch: Patch) -> Screen:
    """A terminal in place of standard output and standard error."""
    screen = Screen()
    for stream in ("sys.stdout", "sys.stderr"):
        monkeypatch.setattr(stream, screen)
    monkeypatch.setenv("TERM", "xterm-256color")
    return screen


@pytest.fixture
def hostile(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A model whose folder and manifest have hostile names."""
    folder = tmp_path / (NAME if sys.platform != "win32" else "model")
    shutil.copytree(tiny_bundle, folder)
    path = folder / "edge.json"
    manifest = Manifest.from_json(path.read_bytes())
    hostile = dataclasses.replace(
        manifest,
        command=TEXT,
        calibration=Calibration(TEXT, 900, 100, awq=True),
        quality={TEXT: 0.125},
        parity={TEXT: 0.125},
        weights={**manifest.weights, f"layers.1.{TEXT}": manifest.weights["head"]},
    )
    path.write_text(hostile.to_json(), encoding="utf-8")
    return folder


def output(capsys: Capture) -> str:
    """What was printed; nothing in it controls a terminal."""
    captured = capsys.readouterr()
    both = captured.out + captured.err
    assert {char for char in both if char in CONTROLS} <= {"\n"}, both
    return both


COMMANDS: dict[str, Callable[[Path], list[str]]] = {
    "inspect": lambda model: ["inspect", str(model)],
    "inspect --json": lambda model: ["inspect", str(model), "--json"],
    "run --json": lambda model: [str(model), "-p", "the", "-n", "2", "--json", "--stats", "--explain"],
    "tune": lambda model: ["tune", str(model), "--context", "64", "--json"],
    "bench": lambda model: ["bench", str(model), "--limit", "1", "-n", "2", "--prompts", str(model / NAME)],
    "export": lambda model: ["export", str(model.parent / "checkpoint"), str(model.parent / f"out{NAME}")],
}


@needs_such_names
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_commands_show_hostile_names_as_text(
    hostile: Path, tiny_bundle: Path, capsys: Capture, command: Callable[[Path], list[str]]
) -> None:
    shutil.copytree(tiny_bundle.parent / "checkpoint", hostile.parent / "checkpoint")
    (hostile / NAME).write_text(
        json.dumps({"question_id": 1, "category": TEXT, "turns": ["the other"]}) + "\n", encoding="utf-8"
    )
    assert main(command(hostile)) == 0
    shown = output(capsys)
    assert "[bold]x[nope] :smile:" in shown.replace("\n", "")


def damaged(name: str, text: str, *arguments: str) -> Callable[[Path], list[str]]:
    """Writes a file of the model, and gives the arguments with it; by default those for an answer."""

    def write(model: Path) -> list[str]:
        (model / name).write_text(text, encoding="utf-8")
        return [each.replace("MODEL", str(model)) for each in arguments or ("MODEL", "-p", "a")]

    return write


ERRORS: dict[str, Callable[[Path], list[str]]] = {
    "no such model": lambda model: [str(model / "no" / NAME), "-p", "a"],
    "chat template": damaged("chat_template.jinja", "{{ raise_exception(" + repr(TEXT) + ") }}"),
    "tokenizer": damaged("tokenizer.json", json.dumps({"model": {"type": TEXT}, "added_tokens": [], TEXT: TEXT})),
    "setting": damaged("generation_config.json", json.dumps({"temperature": TEXT})),
    "plan": damaged(
        "plan.toml",
        f"[linears]\n{json.dumps(TEXT)} = 'int4/32'\n",
        *("export", "MODEL", "MODEL-out", "--plan", "MODEL/plan.toml"),
    ),
    "option": lambda _: [f"--{TEXT}"],
    "saved conversation": lambda model: [str(model), "--resume", str(model / NAME), "-p", "a"],
    "hub id": lambda _: ["pull", TEXT],
    "draft": lambda model: [str(model), "-p", "a", "--draft", str(model / "no" / NAME)],
    "text file": lambda model: ["tune", str(model), "--text", str(model / NAME)],
}


@needs_such_names
@pytest.mark.parametrize("debug", [[], ["--debug"]], ids=["", "debug"])
@pytest.mark.parametrize("arguments", ERRORS.values(), ids=ERRORS)
def test_errors_show_hostile_names_as_text(
    tiny_bundle: Path, tmp_path: Path, capsys: Capture, arguments: Callable[[Path], list[str]], debug: list[str]
) -> None:
    model = shutil.copytree(tiny_bundle, tmp_path / NAME)
    (model / "edge.json").unlink()  # its digests would be looked at first
    assert main([*arguments(model), *debug]) == 2
    shown = output(capsys)
    assert shown.splitlines()[-1].startswith("edge-run: error: ")
    assert debug or shown.count("\n") == 1


def test_listings_of_the_hub_are_shown_as_text(tiny_bundle: Path, tmp_path: Path, capsys: Capture) -> None:
    files = files_of(tiny_bundle)
    graphs = {f"onnx/model_{name}.onnx": files["model.onnx"] for name in ("[nope]a", "[nope]\x9bb")}
    others = {name: data for name, data in files.items() if not name.startswith("model.onnx") and name != "edge.json"}
    with own_hub(tmp_path / "hf") as hub:
        hub.repo("org/hostile", {**others, **graphs})
        assert main(["pull", "org/hostile:none"]) == 2
        assert "[nope]\ufffdb" in output(capsys)
        assert main(["pull", "org/hostile"]) == 2
        assert "[nope]\ufffdb" in output(capsys)


@needs_such_names
def test_the_chat_shows_hostile_names_as_text(hostile: Path, monkeypatch: Patch, capsys: Capture) -> None:
    lines = iter([f"/system {TEXT}", f"/title {TEXT}", f"/save {hostile / NAME / NAME}", f"/{TEXT}", "the", "/quit"])
    monkeypatch.setattr("builtins.input", lambda _prompt: next(lines))
    chosen, options = RunOptions(save=False, stats=True), GenerateOptions(max_tokens=2)
    assert open_chat(lambda name, progress: edgerun.load(name, progress=progress), str(hostile), chosen, options) == 0
    captured = capsys.readouterr()
    assert not CONTROLS.intersection(captured.err) - {"\n"}
    assert captured.err.count(SHOWN) == 6


ANSWERS = {
    "text": TEXT,
    "heading": f"# {TEXT}",
    "list": f"- {TEXT}",
    "code": f"```{TEXT}\n{TEXT}\n```",
    "inline code": f"`{TEXT}`",
    "table": f"| {TEXT} |\n|---|\n| {TEXT} |",
    "link": f"[{TEXT}](http://{TEXT}) [x](<http://{TEXT}>) ![x](y{TEXT})",
    "html": f"<b>{TEXT}</b>\n\n<div>{TEXT}</div>",
    "entities": "&#27;[31m &#x9b;2J &#8238; [x](http://&#27;]0;owned&#7;)",
    "escapes": "\\\x1b[31m \\\x9b2J \u202e",
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_rendered_answers_control_no_terminal(monkeypatch: Patch, answer: str) -> None:
    screen = terminal(monkeypatch)
    view = MarkdownView(SafeConsole())
    for piece in answer:
        view.write(piece)
    view.close()
    sent = re.sub(r"\x1b\[[0-9;]*[mAK]|\x1b\[\?25[hl]|\r", "", screen.getvalue())  # styles, and the cursor
    assert not CONTROLS.intersection(sent) - {"\n"}, sent
    assert "\x1b[31m" not in screen.getvalue()


def test_logged_warnings_are_one_filtered_line(capsys: Capture) -> None:
    with showing_warnings():
        logging.getLogger("library").warning("odd %s\nline", TEXT)
    assert output(capsys).startswith("edge-run: warning: odd \ufffd[31m")


def test_json_stays_lossless(capsys: Capture) -> None:
    value = {TEXT: [TEXT, "plain ü\n\t\u2066"]}
    write_json(value)
    shown = output(capsys)
    assert json.loads(shown) == value
    assert "ü" in shown


def test_what_a_prompt_draws_is_filtered(monkeypatch: Patch) -> None:
    screen = terminal(monkeypatch)
    output = prompt_output()
    output.write(f"a\r\n{TEXT}")
    output.cursor_up(2)
    output.flush()
    assert screen.getvalue() == f"a\r\n{for_terminal(TEXT)}\x1b[2A"


def test_what_styles_and_progress_send_to_a_terminal_is_filtered(monkeypatch: Patch) -> None:
    screen = terminal(monkeypatch)
    SafeConsole().print(NAME, style="bold")
    write_line(NAME + "\n")
    with ProgressDisplay() as progress:
        progress(NAME, 0.5)
    sent = screen.getvalue()
    assert "\x1b[1m" in sent
    assert sent.count(SHOWN) >= 3
    assert "\x9b" not in sent
    assert "\x1b[31m" not in sent


def test_long_work_writes_plain_lines_where_there_is_no_terminal(monkeypatch: Patch, capsys: Capture) -> None:
    with ProgressDisplay(lines=True) as progress:
        for stage, fraction in (("text", 0.0), ("text", 0.5), ("searching", 0.1), ("text", 1.0)):
            progress(stage, fraction)
        monkeypatch.setattr("edgerun.models.progress._LINE_S", 0.0)
        progress(NAME, 0.0)
        progress("searching", 0.25)
    lines = ["text", "searching", f"{SHOWN}\ufffd[bold]x[nope] :smile:", "searching, 25%"]
    shown = [re.sub(r"%, \d+ s left$", "%", line) for line in capsys.readouterr().err.splitlines()]
    assert shown == [f"edge-run: progress: {line}" for line in lines]
    with ProgressDisplay() as progress:
        progress("searching", 0.5)
    assert capsys.readouterr().err == ""
