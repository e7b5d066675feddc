"""Optimizers (Muon for layer matrices, AdamW for others), and the training loop: resumable, within a time budget."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

from ...models.atomic import write_atomically
from ...models.progress import Progress, silent
from .torch_llama import CausalLM, ModelShape

RECORD_NAME: Final = "training.json"
"""What a run measured, for people and programs."""
_STAGE: Final = "training"
_RECENT: Final = 50
"""Number of steps over which the reported loss is averaged."""
WEIGHTS_NAME: Final = "model.safetensors"
STATE_TENSORS: Final = "state.safetensors"
_BY_TOKEN = ("model.embed_tokens.", "lm_head.")
"""Matrices with a row for each token, which are not Muon's: most rows have no gradient in a step."""


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
    seed: int = 1
    evaluate_every: int = 250
    save_every: int = 100
    save_seconds: float = 30.0
    """A run is saved when this much time has passed, too."""


class Schedule:
    """Warm-up, then cosine decay to zero at the end of the step or time budget, whichever is nearer.

    `used_seconds` is the time of earlier runs of the same training, so that a resumed run keeps the same budget. Time
    during which the process is suspended counts too.
    """

    def __init__(self, options: TrainOptions, used_seconds: float = 0.0) -> None:
        self._options = options
        self._started = time.monotonic() - used_seconds

    @property
    def elapsed(self) -> float:
        """Seconds of training so far, including earlier runs."""
        return time.monotonic() - self._started

    def progress(self, step: int) -> float:
        """Fraction of the budget that is used before step `step`, 0 to 1."""
        share = step / self._options.steps
        if self._options.minutes is not None:
            share = max(share, self.elapsed / (60 * self._options.minutes))
        return min(1.0, share)

    def factor(self, step: int, progress: float) -> float:
        """Learning-rate multiplier for `step` at `progress`."""
        return min(1.0, (step + 1) / max(1, self._options.warmup)) * 0.5 * (1 + math.cos(math.pi * progress))


class Optimizers:
    """Both optimizers, with a common state that fits in a safetensors file."""

    def __init__(self, model: nn.Module, options: TrainOptions) -> None:
        named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        is_matrix = {name: p.dim() == 2 and not name.startswith(_BY_TOKEN) for name, p in named.items()}
        matrices, others = ([p for name, p in named.items() if is_matrix[name] is each] for each in (True, False))
        # match_rms_adamw scales each update to the size an AdamW update would have, so rates mean the same.
        muon = torch.optim.Muon(
            matrices, lr=options.matrix_rate, weight_decay=options.weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        adam = torch.optim.AdamW(others, lr=options.other_rate, betas=(0.9, 0.98), eps=1e-9, weight_decay=0.0)
        self.parts: list[torch.optim.Optimizer] = [muon, adam]
        self.base = [[float(group["lr"]) for group in part.param_groups] for part in self.parts]
        self.names: dict[Tensor, str] = {parameter: name for name, parameter in named.items()}

    def step(self, factor: float) -> None:
        """Apply one update with every learning rate multiplied by `factor`, then clear the gradients."""
        for part, rates in zip(self.parts, self.base, strict=True):
            for group, rate in zip(part.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            part.step()
            part.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """All optimizer state as named tensors: `PARAMETER|FIELD`."""
        tensors = {}
        for part in self.parts:
            for parameter, fields in part.state.items():
                for field, value in fields.items():
                    tensors[f"{self.names[parameter]}|{field}"] = torch.as_tensor(value).detach()
        return tensors

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Restore a state that `state` returned."""
        parameters = {name: parameter for parameter, name in self.names.items()}
        owner = {p: part for part in self.parts for group in part.param_groups for p in group["params"]}
        for key, value in tensors.items():
            name, field = key.rsplit("|", 1)
            parameter = parameters[name]
            # Step counters stay on the CPU, where the optimizers expect them.
            placed = value.clone() if field == "step" else value.to(parameter.device, copy=True)
            owner[parameter].state[parameter][field] = placed


class Average:
    """Exponential moving average of the weights, with a smaller decay in early steps."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay, self.updates = decay, 0
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Move the average towards the model's current weights."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        current = dict(model.named_parameters())
        torch._foreach_lerp_(list(self.weights.values()), [current[name] for name in self.weights], 1 - decay)

    def swap(self, model: nn.Module) -> None:
        """Exchange the average and the model's weights; calling it twice restores both."""
        with torch.no_grad():
            current = dict(model.named_parameters())
            for name, average in self.weights.items():
                held = current[name].detach().clone()
                current[name].copy_(average)
                self.weights[name] = held


def write_checkpoint(folder: Path, model: CausalLM, files: Mapping[str, bytes], end_ids: list[int]) -> None:
    """Write a Hugging Face checkpoint; `model.safetensors` is written last.

    Weights are bfloat16. A model that is trained with rounded weights is written with these in float32, since bfloat16
    would change the codes that they stand for.

    Args:
        folder: the folder to write.
        model: the model.
        files: the other files by name, such as `tokenizer.json`.
        end_ids: token ids that end a text.
    """
    dtype = torch.bfloat16 if model.rounding is None else torch.float32
    config = json.dumps(model.shape.to_config(dtype, end_ids), indent=2).encode()
    for name, content in {**files, "config.json": config}.items():
        write_atomically(folder / name, content)
    write_weights(folder, model.stored(), dtype)


def write_weights(folder: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Write `model.safetensors`, with floating-point tensors in `dtype`."""
    stored = {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype).contiguous().clone()
        for name, tensor in tensors.items()
    }
    write_atomically(folder / WEIGHTS_NAME, save(stored, metadata={"format": "pt"}))


def read_checkpoint(folder: Path, dropout: float = 0.0) -> CausalLM:
    """Read a Hugging Face checkpoint into a float32 model.

    Raises:
        ValueError: the checkpoint is not a llama model with tied embeddings, or has other tensors than its shape.
    """
    shape = ModelShape.from_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    model = CausalLM(shape, dropout)
    weights = {name: tensor.float() for name, tensor in load_file(folder / WEIGHTS_NAME).items()}
    weights.pop("lm_head.weight", None)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"{folder / WEIGHTS_NAME} does not fit its config.json: {error}") from error
    return model


def load_state(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Read the tensors and numbers of the state of a run; None if there is none."""
    path = folder / STATE_TENSORS
    if not path.exists():
        return None
    with safe_open(path, "pt") as file:
        numbers: dict[str, Any] = json.loads(file.metadata()["numbers"])
    return load_file(path), numbers


class TrainingTask(NamedTuple):
    """What a run trains, on what, and how it is judged."""

    model: nn.Module
    """Trained in place, on the device of its parameters."""
    batch: Callable[[int], Any]
    """The batch of each step, `Batch` or `HeadBatch`, which depends on its number alone."""
    loss: Callable[[Any], Tensor]
    """The loss to minimize, a scalar."""
    validate: Callable[[], dict[str, float]]
    """Named figures of the model as it is now."""
    score: str
    """Name of the figure that selects: the checkpoint with the highest one is kept."""
    save: Callable[[], None]
    """Writes the checkpoint of the model as it is now."""


def train(
    task: TrainingTask,
    options: TrainOptions,
    folder: Path,
    progress: Progress = silent,
    report: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Train a model in place, and keep the best averaged weights with `task.save`.

    If the folder has the state of a run, the run resumes from it: weights, optimizer, average, step, time used. The
    data and dropout of a step depend on the seed and the step number only, so a resumed run repeats an uninterrupted
    one exactly if its budget is counted in steps.

    Args:
        task: what to train.
        options: options of the run.
        folder: folder of the state and the record of the run.
        progress: receives the stage "training".
        report: receives a line for each evaluation.

    Returns:
        The run's record: `step`, `tokens`, `seconds`, `best` (the highest score), `best_step`, and `history` with the
        figures of every evaluation.
    """
    optimizers, average = Optimizers(task.model, options), Average(task.model, options.average)
    record = _resumed(folder, task.model, optimizers, average, report)
    schedule = Schedule(options, record["seconds"])
    task.model.train()
    recent: list[float] = []
    share = schedule.progress(record["step"])
    saved_at = time.monotonic()
    # The clock is read once a step, so that the step that ends the budget is always evaluated and saved. A finished run
    # that is started again does nothing, which is not an error.
    while share < 1.0:
        step = record["step"]
        try:
            progress(_STAGE, share)
            tokens, loss = _backward(task, step, options.seed)
        except KeyboardInterrupt:
            # Nothing has changed yet in this step, which takes nearly all of its time until here.
            _snapshot(folder, task.model, optimizers, average, record)
            raise
        torch.nn.utils.clip_grad_norm_(task.model.parameters(), 1.0)
        optimizers.step(schedule.factor(step, share))
        average.update(task.model)
        recent = [*recent[1 - _RECENT :], loss]
        record.update(step=step + 1, tokens=record["tokens"] + tokens, seconds=schedule.elapsed)
        share = schedule.progress(step + 1)
        last = share >= 1.0
        if last or (step + 1) % options.evaluate_every == 0:
            report(_evaluate(task, average, record, sum(recent) / len(recent)))
        due = (step + 1) % options.save_every == 0 or time.monotonic() - saved_at > options.save_seconds
        if last or due:
            record["seconds"] = schedule.elapsed
            _snapshot(folder, task.model, optimizers, average, record)
            saved_at = time.monotonic()
    progress(_STAGE, 1.0)
    write_atomically(folder / RECORD_NAME, json.dumps({"options": asdict(options), **record}, indent=2).encode())
    return record


def _resumed(
    folder: Path, model: nn.Module, optimizers: Optimizers, average: Average, report: Callable[[str], None]
) -> dict[str, Any]:
    """Restore the state of the run in the folder, if there is one; returns the record to go on from."""
    found = load_state(folder)
    if found is None:
        return {"step": 0, "tokens": 0, "seconds": 0.0, "best": 0.0, "best_step": 0, "history": []}
    tensors, numbers = found
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "average": {}, "optimizer": {}}
    for key, value in tensors.items():
        part, name = key.split("/", 1)
        parts[part][name] = value
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, values in parts["model"].items():
            parameters[name].copy_(values)
            average.weights[name].copy_(parts["average"][name])
    average.updates = int(numbers["average_updates"])
    optimizers.load_state(parts["optimizer"])
    record: dict[str, Any] = numbers["record"]
    report(f"resuming at step {record['step']}, {record['seconds'] / 60:.1f} minutes used")
    return record


def _backward(task: TrainingTask, step: int, seed: int) -> tuple[int, float]:
    """Compute the gradients of a step; returns the number of its tokens and its loss."""
    device = next(task.model.parameters()).device
    torch.manual_seed(seed * 1_000_003 + step)
    batch = task.batch(step).to(device)
    with autocast(device):
        loss = task.loss(batch)
    loss.backward()  # type: ignore[no-untyped-call]
    return batch.tokens, float(loss.detach())


def _evaluate(task: TrainingTask, average: Average, record: dict[str, Any], train_loss: float) -> str:
    """Measure the averaged weights, keep them if they are the best, and return a line about them."""
    average.swap(task.model)
    measured = task.validate()
    if measured[task.score] >= record["best"]:
        record.update(best=measured[task.score], best_step=record["step"])
        task.save()
    average.swap(task.model)
    measured = {"step": record["step"], **measured, "train_loss": train_loss, "tokens": record["tokens"]}
    measured["minutes"] = record["seconds"] / 60
    record["history"].append(measured)
    return ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in measured.items())


def _snapshot(folder: Path, model: nn.Module, optimizers: Optimizers, average: Average, record: dict[str, Any]) -> None:
    """Write everything that a resumed run needs, in float32."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    tensors: dict[str, Tensor] = {f"model/{name}": p for name, p in trained.items()}
    tensors |= {f"average/{name}": p for name, p in average.weights.items()}
    tensors |= {f"optimizer/{name}": value for name, value in optimizers.state().items()}
    flat = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    # One file, so that tensors and numbers always belong together.
    numbers = json.dumps({"record": record, "average_updates": average.updates})
    write_atomically(folder / STATE_TENSORS, save(flat, metadata={"numbers": numbers}))


@functools.cache
def native_bfloat16(kind: str) -> bool:
    """Whether a device of this kind multiplies bfloat16 matrices in hardware."""
    if kind == "cuda":
        return bool(torch.cuda.is_bf16_supported())
    return kind == "cpu" and bool(torch.cpu._is_avx512_bf16_supported())


def autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return bfloat16 autocast on machines with native support, otherwise a context that does nothing."""
    if native_bfloat16(device.type):
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return contextlib.nullcontext()
