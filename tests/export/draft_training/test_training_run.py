"""Whole runs: the same seed gives the same weights, interrupted or not, and the draft gets better."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from edgerun.export.draft_training.draft_tasks import LossKind  # noqa: E402
from edgerun.export.draft_training.optimizer import TrainOptions  # noqa: E402
from edgerun.export.draft_training.request import DraftKind, DraftSize, DraftTrainingRequest  # noqa: E402
from edgerun.export.draft_training.target_data import AnswerOptions, PromptConversation  # noqa: E402
from edgerun.export.draft_training.torch_llama import BlockRounding  # noqa: E402
from edgerun.export.draft_training.training_loop import load_state  # noqa: E402
from edgerun.export.draft_training.training_run import train_draft  # noqa: E402
from support.tiny_models import write_bundle  # noqa: E402

OPTIONS = TrainOptions(
    steps=10, batch_tokens=200, matrix_rate=1e-2, other_rate=1e-2, warmup=2, evaluate_every=4, save_every=3, average=0.9
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("target"), num_hidden_layers=4)


def request(target: Path, out: Path, **changes: Any) -> DraftTrainingRequest:
    told = [PromptConversation((f"the thing {number} of them",)) for number in range(30)]
    made = DraftTrainingRequest(
        target=str(target),
        out=out,
        conversations=tuple(told[6:]),
        held_out=tuple(told[:6]),
        answers=AnswerOptions(max_tokens=12),
        size=DraftSize(layers=1, hidden_size=32),
        device="cpu",
        training=OPTIONS,
    )
    return replace(made, **changes)


VARIANTS = {
    "model": {"dropout": 0.1},
    "rounded": {"rounding": BlockRounding(4, 32), "loss": LossKind.CROSS_ENTROPY},
    "head": {"kind": DraftKind.EAGLE3, "depths": 3},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_interrupted_run_gives_the_same_weights(target: Path, tmp_path: Path, variant: str) -> None:
    changes = VARIANTS[variant]
    record = train_draft(request(target, tmp_path / "whole", **changes))
    fractions: list[float] = []

    def interrupted(stage: str, fraction: float) -> None:
        if stage == "training" and fraction >= 0.7:
            raise KeyboardInterrupt
        fractions.append(fraction)

    with pytest.raises(KeyboardInterrupt):
        train_draft(request(target, tmp_path / "interrupted", **changes), interrupted)
    state = load_state(tmp_path / "interrupted" / "training")
    assert state[1]["record"]["step"] == 7
    resumed = train_draft(request(target, tmp_path / "interrupted", **changes))
    timeless = [{name: value for name, value in each.items() if name != "minutes"} for each in record["history"]]
    for each, expected in zip(resumed["history"], timeless, strict=True):
        # The mean loss of the last steps begins anew with the run.
        assert {name: each[name] for name in expected if name != "train_loss"} == {
            name: value for name, value in expected.items() if name != "train_loss"
        }
    weights = [(tmp_path / run / "model.safetensors").read_bytes() for run in ("whole", "interrupted")]
    assert weights[0] == weights[1]
    other = train_draft(request(target, tmp_path / "other", training=replace(OPTIONS, seed=9), **changes))
    assert other["step"] == record["step"]
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != weights[0]


@pytest.mark.parametrize("kind", list(DraftKind))
@pytest.mark.parametrize("loss", [LossKind.CROSS_ENTROPY, LossKind.KL])
def test_a_draft_learns_what_its_target_answers(target: Path, tmp_path: Path, kind: DraftKind, loss: LossKind) -> None:
    steps = 60 if kind is DraftKind.MODEL else 35
    options = replace(OPTIONS, steps=steps, evaluate_every=steps, batch_tokens=600)
    # The held-out prompts are trained on too: what is tested is that the loss leads to acceptance.
    same = request(target, tmp_path, kind=kind, loss=loss, training=options, size=DraftSize(2, 128))
    record = train_draft(replace(same, conversations=(*same.conversations, *same.held_out)))
    assert record["best"] > 1.5
    assert record["history"][-1]["agreement"] > 0.4


def test_nothing_is_pickled(target: Path, tmp_path: Path) -> None:
    train_draft(request(target, tmp_path))
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {".safetensors", ".json"}
