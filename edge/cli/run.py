"""`edge-run [MODEL]`: one answer, or a chat."""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Annotated, Final

import typer

from ...errors import InputError
from ...runtime.decode import FinishReason
from ...runtime.engine import Engine, load
from ...runtime.options import GenerateOptions
from ...runtime.result import Reply
from ...runtime.speculation.choice import Speculation
from ...runtime.speculation.sampled_speculator import DraftSampling
from ..terminal.chat import TerminalChat
from ..terminal.explain import show_rounds
from ..terminal.interrupt import cancelling_on_interrupt
from ..terminal.output import reply_json, stats_line, write_error, write_out
from .offline import Offline

_INTERRUPTED: Final = 130


def run(
    model: Annotated[
        str | None,
        typer.Argument(help="An .onnx file, a model folder, or org/name on the hub.", show_default="the bundled model"),
    ] = None,
    prompt: Annotated[str | None, typer.Option("-p", "--prompt", help="Answer this once, then exit.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    max_tokens: Annotated[
        int | None, typer.Option("-n", "--max-tokens", min=1, help="Most tokens to write.", show_default="no limit")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End the answer at this text; may be repeated.")] = None,
    temperature: Annotated[
        float | None,
        typer.Option("-t", "--temperature", min=0, help="0 is greedy.", show_default="the model's own, else greedy"),
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="Sample among the K likeliest tokens; 0: all.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample within this probability mass.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Drop tokens less likely than this times the likeliest.")] = None,
    repeat_penalty: Annotated[
        float | None, typer.Option(help="Make tokens already in the text less likely; 1: off.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Same seed, same text.", show_default="random")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, gpu, npu, or an execution provider's name.")] = "auto",
    threads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Compute threads.", show_default="one per physical core")
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=2, help="Most tokens of a conversation.", show_default="what the model allows")
    ] = None,
    cache: Annotated[
        bool, typer.Option("--cache/--no-cache", help="Keep weights packed for this machine on disk.")
    ] = True,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="tokenizer.json, or a folder with one.", show_default="the one beside the model"),
    ] = None,
    draft: Annotated[
        str, typer.Option(metavar="MODEL", help="Draft model: a folder, auto (the one MODEL names), or none.")
    ] = "auto",
    spec: Annotated[
        str,
        typer.Option(
            metavar="WHO", help="Who guesses ahead: auto, off, or some of suffix,recycle,ngram,history,model."
        ),
    ] = "auto",
    history: Annotated[
        bool, typer.Option("--history", help="Keep this conversation on disk, and guess from earlier ones.")
    ] = False,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact", help="Exactly the text of --spec off: near-ties are run again, sampled text is not drafted."
        ),
    ] = False,
    resume: Annotated[Path | None, typer.Option(help="Go on with a conversation put aside by /save.")] = None,
    offline: Offline = False,  # noqa: ARG001  its callback acts
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print what the answer cost, on stderr.")] = False,
    draw: Annotated[
        DraftSampling,
        typer.Option(help="Draw the draft model's guesses at random: same law, but no fixed text for a seed."),
    ] = DraftSampling.OFF,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print, on stderr, what every round guessed, verified and cost.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback with an error.")] = False,  # noqa: ARG001
) -> int:
    """Chat with MODEL, or answer one prompt given with -p or on standard input.

    Example: edge-run my-model -p "Why is the sky blue?" -n 200 --stats
    """
    options = GenerateOptions(
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repeat_penalty=repeat_penalty,
        seed=seed,
        raw=raw,
        speculation=Speculation.parse(spec),
        exact=exact,
        draft_sampling=draw,
        explain=explain,
    )
    chatting = prompt is None and sys.stdin is not None and sys.stdin.isatty()
    if chatting:
        _check_chat(raw=raw, as_json=as_json)
    elif prompt is None:
        prompt = _read_standard_input()
    if prompt == "":
        raise InputError("the prompt is empty", "give -p TEXT, or text on standard input")

    started = time.perf_counter()
    engine = load(
        model,
        device=device,
        threads=threads,
        context=context,
        cache=cache,
        # A model that nobody will ask costs memory, and processor time that the target could use.
        draft=None if options.speculation == Speculation.OFF else draft,
        history=history,
        tokenizer=tokenizer,
    )
    load_s = time.perf_counter() - started
    with engine:
        if chatting:
            return TerminalChat(engine, options, system=system, resume=resume, show_stats=stats).run()
        assert prompt is not None  # noqa: S101  only a chat has none
        reply, interrupted = _answer(engine, prompt, options, system, resume, show=not as_json)
        if as_json:
            print(json.dumps(reply_json(reply, engine, options.speculation, load_s), ensure_ascii=False))  # noqa: T201
        if explain:
            show_rounds(reply.stats.rounds, engine.graph_io)
        if stats:
            write_error(stats_line(reply.stats, load_s))
    return _INTERRUPTED if interrupted else 0


def _answer(
    engine: Engine, prompt: str, options: GenerateOptions, system: str | None, resume: Path | None, *, show: bool
) -> tuple[Reply, bool]:
    """Answer once; Ctrl-C keeps what was written. Returns the reply and whether it was interrupted."""
    if resume is not None:
        chunks = engine.session(system=system, resume=resume).stream(prompt, options)
    else:
        chunks = engine.stream(prompt, options, system=system)
    pieces = []
    with closing(chunks), cancelling_on_interrupt(chunks.cancel) as interrupted:
        for chunk in chunks:
            pieces.append(chunk)
            if show:
                write_out(chunk.text)
    reply = Reply.of(pieces)
    if show and not reply.text.endswith("\n"):
        write_out("\n")
    return reply, interrupted() and reply.finish_reason is FinishReason.CANCELLED


def _check_chat(*, raw: bool, as_json: bool) -> None:
    if raw or as_json:
        raise InputError(f"{'--raw' if raw else '--json'} needs a prompt", "give -p TEXT, or text on standard input")
    if not sys.stdout.isatty():
        raise InputError("a chat needs a terminal on standard output", "give -p TEXT, or text on standard input")


def _read_standard_input() -> str:
    if sys.stdin is None:
        return ""
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InputError("standard input is not UTF-8 text", "convert it first") from error
