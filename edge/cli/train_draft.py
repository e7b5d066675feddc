"""`edge-run train-draft TARGET OUT`: trains a draft model or an EAGLE-3 head for a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import InputError
from ...models.progress import ProgressDisplay
from ...models.user_text import json_lines, read_text, text_of
from ..bench.prompt_sets import read_prompts
from ..terminal.output import write_json, write_line
from .shared_options import AsJson, Debug, Offline, chosen_options, takes_options

if TYPE_CHECKING:  # PyTorch is an extra
    from ...export.draft_training.request import DraftTrainingRequest
    from ...export.draft_training.target_data import PromptConversation

_MOST_HELD_OUT = 128
_HELD_OUT_SHARE = 10
"""One conversation in so many is held out."""


class HeadChoice(StrEnum):
    """Values of `--head`."""

    EAGLE3 = "eagle3"


class LossChoice(StrEnum):
    """Values of `--loss`."""

    CE = "ce"
    KL = "kl"
    TVD = "tvd++"


@dataclass(frozen=True)
class TrainDraftOptions:
    """Options of `edge-run train-draft`."""

    target: Annotated[
        str,
        typer.Argument(metavar="TARGET", help="The model to draft for: a model folder, an .onnx file, or org/name."),
    ]
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Checkpoint folder to write; a run in it is continued.")]
    text: Annotated[
        list[Path],
        typer.Option(
            metavar="FILE",
            help="Prompts that the target answers, as often as wanted: JSON lines with messages, turns, prompt, "
            "question or request, or plain text, one prompt a paragraph or line.",
        ),
    ]
    head: Annotated[
        HeadChoice | None,
        typer.Option(help="Train a head on the target's hidden states.", show_default="a small model of its own"),
    ] = None
    loss: Annotated[
        LossChoice,
        typer.Option(
            help="ce: the target's own tokens; kl: its probabilities; tvd++: the rate of acceptance, for a draft that "
            "is already good (--init)."
        ),
    ] = LossChoice.KL
    layers: Annotated[int, typer.Option(metavar="N", min=1, help="Layers of a draft model.")] = 2
    hidden_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=32,
            help="Hidden size of a draft model.",
            show_default="two fifths of the target's, as a multiple of 128",
        ),
    ] = None
    draft_vocab: Annotated[
        int,
        typer.Option(metavar="N", min=2, help="Largest number of tokens of a head: the target's most frequent ones."),
    ] = 32_000
    depth: Annotated[
        int, typer.Option(metavar="N", min=1, max=16, help="Number of tokens of a chain with which a head is trained.")
    ] = 4
    init: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Draft checkpoint to start from.", show_default="random weights"),
    ] = None
    rounding: Annotated[
        str | None,
        typer.Option(
            "--round",
            metavar="BITS/BLOCK",
            help="Train a draft model for this weight format, such as 4/128; the checkpoint has rounded weights.",
        ),
    ] = None
    max_tokens: Annotated[
        int, typer.Option("-n", "--max-tokens", metavar="N", min=2, help="Most tokens of an answer of the target.")
    ] = 256
    temperature: Annotated[
        float, typer.Option("-t", "--temperature", metavar="T", min=0, help="Temperature of the target's answers.")
    ] = 0.0
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=2, help="Most conversations to take.", show_default="all")
    ] = None
    held_out: Annotated[
        int | None,
        typer.Option(
            "--held-out",
            metavar="N",
            min=1,
            help="Conversations on which acceptance is measured instead.",
            show_default=f"one in {_HELD_OUT_SHARE}, at most {_MOST_HELD_OUT}",
        ),
    ] = None
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Most training steps.")] = 2000
    minutes: Annotated[
        float | None,
        typer.Option(metavar="N", min=0, help="Time limit of the training, in minutes.", show_default="none"),
    ] = None
    batch_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of a step.")] = 4096
    learning_rate: Annotated[float, typer.Option(metavar="RATE", min=0, help="Highest learning rate.")] = 3e-3
    evaluate_every: Annotated[
        int, typer.Option(metavar="N", min=1, help="Steps between two measurements of acceptance.")
    ] = 200
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of answers, weights and batches.")] = 0
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Where to train: cpu or cuda.", show_default="a GPU if PyTorch sees one"),
    ] = None


@takes_options(TrainDraftOptions)
def train_draft(
    offline: Offline = False,  # noqa: ARG001  its callback acts
    as_json: AsJson = False,
    debug: Debug = False,  # noqa: ARG001  main reads it
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
    try:
        from ...export.draft_training.training_run import train_draft as run
    except ModuleNotFoundError as error:
        raise InputError(f"train-draft needs the package {error.name}", 'pip install "edge-run[train]"') from error
    options = chosen_options(TrainDraftOptions, given)
    request = _request(options)
    with ProgressDisplay() as progress:
        record = run(request, progress, lambda line: None if as_json else write_line(line))
    if as_json:
        write_json({name: record[name] for name in ("step", "tokens", "seconds", "best", "best_step", "history")})
        return
    best = f"{record['best']:.2f} tokens a pass of the target"
    write_line(f"{options.out}: {best}, at step {record['best_step']} of {record['step']}")


def _request(options: TrainDraftOptions) -> DraftTrainingRequest:
    """The training that the options ask for.

    Raises:
        InputError: a value cannot be used, or there are too few prompts.
    """
    from ...export.draft_training.draft_tasks import LossKind
    from ...export.draft_training.request import DraftKind, DraftSize, DraftTrainingRequest
    from ...export.draft_training.target_data import AnswerOptions, PromptConversation
    from ...export.draft_training.torch_llama import BlockRounding
    from ...export.draft_training.training_loop import TrainOptions

    try:
        rounded = None if options.rounding is None else BlockRounding.parse(options.rounding)
    except ValueError as error:
        raise InputError(f"--round: {error}", "give a format such as 4/128") from error
    conversations = _shuffled(_conversations(options.text, PromptConversation), options.seed)[: options.limit]
    kept = options.held_out or max(1, min(_MOST_HELD_OUT, len(conversations) // _HELD_OUT_SHARE))
    if len(conversations) <= kept:
        raise InputError(
            f"{len(conversations)} prompts are too few with {kept} held out", "give more, or a smaller --held-out"
        )
    return DraftTrainingRequest(
        target=options.target,
        out=options.out,
        conversations=tuple(conversations[kept:]),
        held_out=tuple(conversations[:kept]),
        kind=DraftKind.MODEL if options.head is None else DraftKind.EAGLE3,
        loss=LossKind(options.loss.value),
        answers=AnswerOptions(options.max_tokens, options.temperature, options.seed),
        size=DraftSize(options.layers, options.hidden_size),
        vocabulary=options.draft_vocab,
        depths=options.depth,
        initial=options.init,
        rounding=rounded,
        device=options.device,
        training=TrainOptions(
            steps=options.steps,
            minutes=options.minutes,
            batch_tokens=options.batch_tokens,
            matrix_rate=options.learning_rate,
            other_rate=options.learning_rate,
            warmup=min(100, options.steps // 10),
            average=0.99,
            seed=options.seed,
            evaluate_every=options.evaluate_every,
        ),
    )


def _conversations(files: Sequence[Path], made: type[PromptConversation]) -> list[PromptConversation]:
    """The conversations of prompt files, without duplicates.

    Raises:
        InputError: a file cannot be read, or has no prompts.
    """
    found: dict[PromptConversation, None] = {}
    for path in files:
        content = read_text(path)
        if content.lstrip().startswith("{") and "messages" in (rows := json_lines(content, path))[0]:
            for number, row in enumerate(rows, 1):
                found.setdefault(made(*_said(row, path, number)))
        else:
            for each in read_prompts(path):
                found.setdefault(made(tuple(exchange.prompt for exchange in each.exchanges)))
    return list(found)


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


def _shuffled(conversations: list[PromptConversation], seed: int) -> list[PromptConversation]:
    """The conversations in random order."""
    import numpy as np

    return [conversations[index] for index in np.random.default_rng(seed).permutation(len(conversations)).tolist()]
