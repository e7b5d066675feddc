"""Models whose layers differ (LFM2, Qwen3.5, Granite 4.0-H, Gemma 4): replays, shared caches, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

import edgerun
from edgerun.edge.cli.main import main
from edgerun.errors import BundleError, CheckpointError, EdgeError, InputError
from edgerun.export import FP32, INT4, ExportRecipe, export_checkpoint
from edgerun.models.bundle import open_bundle
from edgerun.models.manifest import GraphLayout
from edgerun.runtime.decode import DecodeLimits, decode
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph.model_metadata import metadata_of
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from edgerun.runtime.prefill import prefill
from edgerun.runtime.result import StatsRecorder
from edgerun.runtime.sampling.sampler import Sampler, SamplingParams
from edgerun.runtime.speculation.verification import NearTies
from support.adversarial_drafters import adversaries, eager
from support.hybrid_graphs import HYBRIDS, write_hybrid
from support.tiny_models import write_bundle, write_checkpoint

PROMPT = "the and of the and of to in the and of the and of to in the and of"
CONTEXT = 512


@pytest.fixture(scope="module", params=HYBRIDS)
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hybrid(tmp_path_factory.mktemp("hybrid"), request.param, CONTEXT)


def test_tokens_run_again_one_by_one_where_wide_passes_are_wrong(bundle: Path) -> None:
    graph = GraphSession(bundle / "model.onnx", SessionConfig(choose_device("cpu"), 1))
    graph.graph_io = replace(graph.graph_io, supports_wide_passes=False)
    bound, tokens = graph.bind(graph.arena(CONTEXT)), [int(token) for token in np.arange(7, 47)]
    prefill(bound, tokens)
    widths = []
    run = bound._run_session

    def spy() -> None:
        if bound.arena.length:
            widths.append(bound._inputs.width)
        run()

    bound._run_session = spy
    bound.arena.rewind_to(25)
    found = bound.forward([9]).copy()
    assert bound.arena.replayed or bound.arena.states.cuts_anywhere
    assert set(widths) == {1}
    fresh = graph.bind(graph.arena(CONTEXT))
    np.testing.assert_allclose(found[0], prefill(fresh, [*tokens[:25], 9]).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("exact", [False, True], ids=["plain passes", "near ties recomputed"])
def test_adversarial_chains_do_not_change_the_text(bundle: Path, exact: bool) -> None:
    graph = GraphSession(bundle / "model.onnx", SessionConfig(choose_device("cpu"), 1))
    prompt, limits, params = [7, 8, 9, 7, 8], DecodeLimits(70, frozenset()), SamplingParams()

    def tokens_of(name: str | None, text: list[int]) -> list[int]:
        bound, sampler = graph.bind(graph.arena(CONTEXT)), Sampler(params, 300)
        near_ties = NearTies(bound, sampler, 0.5, lambda: False) if exact else None
        speculator = None if name is None else eager(adversaries(text, 300, 0)[name], trees=False)
        steps = list(decode(bound, prompt, sampler, limits, speculator, near_ties))
        arena = bound.arena
        tokens = [token for step in steps for token in step.tokens]
        assert arena.states.token_ids == [*prompt, *tokens][: arena.length]
        recorder = StatsRecorder(len(prompt))
        for step in steps:
            recorder.add(step)
        assert recorder.stats(keep_rounds=False).replayed_tokens == arena.replayed
        cuts_anywhere.add(arena.replay is None)
        if arena.replay is None:
            assert arena.replayed == 0  # rounds rewind within their pass, or to the end of plain decoding's slots
        if name is None:
            assert arena.replayed == 0
        replayed.append(arena.replayed)
        return tokens

    replayed: list[int] = []
    cuts_anywhere: set[bool] = set()
    plain = tokens_of(None, [])
    for name in adversaries([1], 300, 0):
        assert tokens_of(name, [*prompt, *plain]) == plain
    assert {sum(replayed) == 0} == cuts_anywhere


def test_a_saved_session_that_lacks_a_state_is_refused(bundle: Path, tmp_path: Path) -> None:
    with edgerun.load(bundle, device="cpu", learned=False, history=False) as engine:
        with engine.session() as chat:
            chat.send("in the", max_tokens=4)
            chat.save(tmp_path / "s.kv")
        saved = dict(np.load(tmp_path / "s.kv"))
        for lost in (name for name in saved if name.startswith("rows.")):
            np.savez(tmp_path / "damaged.npz", **{name: saved[name] for name in saved.keys() - {lost}})
            with pytest.raises(InputError, match="is damaged"):
                engine.session(resume=tmp_path / "damaged.npz")


GENAI = (ExportRecipe(INT4, layout=GraphLayout.GENAI), "--layout genai")
DRAFT = (ExportRecipe(INT4, draft="checkpoint"), "--draft")
HYBRID_REFUSALS = (GENAI, (ExportRecipe(INT4, device="gpu"), "--device gpu"))
LAYERS = {
    "lfm2": ("convolution layers", HYBRID_REFUSALS),
    "qwen3_5_text": ("linear attention layers", HYBRID_REFUSALS),
    "granitemoehybrid": ("linear attention layers", HYBRID_REFUSALS),
    "gemma4_text": (
        "layers that differ",
        (
            *(DRAFT, GENAI, (ExportRecipe(INT4, report=True), "--report")),
            (ExportRecipe(INT4, calibration=Path("self")), "calibration"),
        ),
    ),
}


@pytest.mark.parametrize(
    ("family", "layers", "recipe", "message"),
    [(family, layers, *each) for family, (layers, refusals) in LAYERS.items() for each in refusals],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_exports_that_it_cannot_have_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, layers: str, recipe: ExportRecipe, message: str
) -> None:
    monkeypatch.chdir(tmp_path)  # where the draft of some recipes is
    source = write_checkpoint(tmp_path / "checkpoint", family)
    with pytest.raises(InputError, match=f"{message}.*{family} models, which have {layers}"):
        export_checkpoint(source, tmp_path / "bundle", recipe)
    assert not (tmp_path / "bundle").exists()


UNKNOWN: dict[str, list[tuple[dict[str, object], str]]] = {
    "lfm2": [
        (
            {"layer_types": ["conv", "mamba", "conv", "conv", "full_attention"]},
            "layer_types has 'mamba'; supported are conv and full_attention",
        ),
        ({"layer_types": ["conv"] * 5}, "no layer of the checkpoint has attention"),
        ({"layer_types": None, "full_attn_idxs": [9]}, "full_attn_idxs must list layers below 5"),
        ({"conv_L_cache": 1}, "conv_L_cache must be an integer of at least 2"),
        ({"conv_L_cache": 4}, r"conv.conv.weight has shape \[64, 1, 3\], but config.json implies \[64, 1, 4\]"),
    ],
    "qwen3_5_text": [
        (
            {"layer_types": ["linear_attention", "mamba", "linear_attention", "full_attention"]},
            "layer_types has 'mamba'; supported are linear_attention and full_attention",
        ),
        ({"layer_types": None, "full_attention_interval": 9}, "no layer of the checkpoint has attention"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads 3 is not a multiple of linear_num_key_heads 2"),
        ({"linear_key_head_dim": 8}, r"qkv.weight has shape \[160, 64\], but config.json implies \[128, 64\]"),
        ({"linear_conv_kernel_dim": 3}, r"weight has shape \[160, 1, 4\], but config.json implies \[160, 1, 3\]"),
        ({"rope_parameters": {"rope_type": "ntk"}}, "rope scaling 'ntk' is not supported"),
    ],
    "granitemoehybrid": [
        ({"num_local_experts": 8}, r"lacks the tensor .*layers\.0\.block_sparse_moe\.router\.layer\.weight"),
        ({"num_local_experts": None}, r"lacks the tensor .*block_sparse_moe\.router\.layer\.weight"),
        (
            {"layer_types": ["mamba", "conv", "mamba", "attention"]},
            "layer_types has 'conv'; supported are mamba and attention",
        ),
        ({"layer_types": None}, "no layer of the checkpoint has attention"),
        ({"mamba_n_groups": 3}, "mamba_n_heads 8 is not a multiple of mamba_n_groups 3"),
        ({"mamba_d_head": 24}, r"8 mamba_n_heads of 24 .* do not make mamba_expand \* hidden_size, which is 128"),
        ({"mamba_d_conv": 3}, r"weight has shape \[224, 1, 4\], but config.json implies \[224, 1, 3\]"),
        ({"time_step_limit": [0.01, 1.0]}, "time_step_limit .* is not supported"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act 'gelu_pytorch_tanh' is not supported"),
    ],
    "gemma4_text": [
        ({"enable_moe_block": True}, "enable_moe_block is not supported; the graph cannot have experts beside"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is not supported"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers 4 leaves layer 1 without a layer of its kind"),
        ({"vocab_size_per_layer_input": 200}, "vocab_size_per_layer_input 200 differs from vocab_size 300"),
        ({"per_layer_config": {"1": {"sliding_window": 3}}}, r"per_layer_config of layer 1 is .*sliding_window"),
        ({"per_layer_config": [1]}, r"per_layer_config of layer 0 is \[1\]"),
        ({"global_head_dim": 12}, "head_dim 12 is not a multiple of 8"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
        ({"hidden_size_per_layer_input": 24}, r"embed_tokens_per_layer.weight has shape \[300, 80\]"),
    ],
}


@pytest.mark.parametrize(
    ("family", "settings", "message"), [(family, *each) for family, cases in UNKNOWN.items() for each in cases]
)
def test_what_the_graph_cannot_have_is_named(
    tmp_path: Path, family: str, settings: dict[str, object], message: str
) -> None:
    source = write_checkpoint(tmp_path / "checkpoint", family)
    config = {**json.loads((source / "config.json").read_text(encoding="utf-8")), **settings}
    config = {name: value for name, value in config.items() if value is not None}
    (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(CheckpointError, match=message) as error:
        export_checkpoint(source, tmp_path / "bundle", ExportRecipe(FP32))
    assert "\n" not in str(error.value)


def test_a_missing_state_output_is_named(bundle: Path, tmp_path: Path) -> None:
    model = onnx.load(bundle / "model.onnx", load_external_data=False)
    lost = [value.name for value in model.graph.output if value.name.startswith("present_conv")][-1]
    kept = [value for value in model.graph.output if value.name != lost]
    del model.graph.output[:]
    model.graph.output.extend(kept)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    (tmp_path / "model.onnx.data").write_bytes((bundle / "model.onnx.data").read_bytes())
    with pytest.raises(BundleError, match=f"no output for its state input {lost.replace('present', 'past')}"):
        GraphSession(tmp_path / "model.onnx", SessionConfig(choose_device("cpu"), 1), metadata_of(open_bundle(bundle)))


# Layers that share a cache (Gemma 4)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("gemma4"), "gemma4_text", weights=INT4, max_position_embeddings=512)


def test_layers_that_share_a_cache_have_none_of_their_own(gemma: Path) -> None:
    graph = onnx.load(gemma / "model.onnx", load_external_data=False).graph
    attentions = [node for node in graph.node if node.op_type == "GroupQueryAttention"]
    assert [len(node.output) for node in attentions] == [3, 3, 3, 1, 1]
    # Layers 3 and 4 have full attention, whose last layer with keys of its own is layer 1.
    assert [node.input[3] for node in attentions[3:]] == ["present.1.key", "present.1.key"]
    shapes = {
        value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in graph.input
        if value.name.endswith(".key")
    }
    assert shapes == {
        "past_key_values.0.key": [1, 2, 0, 16],
        "past_key_values.1.key": [1, 2, 0, 32],
        "past_key_values.2.key": [1, 2, 0, 16],
    }


def test_the_command_line_exports_and_generates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_checkpoint(tmp_path / "checkpoint", "gemma4_text")
    assert main(["export", str(source), str(tmp_path / "bundle"), "--weights", "int4"]) == 0
    assert open_bundle(tmp_path / "bundle").manifest.weights["per_layer_embedding"] == INT4
    capsys.readouterr()
    assert main(["run", str(tmp_path / "bundle"), "--prompt", PROMPT, "--raw", "--max-tokens", "8"]) == 0
    assert capsys.readouterr().out.strip()


def test_an_int8_cache_is_refused_in_one_line(gemma: Path) -> None:
    with pytest.raises(EdgeError, match="layers that read the cache of another layer") as error:
        edgerun.load(gemma, device="cpu", kv="int8").close()
    assert "\n" not in str(error.value)
