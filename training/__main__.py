"""Command line of the training recipe: `python -m edgerun.training COMMAND --help`."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..errors import EdgeError
from ..export.draft_training.request import DraftTrainingRequest
from ..export.draft_training.target_data import PromptConversation
from ..export.draft_training.torch_llama import BlockRounding, CausalLM
from ..export.draft_training.training_batches import BatchStream
from ..export.draft_training.training_loop import TrainingTask, TrainOptions, train
from ..export.draft_training.training_options import LossKind
from ..export.draft_training.training_run import train_draft
from ..models.atomic import write_atomically
from ..models.progress import ProgressDisplay
from .checkpoint import load_model, save_model
from .corpus import data_folder
from .evaluate import agreement, answer_all, answer_loss, by_group, validate
from .examples import answer_cross_entropy, task_examples
from .recipe import TARGET_SHAPE, load_pairs, tokenizer_texts
from .tasks import TaskMaker, distillation_requests
from .tokenizer import ChatCodec, train_tokenizer


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands."""
    parser = argparse.ArgumentParser(prog="python -m edgerun.training", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--data", type=Path, help="data folder; default: environment variable EDGERUN_DATA")
    shared.add_argument("--threads", type=int, default=0, help="CPU threads; 0 for PyTorch's default")
    shared.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    default = TrainOptions()
    run = argparse.ArgumentParser(add_help=False)
    run.add_argument("--out", type=Path, required=True, help="folder to write; a run in it is resumed")
    run.add_argument("--steps", type=int, default=default.steps, help="maximum number of steps")
    run.add_argument("--minutes", type=float, help="time budget of the run and its resumptions")
    run.add_argument("--batch-tokens", type=int, default=default.batch_tokens)
    run.add_argument("--matrix-rate", type=float, default=default.matrix_rate, help="peak rate, layer matrices")
    run.add_argument("--other-rate", type=float, default=default.other_rate, help="peak rate, embedding and norms")
    run.add_argument("--warmup", type=int, default=default.warmup)
    run.add_argument("--average", type=float, default=default.average, help="decay of the weight average")
    run.add_argument("--dropout", type=float, default=0.1)
    run.add_argument(
        "--round",
        dest="rounding",
        metavar="BITS/BLOCK",
        type=BlockRounding.parse,
        help="train for this weight format: passes use rounded weights, and the checkpoint has them",
    )
    run.add_argument("--evaluate-every", type=int, default=default.evaluate_every)
    run.add_argument("--save-every", type=int, default=default.save_every)
    run.add_argument("--seed", type=int, default=default.seed)

    tokenizer = commands.add_parser("tokenizer", parents=[shared], help="train only the tokenizer")
    tokenizer.add_argument("--out", type=Path, required=True)
    tokenizer.add_argument("--vocab-size", type=int, default=TARGET_SHAPE.vocab_size)

    target = commands.add_parser("target", parents=[shared, run], help="train the target")
    target.add_argument("--lead-weight", type=float, default=2.0, help="loss weight of the first word")
    target.add_argument("--label-smoothing", type=float, default=0.0)
    target.add_argument("--compile", action="store_true", help="fuse with torch.compile (needs a C++ compiler)")
    start = target.add_mutually_exclusive_group()
    start.add_argument("--init", type=Path, help="checkpoint folder to start from; default: from scratch")
    start.add_argument("--tokenizer", type=Path, help="folder with tokenizer.json; default: train one")

    draft = commands.add_parser("draft", parents=[shared, run], help="distil a draft from a target")
    draft.add_argument("--target", type=Path, required=True, help="the target's bundle, which edge-run export wrote")
    draft.add_argument("--init", type=Path, help="draft checkpoint with the same tokenizer; default: from scratch")
    draft.add_argument("--requests", type=int, default=60_000, help="number of requests that the target answers")
    draft.add_argument("--loss", type=LossKind, choices=list(LossKind), default=LossKind.KL)
    draft.add_argument("--hard", type=float, default=0.5, help="loss weight of the target's greedy token, 0 to 1")

    evaluate = commands.add_parser("evaluate", parents=[shared], help="evaluate on the held-out pairs")
    evaluate.add_argument("model", type=Path)
    evaluate.add_argument("--draft", type=Path, help="also evaluate this draft's agreement with the model")
    evaluate.add_argument("--validation", action="store_true", help="evaluate on the validation split instead")
    evaluate.add_argument("--answers", type=Path, help="write requests, references and answers as JSON lines")

    ask = commands.add_parser("ask", parents=[shared], help="answer requests with a checkpoint")
    ask.add_argument("model", type=Path)
    ask.add_argument("request", nargs="+")
    return parser


def options_from(arguments: argparse.Namespace) -> TrainOptions:
    """The training options given on the command line."""
    values = {name: getattr(arguments, name) for name in TrainOptions.__dataclass_fields__ if hasattr(arguments, name)}
    return TrainOptions(**values)


def run_tokenizer(arguments: argparse.Namespace) -> None:
    """Train only the tokenizer and write `tokenizer.json`."""
    pairs = load_pairs(data_folder(arguments.data))
    tokenizer = train_tokenizer(tokenizer_texts(pairs.train), arguments.vocab_size)
    write_atomically(arguments.out / "tokenizer.json", tokenizer.to_str(pretty=True).encode())


def run_target(arguments: argparse.Namespace) -> None:
    """Train the target, from scratch or from a checkpoint."""
    torch.manual_seed(arguments.seed)
    pairs = load_pairs(data_folder(arguments.data))
    if arguments.init is not None:
        model, codec = load_model(arguments.init, arguments.dropout)
    else:
        model = CausalLM(TARGET_SHAPE, arguments.dropout)
        if arguments.tokenizer is not None:
            codec = ChatCodec.from_folder(arguments.tokenizer)
        else:
            codec = ChatCodec(train_tokenizer(tokenizer_texts(pairs.train), TARGET_SHAPE.vocab_size))
    model.to(arguments.device)
    model.round_weights(arguments.rounding)
    if arguments.compile:
        model.compile_training()
    maker = TaskMaker(pairs.train, pairs.heldout + pairs.validation)
    stream = BatchStream(
        task_examples(pairs.train, maker, codec, arguments.seed),
        pad=codec.end,
        batch_tokens=arguments.batch_tokens,
        context=model.shape.max_position_embeddings,
        seed=arguments.seed,
    )
    task = TrainingTask(
        model,
        stream.batch,
        answer_cross_entropy(model, arguments.lead_weight, arguments.label_smoothing),
        lambda: validate(model, codec, pairs.validation),
        "first_word",
        lambda: save_model(arguments.out, model, codec.tokenizer),
    )
    with ProgressDisplay() as progress:
        report(train(task, options_from(arguments), arguments.out, progress, say))


def run_draft(arguments: argparse.Namespace) -> None:
    """Let the target answer the training requests, then train the draft on the answers."""
    pairs = load_pairs(data_folder(arguments.data))
    maker = TaskMaker(pairs.train, pairs.heldout + pairs.validation)
    requests = distillation_requests(pairs.train, maker, arguments.requests, arguments.seed)
    request = DraftTrainingRequest(
        target=str(arguments.target),
        out=arguments.out,
        conversations=tuple(PromptConversation((each,)) for each in requests),
        held_out=tuple(PromptConversation((pair.request,)) for pair in pairs.validation),
        loss=arguments.loss,
        hard=arguments.hard,
        max_tokens=48,
        seed=arguments.seed,
        hidden_size=128,
        init=arguments.init,
        dropout=arguments.dropout,
        rounding=arguments.rounding,
        device=arguments.device,
        training=options_from(arguments),
    )
    with ProgressDisplay() as progress:
        report(train_draft(request, progress, say))


def say(line: str) -> None:
    """Print a line about a run on standard error."""
    sys.stderr.write(f"{line}\n")


def report(record: dict[str, Any]) -> None:
    """Print one JSON line about a finished run."""
    sys.stdout.write(
        json.dumps({name: record[name] for name in ("step", "tokens", "seconds", "best", "best_step")}) + "\n"
    )


def run_evaluate(arguments: argparse.Namespace) -> None:
    """Evaluate a checkpoint on held-out or validation pairs; prints one JSON object."""
    loaded = load_pairs(data_folder(arguments.data))
    pairs = loaded.validation if arguments.validation else loaded.heldout
    requests = [pair.request for pair in pairs]
    model, codec = load_model(arguments.model)
    model.to(arguments.device)
    answers = answer_all(model, codec, requests)
    result: dict[str, Any] = {"parameters": model.count(), "loss": answer_loss(model, codec, pairs)}
    result |= {name: asdict(part) for name, part in by_group(pairs, answers).items()}
    if arguments.draft is not None:
        draft, _ = load_model(arguments.draft)
        draft.to(arguments.device)
        result["draft_parameters"] = draft.count()
        result["agreement"] = agreement(draft, model, codec, requests)
    if arguments.answers is not None:
        lines = [
            json.dumps({"source": pair.source, "request": pair.request, "command": pair.command, "answer": answer})
            for pair, answer in zip(pairs, answers, strict=True)
        ]
        write_atomically(arguments.answers, ("\n".join(lines) + "\n").encode())
    sys.stdout.write(json.dumps(result, indent=2) + "\n")


def run_ask(arguments: argparse.Namespace) -> None:
    """Print the answers to the given requests."""
    model, codec = load_model(arguments.model)
    model.to(arguments.device)
    for request, answer in zip(arguments.request, answer_all(model, codec, arguments.request), strict=True):
        sys.stdout.write(f"{request}\n    {answer}\n")


def main() -> int:
    """Run a command; returns the exit status."""
    arguments = build_parser().parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    commands = {
        "tokenizer": run_tokenizer,
        "target": run_target,
        "draft": run_draft,
        "evaluate": run_evaluate,
        "ask": run_ask,
    }
    try:
        commands[arguments.command](arguments)
    except (EdgeError, FileNotFoundError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
