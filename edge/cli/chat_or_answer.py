"""`edge-run [MODEL]`: chats, or answers one prompt."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from ...errors import BundleError, InputError
from ...models.find import may_be_model
from ...models.progress import Progress
from ...models.user_text import read_text, unify_line_ends
from ...runtime.arguments.load_options import LoadOptions
from ...runtime.conversation import Session
from ...runtime.engine import Engine
from ...runtime.engine_loading import load as open_model
from ...runtime.options import GenerateOptions
from ...runtime.speculation.choice import Speculation
from ...runtime.structure.response_format import ResponseFormat
from .ctrl_c import INTERRUPTED
from .run import RunOptions, answer_prompt, opened_model, read_standard_input
from .shared_options import AsJson, ModelArgument, OptionsOf, takes_options

_ANSWER: Final = OptionsOf(
    GenerateOptions(),
    without=(
        *("answer_start", "tools", "tool_choice", "parallel_tool_calls", "parse_answer"),
        *("template_variables", "overflow", "keep_prefix", "response_format"),
        *("suffix", "suffix_first", "extra", "document", "extract"),
    ),
)
_LOAD: Final = OptionsOf(LoadOptions(), without=("learned", "parallel", "max_waiting"))
_RUN: Final = OptionsOf(RunOptions())


@takes_options(_RUN, _ANSWER, _LOAD, offline=True)
def chat_or_answer(
    model: ModelArgument = None,
    as_json: AsJson = False,
    **given: Any,
) -> int:
    """Chat with MODEL, or answer one prompt given with -p or on standard input.

    A chat keeps its conversations, which edge-run app shows too, and takes commands: /help lists them.

    Examples: edge-run my-model -p "Why is the sky blue?" -n 200 --stats; edge-run my-model --continue; edge-run
    my-model --context 16384 --kv int8; edge-run my-model -p "Name a boat." -t 1 --n 3 --best-of 8; edge-run my-model
    --prefix report.txt -p "What does it conclude?"; edge-run my-model --json-schema person.json -p "Who wrote Faust?";
    edge-run my-model --tools servers.json; edge-run my-model -p "Name a boat." --lossy bild:0.6,3 --stats;
    edge-run my-model --documents notes -p "When does the lease end?";
    edge-run my-model -p "Name a boat." --beams 4 --n 2; edge-run my-model --extract notes.txt -p "Who signed?";
    edge-run -p "delete all .tmp files" -t 0.8 --until "bash -n"
    """
    if model is not None and not may_be_model(model):  # before a prompt is read
        raise BundleError(f"{model} does not exist", "give an .onnx file or a model folder")
    chatting = given["prompt"] is None and sys.stdin is not None and sys.stdin.isatty()
    chosen, options, load, raw_prefix = _read_options(given, as_json=as_json, chatting=chatting)
    if chatting:
        return _chat(model, chosen, options, load)
    text = read_standard_input().removesuffix("\n") if chosen.prompt is None else unify_line_ends(chosen.prompt)
    if not text:
        raise InputError("the prompt is empty", "give -p TEXT, or text on standard input")
    if options.extract is not None:
        text = f"{options.extract}\n\n{text}"
    with opened_model(model, load) as opened:
        engine, progress, _ = opened
        resumed = None if chosen.resume is None else engine.session(system=options.system, resume=chosen.resume)
        with progress:
            if raw_prefix:
                engine.keep_prefix(raw_prefix, options)
            text, shown = _with_documents(engine, resumed, chosen, text, options, progress)
        interrupted = answer_prompt(opened, raw_prefix + text, chosen, options, resumed, as_json=as_json, **shown)
    return INTERRUPTED if interrupted else 0


def _with_documents(
    engine: Engine,
    resumed: Session | None,
    chosen: RunOptions,
    text: str,
    options: GenerateOptions,
    progress: Progress,
) -> tuple[str, dict[str, Any]]:
    """The prompt with passages of the documents before it, and what `answer_prompt` shows of them."""
    if not chosen.documents:
        return text, {}
    from ..conversations.records import NO_PASSAGE, source_lines, with_passages
    from ..documents.retrieval import find_passages

    asked, earlier = {"role": "user", "content": text}, 0
    if resumed is not None:
        earlier = engine.count_tokens([*resumed.messages, asked], options) - engine.count_tokens([asked], options)
    found = find_passages(
        engine, chosen.documents, text, options, progress, earlier=earlier, embedding_model=chosen.embedding_model
    )
    described = [{"source": each.source, "line": each.line, "text": each.text} for each in found]
    return with_passages(text, found), {"passages": described, "sources": source_lines(found) or [NO_PASSAGE]}


def _chat(model: str | None, chosen: RunOptions, options: GenerateOptions, load: LoadOptions) -> int:
    """Chat; returns the exit code."""
    from ..terminal.chat.conversation_commands import open_chat

    def open_named(name: str | None, progress: Progress) -> Engine:
        named = load
        if name != model:  # these belong to the model that was named with them
            named = replace(load, tokenizer=None, draft=None if load.draft is None else "auto")
        return open_model(name, named, progress=progress)

    return open_chat(open_named, model, chosen, options)


def _read_options(
    given: Mapping[str, Any], *, as_json: bool, chatting: bool
) -> tuple[RunOptions, GenerateOptions, LoadOptions, str]:
    """Read the options of a command line, and the files that they name.

    Returns:
        The options of the command, of the answer and of the model, and the text that begins a raw prompt.

    Raises:
        InputError: options do not go together, or a file cannot be read.
    """
    chosen, load = _RUN.record(given), _LOAD.record(given)
    source = None if chosen.extract is None else read_text(chosen.extract, "give a file with text")
    options = _ANSWER.record(given, response_format=_response_format(chosen), extract=source)
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
    if chosen.documents and options.raw:
        raise InputError("--documents needs the chat template, which --raw leaves out", "leave out one of them")
    if chosen.image and (chatting or options.raw or chosen.until is not None):
        other = "a chat, which has /image," if chatting else "--raw" if options.raw else "--until"
        raise InputError(f"--image goes with -p TEXT, not with {other}", "leave out one of them")
    if chosen.documents or chosen.embedding_model is not None:  # before the model is loaded
        from ..documents.retrieval import document_paths, passage_encoder

        document_paths(chosen.documents or ())
        if chosen.embedding_model is not None:
            passage_encoder(chosen.embedding_model)
    if options.logprobs is not None and not (as_json or chosen.json_stream):
        raise InputError("--logprobs lists tokens in the JSON of an answer", "add --json, or leave --logprobs out")
    if not chatting:
        if chosen.continue_ or chosen.conversation is not None:
            name = "--continue" if chosen.continue_ else "--conversation"
            raise InputError(f"{name} goes on with a chat, but there is a prompt to answer", f"leave out {name}")
        if chosen.tools is not None:
            raise InputError("--tools asks before each call, but there is a prompt to answer", "leave out one of them")
        return
    of_answers = {
        "--raw": options.raw,
        "--json": as_json,
        "--json-stream": chosen.json_stream,
        "--until": chosen.until is not None,
        "--extract": chosen.extract is not None,
    }
    for name, given in {**of_answers, "--n or --best-of": options.candidates > 1}.items():
        if given:
            raise InputError(f"{name} needs a prompt", "give -p TEXT, or text on standard input")
    if not sys.stdout.isatty():
        raise InputError("a chat needs a terminal on standard output", "give -p TEXT, or text on standard input")


def _response_format(chosen: RunOptions) -> ResponseFormat | None:
    """What the answer has to look like; None for free text.

    Raises:
        InputError: several formats are given, or a file cannot be read.
    """
    schema, regex, grammar, choices = chosen.json_schema, chosen.regex, chosen.grammar, chosen.choice or None
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
