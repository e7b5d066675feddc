"""Optimizers (Muon for layer matrices, AdamW for others) and learning-rate schedule."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

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
