"""Static graphs wholly on an NPU: Qualcomm's simulator of a Snapdragon's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgerun
from edgerun.export import INT4, ExportRecipe, export_checkpoint
from support.devices import require_python, require_qnn, run_edge_run, run_json_script
from support.shared_data import data_path
from support.static_bundles import greedy_text, static_graphs, write_static_bundle

NEAR_TIE = 0.03
"""Margin of a near tie in standard deviations of the logits: float16 against float32."""
PROMPT = "the cat sat"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama for passes of 1 and of 4 tokens, over 16 and 64 cached ones."""
    require_qnn()
    return write_static_bundle(tmp_path_factory.mktemp("npu"), widths=(1, 4), contexts=(16, 64))


def run(call: str, *arguments: object, cache: Path | None = None) -> Any:
    """Call a function of `support.static_bundles` in a new process, with its own cache folder if one is given."""
    script = f"import json, sys\nfrom support import static_bundles\nprint(json.dumps(static_bundles.{call}))"
    environment = {} if cache is None else {"EDGERUN_CACHE": str(cache)}
    return run_json_script(script, *arguments, environment=environment)


def require_agreement(result: dict[str, Any], capacities: list[int]) -> int:
    """Check what `compare_text` found; returns the number of near ties that the NPU decides in another way."""
    assert result["entries"] == {"session.disable_cpu_ep_fallback": "1"}
    assert not result["on_cpu"]
    margins = []
    for width in (1, 4):
        found = result[f"width {width}"]
        assert found["capacities"] == capacities, "the context grows in mid-text"
        margins += found["margins"]
    assert max(margins, default=0.0) < NEAR_TIE
    assert result["tree"] < NEAR_TIE
    return len(margins)


def test_text_and_trees_agree_with_the_cpu(bundle: Path) -> None:
    prompt = np.random.default_rng(4).integers(5, 300, 10).tolist()
    assert require_agreement(run(f"compare_text(sys.argv[1], {prompt}, 16)", bundle), [16, 64]) <= 1


@pytest.mark.nightly
def test_200_tokens_of_a_trained_model_agree_with_the_cpu(tmp_path: Path) -> None:
    require_qnn()
    recipe = ExportRecipe(INT4, device="npu", widths=(1, 4), contexts=(64, 256))
    bundle = export_checkpoint(data_path("weights/stories260K-hf"), tmp_path / "bundle", recipe).bundle
    with edgerun.load(bundle, threads=1) as engine:
        prompt = engine.model.tokenizer.encode("Once upon a time", add_special_tokens=True)
    near_ties = require_agreement(run(f"compare_text(sys.argv[1], {prompt}, 200)", bundle), [64, 256])
    assert near_ties <= 4


def test_compiled_contexts_are_used_while_they_are_sound(bundle: Path, tmp_path: Path) -> None:
    assert run("load_contexts(sys.argv[1])", bundle, cache=tmp_path) == [
        ["new", False],
        ["compiled", True],
        ["truncated", False],
        ["compiled again", True],
        ["refused by the plugin", False],
        ["compiled once more", True],
        ["without its graph", False],
    ]


def test_conversations_drafts_and_prefixes(bundle: Path, tmp_path: Path) -> None:
    result = run("converse(*sys.argv[1:])", bundle, tmp_path)
    assert result["context"] == 64, "the largest context that has graphs"
    assert result["resumed"] > 0
    assert result["plain"] == 0, "the CPU's slots are not the NPU's"
    assert result["reused"] >= result["resumed"]
    assert result["back"] > result["resumed"]
    assert result["answer"]
    plain, drafted = result["texts"]
    assert drafted == plain
    assert result["passes"][1] < result["passes"][0] == 23
    assert result["accepted"] > 0
    assert result["prefix"] >= 16
    assert len(result["margins"]) > 1, "candidates are learned from logits, not from ids"


def test_the_command_runs_on_the_npu(bundle: Path, tiny_bundle: Path) -> None:
    arguments = ("-p", PROMPT, "--raw", "-n", "6", "-t", "0", "--spec", "off", "--threads", "1")
    finished = run_edge_run(bundle, *arguments, "--device", "npu", environment={})
    assert finished.returncode == 0, finished.stderr
    with edgerun.load(bundle, threads=1) as engine:
        expected = engine.generate(
            PROMPT, raw=True, max_tokens=6, temperature=0.0, speculation=edgerun.Speculation.OFF
        ).text
    assert finished.stdout.rstrip("\n").endswith(expected)
    without = run_edge_run(tiny_bundle, *arguments, "--device", "npu", environment={})
    assert without.returncode != 0
    (line,) = (line for line in without.stderr.splitlines() if "NPU" in line)
    assert "has no graphs for an NPU" in line
    assert "edge-run export" in without.stderr
    assert "Traceback" not in without.stderr


def test_openvino_runs_the_same_graphs(tmp_path: Path) -> None:
    interpreter = require_python("EDGERUN_OPENVINO_PYTHON")
    bundle = write_static_bundle(tmp_path, widths=(1, 4), contexts=(16, 64))
    script = (
        "import json, sys\n"
        "try:\n"
        "    import edgerun\n"
        "except ImportError as error:\n"
        "    print(json.dumps({'lacks': str(error)}))\n"
        "    sys.exit()\n"
        "from edgerun import Speculation\n"
        "options = dict(raw=True, max_tokens=24, temperature=0.0, ignore_eos=True, speculation=Speculation.OFF)\n"
        "with edgerun.load(sys.argv[1], device='openvino', threads=1) as engine:\n"
        "    bound = engine.model.new_sequence().bound\n"
        "    tokens = engine.model.tokenizer.encode(sys.argv[2], add_special_tokens=True)\n"
        "    text = engine.generate(sys.argv[2], **options).text\n"
        "    print(json.dumps({'text': text, 'context': engine.model.context, 'prompt': len(tokens)}))\n"
    )
    found = run_json_script(script, bundle, PROMPT, environment={}, interpreter=interpreter)
    if "lacks" in found:
        pytest.skip(f"{interpreter} has no dependencies of edge-run: {found['lacks']}")
    assert found["prompt"] < 16 < found["prompt"] + 24, "the context grows in mid-text"
    with edgerun.load(bundle, threads=1) as engine:
        tokenizer = engine.model.tokenizer
        prompt = tokenizer.encode(PROMPT, add_special_tokens=True)
        expected, _ = greedy_text(static_graphs(bundle), prompt, 24)
        assert found == {"text": tokenizer.decode(expected), "context": 64, "prompt": len(prompt)}
