"""Training: the same seed gives the same weights, interrupted or not, and rounds them as an export does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from safetensors.numpy import load_file  # noqa: E402

from edgerun.export import FP32, ExportRecipe, export_checkpoint  # noqa: E402
from edgerun.export.draft_training import training_loop  # noqa: E402
from edgerun.export.draft_training.request import DraftTrainingRequest  # noqa: E402
from edgerun.export.draft_training.target_data import PromptConversation, load_examples  # noqa: E402
from edgerun.export.draft_training.torch_llama import BlockRounding, CausalLM, ModelShape  # noqa: E402
from edgerun.export.draft_training.training_loop import TrainOptions, load_state  # noqa: E402
from edgerun.export.draft_training.training_options import HeadChoice, LossKind  # noqa: E402
from edgerun.export.draft_training.training_run import train_draft  # noqa: E402
from edgerun.export.quantization.codes import dequantized, nearest_rows  # noqa: E402
from edgerun.models.manifest import WeightFormat  # noqa: E402
from edgerun.runtime.engine_loading import load  # noqa: E402
from edgerun.runtime.measure.draft_benefit import count_agreement  # noqa: E402
from edgerun.runtime.speculation.choice import Speculation  # noqa: E402
from edgerun.training.checkpoint import load_model, save_model  # noqa: E402
from edgerun.training.tokenizer import train_tokenizer  # noqa: E402
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
        max_tokens=12,
        layers=1,
        hidden_size=32,
        device="cpu",
        training=OPTIONS,
    )
    return replace(made, **changes)


VARIANTS = {
    "model": {"dropout": 0.1},
    "rounded": {"rounding": BlockRounding(4, 32), "loss": LossKind.CROSS_ENTROPY},
    "head": {"head": HeadChoice.EAGLE3, "depth": 3},
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
    files = [path for path in (tmp_path / "interrupted").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".safetensors", ".json"}  # nothing is pickled
    other = train_draft(request(target, tmp_path / "other", training=replace(OPTIONS, seed=9), **changes))
    assert other["step"] == record["step"]
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != weights[0]


@pytest.mark.parametrize("head", [None, HeadChoice.EAGLE3])
@pytest.mark.parametrize("loss", [LossKind.CROSS_ENTROPY, LossKind.KL])
def test_a_draft_learns_what_its_target_answers(
    target: Path, tmp_path: Path, head: HeadChoice | None, loss: LossKind
) -> None:
    steps = 60 if head is None else 35
    options = replace(OPTIONS, steps=steps, evaluate_every=steps, batch_tokens=600)
    # The held-out prompts are trained on too: what is tested is that the loss leads to acceptance.
    same = request(target, tmp_path, head=head, loss=loss, training=options, layers=2, hidden_size=128)
    record = train_draft(replace(same, conversations=(*same.conversations, *same.held_out)))
    assert record["best"] > 1.5
    assert record["history"][-1]["agreement"] > 0.4


def test_an_exported_head_drafts_what_it_was_trained_to(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_loop, "native_bfloat16", lambda kind: False)
    options = replace(OPTIONS, steps=12, batch_tokens=400, evaluate_every=12)
    same = request(target, tmp_path / "head", head=HeadChoice.EAGLE3, training=options)
    record = train_draft(replace(same, conversations=(*same.conversations, *same.held_out)))
    recipe = ExportRecipe(FP32, draft=tmp_path / "head", draft_weights=FP32)
    pair = export_checkpoint(target.parent / "checkpoint", tmp_path / "pair", recipe).bundle
    examples = load_examples(tmp_path / "head" / "training" / "held-out" / "answers-00000.safetensors")
    agreeing = positions = 0
    with load(pair, device="cpu", learned=False) as engine:
        drafter, bound = engine.model.drafters.draft_model(), engine.model.new_sequence().bound
        assert drafter is not None
        for example in examples:
            start = example.answer.index(True)
            agreeing += count_agreement(bound, drafter, example.ids[:-1], start)
            positions += len(example.ids) - 1 - start
        answers = [
            engine.generate("the thing", temperature=0.0, max_tokens=20, speculation=speculation).text
            for speculation in (Speculation.parse("eagle"), Speculation.OFF)
        ]
    assert answers[0] == answers[1]
    # The last digit may decide near ties otherwise.
    assert 0 < agreeing < positions
    assert abs(agreeing - record["history"][-1]["agreement"] * positions) <= 1


SHAPE = ModelShape(
    vocab_size=300,
    hidden_size=96,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=96,
)


def tiny_model() -> CausalLM:
    torch.manual_seed(0)
    return CausalLM(SHAPE)


def test_format_is_parsed_or_refused() -> None:
    for text in ("4/128", "8/32", "2/64"):
        weight_format = BlockRounding.parse(text)
        assert f"{weight_format.bits}/{weight_format.block}" == text
    for text in ("", "4", "3/32", "4/16", "4/128/1", "int4/32"):
        with pytest.raises(ValueError, match="BITS/BLOCK"):
            BlockRounding.parse(text)


@given(
    bits=st.sampled_from([2, 4, 8]),
    block=st.sampled_from([32, 64, 128]),
    columns=st.sampled_from([32, 96, 128, 320]),
    seed=st.integers(0, 99),
)
def test_weights_are_rounded_as_an_export_rounds_them(bits: int, block: int, columns: int, seed: int) -> None:
    weights = np.random.default_rng(seed).standard_normal((6, columns)).astype(np.float32)
    weights[1] = 0
    weights[2, :3] = 1e-35
    rounded = BlockRounding(bits, block).rounded(torch.from_numpy(weights))
    weight_format = WeightFormat(bits, block)
    exported = dequantized(nearest_rows(weights, weight_format), columns, weight_format)
    # A weight halfway between two codes may go to either: the two sides compute its quotient in different ways.
    step = np.abs(weights).max() / 2 ** (bits - 1)
    differs = np.abs(rounded.numpy() - exported) > 1e-6
    assert differs.mean() < 0.01
    np.testing.assert_allclose(rounded.numpy(), exported, atol=1.001 * step)


def test_rounding_has_the_gradient_of_the_identity() -> None:
    weight = torch.randn(4, 64, requires_grad=True)
    factors = torch.randn(4, 64)
    (BlockRounding(2, 32)(weight) * factors).sum().backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, factors)


def test_passes_and_checkpoint_have_rounded_matrices(tmp_path: Path) -> None:
    model, rounding = tiny_model().eval(), BlockRounding(2, 32)
    ids = torch.arange(40).reshape(2, 20)
    plain = model(ids)
    model.round_weights(rounding)
    rounded = model(ids)
    assert (rounded - plain).abs().max() > 1e-3

    by_hand = CausalLM(SHAPE).eval()
    by_hand.load_state_dict(
        {name: rounding.rounded(p.detach()) if p.dim() == 2 else p for name, p in model.named_parameters()}
    )
    torch.testing.assert_close(by_hand(ids), rounded)

    save_model(tmp_path, model, train_tokenizer(["list the files"], vocab_size=300))
    read, _ = load_model(tmp_path)
    torch.testing.assert_close(read.eval()(ids), rounded)
    model.round_weights(None)
    torch.testing.assert_close(model(ids), plain)


def test_rounded_checkpoint_is_exported_without_rounding_error(tmp_path: Path) -> None:
    model = tiny_model()
    model.round_weights(BlockRounding(4, 64))
    save_model(tmp_path, model, train_tokenizer(["list the files"], vocab_size=300))
    weight_format = WeightFormat(4, 64)
    matrices = [tensor for tensor in load_file(tmp_path / "model.safetensors").values() if tensor.ndim == 2]
    assert len(matrices) == 1 + 7 * SHAPE.num_hidden_layers
    for matrix in matrices:
        stored = dequantized(nearest_rows(matrix, weight_format), matrix.shape[1], weight_format)
        np.testing.assert_allclose(stored, matrix, rtol=1e-6, atol=0)
