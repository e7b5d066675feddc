"""Command line of the training recipe: `python -m edgerun.models.training COMMAND --help`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from .batches import BatchStream
from .checkpoint import load_model, save_model, write_atomically
from .corpus import data_folder
from .evaluate import agreement, score
from .model import TARGET_SHAPE, CausalLM
from .recipe import load_pairs, tokenizer_texts
from .tasks import TaskMaker
from .tokenizer import ChatCodec, train_tokenizer
from .train import TrainOptions, train


def build_parser() -> argparse.ArgumentParser:
    """The parser with all commands."""
    parser = argparse.ArgumentParser(prog="python -m edgerun.models.training", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--data", type=Path, help="data folder; default: environment variable EDGERUN_DATA")
    shared.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves PyTorch's choice")
    shared.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    default = TrainOptions()
    run = argparse.ArgumentParser(add_help=False)
    run.add_argument("--out", type=Path, required=True, help="folder to write; a run found there is resumed")
    run.add_argument("--steps", type=int, default=default.steps, help="most updates to make")
    run.add_argument("--minutes", type=float, help="wall-clock budget over all resumptions; the decay ends with it")
    run.add_argument("--batch-tokens", type=int, default=default.batch_tokens)
    run.add_argument("--optimizer", choices=("muon", "adamw"), default=default.optimizer)
    run.add_argument("--matrix-rate", type=float, default=default.matrix_rate, help="peak rate, layer matrices")
    run.add_argument("--other-rate", type=float, default=default.other_rate, help="peak rate, embedding and norms")
    run.add_argument("--warmup", type=int, default=default.warmup)
    run.add_argument("--average", type=float, default=default.average, help="decay of the weight average")
    run.add_argument("--label-smoothing", type=float, default=default.label_smoothing)
    run.add_argument("--dropout", type=float, default=0.1)
    run.add_argument("--evaluate-every", type=int, default=default.evaluate_every)
    run.add_argument("--save-every", type=int, default=default.save_every)
    run.add_argument("--seed", type=int, default=default.seed)
    run.add_argument("--compile", action="store_true", help="fuse with torch.compile (needs a C++ compiler)")

    tokenizer = commands.add_parser("tokenizer", parents=[shared], help="train the tokenizer alone")
    tokenizer.add_argument("--out", type=Path, required=True)
    tokenizer.add_argument("--vocab-size", type=int, default=TARGET_SHAPE.vocab_size)

    target = commands.add_parser("target", parents=[shared, run], help="train the target")
    start = target.add_mutually_exclusive_group()
    start.add_argument("--init", type=Path, help="checkpoint folder to start from; default: from scratch")
    start.add_argument("--tokenizer", type=Path, help="folder with tokenizer.json; default: train one")

    evaluate = commands.add_parser("evaluate", parents=[shared], help="measure on the held-out pairs")
    evaluate.add_argument("model", type=Path)
    evaluate.add_argument("--draft", type=Path, help="also measure this draft's agreement with the model")
    evaluate.add_argument("--validation", action="store_true", help="measure on the validation split instead")
    evaluate.add_argument("--answers", type=Path, help="write requests, references and answers as JSON lines")
    return parser


def options_from(arguments: argparse.Namespace) -> TrainOptions:
    """The training options named on the command line."""
    values = {name: getattr(arguments, name) for name in TrainOptions.__dataclass_fields__ if hasattr(arguments, name)}
    return TrainOptions(**values, compiled=arguments.compile)


def run_tokenizer(arguments: argparse.Namespace) -> None:
    pairs = load_pairs(data_folder(arguments.data))
    tokenizer = train_tokenizer(tokenizer_texts(pairs.train), arguments.vocab_size)
    write_atomically(arguments.out / "tokenizer.json", tokenizer.to_str(pretty=True).encode())


def run_target(arguments: argparse.Namespace) -> None:
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
    stream = BatchStream(
        pairs.train,
        TaskMaker(pairs.train, pairs.heldout + pairs.validation),
        codec,
        batch_tokens=arguments.batch_tokens,
        context=model.shape.max_position_embeddings,
        seed=arguments.seed,
    )
    record = train(model, codec, stream, pairs.validation, arguments.out, options_from(arguments))
    print(json.dumps({name: record[name] for name in ("step", "tokens", "seconds", "best")}))


def run_evaluate(arguments: argparse.Namespace) -> None:
    loaded = load_pairs(data_folder(arguments.data))
    pairs = loaded.validation if arguments.validation else loaded.heldout
    model, codec = load_model(arguments.model)
    model.to(arguments.device)
    scored = score(model, codec, pairs)
    result: dict[str, object] = {"parameters": model.count()}
    rows = list(zip(pairs, scored.answers, strict=True))
    groups = {"all": rows, "first_150": rows[:150]}
    groups |= {source: [row for row in rows if row[0].source == source] for source in {pair.source for pair in pairs}}
    for name, group in groups.items():
        from .evaluate import compare

        part = compare([pair for pair, _ in group], [answer for _, answer in group])
        result[name] = {"count": part.count, "exact": part.exact, "first_word": part.first_word}
    if arguments.draft is not None:
        draft, _ = load_model(arguments.draft)
        draft.to(arguments.device)
        result["draft_parameters"] = draft.count()
        result["agreement"] = agreement(model, draft, codec, [pair.request for pair in pairs])
    if arguments.answers is not None:
        lines = [
            json.dumps({"request": pair.request, "command": pair.command, "answer": answer, "source": pair.source})
            for pair, answer in rows
        ]
        write_atomically(arguments.answers, ("\n".join(lines) + "\n").encode())
    print(json.dumps(result, indent=2))


def main() -> int:
    """Run one command; returns the exit status."""
    arguments = build_parser().parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    try:
        {"tokenizer": run_tokenizer, "target": run_target, "evaluate": run_evaluate}[arguments.command](arguments)
    except (FileNotFoundError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
