"""Exported graphs against transformers itself, where it is installed (the oracle extra)."""

from __future__ import annotations

import numpy as np
import pytest

from edgerun.export import FP32, ExportRecipe, export_checkpoint
from edgerun.export.checkpoint import Checkpoint
from edgerun.export.config import read_config, read_json
from edgerun.export.reference import reference_logits
from edgerun.export.session import GraphSession
from tiny import write_checkpoint

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")
TOKENS = np.random.default_rng(11).integers(0, 300, 48)

CASES = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "llama, wide heads": ("llama", {"head_dim": 32, "num_key_value_heads": 1}),
    "qwen2": ("qwen2", {}),
    "qwen2, separate head": ("qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("qwen3", {}),
    "qwen3 with biases": ("qwen3", {"attention_bias": True, "tie_word_embeddings": False}),
    "linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "dynamic": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    "llama3": (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "yarn": ("qwen2", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}),
    "yarn, all settings": (
        "qwen3",
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "truncate": False,
                "mscale": 0.7,
                "mscale_all_dim": 0.4,
            }
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(tmp_path, case: str) -> None:
    family, overrides = CASES[case]
    source = write_checkpoint(tmp_path / "checkpoint", family, **overrides)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).double()
    with torch.no_grad():
        expected = model(torch.tensor(TOKENS)[None]).logits[0].numpy()
    computed = reference_logits(Checkpoint(source), read_json(source / "config.json"), TOKENS, 256)
    # transformers keeps its rotary angles in float32 even in a float64 model.
    np.testing.assert_allclose(computed, expected, atol=2e-4)
    bundle = export_checkpoint(source, tmp_path / "bundle", ExportRecipe(FP32)).bundle
    session = GraphSession(bundle, read_config(bundle), 64)
    np.testing.assert_allclose(session.forward(TOKENS, np.arange(48)), expected, atol=2e-4)


def test_dynamic_scaling_beyond_the_trained_length(tmp_path) -> None:
    """At a sequence as long as the exported context, transformers uses the base the graph was given."""
    context = 96
    overrides = {"max_position_embeddings": 32, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    source = write_checkpoint(tmp_path / "checkpoint", **overrides)
    tokens = np.random.default_rng(12).integers(0, 300, context)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).double()
    with torch.no_grad():
        expected = model(torch.tensor(tokens)[None]).logits[0].numpy()
    bundle = export_checkpoint(source, tmp_path / "bundle", ExportRecipe(FP32, context=context)).bundle
    session = GraphSession(bundle, read_config(bundle), context)
    np.testing.assert_allclose(session.forward(tokens, np.arange(context)), expected, atol=3e-4)
