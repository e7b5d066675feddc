"""`edge-run [MODEL]`: answers one prompt, or chats."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from ...errors import BundleError, InputError
from ...models.find import may_be_model
from ...models.progress import Progress
from ...models.text_files import decode_text, read_text, unify_line_ends
from ...runtime.devices.power import Power
from ...runtime.engine import Engine
from ...runtime.kv.cache_scales import KVFormat
from ...runtime.options import LEAST_CONFIDENCE, MOST_ANSWERS, GenerateOptions
from ...runtime.prefill import PrefillMode
from ...runtime.sampling.logprobs import MAX_ALTERNATIVES
from ...runtime.speculation.choice import Speculation
from ...runtime.speculation.sampled_speculator import DraftSampling
from .format_options import Choices, GrammarAligned, GrammarFile, JsonSchema, Regex, response_format_of
from .shared_options import (
    KV,
    AsJson,
    Cache,
    Context,
    Debug,
    Device,
    Draft,
    DraftDevice,
    ModelArgument,
    ModelOptions,
    Offline,
    OverflowPolicy,
    PowerMode,
    Prefill,
    PrefixCache,
    PrefixDisk,
    Raw,
    Threads,
    Tokenizer,
    ToolFormatName,
    prefix_cache_bytes,
    prefix_disk_bytes,
)
from .single_answer import AnswerDisplay, SinglePrompt, answer_prompt

if TYPE_CHECKING:
    from ..terminal.chat.opening import ChatSettings

_MAX_PROMPT_BYTES: Final = 16 << 20
"""Largest prompt that is read from standard input, several times the text of the longest contexts."""
_BIAS: Final = re.compile(r"([0-9]{1,9})=([+-]?[0-9]{1,9}(?:\.[0-9]{1,18})?)")


def run(
    model: ModelArgument = None,
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", metavar="TEXT", help="Answer this prompt, then exit.")
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message.")] = None,
    prefix: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Begin the conversation with the text of FILE, such as a long document: at the end of the system "
            "message, or with --raw before the prompt. Its KV cache is kept on disk, so that the next start does not "
            "read it again.",
        ),
    ] = None,
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
    json_schema: JsonSchema = None,
    regex: Regex = None,
    grammar: GrammarFile = None,
    choice: Choices = None,
    grammar_aligned: GrammarAligned = 0,
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
    answers: Annotated[
        int,
        typer.Option(
            "--n",
            "--answers",
            metavar="N",
            help=f"Number of answers to the prompt, 1 to {MOST_ANSWERS}. The first has the seed, the next 1 more, and "
            "so on.",
        ),
    ] = 1,
    best_of: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Generate N answers and print those with the largest mean log-probability, as many as --n says.",
        ),
    ] = None,
    early_stop: Annotated[
        float,
        typer.Option(
            metavar="P",
            help="With --best-of, stop an answer once it will not be among the best, with confidence P, "
            f"{LEAST_CONFIDENCE} to 1; at 1, once it cannot be.",
        ),
    ] = 1.0,
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
    kv: KV = KVFormat.FLOAT,
    prefill: Prefill = PrefillMode.AUTO,
    tool_format: ToolFormatName = "auto",
    cache: Cache = True,
    prefix_cache: PrefixCache = None,
    overflow: OverflowPolicy = None,
    prefix_disk: PrefixDisk = None,
    tokenizer: Tokenizer = None,
    draft: Draft = "auto",
    draft_device: DraftDevice = "auto",
    spec: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Drafters for speculative decoding: auto, off, or some of suffix,edit,recycle,ngram,history,"
            "model,eagle,medusa,mtp.",
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

    Examples: edge-run my-model -p "Why is the sky blue?" -n 200 --stats; edge-run my-model --continue; edge-run
    my-model --context 16384 --kv int8; edge-run my-model -p "Name a boat." -t 1 --n 3 --best-of 8; edge-run my-model
    --prefix report.txt -p "What does it conclude?"; edge-run my-model --json-schema person.json -p "Who wrote Faust?"
    """
    if model is not None and not may_be_model(model):  # before a prompt is read
        raise BundleError(f"{model} does not exist", "give an .onnx file or a model folder")
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
        n=answers,
        best_of=best_of,
        early_stop=early_stop,
        seed=seed,
        raw=raw,
        special_tokens_in_messages=special_tokens_in_messages,
        speculation=Speculation.parse(spec),
        exact=exact,
        draft_sampling=draft_sampling,
        explain=explain,
        response_format=response_format_of(json_schema, regex, grammar, choice),
        grammar_aligned=grammar_aligned,
    )
    chatting = prompt is None and sys.stdin is not None and sys.stdin.isatty()
    if chatting:
        _check_chat(raw=raw, as_json=as_json, json_stream=json_stream, several=options.candidates > 1)
    elif continue_ or conversation is not None:
        name = "--continue" if continue_ else "--conversation"
        raise InputError(f"{name} goes on with a chat, but there is a prompt to answer", f"leave out {name}")
    elif prompt is None:
        prompt = _read_standard_input()
    prompt, system = (None if text is None else unify_line_ends(text) for text in (prompt, system))
    document = "" if prefix is None else read_text(prefix, "give a file with text")
    if document and resume is not None:
        raise InputError("a resumed conversation has its beginning already", "leave out --prefix or --resume")
    if document and not raw:
        system = document if system is None else f"{system}\n\n{document}"
    if prompt == "":
        raise InputError("the prompt is empty", "give -p TEXT, or text on standard input")
    options = options.changed({"keep_prefix": (bool(document) and not raw) or (chatting and save)})
    # Without speculation a draft model would cost memory and processor time for nothing.
    used_draft = None if options.speculation == Speculation.OFF else draft
    opened = ModelOptions(
        model,
        device,
        threads,
        context,
        tokenizer,
        used_draft,
        cache,
        history,
        prefix_cache=prefix_cache_bytes(prefix_cache),
        overflow=overflow,
        prefix_disk=prefix_disk_bytes(prefix_disk),
        power=power,
        kv=kv,
        prefill=prefill,
        tool_format=tool_format,
        draft_device=draft_device if used_draft is not None else "auto",
    )
    if not chatting:
        asked = SinglePrompt(prompt or "", system, document if raw else "", resume, options)
        return answer_prompt(opened, asked, AnswerDisplay(as_json, json_stream, stats))
    from ..terminal.chat.opening import ChatSettings

    settings = ChatSettings(options, system, resume, conversation, latest=continue_, saving=save, show_stats=stats)
    return _chat(opened, settings)


def _chat(options: ModelOptions, settings: ChatSettings) -> int:
    from ..terminal.chat.opening import open_chat

    def open_model(name: str | None, progress: Progress) -> Engine:
        named = options
        if name != named.model:  # these belong to the model that was named with them
            draft = None if named.draft is None else "auto"
            named = replace(named, model=name, tokenizer=None, draft=draft)
        return named.open(progress)

    return open_chat(open_model, options.model, settings)


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


def _check_chat(*, raw: bool, as_json: bool, json_stream: bool, several: bool) -> None:
    options = {"--raw": raw, "--json": as_json, "--json-stream": json_stream, "--n or --best-of": several}
    for option, given in options.items():
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
