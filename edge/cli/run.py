"""Answers one prompt on the command line: prints the text or JSON, and statistics."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ...errors import InputError
from ...models.progress import ProgressDisplay
from ...models.user_text import decode_text, unify_line_ends
from ...runtime.arguments.argument_types import option
from ...runtime.arguments.load_options import LoadOptions
from ...runtime.conversation import Session
from ...runtime.engine import Engine
from ...runtime.engine_loading import load as open_model
from ...runtime.options import GenerateOptions
from ...runtime.result import Reply
from ...runtime.scheduling.answer_stream import AnswerStream
from ..terminal.answer_report import AnswerPrinter, best_of_line, chunk_json, reply_json, show_rounds, stats_line
from ..terminal.interrupt import cancelling_on_interrupt
from ..terminal.output import write_error, write_json
from .shared_options import embedding_option
from .until import CheckedAnswers

_MAX_PROMPT_BYTES: Final = 16 << 20
"""Largest prompt that is read from standard input, several times the text of the longest contexts."""


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
    documents: list[Path] | None = option(
        None,
        "Answer from a folder of text files, or from one file: the passages that fit the question go into the prompt, "
        "and the sources are listed under the answer. May be repeated.",
        metavar="PATH",
    )
    embedding_model: str | None = embedding_option()
    json_schema: Path | None = option(
        None,
        "Let the answer be JSON of the schema in FILE, on one line. This, the next three options and "
        "--grammar-aligned need the extra structured.",
        metavar="FILE",
    )
    regex: str | None = option(None, "Let the whole answer match a regular expression.", metavar="PATTERN")
    grammar: Path | None = option(None, "Let the answer follow the Lark or GBNF grammar in FILE.", metavar="FILE")
    choice: list[str] | None = option(None, "Let the answer be this text; repeat it for other choices.", metavar="TEXT")
    extract: Path | None = option(
        None,
        "Answer with the most probable passage of the text of FILE, which goes into the prompt before the question.",
        metavar="FILE",
    )
    until: str | None = option(
        None,
        "Sample until COMMAND succeeds (exit code 0) with the answer on its standard input, such as 'bash -n'; only "
        "that answer is printed.",
        metavar="COMMAND",
    )
    tries: int = option(10, "Most answers to sample for --until.", least=1, metavar="N")
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
    tools: Path | None = option(None, "Let a chat call tools of the MCP servers in FILE.", metavar="FILE")


def answer_prompt(
    model: str | None,
    chosen: RunOptions,
    options: GenerateOptions,
    load: LoadOptions,
    raw_prefix: str,
    *,
    as_json: bool,
) -> bool:
    """Answer the prompt of a command line, which `raw_prefix` precedes; Ctrl-C keeps what was written.

    Returns:
        Whether Ctrl-C was pressed.

    Raises:
        EdgeError: the model cannot be loaded, or the prompt cannot be answered.
    """
    text = read_standard_input().removesuffix("\n") if chosen.prompt is None else unify_line_ends(chosen.prompt)
    if not text and options.suffix is None:
        raise InputError("the prompt is empty", "give -p TEXT, or text on standard input")
    if options.extract is not None:
        text = f"{options.extract}\n\n{text}"
    started = time.perf_counter()
    progress = ProgressDisplay(transient=True)
    engine = open_model(model, load, progress=progress)
    load_s = time.perf_counter() - started
    pieces, wanted, written = [], options.logprobs is not None, AnswerPrinter(options.n)
    with engine:
        if raw_prefix:
            with progress:
                engine.keep_prefix(raw_prefix, options)
        session = engine.session(system=options.system, resume=chosen.resume) if chosen.resume is not None else None
        with progress:
            text, sources, passages = _with_documents(engine, session, chosen, text, options, progress)
        chunks: AnswerStream | CheckedAnswers = (
            CheckedAnswers(engine, raw_prefix + text, options, chosen.until, chosen.tries)
            if chosen.until is not None
            else engine.stream(raw_prefix + text, options)
            if session is None
            else session.stream(text, options, system=None)
        )
        with progress, closing(chunks), cancelling_on_interrupt(chunks.cancel) as interrupted:
            for chunk in chunks:
                pieces.append(chunk)
                if chosen.json_stream:
                    if chunk.text or chunk.logprobs or chunk.reasoning:
                        write_json(chunk_json(chunk, with_logprobs=wanted, several=options.n > 1))
                elif not as_json:
                    written.write(chunk)
        reply = Reply.of(pieces)
        if as_json or chosen.json_stream:
            shown = reply_json(reply, engine, options.speculation, load_s, with_logprobs=wanted)
            if chosen.documents:
                shown["passages"] = passages
            write_json(shown)
        elif any(choice.text for choice in reply.choices) or not interrupted():
            written.end()
            for line in sources:
                write_error(line)
        _show_statistics(reply, engine, chosen, options, load_s)
    return interrupted()


def _with_documents(
    engine: Engine,
    session: Session | None,
    chosen: RunOptions,
    text: str,
    options: GenerateOptions,
    progress: ProgressDisplay,
) -> tuple[str, list[str], list[dict[str, Any]]]:
    """The prompt with passages of the documents before it, lines about these, and the passages for JSON."""
    if not chosen.documents:
        return text, [], []
    from ..conversations.records import NO_PASSAGE, source_lines, with_passages
    from ..documents.retrieval import find_passages

    asked, earlier = {"role": "user", "content": text}, 0
    if session is not None:
        earlier = engine.count_tokens([*session.messages, asked], options) - engine.count_tokens([asked], options)
    found = find_passages(
        engine, chosen.documents, text, options, progress, earlier=earlier, embedding_model=chosen.embedding_model
    )
    described = [{"source": each.source, "line": each.line, "text": each.text} for each in found]
    return with_passages(text, found), source_lines(found) or [NO_PASSAGE], described


def _show_statistics(reply: Reply, engine: Engine, chosen: RunOptions, options: GenerateOptions, load_s: float) -> None:
    for number, choice in enumerate(reply.choices, 1):
        if options.explain:
            show_rounds(choice.stats.rounds, engine.graph_io)
        if chosen.stats:
            line = stats_line(choice.stats, engine, load_s)
            write_error(f"answer {number}: {line}" if options.n > 1 else line)
    if chosen.stats and reply.stats.best_of is not None:
        write_error(best_of_line(reply.stats.best_of))


def read_standard_input() -> str:
    """The text on standard input.

    Raises:
        InputError: there is too much of it, or it is not UTF-8.
    """
    if sys.stdin is None:
        return ""
    data = sys.stdin.buffer.read(_MAX_PROMPT_BYTES + 1)
    if len(data) > _MAX_PROMPT_BYTES:
        raise InputError(f"standard input has more than {_MAX_PROMPT_BYTES} bytes", "give a shorter prompt")
    return decode_text(data, "standard input")
