"""Multi-token-prediction modules against one built of transformers' layers, where that is installed."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest

from edgerun.export import FP32, ExportRecipe
from edgerun.export.check.reference import reference_head
from edgerun.export.check.reference_operations import looked_up
from edgerun.export.checkpoint.config import read_config
from edgerun.export.checkpoint.layout import embedding_layout
from edgerun.export.checkpoint.safetensors_files import Checkpoint
from edgerun.export.drafts.draft_head import head_passes
from edgerun.export.drafts.feature_heads import open_mtp_module
from edgerun.export.recipe import OWN_MODULE
from edgerun.models.bundle import open_bundle
from support.tiny_heads import write_mtp_checkpoint
from support.tiny_models import exported

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

pytestmark = pytest.mark.filterwarnings("ignore")
COUNT, GIVEN = 14, 9
"""Number of tokens, and of those that have features of the target."""


def torch_module(source: Path, tokens: npt.NDArray[np.int64]) -> tuple[Any, Any, Any]:
    """Features of a text [COUNT + 1], and the module's logits and states, in float64."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, attn_implementation="eager"
    ).double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    weights = {name: value.double() for name, value in safetensors.load_file(source / "model.safetensors").items()}
    config = transformers.AutoConfig.from_pretrained(source)
    config.layer_types, config.num_hidden_layers, config._attn_implementation = ["full_attention"], 1, "eager"
    config._experts_implementation = "eager"
    classes = importlib.import_module(type(model).__module__)
    kind = type(model).__name__.removesuffix("ForCausalLM")

    def loaded(module: Any, prefix: str) -> Any:
        own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        module.double().load_state_dict(own)
        return module

    def norm(name: str) -> Any:
        return loaded(getattr(classes, f"{kind}RMSNorm")(config.hidden_size, eps=config.rms_norm_eps), f"mtp.{name}.")

    layer = loaded(getattr(classes, f"{kind}DecoderLayer")(config, 0), "mtp.layers.0.")
    names, before = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"), []
    embedding_norm, state_norm, last_norm = map(norm, names)
    model.model.norm.register_forward_pre_hook(lambda _, inputs: before.append(inputs[0]))
    with torch.no_grad():
        normed = model.model(torch.tensor(tokens[:GIVEN])[None]).last_hidden_state
        embedded = embedding_norm(model.model.embed_tokens(torch.tensor(tokens[1:])[None]))
        for count in range(GIVEN, COUNT + 1):
            both = torch.cat([embedded[:, :count], state_norm(normed)], dim=-1)
            hidden = both @ weights["mtp.fc.weight"].T
            angles = model.model.rotary_emb(hidden, torch.arange(count)[None].expand(3, 1, count))
            mask = torch.full((count, count), -torch.inf, dtype=torch.float64).triu(1)[None, None]
            states = last_norm(layer(hidden, position_embeddings=angles, attention_mask=mask))
            normed = torch.cat([normed, states[:, -1:]], dim=1)
        logits = model.lm_head(states)
    return before[0][0].numpy(), logits[0].numpy(), states[0].numpy()


@pytest.mark.parametrize(
    "overrides",
    [{}, {"tie_word_embeddings": False, "attention_bias": True}, {"family": "qwen3_5_moe_text"}],
    ids=["tied", "biased", "experts"],
)
def test_logits_and_states_equal_those_of_transformers(tmp_path: Path, overrides: dict[str, Any]) -> None:
    if "qwen3_5_moe_text" not in transformers.CONFIG_MAPPING:
        pytest.skip("this transformers has no Qwen3.5")
    source = write_mtp_checkpoint(tmp_path / "source", **overrides)
    tokens = np.random.default_rng(5).integers(5, 300, COUNT + 1)
    features, logits, states = torch_module(source, tokens)
    checkpoint, module = Checkpoint(source), open_mtp_module(source, read_config(source))
    embedded = looked_up(checkpoint, embedding_layout(module.config), tokens[1:])
    computed, computed_states = reference_head(
        module, module.checkpoint, embedded, features, 256, (checkpoint, checkpoint)
    )
    # transformers keeps its rotary angles in float32 even in a float64 model.
    np.testing.assert_allclose(computed, logits, atol=2e-4)
    np.testing.assert_allclose(computed_states, states, atol=2e-4)

    bundle = exported(source, tmp_path / "bundle", ExportRecipe(FP32, draft=OWN_MODULE))
    architecture = open_bundle(bundle).manifest.architecture  # type: ignore[union-attr]
    graph = onnx.load(bundle / "draft.onnx", load_external_data=False)
    given = features[:GIVEN].astype(np.float32)
    for found, state, place in head_passes(bundle, graph, tokens[1:], given, architecture.hidden_size):
        np.testing.assert_allclose(found, logits[place], atol=2e-4)
        np.testing.assert_allclose(state, states[place], atol=2e-4)
