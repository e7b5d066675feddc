"""Options of `edge-run export`: those that contradict each other, how they become a request, and the report."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import typer

from edgerun.edge.cli import export as export_command
from edgerun.edge.cli.main import main
from edgerun.export import ExportRecipe, Method
from edgerun.export.allocation.format_candidates import planned_linears
from edgerun.export.calibration import work_folder
from edgerun.export.checkpoint.config import read_config
from edgerun.export.quantization.option_values import PRESETS, MethodChoice, PresetChoice
from edgerun.models.atomic import discard_folder
from edgerun.models.bundle import open_bundle
from edgerun.runtime.arguments.argument_types import options_of
from support import generated_texts
from support.commands import Capture, Patch, fails, output_of
from support.tiny_models import write_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("source") / "checkpoint")


pytestmark = pytest.mark.usefixtures("cache")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budget", "3.5bpw"], "--budget has no effect without mixed weights; add --weights mixed"),
        (["--weights", "mixed"], "mixed weights need either a budget or a plan, not both; add --budget 3.5bpw"),
        (["--weights", "mixed", "--budget", "3 bits"], "'3 bits' is not a budget"),
        (
            ["--weights", "mixed", "--budget", "3bpw", "--block", "64", "--draft", "draft"],
            "--block has no effect with mixed weights; leave it out",
        ),
        (["--weights", "mixed", "--budget", "3bpw", "--head", "int8"], "--head has no effect with mixed weights"),
        (["--weights", "int4", "--plan", "plan.toml"], "--plan and --weights int4 exclude each other"),
        (["--weights", "mixed", "--budget", "3bpw", "--plan", "plan.toml"], "need either a budget or a plan, not both"),
        (["--head", "mixed"], "only --weights can be mixed"),
        (["--preset", "fast", "--weights", "int8"], "--preset fast and --weights exclude each other; leave one"),
        (["--preset", "best", "--budget", "5bpw"], "--preset best and --budget exclude each other; leave one"),
        (["--preset", "small", "--head", "int8"], "--head has no effect with mixed weights"),
        (["--draft-vocab", "100"], "has no effect without a draft; add --draft SRC"),
        (["--draft", "draft", "--draft-vocab", "many"], "must be a positive number of tokens, not 'many'"),
        (["--draft", "draft", "--draft-vocab", "0"], "must be a positive number of tokens, not '0'"),
        (["--widths", "1,4"], "--widths has no effect without --device npu; add --device npu"),
        (["--contexts", "512"], "--contexts has no effect without --device npu; add --device npu"),
        (["--activations", "int8"], "--activations has no effect without --device npu; add --device npu"),
        (["--device", "npu", "--activations", "int4"], "int4"),
        (["--device", "npu", "--widths", "1,x"], "--widths must be whole numbers with commas between them, not '1,x'"),
        (["--device", "npu", "--contexts", "512"], "--contexts 512 is longer than the 256 positions"),
        (["--device", "npu", "--layout", "genai"], "--device npu needs edge-run's own layout"),
        (["--layout", "genai", "--method", "gptq"], "need edge-run's own layout; leave --layout out"),
        (["--layout", "genai", "--report"], "reports need edge-run's own layout; leave --layout out"),
        (["--layout", "genai", "--eval", "text.txt"], "reports need edge-run's own layout; leave --layout out"),
        (["--weights", "fp32", "--zero-points"], "--zero-points has no effect on fp32 weights"),
        (["--weights", "fp32", "--half-scales"], "--half-scales has no effect on fp32 weights"),
        (["--weights", "fp32", "--block", "64"], "--block has no effect on fp32 weights"),
        (["--work", "work"], "--work has no effect on an export that reads no text; leave it out"),
        (["--weights", "int3"], "int3"),
        (["--block", "48"], "blocks of 48"),
        (["--context", "0"], "greater than or equal to 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_options_are_refused(
    checkpoint: Path, tmp_path: Path, capsys: Capture, options: list[str], message: str
) -> None:
    assert message in fails(capsys, "export", checkpoint, tmp_path / "bundle", *options)
    assert not (tmp_path / "bundle").exists()


def test_static_graphs_are_named_at_the_end(checkpoint: Path, tmp_path: Path, capsys: Capture) -> None:
    bundle = tmp_path / "bundle"
    options = ["--device", "npu", "--widths", "1,4", "--contexts", "64"]
    output = output_of(capsys, "export", checkpoint, bundle, *options)
    assert "2 graphs for NPUs, of widths 1, 4 and contexts 64: " in output
    assert "of which 0.0 MB are the embedding in float16" in output
    assert {path.name for path in bundle.glob("model_npu*")} == {
        "model_npu.onnx.data",
        "model_npu_w1_c64.onnx",
        "model_npu_w4_c64.onnx",
    }
    assert "--device npu --widths 1,4 --contexts 64" in open_bundle(bundle).manifest.command


@pytest.mark.parametrize(
    "preset", [pytest.param(each, marks=[] if each == "fast" else pytest.mark.nightly) for each in PresetChoice]
)
def test_a_preset_is_its_options(checkpoint: Path, tmp_path: Path, capsys: Capture, preset: PresetChoice) -> None:
    """How long it takes is said first, and the options that it stands for are recorded."""
    options = ["--preset", preset, "--calibration-tokens", "1100"]
    if PRESETS[preset]["weights"] == "mixed":
        options += ["--time-limit", "0.02"]
    assert main(["export", str(checkpoint), str(tmp_path / "out"), *options]) == 0
    first, *stages = capsys.readouterr().err.splitlines()
    found = re.fullmatch(
        r"edge-run: progress: expected to take (\S+) to (\S+) minutes, longer beside other programs", first
    )
    assert found is not None
    assert 0 < float(found[1]) < float(found[2])
    assert stages[0] == "edge-run: progress: text"
    command = open_bundle(tmp_path / "out").manifest.command
    assert "--preset" not in command
    for name, value in PRESETS[preset].items():
        assert f"--{name.replace('_', '-')}{'' if value is True else f' {value}'}" in command
    again = ["export", str(checkpoint), str(tmp_path / "again"), *shlex.split(command)[4:]]
    assert main(again) == 0
    assert open_bundle(tmp_path / "again").manifest.command.replace("again", "out") == command


def test_block_applies_to_the_draft_of_mixed_weights(checkpoint: Path, tmp_path: Path, capsys: Capture) -> None:
    draft = write_checkpoint(tmp_path / "draft", seed=1, num_hidden_layers=1, intermediate_size=128)
    plan, text = tmp_path / "plan.toml", tmp_path / "text.txt"
    linears = (f'"{linear.name}" = "int8/32"\n' for linear in planned_linears(read_config(checkpoint)))
    plan.write_text("[linears]\n" + "".join(linears), encoding="utf-8")
    text.write_text(" ".join(np.random.default_rng(0).choice(["the", "sea", "and", "sand"], 1200)), encoding="utf-8")
    observed = ["--plan", str(plan), "--calibration", str(text), "--calibration-tokens", "1100"]
    small = ["--draft", str(draft), "--draft-weights", "int8", "--block", "64"]
    assert main(["export", str(checkpoint), str(tmp_path / "bundle"), *observed, *small]) == 0, capsys.readouterr().err
    for folder, block in ((tmp_path / "bundle", 32), (tmp_path / "bundle" / "draft", 64)):
        manifest = open_bundle(folder).manifest
        assert {form.block for form in manifest.weights.values()} == {block}
    assert "--block 64" in manifest.command
    assert "--draft draft " in manifest.command
    assert str(tmp_path) not in manifest.command


def test_the_recorded_command_names_models_of_the_hub_whole() -> None:
    app = typer.Typer()
    app.command()(export_command.export)
    words = ["Some/Model", "folder/out", "--draft", "Some/Draft"]
    context = typer.main.get_command(app).make_context("export", words)
    command = export_command._recorded(context, Path("Some/Model"), {})
    assert command == "edge-run export Some/Model out --draft Some/Draft"


def test_every_choice_of_a_recipe_is_an_option_with_help(capsys: Capture) -> None:
    declared = options_of(ExportRecipe)
    assert list(declared) == [each.name for each in dataclasses.fields(ExportRecipe)]
    main(["export", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for name, option in declared.items():
        assert f"--{name.replace('_', '-')} " in shown
        assert option.help[:30] in shown
    page = generated_texts.EXPORT_PAGE.read_text(encoding="utf-8")
    assert generated_texts.with_export_options(page) == page


def test_methods_are_a_rounding_method_and_optional_awq_scaling() -> None:
    recipes = {choice.value: ExportRecipe(method=choice) for choice in MethodChoice}
    methods = {name: (recipe.rounding, recipe.awq) for name, recipe in recipes.items()}
    assert methods == {
        "rtn": (Method.RTN, False),
        "k-quant": (Method.K_QUANT, False),
        "gptq": (Method.GPTQ, False),
        "yaqa": (Method.GPTQ, False),
        "learned": (Method.GPTQ, False),
        "awq": (Method.RTN, True),
        "awq+k-quant": (Method.K_QUANT, True),
        "awq+gptq": (Method.GPTQ, True),
        "awq+yaqa": (Method.GPTQ, True),
        "awq+learned": (Method.GPTQ, True),
    }
    assert [name for name, recipe in recipes.items() if recipe.gradients] == [
        "yaqa",
        "learned",
        "awq+yaqa",
        "awq+learned",
    ]
    assert [name for name, recipe in recipes.items() if recipe.learns] == ["learned", "awq+learned"]


@pytest.fixture
def mapped_work(monkeypatch: Patch) -> list[str]:
    """Files of a work folder that are mapped into memory when it is removed, which Windows would refuse."""
    found: list[str] = []

    def discard(folder: Path) -> bool:
        maps = Path("/proc/self/maps")
        lines = maps.read_text(encoding="utf-8").splitlines() if maps.exists() else []
        found.extend(line for line in lines if f"{folder}{os.sep}" in line)
        return discard_folder(folder)

    monkeypatch.setattr(work_folder, "discard_folder", discard)
    return found


def test_a_calibrated_export_has_a_report(
    checkpoint: Path, tmp_path: Path, capsys: Capture, mapped_work: list[str]
) -> None:
    out = tmp_path / "out"
    options = ("--weights", "int4", "--block", "64", "--method", "awq+gptq", "--calibration-tokens", "1100", "--report")
    shown = output_of(capsys, "export", checkpoint, out, *options)
    assert mapped_work == []
    assert list((tmp_path / "cache" / "exports").iterdir()) == []
    report, manifest = (json.loads((out / name).read_text(encoding="utf-8")) for name in ("report.json", "edge.json"))
    assert report["shipped"] | {"tokens": 0} == pytest.approx(manifest["quality"] | {"tokens": 0}, rel=1e-5)
    assert report["calibration"] == manifest["calibration"]
    assert report["calibration"]["awq"] is True
    assert report["command"] == manifest["command"]
    assert all(linear["kl_alone"] > 0 for linear in report["linears"])
    assert {linear["weight_format"]["method"] for linear in report["linears"]} == {"gptq"}
    chosen, nearest = report["plans"]
    assert (chosen["kind"], nearest["kind"], nearest["name"]) == ("chosen", "nearest", "int4/64 int4/32 rtn")
    assert chosen["bytes_read"] == nearest["bytes_read"] == sum(linear["bytes_read"] for linear in report["linears"])
    assert sorted(map(int, report["speed"]["measured"])) == [1, 2, 4, 8]
    assert (out / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert shown.count("mean KL") == 2
    assert shown.count("With --kv int8 the mean KL from a float cache is") == 1
    assert (
        f"held-out tokens of text sampled from the model itself: mean KL {report['shipped']['mean_kl']:#.3g}," in shown
    )
    assert "than round-to-nearest" in shown


@pytest.mark.nightly
def test_report_option_and_replacing_a_bundle_with_a_report(checkpoint: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "out"
    for weights, bits, most_kl in (("int8", 10.0, 0.1), ("int4", 6.0, 1.0)):
        output_of(capsys, "export", checkpoint, out, "--weights", weights, "--report", "--calibration-tokens", "1100")
        report = json.loads((out / "report.json").read_text(encoding="utf-8"))
        assert report["bits_per_weight_read"] == pytest.approx(bits)
        assert report["shipped"]["mean_kl"] < most_kl
    output_of(capsys, "export", checkpoint, out, "--weights", "int4")
    assert not (out / "report.json").exists()
    assert output_of(capsys, out, "-p", "the", "-n", "3")
