"""The training loop: resumable, within a time budget, with checkpoint selection."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from ..models.atomic import write_atomically
from .batches import Batch, BatchStream
from .checkpoint import load_state, save_model, save_state
from .model import CausalLM
from .optimizer import Average, Optimizers, Schedule
from .precision import autocast

LossFunction = Callable[[CausalLM, Batch], Tensor]
Validation = Callable[[CausalLM], dict[str, float]]


@dataclass(frozen=True)
class TrainOptions:
    """Options of a run, which ends with the first of its budgets, `steps` or `minutes`."""

    steps: int = 4000
    minutes: float | None = None
    batch_tokens: int = 8192
    matrix_rate: float = 1e-3
    other_rate: float = 1e-3
    weight_decay: float = 0.1
    warmup: int = 100
    average: float = 0.997
    lead_weight: float = 2.0
    label_smoothing: float = 0.0
    optimizer: str = "muon"
    seed: int = 1
    evaluate_every: int = 250
    save_every: int = 100
    compiled: bool = False


def answer_cross_entropy(lead_weight: float = 1.0, label_smoothing: float = 0.0) -> LossFunction:
    """Mean cross-entropy of the answer tokens, with weight `lead_weight` for the first few of an answer.

    Logits are computed at these positions only.
    """

    def loss(model: CausalLM, batch: Batch) -> Tensor:
        logits = model.head(model.hidden(batch.ids)[batch.predicts])
        each = functional.cross_entropy(
            logits.float(), batch.targets, label_smoothing=label_smoothing, reduction="none"
        )
        weight = 1.0 + (lead_weight - 1.0) * batch.leads
        return (each * weight).sum() / weight.sum()

    return loss


def train(
    model: CausalLM,
    tokenizer: Tokenizer,
    stream: BatchStream,
    out: Path,
    options: TrainOptions,
    loss_function: LossFunction,
    validate: Validation,
) -> dict[str, Any]:
    """Train `model` in place and write the best averaged weights to `out`; returns the run's record.

    `validate` returns named figures; the checkpoint with the highest `score` is kept.

    If `out/state.safetensors` exists, the run resumes from it: weights, optimizer, average, step, time used. The data
    and dropout of a step depend on the seed and the step number only, so a resumed run repeats an uninterrupted one
    exactly if its budget is counted in steps.
    """
    device = next(model.parameters()).device
    optimizers = Optimizers(
        model,
        matrix_rate=options.matrix_rate,
        other_rate=options.other_rate,
        weight_decay=options.weight_decay,
        kind=options.optimizer,
    )
    average = Average(model, options.average)
    record: dict[str, Any] = {"step": 0, "tokens": 0, "seconds": 0.0, "best": 0.0, "best_step": 0, "history": []}
    found = load_state(out)
    if found is not None:
        tensors, numbers = found
        record = numbers["record"]
        restore(model, optimizers, average, tensors, numbers)
        tqdm.write(f"resuming at step {record['step']}, {record['seconds'] / 60:.1f} minutes used", file=sys.stderr)
    schedule = Schedule(options.steps, options.minutes, options.warmup, record["seconds"])
    if options.compiled:
        model.compile_training()
    model.train()
    bar = tqdm(total=1000, unit="‰", file=sys.stderr, disable=None, dynamic_ncols=True)
    recent: list[float] = []
    progress = schedule.progress(record["step"])
    # The clock is read once a step, so that the step that ends the budget is always evaluated and saved. A finished run
    # that is started again does nothing, which is not an error.
    while progress < 1.0:
        step = record["step"]
        torch.manual_seed(options.seed * 1_000_003 + step)
        batch = stream.batch(step).to(device)
        with autocast(device):
            loss = loss_function(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizers.step(schedule.factor(step, progress))
        average.update(model)
        recent = [*recent[-49:], float(loss.detach())]
        record.update(step=step + 1, tokens=record["tokens"] + batch.tokens, seconds=schedule.elapsed)
        bar.set_postfix_str(f"step {step + 1} loss {sum(recent) / len(recent):.3f}", refresh=False)
        progress = schedule.progress(step + 1)
        bar.update(int(1000 * progress) - bar.n)
        last = progress >= 1.0
        if last or (step + 1) % options.evaluate_every == 0:
            average.swap(model)
            measured = validate(model)
            if measured["score"] >= record["best"]:
                record.update(best=measured["score"], best_step=step + 1)
                save_model(out, model, tokenizer)
            average.swap(model)
            measured |= {"step": step + 1, "tokens": record["tokens"], "minutes": schedule.elapsed / 60}
            measured["train_loss"] = sum(recent) / len(recent)
            record["history"].append(measured)
            tqdm.write(json.dumps({k: round(v, 4) for k, v in measured.items()}), file=sys.stderr)
        if last or (step + 1) % options.save_every == 0:
            record["seconds"] = schedule.elapsed
            snapshot(out, model, optimizers, average, record)
    bar.close()
    write_atomically(out / "training.json", json.dumps({"options": asdict(options), **record}, indent=2).encode())
    return record


def snapshot(out: Path, model: CausalLM, optimizers: Optimizers, average: Average, record: dict[str, Any]) -> None:
    """Write everything that a resumed run needs, in float32."""
    tensors: dict[str, Tensor] = {f"model/{name}": p for name, p in model.named_parameters()}
    tensors |= {f"average/{name}": p for name, p in average.weights.items()}
    tensors |= {f"optimizer/{name}": value for name, value in optimizers.state().items()}
    save_state(out, tensors, {"record": record, "average_updates": average.updates})


def restore(
    model: CausalLM, optimizers: Optimizers, average: Average, tensors: dict[str, Tensor], numbers: dict[str, Any]
) -> None:
    """Restore what `snapshot` wrote."""
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "average": {}, "optimizer": {}}
    for key, value in tensors.items():
        part, name = key.split("/", 1)
        parts[part][name] = value
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(parts["model"][name])
            average.weights[name].copy_(parts["average"][name])
    average.updates = int(numbers["average_updates"])
    optimizers.load_state(parts["optimizer"])
