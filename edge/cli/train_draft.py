"""`edge-run train-draft` and `edge-run control-vector`: what is made for a model from its answers or hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ...errors import InputError, missing_extra
from ...export.draft_training.training_options import HELD_OUT_SHARE, MOST_HELD_OUT, DraftTrainingOptions
from ...models.progress import ProgressDisplay
from ...models.user_text import json_lines, read_text, text_of
from ..bench.prompt_sets import read_prompts
from ..terminal.output import write_json, write_line
from .shared_options import AsJson, OptionsOf, takes_options

if TYPE_CHECKING:  # PyTorch is an extra
    from ...export.draft_training.request import DraftTrainingRequest
    from ...export.draft_training.target_data import PromptConversation
from ...runtime.arguments.load_options import MEASURING_OPTIONS
from ...runtime.engine_loading import load as open_model
from ...runtime.graph.session import SessionConfig
from ...runtime.options import GenerateOptions

_TRAIN: Final = OptionsOf(DraftTrainingOptions())
_LOAD: Final = OptionsOf(MEASURING_OPTIONS.changed({"device": "cpu", "draft": "none"}), only=("threads", "tokenizer"))
_PROMPT: Final = OptionsOf(GenerateOptions(), only=("raw", "system"))


@takes_options(_TRAIN, offline=True)
def train_draft(
    target: Annotated[
        str,
        typer.Argument(metavar="TARGET", help="The model to draft for: a model folder, an .onnx file, or org/name."),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Checkpoint folder to write; a run in it is continued.")],
    text: Annotated[
        list[Path],
        typer.Option(
            metavar="FILE",
            help="Prompts that the target answers, as often as wanted: JSON lines with messages, turns, prompt, "
            "question or request, or plain text, one prompt a paragraph or line.",
        ),
    ],
    as_json: AsJson = False,
    **given: Any,
) -> None:
    """Train a draft for a model, on what the model itself answers to your prompts.

    First the target answers all prompts, then a small model, or with --head eagle3 a head on the target's hidden
    states, learns these answers. On held-out prompts the acceptance length is measured again and again: tokens of a
    pass of the target with chains of 4. The best checkpoint is kept. Ctrl-C keeps what is done; the same command
    continues it. Then edge-run export CHECKPOINT MODEL --draft OUT makes the pair.

    Examples:

    \b
    edge-run train-draft my-model my-draft --text prompts.jsonl --minutes 60
    edge-run train-draft my-model my-better-draft --text prompts.jsonl --init my-draft --loss tvd++
    edge-run train-draft my-model my-head --text prompts.jsonl --head eagle3
    """
    with missing_extra("train-draft", "train"):
        from ...export.draft_training.training_run import train_draft as run
    request = _request(target, out, text, _TRAIN.record(given))
    with ProgressDisplay() as progress:
        record = run(request, progress, lambda line: None if as_json else write_line(line))
    if as_json:
        write_json({name: record[name] for name in ("step", "tokens", "seconds", "best", "best_step", "history")})
        return
    best = f"{record['best']:.2f} tokens a pass of the target"
    write_line(f"{out}: {best}, at step {record['best_step']} of {record['step']}")


def _request(target: str, out: Path, text: Sequence[Path], options: DraftTrainingOptions) -> DraftTrainingRequest:
    """The training that the options ask for.

    Raises:
        InputError: a value cannot be used, or there are too few prompts.
    """
    import numpy as np

    from ...export.draft_training.request import DraftTrainingRequest
    from ...export.draft_training.target_data import PromptConversation
    from ...export.draft_training.torch_llama import BlockRounding
    from ...export.draft_training.training_loop import TrainOptions

    try:
        rounded = None if options.round_to is None else BlockRounding.parse(options.round_to)
    except ValueError as error:
        raise InputError(f"--round: {error}", "give a format such as 4/128") from error
    given = _conversations(text, PromptConversation)
    order = np.random.default_rng(options.seed).permutation(len(given)).tolist()
    conversations = [given[index] for index in order[: options.limit]]
    kept = options.held_out_count or max(1, min(MOST_HELD_OUT, len(conversations) // HELD_OUT_SHARE))
    if len(conversations) <= kept:
        raise InputError(
            f"{len(conversations)} prompts are too few with {kept} held out", "give more, or a smaller --held-out"
        )
    return DraftTrainingRequest(
        **vars(options),
        target=target,
        out=out,
        conversations=tuple(conversations[kept:]),
        held_out=tuple(conversations[:kept]),
        rounding=rounded,
        training=TrainOptions(
            **{name: getattr(options, name) for name in ("steps", "minutes", "batch_tokens", "seed", "evaluate_every")},
            matrix_rate=options.learning_rate,
            other_rate=options.learning_rate,
            warmup=min(100, options.steps // 10),
            average=0.99,
        ),
    )


def _conversations(files: Sequence[Path], made: type[PromptConversation]) -> list[PromptConversation]:
    """The conversations of prompt files, without duplicates.

    Raises:
        InputError: a file cannot be read, or has no prompts.
    """
    found: list[PromptConversation] = []
    for path in files:
        content = read_text(path)
        if content.lstrip().startswith("{") and "messages" in (rows := json_lines(content, path))[0]:
            found += [made(*_said(row, path, number)) for number, row in enumerate(rows, 1)]
        else:
            found += [made(tuple(exchange.prompt for exchange in each.exchanges)) for each in read_prompts(path)]
    return list(dict.fromkeys(found))


def _said(row: dict[str, Any], path: Path, number: int) -> tuple[tuple[str, ...], str | None]:
    """What the user says in the messages of a row, and the system message; the answers are left out.

    Raises:
        InputError: the row has no message of a user.
    """
    messages = row.get("messages")
    by_role: dict[str, list[str]] = {"user": [], "system": []}
    for message in messages if isinstance(messages, list) else []:
        role = message.get("role") if isinstance(message, dict) else None
        if role in by_role:
            by_role[role].append(text_of(message, "content", path, number))
    if not by_role["user"]:
        raise InputError(f"{path}, row {number}: no message of a user", "give messages with role and content")
    return tuple(by_role["user"]), "\n".join(by_role["system"]) or None


@takes_options(_PROMPT, _LOAD)
def control_vector(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model folder that edge-run has exported.")],
    positive: Annotated[Path, typer.Argument(metavar="POSITIVE", help="Prompts, one a line, to steer towards.")],
    negative: Annotated[Path, typer.Argument(metavar="NEGATIVE", help="Their opposites, in the same order.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The GGUF file to write.")],
    **given: Any,
) -> None:
    """Make a control vector: the mean difference of a model's hidden states after pairs of prompts.

    The file works with --control-vector of edge-run and of llama.cpp.

    Example: edge-run control-vector my-model calm.txt excited.txt calm.gguf
    """
    from ...runtime.steering.control_vectors import mean_differences, write_control_vector

    options = _PROMPT.record(given)
    texts = [[line for line in read_text(path).splitlines() if line.strip()] for path in (positive, negative)]
    if len(texts[0]) != len(texts[1]):
        what = f"{positive} has {len(texts[0])} prompts, and {negative} has {len(texts[1])}"
        raise InputError(what, "give pairs, one prompt a line")
    with open_model(model, _LOAD.record(given)) as engine:

        def encoded(text: str) -> Sequence[int]:
            if options.raw:
                return engine.tokenizer.encode(text, add_special_tokens=True)
            return engine.chat_prompt(text, options).ids

        pairs = [(encoded(one), encoded(other)) for one, other in zip(*texts, strict=True)]
        directions = mean_differences(engine.bundle, SessionConfig(engine.device, engine.threads), pairs)
    write_control_vector(out, directions)
    write_line(f"{out}: {len(directions)} layers, from {len(pairs)} pairs of prompts")
    write_line(f"to use it: edge-run {model} --control-vector NAME={out} --control NAME")
