"""Command line of the training recipe: `python -m edgerun.training COMMAND --help`."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from ..models.atomic import write_atomically
from .batches import BatchStream, ExampleSource, task_examples
from .checkpoint import load_model
from .corpus import data_folder
from .distill import (
    agreement,
    answer_requests,
    distillation_loss,
    distillation_requests,
    fixed_examples,
    load_examples,
    save_examples,
)
from .evaluate import answer_all, answer_loss, by_group, validate
from .model import DRAFT_SHAPE, TARGET_SHAPE, CausalLM
from .recipe import load_pairs, tokenizer_texts
from .rounding import BlockRounding
from .tasks import TaskMaker
from .tokenizer import ChatCodec, train_tokenizer
from .train import TrainOptions, answer_cross_entropy, train


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
    run.add_argument("--optimizer", choices=("muon", "adamw"), default=default.optimizer)
    run.add_argument("--matrix-rate", type=float, default=default.matrix_rate, help="peak rate, layer matrices")
    run.add_argument("--other-rate", type=float, default=default.other_rate, help="peak rate, embedding and norms")
    run.add_argument("--warmup", type=int, default=default.warmup)
    run.add_argument("--average", type=float, default=default.average, help="decay of the weight average")
    run.add_argument("--label-smoothing", type=float, default=default.label_smoothing)
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
    run.add_argument("--compile", action="store_true", help="fuse with torch.compile (needs a C++ compiler)")

    tokenizer = commands.add_parser("tokenizer", parents=[shared], help="train only the tokenizer")
    tokenizer.add_argument("--out", type=Path, required=True)
    tokenizer.add_argument("--vocab-size", type=int, default=TARGET_SHAPE.vocab_size)

    target = commands.add_parser("target", parents=[shared, run], help="train the target")
    target.add_argument("--lead-weight", type=float, default=default.lead_weight, help="loss weight of the first word")
    start = target.add_mutually_exclusive_group()
    start.add_argument("--init", type=Path, help="checkpoint folder to start from; default: from scratch")
    start.add_argument("--tokenizer", type=Path, help="folder with tokenizer.json; default: train one")

    draft = commands.add_parser("draft", parents=[shared, run], help="distil a draft from a target")
    draft.add_argument("--target", type=Path, required=True, help="the target's checkpoint folder")
    draft.add_argument("--init", type=Path, help="draft checkpoint with the same tokenizer; default: from scratch")
    draft.add_argument("--requests", type=int, default=60_000, help="number of requests that the target answers")
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
    return TrainOptions(**values, compiled=arguments.compile)


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
    maker = TaskMaker(pairs.train, pairs.heldout + pairs.validation)
    record = train(
        model,
        codec.tokenizer,
        stream_of(task_examples(pairs.train, maker, codec, arguments.seed), model, codec, arguments),
        arguments.out,
        options_from(arguments),
        answer_cross_entropy(arguments.lead_weight, arguments.label_smoothing),
        lambda trained: validate(trained, codec, pairs.validation),
    )
    report(record)


def run_draft(arguments: argparse.Namespace) -> None:
    """Let the target answer the training requests once, then train the draft on the answers."""
    torch.manual_seed(arguments.seed)
    pairs = load_pairs(data_folder(arguments.data))
    target, codec = load_model(arguments.target)
    target.to(arguments.device)
    if arguments.init is not None:
        draft, own = load_model(arguments.init, arguments.dropout)
        if own.tokenizer.get_vocab() != codec.tokenizer.get_vocab():
            raise ValueError(f"the draft in {arguments.init} does not have the vocabulary of the target")
    else:
        draft = CausalLM(replace(DRAFT_SHAPE, vocab_size=target.shape.vocab_size), arguments.dropout)
    draft.to(arguments.device)
    draft.round_weights(arguments.rounding)
    answers_file = arguments.out / "target_answers.safetensors"
    if not answers_file.exists():
        maker = TaskMaker(pairs.train, pairs.heldout + pairs.validation)
        requests = distillation_requests(pairs.train, maker, arguments.requests, arguments.seed)
        save_examples(answers_file, answer_requests(target, codec, requests))
    answered = load_examples(answers_file)
    validation = answer_requests(target, codec, [pair.request for pair in pairs.validation])
    record = train(
        draft,
        codec.tokenizer,
        stream_of(fixed_examples(answered, arguments.seed), draft, codec, arguments),
        arguments.out,
        options_from(arguments),
        distillation_loss(arguments.hard),
        lambda trained: {"score": agreement(trained, validation, codec.end)},
    )
    report(record)


def stream_of(source: ExampleSource, model: CausalLM, codec: ChatCodec, arguments: argparse.Namespace) -> BatchStream:
    """The batch stream for a run's options."""
    return BatchStream(
        source,
        pad=codec.end,
        batch_tokens=arguments.batch_tokens,
        context=model.shape.max_position_embeddings,
        seed=arguments.seed,
    )


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
        result["agreement"] = agreement(draft, answer_requests(model, codec, requests), codec.end)
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
    except (FileNotFoundError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
