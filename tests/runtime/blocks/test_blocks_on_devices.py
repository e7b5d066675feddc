"""Models that fill blocks on NPUs: their texts are the CPU's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgerun import EdgeError, InputError
from edgerun.export import INT4, ExportRecipe
from edgerun.export.quantization.option_values import DeviceChoice
from support.block_models import answer, write_block_model
from support.devices import require_qnn, run_edge_run, run_json_script
from support.static_bundles import float_graph, static_graphs
from support.tiny_models import exported

RULES = ("in-order:1", "fixed:2", "threshold:0.2")
PROMPT = np.random.default_rng(1).integers(5, 290, 13).tolist()


def on_npu(folder: Path, family: str = "sdar", widths: tuple[int, ...] = (1, 4, 8, 32), **overrides: Any) -> Path:
    """A bundle with graphs for NPUs."""
    write_block_model(folder, family, **overrides)
    recipe = ExportRecipe(INT4, device=DeviceChoice.NPU, widths=widths, contexts=(64, 256))
    return exported(folder / "checkpoint", folder / "npu", recipe)


@pytest.mark.parametrize("family", ["sdar", "Fast_dLLM_Qwen"])
def test_static_graphs_give_the_tokens_of_the_usual_graph(family: str, tmp_path: Path) -> None:
    bundle = on_npu(tmp_path, family)
    static, usual = static_graphs(bundle), float_graph(bundle)
    for rule in RULES:
        assert answer(static, PROMPT, rule) == answer(usual, PROMPT, rule)


def test_graphs_that_are_too_narrow_for_a_block_are_refused(tmp_path: Path) -> None:
    on_npu(tmp_path)
    for widths in ((1, 2), (1, 2, 64)):
        with pytest.raises(InputError, match="no graph for the logits of a block of 4 tokens; give --widths 1,4,128"):
            exported(tmp_path / "checkpoint", tmp_path / "narrow", ExportRecipe(device=DeviceChoice.NPU, widths=widths))
    narrow = static_graphs(on_npu(tmp_path / "other", widths=(1, 4)))
    bound = narrow.bind(narrow.arena(64))
    with pytest.raises(EdgeError, match="take 4 tokens, fewer than attend to each other"):
        bound.forward(PROMPT[:5], tree_mask=np.ones((5, 5), np.bool_))


def test_texts_on_qualcomms_simulator_are_the_cpus(tmp_path: Path) -> None:
    require_qnn()
    bundle = on_npu(tmp_path)
    script = f"""
import json, sys
from pathlib import Path
from edgerun.models.bundle import open_bundle
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph.session import SessionConfig
from edgerun.runtime.graph.static_variants import StaticGraphs
from support.block_models import answer
graphs = StaticGraphs(open_bundle(Path(sys.argv[1])), SessionConfig(choose_device("npu"), 1), cache=False)
assert not graphs.on_cpu
print(json.dumps([answer(graphs, {PROMPT}, rule) for rule in {RULES}]))
"""
    usual = float_graph(bundle)
    assert run_json_script(script, bundle, environment={}) == [answer(usual, PROMPT, rule) for rule in RULES]


def test_the_command_line_answers_on_the_simulator(tmp_path: Path) -> None:
    require_qnn()
    bundle = on_npu(tmp_path)
    arguments = (
        "-p",
        "the sea",
        "--raw",
        "-n",
        12,
        "--ignore-eos",
        "--block-rule",
        "fixed:2",
        "--device",
        "npu",
        "--stats",
    )
    finished = run_edge_run("run", bundle, *arguments, environment={})
    assert finished.returncode == 0, finished.stderr
    assert "over their block, on QNN (simulated)" in finished.stderr
