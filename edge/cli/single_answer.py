"""Answers one prompt on the command line: prints the text or JSON, and statistics."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from ...models.progress import ProgressDisplay
from ...runtime.arguments.load_options import LoadOptions
from ...runtime.engine import Engine
from ...runtime.engine_loading import load
from ...runtime.options import GenerateOptions
from ...runtime.result import Reply
from ...runtime.scheduling.answer_stream import AnswerStream
from ..terminal.answer_report import AnswerPrinter, best_of_line, chunk_json, reply_json, show_rounds, stats_line
from ..terminal.interrupt import cancelling_on_interrupt
from ..terminal.output import write_error, write_json
from .ctrl_c import INTERRUPTED


@dataclass(frozen=True)
class SinglePrompt:
    """What is answered once, and how the answer is prompt."""

    text: str
    options: GenerateOptions
    raw_prefix: str = ""
    """Text before a raw prompt, whose KV cache is kept."""
    resume: Path | None = None
    """A saved conversation that the prompt continues."""
    as_json: bool = False
    """Whether one JSON object is printed in place of the text."""
    json_stream: bool = False
    """Whether a JSON object is printed for every piece."""
    stats: bool = False
    """Whether statistics are printed on standard error."""


def answer_prompt(model: str | None, load_options: LoadOptions, prompt: SinglePrompt) -> int:
    """Answer a prompt once; Ctrl-C keeps what was written.

    Returns:
        The exit code.

    Raises:
        EdgeError: the model cannot be loaded, or the prompt not be answered.
    """
    options = prompt.options
    started = time.perf_counter()
    progress = ProgressDisplay(transient=True)
    engine = load(model, load_options, progress=progress)
    load_s = time.perf_counter() - started
    pieces = []
    wanted, several = options.logprobs is not None, options.n > 1
    written = AnswerPrinter(options.n)
    with engine:
        chunks = _open_stream(prompt, engine, progress)
        with progress, closing(chunks), cancelling_on_interrupt(chunks.cancel) as interrupted:
            for chunk in chunks:
                pieces.append(chunk)
                if prompt.json_stream:
                    if chunk.text or chunk.logprobs or chunk.reasoning:
                        write_json(chunk_json(chunk, with_logprobs=wanted, several=several))
                elif not prompt.as_json:
                    written.write(chunk)
        reply = Reply.of(pieces)
        if prompt.as_json or prompt.json_stream:
            write_json(reply_json(reply, engine, options.speculation, load_s, with_logprobs=wanted))
        elif any(choice.text for choice in reply.choices) or not interrupted():
            written.end()
        for number, choice in enumerate(reply.choices, 1):
            if options.explain:
                show_rounds(choice.stats.rounds, engine.graph_io)
            if prompt.stats:
                line = stats_line(choice.stats, engine, load_s)
                write_error(f"answer {number}: {line}" if several else line)
        if prompt.stats and reply.stats.best_of is not None:
            write_error(best_of_line(reply.stats.best_of))
    return INTERRUPTED if interrupted() else 0


def _open_stream(prompt: SinglePrompt, engine: Engine, progress: ProgressDisplay) -> AnswerStream:
    """The stream of the answers to a prompt."""
    text, options = prompt.text, prompt.options
    if prompt.resume is not None:
        return engine.session(system=options.system, resume=prompt.resume).stream(text, options, system=None)
    if prompt.raw_prefix:
        with progress:
            engine.keep_prefix(prompt.raw_prefix, options)
        text = prompt.raw_prefix + text
    return engine.stream(text, options)
