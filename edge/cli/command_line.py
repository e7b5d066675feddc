"""The `edge-run` command: subcommands, errors and exit codes."""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from typing import Annotated, Final

import typer
from typer.exceptions import Abort, TyperException

from ...errors import EdgeError, InputError
from ...runtime.text.tokenizer_library import panic_messages_hidden
from ...version import __version__
from ..terminal.output import showing_warnings, write_error, write_line
from .ctrl_c import INTERRUPTED, CommandInterrupts

COMMANDS: Final = {
    "app": "Chat with models in the browser.",
    "run": "Chat with a model, or answer one prompt (the default).",
    "complete": "Fill the gap between two texts, as editors do.",
    "export": "Export a model to a folder that edge-run runs.",
    "train-draft": "Train a draft for a model, on the model's own answers.",
    "control-vector": "Make a control vector, which steers a model's answers, from pairs of prompts.",
    "inspect": "Show what a model is made of.",
    "devices": "List the devices of this machine.",
    "bench": "Compare the speed of speculative and plain decoding, or of numbers of clients.",
    "tune": "Measure what passes over several tokens cost.",
    "verify": "Check that speculation does not change the text.",
    "pull": "Download a model from the Hugging Face Hub.",
    "serve": "Serve models to programs that talk to OpenAI's, Anthropic's or Ollama's API.",
    "models": "List the models on this machine, or remove one.",
    "ps": "List the models that running servers and apps have in memory.",
    "stop": "Unload a model from the memory of running servers and apps.",
    "doctor": "Show what this machine offers, what is kept on it, and what would make models faster.",
    "mcp": "Offer models as tools to a program that uses MCP, over standard input and output.",
    "rpc": "Answer JSON-RPC requests of another program over standard input and output.",
}
"""What each command does; the module and the function are named like the command, with `_` for `-`, but for `run`."""
_MODULES: Final = {
    "ps": "models",
    "stop": "models",
    "doctor": "devices",
    "control-vector": "train_draft",
    "mcp": "rpc",
    "pull": "models",
    "complete": "run",
}
"""Modules of commands that stand with another one."""
ALIASES: Final = {"list": ("models",), "ls": ("models",), "show": ("inspect",), "rm": ("models", "--remove")}
"""Names that commands have in other programs, which work here too."""
_DEFAULT_COMMAND: Final = "run"
_OTHER_NAMES: Final = {
    "app": ("start", "web", "ui", "gui"),
    "run": ("chat", "generate"),
    "models --remove": ("remove",),
    "pull": ("download", "get", "install"),
    "serve": ("server", "api"),
    "export": ("create", "convert", "quantize"),
    "train-draft": ("train", "distill"),
    "inspect": ("info",),
    "bench": ("benchmark",),
    "--help": ("help",),
    "--version": ("version",),
}
"""What else people may try first; it is refused with the name of the command."""
_SIMILAR: Final = 0.66
"""Similarity from which a word is taken for a mistyped command, from 0 to 1: one slip in three letters."""
_SEVERAL: Final = "--clients"
"""The option after which several numbers may stand."""
_GLOBAL_OPTIONS: Final = ("-h", "--help", "--version")
_HELP: Final = """
Run language models on this machine: private, fast, no server elsewhere.

edge-run [MODEL] chats; with -p TEXT it answers once. MODEL is an .onnx file, a model folder, or org/name on the Hugging
Face Hub. Without MODEL, the bundled model translates English requests into shell commands.

Examples:

\b
edge-run -p "find files larger than 100 MB"
edge-run app
edge-run my-model
edge-run onnx-community/Qwen2.5-0.5B-Instruct
edge-run export Qwen/Qwen2.5-0.5B-Instruct my-model --weights int4
edge-run ps

list, show and rm are other names of models, inspect and models --remove.
All options of chats and answers: edge-run run --help
"""


def _show_version(wanted: bool) -> None:
    if wanted:
        write_line(f"edge-run {__version__}")
        raise typer.Exit


def run_command(given: list[str]) -> int:
    """Run the command line `edge-run GIVEN...`; returns the exit code."""
    if sys.stdout is None:
        return _fail("standard output is closed; give it a file or a terminal", 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Models write any character, so the default encoding of a pipe does not do.
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    if given and given[0] in ALIASES:
        command, *option = ALIASES[given[0]]
        words = given[1:]
        # What is to be removed may stand behind options of `rm`.
        at = next((index for index, word in enumerate(words) if not word.startswith("-")), len(words))
        given = [command, *words[:at], *([] if {"-h", "--help"} & set(words) else option), *words[at:]]
    if not given or (given[0] not in COMMANDS and given[0] not in _GLOBAL_OPTIONS):
        given = [_DEFAULT_COMMAND, *given]
    try:
        if given[0] == _DEFAULT_COMMAND:
            _check_first_word(given[1:2])
        command_line = _command_line(given[0])
        with CommandInterrupts(), showing_warnings(), panic_messages_hidden():
            result = command_line(_one_value_each(given), prog_name="edge-run", standalone_mode=False)
    except TyperException as error:
        help_command = "edge-run --help" if given[0] in _GLOBAL_OPTIONS else f"edge-run {given[0]} --help"
        return _fail(f"{error.format_message().rstrip('.')}; see {help_command}", 2)
    except (KeyboardInterrupt, Abort):
        return INTERRUPTED
    except (EdgeError, OSError, MemoryError) as error:
        if "--debug" in given:
            write_error(traceback.format_exc().rstrip())
        if isinstance(error, EdgeError):
            return _fail(str(error), error.exit_code)
        return _fail(_system_refusal(error), 1)
    return result if isinstance(result, int) else 0


def _one_value_each(given: list[str]) -> list[str]:
    """Write `--clients 1 2 4` as `--clients 1 --clients 2 --clients 4`: options of typer take one value each."""
    words: list[str] = []
    for word in given:
        if word.isdecimal() and words[-2:-1] == [_SEVERAL] and words[-1].isdecimal():
            words.append(_SEVERAL)
        words.append(word)
    return words


def _check_first_word(words: list[str]) -> None:
    """Check that the first word after `edge-run`, unless it is an option or a path, names a model.

    Raises:
        InputError: there is no such model, so that the word was meant as a command, or mistyped.
        BundleError: it is not a name that a model can have.
    """
    from ...models.find import may_be_model, named_models

    if not words or words[0].startswith("-") or {"/", os.sep} & set(words[0]) or may_be_model(words[0]):
        return
    word = words[0].lower()
    names = [*COMMANDS, *ALIASES, *named_models()]
    others = [command for command, aliases in _OTHER_NAMES.items() if word in aliases]
    meant = next(iter(others or get_close_matches(word, names, n=1, cutoff=_SIMILAR)), None)
    hint = f"commands: {', '.join(COMMANDS)}" if meant is None else f"did you mean edge-run {meant}?"
    raise InputError(f"{words[0]!r:.60} is neither a command nor a model", hint)


def _command_line(chosen: str) -> Callable[..., object]:
    """All commands, of which only `chosen` is imported: the others are there to be listed."""
    app = typer.Typer(
        name="edge-run",
        help=_HELP,
        add_completion=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    )
    app.callback()(_global_options)
    for name, summary in COMMANDS.items():
        function = "chat_or_answer" if name == _DEFAULT_COMMAND else name.replace("-", "_")
        module = _MODULES.get(name, function)
        command = getattr(import_module(f".{module}", __package__), function) if name == chosen else lambda: None
        app.command(name=name, short_help=summary)(command)
    return typer.main.get_command(app)


def _global_options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


def _system_refusal(error: OSError | MemoryError) -> str:
    """What the system refused, and what to do."""
    if isinstance(error, MemoryError):
        what = f"not enough memory: {str(error) or 'the system gives no more'}"
        return f"{what}; use a shorter --context or a smaller model, or close other programs"
    # Writing buffered output again at exit would fail again, with a traceback, so it goes nowhere.
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}; check the path and the disk"


def _fail(message: str, code: int) -> int:
    """Print the message as one line on standard error."""
    write_error(f"edge-run: error: {' '.join(message.split())}")
    return code
