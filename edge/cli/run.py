"""`edge-run [MODEL]`: answers one prompt, or chats."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final

import typer

from ...errors import InputError
from ...models.byte_sizes import parse_bytes
from ...models.progress import Progress, ProgressDisplay
from ...models.text_files import decode_text, unify_line_ends
from ...runtime.decode import FinishReason
from ...runtime.devices.power import Power
from ...runtime.engine import Engine
from ...runtime.options import GenerateOptions
from ...runtime.result import Reply
from ...runtime.sampling.logprobs import MAX_ALTERNATIVES
from ...runtime.speculation.choice import Speculation
from ...runtime.speculation.sampled_speculator import DraftSampling
from ..terminal.explain import show_rounds
from ..terminal.interrupt import cancelling_on_interrupt
from ..terminal.output import chunk_json, reply_json, stats_line, write_error, write_json, write_out
from .ctrl_c import INTERRUPTED
from .shared_options import (
    AsJson,
    Cache,
    Context,
    Debug,
    Device,
    Draft,
    ModelArgument,
    ModelOptions,
    Offline,
    PowerMode,
    PrefixCache,
    Raw,
    Threads,
    Tokenizer,
)

_MAX_PROMPT_BYTES: Final = 16 << 20
"""Largest prompt that is read from standard input, several times the text of the longest contexts."""
_BIAS: Final = re.compile(r"([0-9]{1,9})=([+-]?[0-9]{1,9}(?:\.[0-9]{1,18})?)")


@dataclass(frozen=True)
class RunOptions:
    """What to answer, and how to show it."""

    model: ModelOptions
    generate: GenerateOptions
    prompt: str | None
    """The prompt to answer; None for a chat."""
    system: str | None
    resume: Path | None
    conversation: str | None
    """Id of the stored conversation that a chat goes on with."""
    latest: bool
    """Whether a chat goes on with the latest conversation."""
    saving: bool
    """Whether a chat is kept."""
    as_json: bool
    json_stream: bool
    stats: bool


def run(
    model: ModelArgument = None,
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", metavar="TEXT", help="Answer this prompt, then exit.")
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message.")] = None,
    raw: Raw = False,
    special_tokens_in_messages: Annotated[
        bool,
        typer.Option(
            "--special-tokens-in-messages",
            help="Turn the text of special tokens in messages, such as <|end|>, into these tokens.",
        ),
    ] = False,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "-n", "--max-tokens", metavar="N", min=1, help="Maximum tokens of an answer.", show_default="no limit"
        ),
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End the answer before this text; may be repeated.")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            "-t",
            "--temperature",
            metavar="T",
            min=0,
            help="Sampling temperature; 0 is greedy.",
            show_default="what the model recommends, or 0",
        ),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(metavar="K", min=0, help="Sample from the K most likely tokens; 0 for all.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(metavar="P", help="Sample from the most likely tokens that together have probability P."),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(metavar="P", help="Leave out tokens less likely than P times the most likely one."),
    ] = None,
    repeat_penalty: Annotated[
        float | None,
        typer.Option(metavar="X", help="Above 1, make tokens that are already in the text less likely; 1 is off."),
    ] = None,
    presence_penalty: Annotated[
        float, typer.Option(metavar="X", help="Lower the logits of all tokens that the answer has already by X.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float,
        typer.Option(
            metavar="X", help="Lower the logit of a token by X for every time that the answer has it already."
        ),
    ] = 0.0,
    logit_bias: Annotated[
        list[str] | None, typer.Option(metavar="ID=X", help="Add X to the logit of the token ID; may be repeated.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after end-of-sequence tokens, up to --max-tokens.")
    ] = False,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, help="Seed of the sampling; the same seed gives the same text.", show_default="random"
        ),
    ] = None,
    device: Device = "auto",
    threads: Threads = None,
    power: PowerMode = Power.AUTO,
    context: Context = None,
    cache: Cache = True,
    prefix_cache: PrefixCache = None,
    tokenizer: Tokenizer = None,
    draft: Draft = "auto",
    spec: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Drafters for speculative decoding: auto, off, or some of suffix,recycle,ngram,history,model.",
        ),
    ] = "auto",
    draft_sampling: Annotated[
        DraftSampling,
        typer.Option(
            help="Sample the draft model's tokens (a chain or a tree of them) instead of taking the most likely ones. "
            "This is faster at high temperatures and keeps the distribution, but a seed no longer fixes the text."
        ),
    ] = DraftSampling.OFF,
    history: Annotated[
        bool,
        typer.Option("--history", help="Keep this conversation on disk, and draft from earlier conversations."),
    ] = False,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            help="Give exactly the text of --spec off: recompute near ties, and do not speculate when sampling.",
        ),
    ] = False,
    resume: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Continue a conversation that /save wrote.")
    ] = None,
    continue_: Annotated[
        bool,
        typer.Option("-c", "--continue", help="Go on with the latest conversation, with its model if none is named."),
    ] = False,
    conversation: Annotated[
        str | None,
        typer.Option(
            metavar="ID", help="Go on with a conversation of this id, as /conversations and the app list them."
        ),
    ] = None,
    save: Annotated[
        bool, typer.Option("--save/--no-save", help="Keep the conversations of a chat, and what is typed, on disk.")
    ] = True,
    offline: Offline = False,  # noqa: ARG001  its callback acts
    as_json: AsJson = False,
    json_stream: Annotated[
        bool,
        typer.Option(
            "--json-stream",
            help="Print JSON lines while the answer is generated: an object for each piece, and at the end that of "
            "--json.",
        ),
    ] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            min=0,
            max=MAX_ALTERNATIVES,
            help="With --json or --json-stream, list every token with its log-probability and K alternatives.",
        ),
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print statistics of the answer on standard error.")] = False,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain", help="Print what each round drafted, verified and took, as a table on standard error."
        ),
    ] = False,
    debug: Debug = False,  # noqa: ARG001  main reads it
) -> int:
    """Chat with MODEL, or answer one prompt given with -p or on standard input.

    A chat keeps its conversations, which edge-run app shows too, and takes commands: /help lists them.

    Examples: edge-run my-model -p "Why is the sky blue?" -n 200 --stats; edge-run my-model --continue
    """
    if as_json and json_stream:
        raise InputError("--json and --json-stream are both given", "give one of them")
    if logprobs is not None and not (as_json or json_stream):
        raise InputError("--logprobs lists tokens in the JSON of an answer", "add --json, or leave --logprobs out")
    options = GenerateOptions(
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repeat_penalty=repeat_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=_logit_bias(logit_bias or ()),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        seed=seed,
        raw=raw,
        special_tokens_in_messages=special_tokens_in_messages,
        speculation=Speculation.parse(spec),
        exact=exact,
        draft_sampling=draft_sampling,
        explain=explain,
    )
    chatting = prompt is None and sys.stdin is not None and sys.stdin.isatty()
    if chatting:
        _check_chat(raw=raw, as_json=as_json, json_stream=json_stream)
    elif continue_ or conversation is not None:
        name = "--continue" if continue_ else "--conversation"
        raise InputError(f"{name} goes on with a chat, but there is a prompt to answer", f"leave out {name}")
    elif prompt is None:
        prompt = _read_standard_input()
    prompt, system = (None if text is None else unify_line_ends(text) for text in (prompt, system))
    if prompt == "":
        raise InputError("the prompt is empty", "give -p TEXT, or text on standard input")
    # Without speculation a draft model would cost memory and processor time for nothing.
    used_draft = None if options.speculation == Speculation.OFF else draft
    prefix_bytes = None if prefix_cache is None else parse_bytes(prefix_cache, "--prefix-cache")
    opened = ModelOptions(
        model,
        device,
        threads,
        context,
        tokenizer,
        used_draft,
        cache,
        history,
        prefix_cache=prefix_bytes,
        power=power,
    )
    request = RunOptions(
        opened, options, prompt, system, resume, conversation, continue_, save, as_json, json_stream, stats
    )
    return _chat(request) if chatting else _answer(request)


def _chat(options: RunOptions) -> int:
    from ..terminal.chat.opening import ChatSettings, open_chat

    def open_model(name: str | None, progress: Progress) -> Engine:
        named = options.model
        if name != named.model:  # these belong to the model that was named with them
            draft = None if named.draft is None else "auto"
            named = replace(named, model=name, tokenizer=None, draft=draft)
        return named.open(progress)

    settings = ChatSettings(
        options.generate,
        options.system,
        options.resume,
        options.conversation,
        latest=options.latest,
        saving=options.saving,
        show_stats=options.stats,
    )
    return open_chat(open_model, options.model.model, settings)


def _answer(options: RunOptions) -> int:
    """Answer the prompt once; Ctrl-C keeps what was written."""
    prompt = options.prompt or ""
    started = time.perf_counter()
    progress = ProgressDisplay(transient=True)
    engine = options.model.open(progress)
    load_s = time.perf_counter() - started
    pieces = []
    wanted = options.generate.logprobs is not None
    with engine:
        if options.resume is not None:
            session = engine.session(system=options.system, resume=options.resume)
            chunks = session.stream(prompt, options.generate)
        else:
            chunks = engine.stream(prompt, options.generate, system=options.system)
        with progress, closing(chunks), cancelling_on_interrupt(chunks.cancel) as interrupted:
            for chunk in chunks:
                pieces.append(chunk)
                if options.json_stream:
                    if chunk.text or chunk.logprobs:
                        write_json(chunk_json(chunk, with_logprobs=wanted))
                elif not options.as_json:
                    write_out(chunk.text)
        reply = Reply.of(pieces)
        if options.as_json or options.json_stream:
            write_json(reply_json(reply, engine, options.generate.speculation, load_s, with_logprobs=wanted))
        elif not reply.text.endswith("\n") and (reply.text or not interrupted()):
            write_out("\n")
        if options.generate.explain:
            show_rounds(reply.stats.rounds, engine.graph_io)
        if options.stats:
            write_error(stats_line(reply.stats, engine, load_s))
    return INTERRUPTED if interrupted() and reply.finish_reason is FinishReason.CANCELLED else 0


def _logit_bias(given: Sequence[str]) -> dict[int, float] | None:
    """What is added to the logits of which token ids, from arguments such as `42=-1.5`.

    Raises:
        InputError: an argument is something else.
    """
    biases: dict[int, float] = {}
    for text in given:
        match = _BIAS.fullmatch(text)
        if match is None:
            raise InputError(f"--logit-bias is {text!r:.60}", "give a token id and what to add, such as 42=-1.5")
        biases[int(match[1])] = float(match[2])
    return biases or None


def _check_chat(*, raw: bool, as_json: bool, json_stream: bool) -> None:
    for option, given in (("--raw", raw), ("--json", as_json), ("--json-stream", json_stream)):
        if given:
            raise InputError(f"{option} needs a prompt", "give -p TEXT, or text on standard input")
    if not sys.stdout.isatty():
        raise InputError("a chat needs a terminal on standard output", "give -p TEXT, or text on standard input")


def _read_standard_input() -> str:
    if sys.stdin is None:
        return ""
    data = sys.stdin.buffer.read(_MAX_PROMPT_BYTES + 1)
    if len(data) > _MAX_PROMPT_BYTES:
        raise InputError(f"standard input has more than {_MAX_PROMPT_BYTES} bytes", "give a shorter prompt")
    return decode_text(data, "standard input").removesuffix("\n")
