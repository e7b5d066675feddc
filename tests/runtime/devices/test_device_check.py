"""What a device computes is compared with the CPU: here, graphs that compute something else stand for devices."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgerun.errors import DeviceError
from edgerun.models.bundle import open_bundle
from edgerun.models.onnx_file.model_messages import node, read_model, tensor
from edgerun.runtime.devices.device_check import DEVICE_CHECKS, DeviceCheck, check_device, device_check_key
from edgerun.runtime.devices.providers import cpu_device
from edgerun.runtime.graph.model_metadata import metadata_of
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from support.devices import require_webgpu, run_json_script

ON_WEBGPU = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from edgerun.models.bundle import open_bundle
from edgerun.runtime.devices.device_check import check_device
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph.model_metadata import metadata_of
from edgerun.runtime.graph.session import GraphSession, SessionConfig
bundle, config = open_bundle(Path(sys.argv[1])), SessionConfig(choose_device("gpu"))
graph = GraphSession(bundle.graph, config, metadata_of(bundle))
check = check_device(graph, bundle, config, cache=False)
print(json.dumps({**asdict(check), "trees": graph.graph_io.supports_trees}))
"""
CONFIG = SessionConfig(cpu_device())
POSITIONS, BIAS = 9, 10
"""Inputs of GroupQueryAttention."""


def ignoring_positions(graph: Any) -> None:
    for each in graph.node:
        if each.op_type == "GroupQueryAttention":
            each.input[POSITIONS] = ""


def ignoring_the_mask(graph: Any) -> None:
    graph.initializer.append(tensor("nothing", np.zeros(1, np.float32)))
    graph.node.insert(0, node("Mul", ["attention_bias", "nothing"], ["no_bias"]))
    for each in graph.node:
        if each.op_type == "GroupQueryAttention":
            each.input[BIAS] = "no_bias"


def with_other_weights(graph: Any) -> None:
    of_norms = next(each for each in graph.node if each.op_type == "SimplifiedLayerNormalization").input[1]
    graph.initializer.append(tensor("weights", np.linspace(0, 4, 64, dtype=np.float32)))
    for each in graph.node:
        each.input[:] = ["weights" if name == of_norms else name for name in each.input]


def last_node(graph: Any) -> Any:
    (last,) = (each for each in graph.node if "logits" in each.output)
    last.name = "head"
    return last


def giving_nan(graph: Any) -> None:
    last_node(graph).output[:] = ["right"]
    graph.initializer.append(tensor("zero", np.zeros(1, np.float32)))
    graph.node.append(node("Mul", ["right", "zero"], ["zeros"]))
    graph.node.append(node("Div", ["zeros", "zeros"], ["logits"]))


def slightly_different(graph: Any) -> None:
    last_node(graph).output[:] = ["right"]
    graph.initializer.append(tensor("factor", np.full(1, 1.0005, np.float32)))
    graph.node.append(node("Mul", ["right", "factor"], ["logits"]))


def load(folder: Path, edit: Callable[[Any], None] | None) -> GraphSession:
    bundle = open_bundle(folder)
    model = read_model(bundle.graph)
    if edit is not None:
        edit(model.graph)
    return GraphSession(bundle.graph, CONFIG, metadata_of(bundle), model=model.SerializeToString())


def check(folder: Path, edit: Callable[[Any], None] | None, *, cache: bool = False) -> DeviceCheck:
    return check_device(load(folder, edit), open_bundle(folder), CONFIG, cache=cache)


@pytest.mark.parametrize("edit", [None, slightly_different])
def test_rounding_is_correct(tiny_bundle: Path, edit: Callable[[Any], None] | None) -> None:
    found = check(tiny_bundle, edit)
    assert found.plain_correct
    assert found.tree_correct
    assert found.plain < 0.002
    assert found.tree is not None
    assert found.tree < 0.002


@pytest.mark.parametrize("edit", [ignoring_positions, ignoring_the_mask])
def test_wrong_trees_are_switched_off_and_plain_decoding_stays(
    tiny_bundle: Path, edit: Callable[[Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    graph = load(tiny_bundle, edit)
    assert graph.graph_io.supports_trees
    with caplog.at_level(logging.WARNING):
        found = check_device(graph, open_bundle(tiny_bundle), CONFIG, cache=False)
    assert found.plain_correct
    assert not found.tree_correct
    assert not graph.graph_io.supports_trees
    assert graph.graph_io.supports_verification
    assert [record.getMessage() for record in caplog.records] == [
        "CPU cannot compute token trees of bundle correctly; drafts are chains"
    ]


def test_webgpu_is_caught_ignoring_positions(tiny_bundle: Path) -> None:
    """WebGPU's attention ignores the positions of a tree where it also rotates, as in the model's own graph.

    `open_graph` therefore gives it another form of the graph, whose trees are right (`test_fastest_device.py`).
    """
    require_webgpu()
    found = run_json_script(ON_WEBGPU, tiny_bundle)
    assert found["plain_correct"]
    assert not found["tree_correct"]
    assert not found["trees"]
    assert not found["on_cpu"]


def test_a_wrong_tree_is_found_where_positions_hardly_matter(tiny_bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(tiny_bundle, folder)
    model = read_model(folder / "model.onnx")
    angles = np.arange(256, dtype=np.float32)[:, None] * np.full((1, 8), 0.002, np.float32)
    for each in model.graph.initializer:
        if each.name in ("rope.cos", "rope.sin"):
            each.CopyFrom(tensor(each.name, np.cos(angles) if each.name == "rope.cos" else np.sin(angles)))
    data = model.SerializeToString()
    (folder / "model.onnx").write_bytes(data)
    manifest = json.loads((folder / "edge.json").read_text(encoding="utf-8"))
    manifest["files"]["model.onnx"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "edge.json").write_text(json.dumps(manifest), encoding="utf-8")
    assert check(folder, None).tree_correct
    found = check(folder, ignoring_positions)
    assert not found.tree_correct
    # Less than the tolerance: the tree is nearer to that of another order of positions than to the right one.
    assert found.tree is not None
    assert found.tree < 0.01


@pytest.mark.parametrize("edit", [with_other_weights, giving_nan])
def test_wrong_logits_refuse_the_device(tiny_bundle: Path, edit: Callable[[Any], None]) -> None:
    with pytest.raises(
        DeviceError, match="CPU computes bundle wrongly: logits differ from the CPU's by .*--device cpu"
    ):
        check(tiny_bundle, edit)


def test_the_result_is_kept_for_the_model_and_the_device(tiny_bundle: Path) -> None:
    key = device_check_key(open_bundle(tiny_bundle), CONFIG)
    first = check(tiny_bundle, None, cache=True)
    assert DEVICE_CHECKS.load(key) == first
    # The kept result is believed: the wrong graph is not run.
    assert check(tiny_bundle, with_other_weights, cache=True) == first
    DEVICE_CHECKS.file(key).write_text('{"plain": "x"}', encoding="utf-8")
    assert check(tiny_bundle, None, cache=True) == first
    DEVICE_CHECKS.file(key).unlink()
