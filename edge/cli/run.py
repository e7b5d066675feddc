"""Answers one prompt on the command line, or fills a gap: prints the text or JSON, and statistics."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ...errors import EdgeError, InputError
from ...models.progress import ProgressDisplay
from ...models.user_text import decode_text, read_text
from ...runtime.arguments.argument_types import option
from ...runtime.arguments.load_options import LoadOptions
from ...runtime.conversation import Session
from ...runtime.decode import FinishReason
from ...runtime.engine import Engine, Prompt
from ...runtime.engine_loading import load as open_model
from ...runtime.options import MOST_ANSWERS, GenerateOptions
from ...runtime.result import Chunk, Reply
from ...runtime.scheduling.answer_stream import AnswerStream
from ...runtime.text.infill import SUGGESTION_TOKENS
from ..terminal.answer_report import AnswerPrinter, best_of_line, chunk_json, reply_json, show_rounds, stats_line
from ..terminal.interrupt import Interrupts
from ..terminal.output import write_error, write_json
from .ctrl_c import INTERRUPTED
from .shared_options import AsJson, ModelArgument, OptionsOf, embedding_option, takes_options

_MAX_PROMPT_BYTES: Final = 16 << 20
"""Largest prompt that is read from standard input, several times the text of the longest contexts."""


@dataclass(frozen=True)
class RunOptions:
    """Options of `edge-run run` beside the options of the model and the answer."""

    prompt: str | None = option(None, "Answer this prompt, then exit.", flags=("-p", "--prompt"), metavar="TEXT")
    image: list[Path] | None = option(
        None,
        "Let the model see an image before the prompt: PNG, JPEG, WEBP, GIF, BMP. May be repeated. Needs a model that "
        "was exported with its vision tower, and the extra images.",
        metavar="FILE",
    )
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
    json_schema: Path | None = option(None, "Let the answer be JSON of the schema in FILE, on a line.", metavar="FILE")
    regex: str | None = option(None, "Let the whole answer match a regular expression.", metavar="PATTERN")
    grammar: Path | None = option(None, "Let the answer follow the Lark or GBNF grammar in FILE.", metavar="FILE")
    choice: list[str] | None = option(None, "Let the answer be this text; repeat it for other choices.", metavar="TEXT")
    extract: Path | None = option(None, "Answer with the most probable passage of the text of FILE.", metavar="FILE")
    until: str | None = option(
        None, "Sample until COMMAND succeeds with the answer on its standard input: 'bash -n'.", metavar="COMMAND"
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
    json_stream: bool = option(False, "Print a JSON line for each piece of the answer, and then that of --json.")
    stats: bool = option(False, "Print statistics of the answer on standard error.")
    tools: Path | None = option(None, "Let a chat call tools of the MCP servers in FILE.", metavar="FILE")


@dataclass
class CheckedAnswers:
    """The chunks of the first sampled answer that a command accepts; `cancel` may be called from a signal handler.

    Source: Brown et al., "Large language monkeys" (2024): repeated sampling with a check from outside.
    """

    engine: Engine
    prompt: Prompt
    options: GenerateOptions
    """Options of an answer; each further one has the next seed."""
    command: str
    """A command of the shell, which reads the answer on its standard input."""
    most: int
    """Largest number of answers to sample."""
    _stream: AnswerStream | None = None

    def __iter__(self) -> Iterator[Chunk]:
        """Sample, check, and give the chunks of the accepted answer.

        Raises:
            EdgeError: none was accepted.
            InputError: all answers would be equal, or several are wanted.
        """
        sampling = self.options.sampling(self.engine.defaults)
        if sampling.greedy or self.options.candidates > 1:
            raise InputError("--until samples one answer after the other", "add -t 0.8, and no --n or --best-of")
        for number in range(self.most):
            options = replace(self.options, seed=(sampling.seed + number) % (1 << 64))
            self._stream = self.engine.stream(self.prompt, options)
            chunks = list(self._stream)
            text = "".join(chunk.text for chunk in chunks).encode()
            if chunks[-1].finish_reason is FinishReason.CANCELLED or self._accepts(text):
                yield from chunks
                return
        raise EdgeError(f"none of {self.most} answers passes {self.command!r}", "give more --tries, or a higher -t")

    def _accepts(self, text: bytes) -> bool:
        # What the user types as a command is run by the shell, as in a terminal; nothing else can set it.
        checked = subprocess.run(self.command, shell=True, input=text, capture_output=True, check=False)  # noqa: S602
        return checked.returncode == 0

    def cancel(self) -> None:
        """End the sampling after the current pass."""
        if self._stream is not None:
            self._stream.cancel()

    close = cancel


@contextmanager
def opened_model(model: str | None, load: LoadOptions) -> Iterator[tuple[Engine, ProgressDisplay, float]]:
    """Open the model of a command line during the block.

    Yields:
        The engine, what shows its progress, and the seconds that loading took.

    Raises:
        EdgeError: the model cannot be loaded.
    """
    started, progress = time.perf_counter(), ProgressDisplay(transient=True)
    with open_model(model, load, progress=progress) as engine:
        yield engine, progress, time.perf_counter() - started


def answer_prompt(
    opened: tuple[Engine, ProgressDisplay, float],
    text: str,
    chosen: RunOptions,
    options: GenerateOptions,
    resumed: Session | None = None,
    *,
    as_json: bool,
    sources: Sequence[str] = (),
    **further: Any,
) -> bool:
    """Answer a prompt; Ctrl-C keeps what was written.

    Args:
        opened: the model, of `opened_model`.
        text: the prompt.
        chosen: how the answer is chosen and shown.
        options: options of the answer.
        resumed: the conversation that the prompt continues.
        as_json: whether standard output has one JSON object.
        sources: lines below the text, on standard error.
        further: what the JSON object has beside the answer.

    Returns:
        Whether Ctrl-C was pressed.

    Raises:
        EdgeError: the prompt cannot be answered.
    """
    engine, progress, load_s = opened
    pieces, wanted, written = [], options.logprobs is not None, AnswerPrinter(options.n)
    asked = _asked(text, chosen, options, resumed)
    chunks: AnswerStream | CheckedAnswers = (
        engine.stream(*asked) if chosen.until is None else CheckedAnswers(engine, *asked, chosen.until, chosen.tries)
    )
    with progress, closing(chunks), Interrupts(enough=1) as interrupts, interrupts.calling(chunks.cancel):
        for chunk in chunks:
            pieces.append(chunk)
            if chosen.json_stream:
                if chunk.text or chunk.logprobs or chunk.reasoning:
                    write_json(chunk_json(chunk, with_logprobs=wanted, several=options.n > 1))
            elif not as_json:
                written.write(chunk)
    reply, interrupted = Reply.of(pieces), interrupts.take()
    if as_json or chosen.json_stream:
        write_json(reply_json(reply, engine, options.speculation, load_s, with_logprobs=wanted) | further)
    elif any(choice.text for choice in reply.choices) or not interrupted:
        written.end()
        for line in sources:
            write_error(line)
    _show_statistics(reply, engine, chosen, options, load_s)
    return interrupted


def _asked(
    text: str, chosen: RunOptions, options: GenerateOptions, resumed: Session | None
) -> tuple[Prompt, GenerateOptions]:
    """The prompt with its images, behind the conversation that it continues, and the options for it."""
    if not chosen.image and resumed is None:
        return text, options
    parts = [{"type": "image", "image": path} for path in chosen.image or ()]
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    before = system if resumed is None else resumed.messages
    return [*before, {"role": "user", "content": [*parts, {"type": "text", "text": text}]}], replace(
        options, system=None
    )


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


_STANDARD_INPUT: Final = Path("-")


@dataclass(frozen=True)
class CompleteOptions:
    """Options of `edge-run complete` beside the options of the model and the suggestions."""

    prefix_file: Path = option(_STANDARD_INPUT, "The text before the gap; - for standard input.", metavar="FILE")
    suffix_file: Path | None = option(None, "The text after the gap; - for standard input.", metavar="FILE")
    extra_file: list[Path] | None = option(
        None, "Another file of the project; repeat it, the most important file last.", metavar="FILE"
    )
    choices: int = option(
        1, "Number of suggestions.", least=1, most=MOST_ANSWERS, flags=("-k", "--choices"), metavar="N"
    )


_COMPLETE: Final = OptionsOf(CompleteOptions())
_SHOWN: Final = OptionsOf(RunOptions(), only=("stats",))
_ANSWER: Final = OptionsOf(
    GenerateOptions(max_tokens=SUGGESTION_TOKENS),
    only=(
        *("max_tokens", "stop", "temperature", "top_k", "top_p", "min_p", "repeat_penalty", "least_confidence"),
        *("seed", "suffix_first", "speculation", "exact", "explain"),
    ),
)
_LOAD: Final = OptionsOf(
    LoadOptions(),
    without=("tool_format", "overflow", "prefix_cache", "prefix_disk", "learned", "parallel", "max_waiting"),
)


@takes_options(_COMPLETE, _SHOWN, _ANSWER, _LOAD, offline=True)
def complete(
    model: ModelArgument = None,
    as_json: AsJson = False,
    **given: Any,
) -> int:
    """Fill the gap between two texts with a model that was trained for it, such as Qwen/Qwen2.5-Coder-0.5B.

    Examples: edge-run complete my-coder --prefix-file before.py --suffix-file after.py -k 3; edge-run complete my-coder
    --suffix-file after.py < before.py
    """
    chosen, load = _COMPLETE.record(given), _LOAD.record(given)
    files = [chosen.prefix_file, chosen.suffix_file, *(chosen.extra_file or ())]
    if twice := next((path for path in files if path is not None and files.count(path) > 1), None):
        raise InputError(f"{twice} is given twice", "give each text once")
    prefix, suffix = ("" if path is None else _text(path) for path in (chosen.prefix_file, chosen.suffix_file))
    options = _ANSWER.record(
        given,
        suffix=suffix,
        extra=[{"filename": _name(path), "text": _text(path)} for path in chosen.extra_file or ()],
        n=chosen.choices,
        branch=chosen.choices > 1,
        document=_name(chosen.prefix_file),
    )
    with opened_model(model, load) as opened:
        return INTERRUPTED if answer_prompt(opened, prefix, _SHOWN.record(given), options, as_json=as_json) else 0


def _text(path: Path) -> str:
    return read_standard_input() if path == _STANDARD_INPUT else read_text(path, blank=True)


def _name(path: Path) -> str:
    """What the model is told that a file is called; nothing of standard input."""
    return "" if path == _STANDARD_INPUT else path.name
