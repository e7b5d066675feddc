"""Medusa heads: parity with torch, text that stays the target's, and what does not fit is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file

import edgerun
from edgerun import EdgeError, Engine, GenerateOptions, InputError
from edgerun.export import FP32, INT4, ExportRecipe
from edgerun.export.check.contract_session import ModelSession
from edgerun.export.drafts.medusa_draft import MEDUSA_FILE
from edgerun.runtime.speculation.choice import DraftSampling, Speculation
from edgerun.runtime.speculation.drafters.draft_model import Path as TokenPath
from edgerun.runtime.speculation.drafters.draft_model import TopTokens
from edgerun.runtime.speculation.drafters.target_drafts import MedusaDraft
from edgerun.runtime.speculation.tree import Source
from support.adversarial_drafters import NEARLY_FREE, FixedCost
from support.tiny_heads import write_medusa_heads
from support.tiny_models import exported, tiny_config, write_checkpoint, write_weights

MEDUSA = Speculation.of(Source.MEDUSA)
GREEDY = GenerateOptions(max_tokens=40, ignore_eos=True)
SAMPLED = GenerateOptions(max_tokens=30, temperature=0.8, top_k=40, top_p=0.95, seed=3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def bundle(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("medusa")
    return exported(checkpoint, folder / "bundle", ExportRecipe(FP32, draft=write_medusa_heads(folder / "heads")))


@pytest.mark.parametrize(("heads", "blocks"), [(1, 1), (4, 2)])
def test_outputs_equal_those_of_torch(checkpoint: Path, tmp_path: Path, heads: int, blocks: int) -> None:
    torch = pytest.importorskip("torch", reason="needs the extra oracle or train")
    functional = torch.nn.functional
    source = write_medusa_heads(tmp_path / "heads", heads=heads, blocks=blocks, seed=2)
    bundle = exported(checkpoint, tmp_path / "bundle", ExportRecipe(FP32, draft=source))
    graph = onnx.load(bundle / "draft.onnx", load_external_data=False)
    state = np.random.default_rng(3).standard_normal((1, 64)).astype(np.float32)
    found, ids = ModelSession(graph, bundle).run(("top_probabilities", "top_ids"), {"draft_features": state})
    weights = {name: torch.from_numpy(value) for name, value in load_file(source / "model.safetensors").items()}
    for head in range(heads):
        hidden = torch.from_numpy(state)
        for block in range(blocks):
            module = f"medusa_head.{head}.{block}.linear"
            hidden = hidden + functional.silu(
                functional.linear(hidden, weights[f"{module}.weight"], weights[f"{module}.bias"])
            )
        logits = functional.linear(hidden, weights[f"medusa_head.{head}.{blocks}.weight"])
        expected = torch.softmax(logits[0].double(), dim=-1).topk(8)
        np.testing.assert_allclose(found[head], expected.values.numpy(), atol=1e-5)
        np.testing.assert_array_equal(ids[head], expected.indices.numpy())


def loaded(bundle: Path) -> Engine:
    """An engine for which every draft token pays."""
    engine = edgerun.load(bundle, threads=1, cache=False)
    engine.model.drafters._pass_cost = FixedCost(NEARLY_FREE)
    draft = engine.model.drafters.draft_model()
    assert isinstance(draft, MedusaDraft)
    draft._seconds = 1e-9
    return engine


@pytest.mark.parametrize("choice", [Speculation.AUTO, MEDUSA], ids=str)
@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_text_is_that_of_plain_decoding(bundle: Path, choice: Speculation, options: GenerateOptions) -> None:
    drafted = 0
    with loaded(bundle) as engine:
        for prompt in ("the other thing", "in the in the in the"):
            plain = engine.generate(prompt, options, speculation=Speculation.OFF)
            reply = engine.generate(prompt, options, speculation=choice)
            assert reply.text == plain.text
            if "medusa" in reply.stats.by_source:
                drafted += reply.stats.by_source["medusa"].drafted
    assert drafted > 0


class Knowing(MedusaDraft):
    """Heads that know the answer, or are sure of something else."""

    text: list[int]
    right: bool

    def top_tokens(self, path: TokenPath, count: int, temperature: float = 1.0) -> TopTokens:
        """The next token, or another one, as sure as heads can be."""
        found = super().top_tokens(path, count, temperature)
        place = self._length + len(path)
        if not found.tokens or place >= len(self.text):
            return found
        token = self.text[place] if self.right else (self.text[place] + 1) % 300
        return TopTokens((token,), (0.999,))


@pytest.mark.parametrize("right", [True, False], ids=["right", "wrong"])
@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_right_heads_save_passes_and_wrong_ones_change_nothing(
    bundle: Path, options: GenerateOptions, right: bool
) -> None:
    with loaded(bundle) as engine:
        plain = engine.generate("in the other thing", options, speculation=Speculation.OFF)
        heads: Any = engine.model.drafters.draft_model()
        heads.__class__ = Knowing
        heads.text, heads.right = engine.model.prefixes._kept[-1].token_ids.tolist(), right
        reply = engine.generate("in the other thing", options, speculation=MEDUSA)
        counts = reply.stats.by_source["medusa"]
    assert reply.text == plain.text
    assert counts.accepted > 10 if right else counts.accepted < 3


def test_heads_propose_what_the_last_state_says(bundle: Path, checkpoint: Path) -> None:
    with loaded(bundle) as engine:
        engine.generate("the other", GREEDY, speculation=Speculation.OFF)
        kept = engine.model.prefixes._kept[-1]
        draft: Any = engine.model.drafters.draft_model()
        sequence = engine.model.new_sequence()
        sequence.bound.forward(kept.token_ids[:9].tolist())
        sequence.bound.arena.commit(9)
        draft.attach(sequence.bound.arena)
        draft.reset(kept.token_ids[:10].tolist())
        state = sequence.bound.arena.features.read(8, 9)
        graph = onnx.load(bundle / "draft.onnx", load_external_data=False)
        (ids,) = ModelSession(graph, bundle).run(("top_ids",), {"draft_features": state})
        for depth in range(3):
            assert draft.top_tokens((5,) * depth, 3).tokens == tuple(ids[depth][:3].tolist())
        assert draft.top_tokens((5, 6, 7), 3).tokens == ()
        assert draft.take_seconds_spent() > 0
        assert draft.seconds((5,)) == 0


def test_draft_tokens_cannot_be_sampled_from_them(bundle: Path) -> None:
    with loaded(bundle) as engine, pytest.raises(InputError, match="propose a few tokens and no distribution"):
        engine.generate("the other thing", SAMPLED, draft_sampling=DraftSampling.CHAIN)


def test_quantized_heads_in_a_file_of_their_own_name(checkpoint: Path, tmp_path: Path) -> None:
    source = write_medusa_heads(tmp_path / "heads")
    tensors = load_file(source / "model.safetensors")
    write_weights(source, {name.removeprefix("medusa_head."): value for name, value in tensors.items()})
    (source / "model.safetensors").rename(source / MEDUSA_FILE)
    bundle = exported(checkpoint, tmp_path / "bundle", ExportRecipe(INT4, draft=source))
    with loaded(bundle) as engine:
        reply = engine.generate("in the in the", GREEDY, speculation=MEDUSA)
        assert reply.text == engine.generate("in the in the", GREEDY, speculation=Speculation.OFF).text
        assert reply.stats.by_source["medusa"].drafted > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": 32}, "made for a hidden size of 32, and the model has 64"),
        ({"vocab_size": 200}, "made for a vocabulary of 200 tokens, and the model has 300"),
        ({}, r"lacks the tensor medusa_head\.2\.0\.linear\.bias"),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    checkpoint: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    source = write_medusa_heads(tmp_path / "heads", tiny_config(**settings))
    tensors = load_file(source / "model.safetensors")
    del tensors["medusa_head.2.0.linear.bias"]
    write_weights(source, tensors)
    with pytest.raises(EdgeError, match=message):
        exported(checkpoint, tmp_path / "bundle", ExportRecipe(FP32, draft=source))
