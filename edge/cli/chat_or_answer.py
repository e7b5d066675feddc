"""`edge-run [MODEL]`: chats, or answers one prompt."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from ...errors import BundleError
from ...models.find import may_be_model
from ...models.progress import Progress
from ...runtime.engine import Engine
from ...runtime.engine_loading import load as open_model
from .run import ANSWER, LOAD, RUN, answer_prompt, read_options
from .shared_options import AsJson, Debug, ModelArgument, Offline, takes_options


@takes_options(RUN, ANSWER, LOAD)
def chat_or_answer(
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
    if given["prompt"] is not None or sys.stdin is None or not sys.stdin.isatty():
        return answer_prompt(model, given, as_json=as_json)
    chosen, options, load, _ = read_options(given, as_json=as_json, chatting=True)
    from ..terminal.chat.opening import ChatSettings, open_chat

    def open_named(name: str | None, progress: Progress) -> Engine:
        named = load
        if name != model:  # these belong to the model that was named with them
            named = replace(load, tokenizer=None, draft=None if load.draft is None else "auto")
        return open_model(name, named, progress=progress)

    settings = ChatSettings(
        replace(options, system=None),
        options.system,
        chosen.resume,
        chosen.conversation,
        latest=chosen.continue_,
        saving=chosen.save,
        show_stats=chosen.stats,
    )
    return open_chat(open_named, model, settings)
