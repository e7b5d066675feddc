"""Answers one prompt on the command line: prints the text or JSON, and statistics."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ...errors import InputError
from ...models.progress import ProgressDisplay
from ...models.user_text import decode_text, read_text, unify_line_ends
from ...runtime.arguments.argument_types import option
from ...runtime.arguments.load_options import LoadOptions
from ...runtime.engine import Engine
from ...runtime.engine_loading import load as open_model
from ...runtime.options import GenerateOptions
from ...runtime.result import Reply
from ...runtime.speculation.choice import Speculation
from ...runtime.structure.response_format import ResponseFormat
from ..terminal.answer_report import AnswerPrinter, best_of_line, chunk_json, reply_json, show_rounds, stats_line
from ..terminal.interrupt import cancelling_on_interrupt
from ..terminal.output import write_error, write_json
from .ctrl_c import INTERRUPTED
from .shared_options import OptionsOf

_MAX_PROMPT_BYTES: Final = 16 << 20
"""Largest prompt that is read from standard input, several times the text of the longest contexts."""
ANSWER: Final = OptionsOf(
    GenerateOptions(),
    without=(
        *("answer_start", "tools", "tool_choice", "parallel_tool_calls", "parse_answer"),
        *("template_variables", "overflow", "keep_prefix", "response_format"),
    ),
)
LOAD: Final = OptionsOf(LoadOptions(), without=("learned", "parallel", "max_waiting"))


@dataclass(frozen=True)
class RunOptions:
    """Options of `edge-run run` beside the options of the model and the answer."""

    prompt: str | None = option(None, "Answer this prompt, then exit.", flags=("-p", "--prompt"), metavar="TEXT")
    prefix: Path | None = option(
        None,
        "Begin the conversation with the text of FILE, such as a long document: at the end of the system "
        "message, or with --raw before the prompt. Its KV cache is kept on disk, so that the next start does not "
        "read it again.",
        metavar="FILE",
    )
    json_schema: Path | None = option(
        None,
        "Let the answer be JSON of the schema in FILE, on one line. This, the next three options and "
        "--grammar-aligned need the extra structured.",
        metavar="FILE",
    )
    regex: str | None = option(None, "Let the whole answer match a regular expression.", metavar="PATTERN")
    grammar: Path | None = option(None, "Let the answer follow the Lark or GBNF grammar in FILE.", metavar="FILE")
    choice: list[str] | None = option(None, "Let the answer be this text; repeat it for other choices.", metavar="TEXT")
    resume: Path | None = option(None, "Continue a conversation that /save wrote.", metavar="FILE")
    continue_: bool = option(
        False, "Go on with the latest conversation, with its model if none is named.", flags=("-c", "--continue")
    )
    conversation: str | None = option(
        None, "Go on with a conversation of this id, as /conversations and the app list them.", metavar="ID"
    )
    save: bool = option(True, "Keep the conversations of a chat, and what is typed, on disk.")
    json_stream: bool = option(
        False,
        "Print JSON lines while the answer is generated: an object for each piece, and at the end that of --json.",
    )
    stats: bool = option(False, "Print statistics of the answer on standard error.")

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


RUN: Final = OptionsOf(RunOptions())


def read_options(
    given: Mapping[str, Any], *, as_json: bool, chatting: bool
) -> tuple[RunOptions, GenerateOptions, LoadOptions, str]:
    """Read the options of a command line, and the files that they name.

    Returns:
        The options of the command, of the answer and of the model, and the text that begins a raw prompt.

    Raises:
        InputError: options do not go together, or a file cannot be read.
    """
    chosen, load = RUN.record(given), LOAD.record(given)
    options = ANSWER.record(given, response_format=chosen.response_format())
    _check(chosen, options, chatting=chatting, as_json=as_json)
    system = None if options.system is None else unify_line_ends(options.system)
    document = "" if chosen.prefix is None else read_text(chosen.prefix, "give a file with text")
    if document and chosen.resume is not None:
        raise InputError("a resumed conversation has its beginning already", "leave out --prefix or --resume")
    if document and not options.raw:
        system = document if system is None else f"{system}\n\n{document}"
    keep_prefix = (bool(document) and not options.raw) or (chatting and chosen.save)
    # Without speculation a draft model would cost memory and processor time for nothing.
    if options.speculation == Speculation.OFF:
        load = replace(load, draft=None, draft_device="auto")
    options = replace(options, system=system, keep_prefix=keep_prefix)
    return chosen, options, load, document if options.raw else ""


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
    for name, given in of_answers.items():
        if given:
            raise InputError(f"{name} needs a prompt", "give -p TEXT, or text on standard input")
    if not sys.stdout.isatty():
        raise InputError("a chat needs a terminal on standard output", "give -p TEXT, or text on standard input")


def answer_prompt(model: str | None, given: Mapping[str, Any], *, as_json: bool) -> int:
    """Answer the prompt of a command line; Ctrl-C keeps what was written.

    Returns:
        The exit code.

    Raises:
        EdgeError: the options cannot be used, the model cannot be loaded, or the prompt not be answered.
    """
    chosen, options, load, raw_prefix = read_options(given, as_json=as_json, chatting=False)
    text = unify_line_ends(_read_standard_input() if chosen.prompt is None else chosen.prompt)
    if not text:
        raise InputError("the prompt is empty", "give -p TEXT, or text on standard input")
    started = time.perf_counter()
    progress = ProgressDisplay(transient=True)
    engine = open_model(model, load, progress=progress)
    load_s = time.perf_counter() - started
    pieces = []
    wanted, several = options.logprobs is not None, options.n > 1
    written = AnswerPrinter(options.n)
    with engine:
        if raw_prefix:
            with progress:
                engine.keep_prefix(raw_prefix, options)
        chunks = (
            engine.stream(raw_prefix + text, options)
            if chosen.resume is None
            else engine.session(system=options.system, resume=chosen.resume).stream(text, options, system=None)
        )
        with progress, closing(chunks), cancelling_on_interrupt(chunks.cancel) as interrupted:
            for chunk in chunks:
                pieces.append(chunk)
                if chosen.json_stream:
                    if chunk.text or chunk.logprobs or chunk.reasoning:
                        write_json(chunk_json(chunk, with_logprobs=wanted, several=several))
                elif not as_json:
                    written.write(chunk)
        reply = Reply.of(pieces)
        if as_json or chosen.json_stream:
            write_json(reply_json(reply, engine, options.speculation, load_s, with_logprobs=wanted))
        elif any(choice.text for choice in reply.choices) or not interrupted():
            written.end()
        _show_statistics(reply, engine, chosen, options, load_s)
    return INTERRUPTED if interrupted() else 0


def _show_statistics(reply: Reply, engine: Engine, chosen: RunOptions, options: GenerateOptions, load_s: float) -> None:
    for number, choice in enumerate(reply.choices, 1):
        if options.explain:
            show_rounds(choice.stats.rounds, engine.graph_io)
        if chosen.stats:
            line = stats_line(choice.stats, engine, load_s)
            write_error(f"answer {number}: {line}" if options.n > 1 else line)
    if chosen.stats and reply.stats.best_of is not None:
        write_error(best_of_line(reply.stats.best_of))


def _read_standard_input() -> str:
    if sys.stdin is None:
        return ""
    data = sys.stdin.buffer.read(_MAX_PROMPT_BYTES + 1)
    if len(data) > _MAX_PROMPT_BYTES:
        raise InputError(f"standard input has more than {_MAX_PROMPT_BYTES} bytes", "give a shorter prompt")
    return decode_text(data, "standard input").removesuffix("\n")
