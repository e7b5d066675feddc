"""EAGLE-3 heads: chains against the reference, the format, and the target's states."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402

from edgerun.errors import InputError  # noqa: E402
from edgerun.export.check.reference import reference_head, reference_logits  # noqa: E402
from edgerun.export.checkpoint.config import read_config  # noqa: E402
from edgerun.export.checkpoint.safetensors_files import Checkpoint  # noqa: E402
from edgerun.export.draft_training import training_loop  # noqa: E402
from edgerun.export.draft_training.draft_tasks import (  # noqa: E402
    CHAIN,
    chain_passes,
    head_acceptance,
    head_labels,
    with_states,
)
from edgerun.export.draft_training.eagle_head import EagleNetwork  # noqa: E402
from edgerun.export.draft_training.target_data import (  # noqa: E402
    TargetStates,
    state_layers,
)
from edgerun.export.draft_training.training_batches import Example  # noqa: E402
from edgerun.export.drafts.feature_heads import open_eagle_head  # noqa: E402
from edgerun.models.bundle import open_bundle  # noqa: E402
from edgerun.models.manifest import Architecture  # noqa: E402
from support.tiny_heads import eagle_tensors  # noqa: E402
from support.tiny_models import write_bundle  # noqa: E402

TARGET = Architecture("llama", 30, 16, 24, 6, 2, 1, 8, 64, tied_head=True)
LAYERS = (1, 3, 5)
KEPT = (0, 3, 4, 9, 10, 11, 17, 20, 28, 29)


def head(seed: int = 0) -> EagleNetwork:
    torch.manual_seed(seed)
    made = EagleNetwork(TARGET, LAYERS, torch.tensor(KEPT))
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 2:
                parameter.mul_(15.0)
            else:
                parameter.add_(torch.rand(parameter.shape) - 0.5)
            parameter.copy_(parameter.bfloat16())  # as a checkpoint has them
    return made.eval()


def test_chains_from_all_indices_are_those_of_the_reference(tmp_path: Path) -> None:
    model = head()
    model.write(tmp_path)
    opened = open_eagle_head(tmp_path, TARGET)
    rng = np.random.default_rng(0)
    length, depths = 9, 3
    embedded, states = rng.normal(size=(length, 16)), rng.normal(size=(length, 48))
    with torch.no_grad():
        chains = model.chains(torch.tensor(embedded[None]).float(), torch.tensor(states[None]).float(), depths)
        found = [model.lm_head(each)[0].numpy() for each in chains]
    for count in range(1, length - depths):
        expected, _ = reference_head(
            opened, opened.checkpoint, embedded[1 : count + depths], states[:count], TARGET.context
        )
        for depth in range(depths):
            np.testing.assert_allclose(found[depth][count - 1], expected[count - 1 + depth], atol=2e-4)


def test_the_checkpoint_has_the_published_format(tmp_path: Path) -> None:
    model = head()
    model.write(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["draft_vocab_size"] == len(KEPT)
    # Counted by outputs, as SpecForge does: the layer before which a state is read is one more.
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 4]
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        **eagle_tensors(hidden=16, target_hidden=16, query=16, key_value=8, intermediate=24, draft_vocab=len(KEPT)),
        "d2t": (len(KEPT),),
        "t2d": (TARGET.vocab_size,),
    }
    assert tensors["d2t"].dtype == torch.int64
    assert (torch.arange(len(KEPT)) + tensors["d2t"]).tolist() == list(KEPT)
    assert torch.nonzero(tensors["t2d"]).flatten().tolist() == list(KEPT)


def test_states_are_read_where_published_heads_read_them() -> None:
    expected = {28: (2, 14, 25), 7: (2, 3, 4), 6: (1, 3, 5), 4: (1, 2, 3)}
    assert {layers: state_layers(layers) for layers in expected} == expected
    with pytest.raises(InputError, match="which has 3; train a draft model instead"):
        state_layers(3)


def test_states_are_those_of_the_reference_decoder(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path, num_hidden_layers=6)
    ids = np.array([5, 20, 33, 41, 7, 250], np.int64)
    embedded, states = TargetStates(open_bundle(bundle), 16).read(ids)
    checkpoint = Checkpoint(tmp_path / "checkpoint")
    config = read_config(tmp_path / "checkpoint")
    matrix, weight = checkpoint.read("model.embed_tokens.weight"), checkpoint.read("model.norm.weight")
    np.testing.assert_allclose(embedded, matrix[ids], atol=1e-6)
    for number, layer in enumerate((1, 3, 5)):
        state = states[:, 64 * number : 64 * (number + 1)]
        normed = state / np.sqrt(np.mean(state * state, axis=1, keepdims=True) + config.norm_epsilon) * weight
        # The layers before the state, as a model of their own.
        expected = reference_logits(checkpoint, config.first_layers(layer), ids, 256)
        np.testing.assert_allclose(normed @ matrix.T, expected, atol=1e-3)


def test_states_of_a_text_do_not_depend_on_the_text_before(tmp_path: Path) -> None:
    bundle = open_bundle(write_bundle(tmp_path, "lfm2"))
    texts, source = (np.arange(1, 20), np.arange(5, 25)), TargetStates(bundle, 32)
    _, found = [source.read(text)[1] for text in texts]
    np.testing.assert_array_equal(found, TargetStates(bundle, 32).read(texts[1])[1])


def test_acceptance_of_a_head_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_loop, "native_bfloat16", lambda kind: False)
    bundle = open_bundle(write_bundle(tmp_path, num_hidden_layers=4))
    source = TargetStates(bundle, 40)
    torch.manual_seed(0)
    kept = torch.arange(0, 300, 2)
    model = EagleNetwork(source.architecture, source.layers, kept).eval()
    rng = np.random.default_rng(1)
    examples = []
    for _ in range(12):
        prompt, answer = int(rng.integers(1, 6)), int(rng.integers(2, 20))
        ids = rng.integers(5, 300, prompt + answer)
        probs = rng.dirichlet(np.ones(4), size=answer).astype(np.float32)
        top = np.stack([rng.choice(300, 4, replace=False) for _ in range(answer)])
        examples.append(Example(ids.tolist(), [False] * prompt + [True] * answer, top, probs))
    # Let some predictions be right, so that chains have several lengths.
    for _ in range(3):
        batch = with_states(examples, source, 0)
        with torch.no_grad():
            for depth, hidden in enumerate(model.chains(batch.embedded, batch.states, CHAIN)):
                best = kept[model.lm_head(hidden).argmax(-1)]
                for row, example in enumerate(examples):
                    for index in range(len(example.ids) - depth - 2):
                        if example.answer[index + depth + 2] and rng.random() < 0.25:
                            example.ids[index + depth + 2] = int(best[row, index])
    batch = with_states(examples, source, 0)
    assert (head_labels(model, batch.batch).tokens < 0).any()
    with torch.no_grad():
        chains = [model.lm_head(each) for each in model.chains(batch.embedded, batch.states, CHAIN)]
    passes = positions = agreeing = 0
    overlap = 0.0
    for row, example in enumerate(examples):
        start, count = example.answer.index(True), sum(example.answer)
        matches = np.array(
            [
                [
                    int(kept[logits[row, max(0, index - depth - 2)].argmax()]) == example.ids[index]
                    for index in range(start, start + count)
                ]
                for depth, logits in enumerate(chains)
            ]
        )
        passes += chain_passes(matches)
        positions += count - 1
        agreeing += int(matches[0, 1:].sum())
        for place in range(1, count):
            probs = chains[0][row, start + place - 2].double().softmax(-1).numpy()
            by_token = dict(zip(kept.tolist(), probs.tolist(), strict=True))
            likeliest = zip(example.top_ids[place].tolist(), example.top_probs[place].tolist(), strict=True)
            overlap += sum(min(by_token.get(token, 0.0), p) for token, p in likeliest)
    found = head_acceptance(model, examples, source, 0)
    assert 0 < agreeing < positions
    assert found["tokens_per_pass"] == positions / passes
    assert found["agreement"] == agreeing / positions
    assert found["acceptance"] == pytest.approx(overlap / positions, abs=1e-6)
