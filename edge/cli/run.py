"""`edge-run [MODEL]`: answers one prompt, or chats."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ...errors import BundleError, InputError
from ...models.find import may_be_model
from ...models.progress import Progress
from ...models.user_text import decode_text, read_text, unify_line_ends
from ...runtime.arguments.load_options import LoadOptions
from ...runtime.engine import Engine
from ...runtime.engine_loading import load as open_model
from ...runtime.options import GenerateOptions
from ...runtime.speculation.choice import Speculation
from ...runtime.structure.response_format import ResponseFormat
from .shared_options import AsJson, Debug, ModelArgument, Offline, OptionsOf, chosen_options, takes_options
from .single_answer import SinglePrompt, answer_prompt

if TYPE_CHECKING:
    from ..terminal.chat.opening import ChatSettings

_MAX_PROMPT_BYTES: Final = 16 << 20
"""Largest prompt that is read from standard input, several times the text of the longest contexts."""
_ANSWER: Final = OptionsOf(
    GenerateOptions(),
    without=(
        *("answer_start", "tools", "tool_choice", "parallel_tool_calls", "parse_answer"),
        *("template_variables", "overflow", "keep_prefix", "response_format"),
    ),
)
_LOAD: Final = OptionsOf(LoadOptions(), without=("learned", "parallel", "max_waiting"))


@dataclass(frozen=True)
class RunOptions:
    """Options of `edge-run run` beside those of the model and the answer."""

    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", metavar="TEXT", help="Answer this prompt, then exit.")
    ] = None
    prefix: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Begin the conversation with the text of FILE, such as a long document: at the end of the system "
            "message, or with --raw before the prompt. Its KV cache is kept on disk, so that the next start does not "
            "read it again.",
        ),
    ] = None
    json_schema: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Let the answer be JSON of the schema in FILE, on one line. This, the next three options and "
            "--grammar-aligned need the extra structured.",
        ),
    ] = None
    regex: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="Let the whole answer match a regular expression.")
    ] = None
    grammar: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Let the answer follow the Lark or GBNF grammar in FILE.")
    ] = None
    choice: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Let the answer be this text; repeat it for other choices.")
    ] = None
    resume: Annotated[Path | None, typer.Option(metavar="FILE", help="Continue a conversation that /save wrote.")] = (
        None
    )
    continue_: Annotated[
        bool,
        typer.Option("-c", "--continue", help="Go on with the latest conversation, with its model if none is named."),
    ] = False
    conversation: Annotated[
        str | None,
        typer.Option(
            metavar="ID", help="Go on with a conversation of this id, as /conversations and the app list them."
        ),
    ] = None
    save: Annotated[
        bool, typer.Option("--save/--no-save", help="Keep the conversations of a chat, and what is typed, on disk.")
    ] = True
    json_stream: Annotated[
        bool,
        typer.Option(
            "--json-stream",
            help="Print JSON lines while the answer is generated: an object for each piece, and at the end that of "
            "--json.",
        ),
    ] = False
    stats: Annotated[bool, typer.Option("--stats", help="Print statistics of the answer on standard error.")] = False

    def response_format(self) -> ResponseFormat | None:
        """What the answer has to look like; None for free text.

        Raises:
            InputError: several formats are given, or a file cannot be read.
        """
        schema, regex, grammar, choices = self.json_schema, self.regex, self.grammar, self.choice or None
        given = {"--json-schema": schema, "--regex": regex, "--grammar": grammar, "--choice": choices}
        named = [name for name, value in given.items() if value is not None]
        if len(named) > 1:
            raise InputError(f"{named[0]} and {named[1]} are both given", "an answer has one format: give one of them")
        if schema is not None:
            return ResponseFormat.json_schema(read_text(schema, "give a file with a JSON schema"))
        if grammar is not None:
            return ResponseFormat.grammar(read_text(grammar, "give a file with a Lark or GBNF grammar"))
        if regex is not None:
            return ResponseFormat.regex(regex)
        return ResponseFormat.choice(choices) if choices else None


@takes_options(RunOptions, _ANSWER, _LOAD)
def run(
    model: ModelArgument = None,
    offline: Offline = False,  # noqa: ARG001  its callback acts
    as_json: AsJson = False,
    debug: Debug = False,  # noqa: ARG001  main reads it
    **given: Any,
) -> int:
    """Chat with MODEL, or answer one prompt given with -p or on standard input.

    A chat keeps its conversations, which edge-run app shows too, and takes commands: /help lists them.

    Examples: edge-run my-model -p "Why is the sky blue?" -n 200 --stats; edge-run my-model --continue; edge-run
    my-model --context 16384 --kv int8; edge-run my-model -p "Name a boat." -t 1 --n 3 --best-of 8; edge-run my-model
    --prefix report.txt -p "What does it conclude?"; edge-run my-model --json-schema person.json -p "Who wrote Faust?"
    """
    if model is not None and not may_be_model(model):  # before a prompt is read
        raise BundleError(f"{model} does not exist", "give an .onnx file or a model folder")
    chosen, load = chosen_options(RunOptions, given), _LOAD.record(given)
    options = _ANSWER.record(given, response_format=chosen.response_format())
    chatting = chosen.prompt is None and sys.stdin is not None and sys.stdin.isatty()
    _check(chosen, options, chatting=chatting, as_json=as_json)
    prompt = _read_standard_input() if chosen.prompt is None and not chatting else chosen.prompt
    prompt, system = (None if text is None else unify_line_ends(text) for text in (prompt, options.system))
    document = "" if chosen.prefix is None else read_text(chosen.prefix, "give a file with text")
    if document and chosen.resume is not None:
        raise InputError("a resumed conversation has its beginning already", "leave out --prefix or --resume")
    if document and not options.raw:
        system = document if system is None else f"{system}\n\n{document}"
    if prompt == "":
        raise InputError("the prompt is empty", "give -p TEXT, or text on standard input")
    keep_prefix = (bool(document) and not options.raw) or (chatting and chosen.save)
    options = replace(options, system=system, keep_prefix=keep_prefix)
    # Without speculation a draft model would cost memory and processor time for nothing.
    if options.speculation == Speculation.OFF:
        load = replace(load, draft=None, draft_device="auto")
    if not chatting:
        raw_prefix = document if options.raw else ""
        asked = SinglePrompt(
            prompt or "", options, raw_prefix, chosen.resume, as_json, chosen.json_stream, chosen.stats
        )
        return answer_prompt(model, load, asked)
    from ..terminal.chat.opening import ChatSettings

    settings = ChatSettings(
        replace(options, system=None),
        system,
        chosen.resume,
        chosen.conversation,
        latest=chosen.continue_,
        saving=chosen.save,
        show_stats=chosen.stats,
    )
    return _chat(model, load, settings)


def _check(chosen: RunOptions, options: GenerateOptions, *, chatting: bool, as_json: bool) -> None:
    """Check that options go together.

    Raises:
        InputError: they do not.
    """
    if as_json and chosen.json_stream:
        raise InputError("--json and --json-stream are both given", "give one of them")
    if options.logprobs is not None and not (as_json or chosen.json_stream):
        raise InputError("--logprobs lists tokens in the JSON of an answer", "add --json, or leave --logprobs out")
    if not chatting:
        if chosen.continue_ or chosen.conversation is not None:
            name = "--continue" if chosen.continue_ else "--conversation"
            raise InputError(f"{name} goes on with a chat, but there is a prompt to answer", f"leave out {name}")
        return
    of_answers = {
        "--raw": options.raw,
        "--json": as_json,
        "--json-stream": chosen.json_stream,
        "--n or --best-of": options.candidates > 1,
    }
    for option, given in of_answers.items():
        if given:
            raise InputError(f"{option} needs a prompt", "give -p TEXT, or text on standard input")
    if not sys.stdout.isatty():
        raise InputError("a chat needs a terminal on standard output", "give -p TEXT, or text on standard input")


def _chat(model: str | None, load: LoadOptions, settings: ChatSettings) -> int:
    from ..terminal.chat.opening import open_chat

    def open_named(name: str | None, progress: Progress) -> Engine:
        options = load
        if name != model:  # these belong to the model that was named with them
            options = replace(load, tokenizer=None, draft=None if load.draft is None else "auto")
        return open_model(name, options, progress=progress)

    return open_chat(open_named, model, settings)


def _read_standard_input() -> str:
    if sys.stdin is None:
        return ""
    data = sys.stdin.buffer.read(_MAX_PROMPT_BYTES + 1)
    if len(data) > _MAX_PROMPT_BYTES:
        raise InputError(f"standard input has more than {_MAX_PROMPT_BYTES} bytes", "give a shorter prompt")
    return decode_text(data, "standard input").removesuffix("\n")
