"""Exports with calibration text: calibrated, mixed, with a draft, interrupted, refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import pytest

import edgerun
from edgerun.edge.cli.main import main
from edgerun.errors import EdgeError, InputError
from edgerun.export import ExportRecipe, Method, WeightFormat, export_checkpoint, export_model
from edgerun.export.allocation.format_candidates import BASE_FORMATS, FILE_FORMATS, planned_linears, write_plan
from edgerun.export.allocation.linear_times import load_or_measure
from edgerun.export.allocation.plan_costs import bytes_read, parse_budget, weight_count
from edgerun.export.calibration.work_folder import KeptNumbers
from edgerun.export.checkpoint.config import read_config
from edgerun.export.pipeline import open_source
from edgerun.export.quantization.codes import dequantized, nearest_rows
from edgerun.models.bundle import open_bundle
from edgerun.models.onnx_file.graph_editor import GraphEditor
from edgerun.models.onnx_file.model_messages import attribute_values
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.gpu_graph.rewriting import form_of, gpu_graph
from edgerun.runtime.graph.packed_graph import packed_graph
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from edgerun.runtime.int8_prompts.integer_weights import BlockMatrix
from support.known_timings import BytesMachine, KnownMachine, use_machine
from support.nightly import some_nightly
from support.tiny_models import WORDS, exported, write_checkpoint

TEXT: Final[dict[str, Any]] = {"calibration": Path("text.txt"), "calibration_tokens": 1100}
PROMPT = "the sea and the"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder; `TEXT` lies in the current folder, and times are known."""
    use_machine(monkeypatch, BytesMachine())
    monkeypatch.setenv("EDGERUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(" ".join(np.random.default_rng(0).choice(WORDS, 1200)), encoding="utf-8")
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("by-text") / "checkpoint", num_hidden_layers=3)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("by-text") / "draft", seed=1, num_hidden_layers=1)


def nightly(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.nightly)


def mixed(budget: str, **settings: object) -> ExportRecipe:
    choices: dict[str, Any] = {"method": Method.K_QUANT, "time_limit": 2 / 60, **TEXT, **settings}
    return ExportRecipe("mixed", budget=budget, **choices)


def weights_of(bundle: Path) -> dict[str, WeightFormat]:
    return dict(open_bundle(bundle).manifest.weights)


def answer(bundle: Path, **settings: object) -> str:
    with edgerun.load(bundle, **settings) as engine:  # type: ignore[arg-type]
        return engine.generate(PROMPT, max_tokens=60, raw=True).text


EXPERTS = {
    "qwen3_moe": {"num_experts": 4, "num_hidden_layers": 2, "mlp_only_layers": [1]},
    "gpt_oss": {"num_hidden_layers": 1, "layer_types": None, "num_local_experts": 4},
    "qwen3_5_moe_text": {
        "num_experts": 4,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
    },
}


@pytest.mark.parametrize(
    ("family", "linears", "method"),
    [
        ("llama", "qkv down", "gptq"),
        nightly("llama", "qkv down", "awq+k-quant"),
        ("qwen3_moe", "gate_up down", "gptq"),
        nightly("qwen3_moe", "gate_up down", "awq+gptq"),
        nightly("gpt_oss", "gate_up down", "gptq"),
        ("qwen3_5_moe_text", "gate_up down", "gptq"),
        nightly("qwen3_5_moe_text", "gate_up down", "awq+gptq"),
        ("lfm2", "conv_in conv_out", "gptq"),
        nightly("lfm2", "conv_in conv_out", "awq+gptq"),
        nightly("qwen3_5_text", "delta_in delta_out", "gptq"),
        nightly("qwen3_5_text", "delta_in delta_out", "awq+gptq"),
        nightly("granitemoehybrid", "mamba_in mamba_out", "gptq"),
        nightly("granitemoehybrid", "mamba_in mamba_out", "awq+gptq"),
    ],
)
def test_calibration_lowers_the_divergence(tmp_path: Path, family: str, linears: str, method: str) -> None:
    source = write_checkpoint(tmp_path / "checkpoint", family, **EXPERTS.get(family, {}))
    weights = WeightFormat(2, 64) if family == "llama" else WeightFormat(4, 32)
    done = export_checkpoint(source, tmp_path / "bundle", ExportRecipe(weights, method=method, **TEXT))
    assert done.parity.max_abs_diff < 1e-3  # the graph equals the reference with the dequantized weights
    chosen, nearest = (each.kl for each in done.report.plans)
    assert chosen < 0.9 * nearest
    manifest = open_bundle(tmp_path / "bundle").manifest
    assert manifest.calibration.awq is method.startswith("awq")
    assert {dict(manifest.weights)[f"layers.0.{linear}"].method for linear in linears.split()} == {
        Method(method.removeprefix("awq+"))
    }
    assert answer(tmp_path / "bundle")
    assert any(note.startswith("With --kv int8 the mean KL from a float cache is 0.0") for note in done.report.notes)
    assert (tmp_path / "bundle" / "kv_scales.json").exists()


@pytest.mark.parametrize("family", ["qwen3_moe", "lfm2"])
def test_a_plan_is_followed_from_the_command_line(tmp_path: Path, family: str) -> None:
    settings = EXPERTS.get(family, {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]})
    source = write_checkpoint(tmp_path / "checkpoint", family, **settings)
    linears = [linear.name for linear in planned_linears(read_config(source))]
    formats = [f'"{name}" = "{("int4/32 gptq", "int8/32")[number % 2]}"' for number, name in enumerate(linears)]
    (tmp_path / "plan.toml").write_text("\n".join(["[linears]", *formats, ""]), encoding="utf-8")
    options = ["--weights", "mixed", "--plan", "plan.toml", "--calibration", "text.txt", "--calibration-tokens", "1100"]
    assert main(["export", str(source), str(tmp_path / "bundle"), *options]) == 0
    plan = weights_of(tmp_path / "bundle")
    assert [plan[name].bits for name in linears] == [(4, 8)[number % 2] for number in range(len(linears))]
    graph = onnx.load(tmp_path / "bundle" / "model.onnx", load_external_data=False).graph
    bits = {
        node.name: next(each.i for each in node.attribute if each.name in ("bits", "expert_weight_bits"))
        for node in graph.node
        if node.op_type in ("MatMulNBits", "QMoE")
    }
    own = {name.replace("experts", "gate_up"): stored for name, stored in bits.items() if name.startswith("layers.")}
    assert len(own) > 4
    assert own == {name: plan[name].bits for name in own}
    assert answer(tmp_path / "bundle")


@pytest.mark.nightly
def test_a_mixed_export_of_experts_from_the_command_line(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "checkpoint", "qwen3_moe", **EXPERTS["qwen3_moe"])
    options = ["--weights", "mixed", "--budget", "6bpw", "--calibration", "text.txt", "--calibration-tokens", "1100"]
    assert main(["export", str(source), str(tmp_path / "bundle"), *options, "--time-limit", "0.05"]) == 0
    plan = weights_of(tmp_path / "bundle")
    assert open_bundle(tmp_path / "bundle").manifest.bits_per_weight_read <= 6
    assert plan["layers.0.gate_up"] == plan["layers.0.down"]
    assert plan["layers.0.router"].bits == 32
    assert answer(tmp_path / "bundle")
    # The plan file names the experts of a layer once.
    text = (tmp_path / "bundle" / "plan.toml").read_text(encoding="utf-8")
    assert '"layers.0.gate_up"' in text
    assert '"layers.0.down"' not in text
    (tmp_path / "two.toml").write_text(f'{text}"layers.0.down" = "int8/32"\n', encoding="utf-8")
    with pytest.raises(InputError, match=r"layers\.0\.gate_up and layers\.0\.down two formats, but one operator"):
        export_checkpoint(source, tmp_path / "again", ExportRecipe(plan=tmp_path / "two.toml", **TEXT))


def test_a_mixed_export_is_within_its_budget_and_writes_its_plan(
    checkpoint: Path, tmp_path: Path, own_cache: Path
) -> None:
    done = export_checkpoint(checkpoint, tmp_path / "bundle", mixed("5bpw"))
    plan, config = weights_of(tmp_path / "bundle"), read_config(checkpoint)
    read = sum(bytes_read(linear, plan[linear.name]) for linear in planned_linears(config))
    spent = 8 * read / weight_count(config)  # bits per weight
    assert set(plan.values()) <= set(BASE_FORMATS)
    assert len(set(plan.values())) > 1
    assert done.report.budget == "5bpw"
    data = json.loads((tmp_path / "bundle" / "report.json").read_text(encoding="utf-8"))
    assert data["bits_per_weight_read"] == pytest.approx(spent, rel=1e-5)
    manifest = open_bundle(tmp_path / "bundle").manifest
    assert manifest.bits_per_weight_read == pytest.approx(data["bits_per_weight_read"], rel=1e-5)
    assert manifest.bits_per_weight == pytest.approx(data["bits_per_weight_in_file"], rel=1e-5)
    assert manifest.bits_per_weight < manifest.bits_per_weight_read <= 5
    assert (tmp_path / "bundle" / "report.html").is_file()
    assert list((own_cache / "exports").iterdir()) == []
    assert answer(tmp_path / "bundle")

    again = ExportRecipe(plan=tmp_path / "bundle" / "plan.toml", **TEXT)
    export_checkpoint(checkpoint, tmp_path / "again", again)
    names = ("model.onnx", "model.onnx.data")
    first, second = (open_bundle(tmp_path / name).manifest for name in ("bundle", "again"))
    assert [first.files[name] for name in names] == [second.files[name] for name in names]


@pytest.mark.nightly
@pytest.mark.parametrize("slow", [1.0, 1.4])
def test_a_time_budget_holds_on_a_machine_that_became_slower(
    checkpoint: Path, tmp_path: Path, slow: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, machine = read_config(checkpoint), KnownMachine()

    def milliseconds(plan: dict[str, WeightFormat]) -> float:
        return 1e3 * machine.pass_of(plan, config.layers, 1)

    def alike(each: WeightFormat) -> dict[str, WeightFormat]:
        return {linear.name: each for linear in planned_linears(config)}

    use_machine(monkeypatch, machine)
    load_or_measure(config, BASE_FORMATS)
    machine.slow = slow
    budget = (milliseconds(alike(BASE_FORMATS[1])) + milliseconds(alike(BASE_FORMATS[-1]))) / 2
    export_checkpoint(checkpoint, tmp_path / "bundle", mixed(f"{budget:.2f}ms"))
    spent = milliseconds(weights_of(tmp_path / "bundle"))
    assert 0.9 * budget < spent <= budget + 0.01
    report = json.loads((tmp_path / "bundle" / "report.json").read_text(encoding="utf-8"))
    assert report["speed"]["predicted"]["1"] == pytest.approx(spent, rel=1e-4)

    machine.slow = 20
    with pytest.raises(
        InputError, match=r"no quantization plan of this model is within .*ms; give a budget from \d+\.\d+ms to"
    ):
        export_checkpoint(checkpoint, tmp_path / "bundle", mixed(f"{budget:.2f}ms"))


@pytest.mark.parametrize("bits", [3, 5, 6])
def test_bits_between_those_of_the_operators_are_in_the_file_alone(tmp_path: Path, bits: int) -> None:
    """The export compares the graph's logits with those of the quantized weights; here all forms of it agree."""
    wide: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "tie_word_embeddings": False}
    source = write_checkpoint(tmp_path / "checkpoint", **wide)
    config = read_config(source)
    linears = {linear.name: linear for linear in planned_linears(config)}
    between, whole = (WeightFormat(each, 64, half_scales=True) for each in (bits, 4))
    plan = {name: between if name.startswith("layers.") else whole for name in linears}
    Path("plan.toml").write_text(write_plan(plan), encoding="utf-8")
    export_checkpoint(source, tmp_path / "bundle", ExportRecipe(plan=Path("plan.toml"), method=Method.RTN, **TEXT))
    manifest = open_bundle(tmp_path / "bundle").manifest
    stored = sum(linears[name].weight_count * (each.bits + 0.25) for name, each in manifest.weights.items())
    assert manifest.bits_per_weight == pytest.approx(stored / weight_count(config))
    graph = tmp_path / "bundle" / "model.onnx"
    editor = GraphEditor(graph)
    products = [each for each in editor.graph.node if each.op_type == "MatMulNBits"]
    assert {attribute_values(each)["bits"] for each in products if each.name != "logits"} == {4 if bits == 3 else 8}
    with open_source(source) as (_, tensors):
        (weights,) = (tensors.read(name) for name in linears["layers.0.o"].weights)
    (own,) = (each for each in products if each.name == "layers.0.o")
    expected = dequantized(nearest_rows(weights, between), weights.shape[1], between)
    np.testing.assert_allclose(BlockMatrix.of(editor, own).decoded(0, len(weights)), expected, rtol=1e-6)
    together = onnx.load_from_string(
        packed_graph(graph, GraphSession(graph, SessionConfig(choose_device("cpu"))).graph_io, 2)
    )
    assert sum(each.op_type == "MatMulNBits" for each in together.graph.node) == len(products)
    assert gpu_graph(graph, form_of("DmlExecutionProvider"))
    with pytest.raises(InputError, match="graphs for NPUs have no linears of 3, 5 and 6 bits"):
        export_checkpoint(source, tmp_path / "npu", ExportRecipe(plan=Path("plan.toml"), device="npu", **TEXT))


@pytest.mark.parametrize("pays", [True, False])
def test_a_budget_of_the_file_is_spent_on_bits_between_those_of_the_operators_where_that_pays(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pays: bool
) -> None:
    if not pays:
        monkeypatch.setattr("edgerun.export.allocation.allocate._FILE_FORMATS_PAY", 0)
    export_checkpoint(checkpoint, tmp_path / "bundle", mixed("6bpw@file"))
    manifest = open_bundle(tmp_path / "bundle").manifest
    assert bool(set(manifest.weights.values()) & set(FILE_FORMATS)) is pays
    assert manifest.bits_per_weight <= 6
    assert answer(tmp_path / "bundle")


@pytest.mark.parametrize("after", [0, 3], ids=["sensitivities", "plans"])
def test_an_interrupted_search_goes_on_where_it_was(
    checkpoint: Path, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Nothing that it measured is measured again."""
    searching = count()

    def interrupt(stage: str, fraction: float) -> None:
        if stage == "searching" and next(searching) == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_checkpoint(checkpoint, tmp_path / "bundle", mixed("5bpw", time_limit=5), interrupt)
    assert not (tmp_path / "bundle").exists()
    (left,) = (own_cache / "exports").iterdir()
    known = json.loads((left / "calibration" / "mean-kl.json").read_text(encoding="utf-8"))
    measured: list[str] = []
    get = KeptNumbers.get

    def watched(kept: KeptNumbers, key: str, measure: Callable[[], float]) -> float:
        return get(kept, key, lambda: (measured.append(key), measure())[1])

    monkeypatch.setattr(KeptNumbers, "get", watched)
    stages: list[str] = []
    export_checkpoint(checkpoint, tmp_path / "bundle", mixed("5bpw"), lambda stage, _: stages.append(stage))
    assert "text" not in stages
    assert len(known) > after
    assert measured
    assert not known.keys() & set(measured)
    assert not left.exists()


@pytest.mark.parametrize("vocabulary", some_nightly([150, None, "auto"], every=3))
def test_a_draft_does_not_change_the_text(
    checkpoint: Path, draft: Path, tmp_path: Path, vocabulary: int | str | None
) -> None:
    recipe = ExportRecipe(draft=draft, draft_vocab=vocabulary, **TEXT)
    done = export_checkpoint(checkpoint, tmp_path / "bundle", recipe)
    manifest = open_bundle(tmp_path / "bundle").manifest
    assert bool(manifest.draft.d2t) == (vocabulary == 150) or vocabulary == "auto"
    assert answer(tmp_path / "bundle") == answer(tmp_path / "bundle", draft=None)
    assert len(done.report.drafts) == 1


def test_the_scales_of_an_int8_cache_are_stored_and_used(checkpoint: Path, tmp_path: Path) -> None:
    done = export_checkpoint(checkpoint, tmp_path / "bundle", ExportRecipe(**TEXT))
    assert any(note.startswith("With --kv int8 the mean KL from a float cache is 0.0") for note in done.report.notes)
    stored = tmp_path / "bundle" / "kv_scales.json"
    stages: list[str] = []
    with edgerun.load(tmp_path / "bundle", kv="int8", progress=lambda stage, _: stages.append(stage)) as engine:
        assert engine.model.config.kv_scales.to_json() == json.loads(stored.read_bytes())
    assert not stages
    stored.write_bytes(stored.read_bytes().replace(b"0", b"1", 1))
    with pytest.raises(edgerun.BundleError, match=r"kv_scales\.json is damaged"):
        edgerun.load(tmp_path / "bundle")


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (
            mixed("1bpw"),
            r"no quantization plan of this model is within 1bpw; give a budget from 3\.\d+bpw to \d+\.\d+bpw",
        ),
        (mixed("1ms"), r"no quantization plan of this model is within 1ms"),
        (ExportRecipe(calibration=Path("few.txt")), r"the calibration text has \d+ tokens"),
        (ExportRecipe(calibration=Path("none.txt")), r"none\.txt"),
        (ExportRecipe(plan=Path("strange.toml"), **TEXT), "layers.9.qkv"),
    ],
    ids=["bytes", "time", "little text", "no text", "unknown linear"],
)
def test_impossible_requests_are_refused(checkpoint: Path, tmp_path: Path, recipe: ExportRecipe, message: str) -> None:
    Path("few.txt").write_text("the sea and the sand\n" * 5, encoding="utf-8")
    Path("strange.toml").write_text('[linears]\n"layers.9.qkv" = "int4/64"\n', encoding="utf-8")
    with pytest.raises(EdgeError, match=message):
        export_checkpoint(checkpoint, tmp_path / "bundle", recipe)
    assert not (tmp_path / "bundle").exists()


def test_only_checkpoints_are_calibrated(tmp_path: Path, checkpoint: Path) -> None:
    bundle = exported(checkpoint, tmp_path / "onnx")
    with pytest.raises(InputError, match="need a checkpoint of a family that edge-run exports itself"):
        export_model(bundle, tmp_path / "bundle", mixed("5bpw"))


def test_a_draft_with_another_vocabulary_is_refused_at_once(checkpoint: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", vocab_size=290)
    with pytest.raises(InputError) as caught:
        export_checkpoint(checkpoint, tmp_path / "bundle", ExportRecipe(draft=other, **TEXT))
    assert str(caught.value) == (
        f"the draft {other} has another vocabulary than the model: its highest token id is 289, not 299; "
        "give a draft with the same tokenizer"
    )
    assert not (tmp_path / "bundle").exists()
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("budget", ["0.001MB", "0.1bpw", "0.1bpw@file", "0.00001ms@4"])
def test_the_budget_that_an_error_names_is_possible(checkpoint: Path, tmp_path: Path, budget: str) -> None:
    with pytest.raises(InputError, match="no quantization plan") as refused:
        export_checkpoint(checkpoint, tmp_path / "bundle", mixed(budget))
    least = re.findall(r"give a budget from (\S+) to", str(refused.value.hint))[0]
    assert parse_budget(least).width == parse_budget(budget).width
    if not least.endswith("ms@4"):  # times differ from one measurement to the next
        export_checkpoint(checkpoint, tmp_path / "bundle", mixed(least))


def test_work_is_not_used_with_awq_scales_of_another_format(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "checkpoint", tie_word_embeddings=False)
    options = ["--method", "awq", "--head", "int8", "--calibration", "text.txt", "--calibration-tokens", "1100"]
    arguments = ["export", str(source), str(tmp_path / "bundle"), *options, "--work", str(tmp_path / "work")]
    assert main([*arguments, "--weights", "int4"]) == 0
    assert main([*arguments, "--weights", "int4"]) == 0
    assert main([*arguments, "--weights", "int2"]) == 2
