"""Two graphs over one cache: passes of consecutive tokens in one without a bias, token trees in the other."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from edgerun.errors import DeviceError
from edgerun.models.bundle import open_bundle
from edgerun.models.manifest import DeviceKind
from edgerun.runtime.devices.device_check import check_device
from edgerun.runtime.devices.providers import CPU_PROVIDER, Device, cpu_device
from edgerun.runtime.gpu_graph import rewriting
from edgerun.runtime.gpu_graph.rewriting import CUDA, WEBGPU, GpuForm, gpu_graph
from edgerun.runtime.graph.bound_graph import BoundGraph
from edgerun.runtime.graph.graph_choice import ChosenGraphs, TreeGraph, runs_trees_beside
from edgerun.runtime.graph.introspection import read_graph_io
from edgerun.runtime.graph.model_metadata import metadata_of
from edgerun.runtime.graph.open_graph import open_graph
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from support.devices import require_webgpu, run_json_script
from support.gpu_passes import TREE

CONFIG = SessionConfig(cpu_device(), 1)
PROMPT = list(range(20, 40))
"""Longer than the window of the mistral, which is 12 tokens."""
PATH = [0, 2, 4]
TOLERANCE = {WEBGPU: 1e-5, CUDA: 0.01}
"""Largest difference in float32 and in float16, by the largest logit."""
ON_WEBGPU = """
import json, sys
from dataclasses import replace
from pathlib import Path
import numpy as np
from edgerun.models.bundle import open_bundle
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.gpu_graph import rewriting
from edgerun.runtime.graph.open_graph import open_graph
from edgerun.runtime.graph.session import SessionConfig
from edgerun.runtime.kv.device_buffers import DeviceBuffers

rewriting.FORMS = {"WebGpuExecutionProvider": replace(rewriting.WEBGPU, has_plain_form=True)}
bundle, config = open_bundle(Path(sys.argv[1])), SessionConfig(choose_device("webgpu"), 1)
graph = open_graph(bundle, config, cache=False)
after_load = "trees" in graph.loaded
bound = graph.bind(graph.arena(64))
bound.whole_logits = False
bound.forward([5, 25, 17])
bound.arena.commit(3)
bound.forward([9, 21], tree_mask=np.tri(2, dtype=bool))
bound.arena.commit(2)
after_chain = "trees" in graph.loaded
logits = bound.forward([7, 8, 6], positions=[5, 6, 6], tree_mask=np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool))
print(json.dumps({
    "trees_correct": graph.graph_io.supports_trees,
    "holds_trees": [after_load, after_chain, "trees" in graph.loaded],
    "on_device": isinstance(bound.arena.buffers, DeviceBuffers),
    "best": [np.sort(row)[::-1][:64].tolist() for row in logits],
}))
"""


def load(folder: Path, form: GpuForm, *, plain: bool = False) -> GraphSession:
    bundle = open_bundle(folder)
    model = gpu_graph(bundle.graph, form, plain=plain)
    return GraphSession(bundle.graph, CONFIG, metadata_of(bundle), model=model)


def joined(folder: Path, form: GpuForm) -> ChosenGraphs:
    bundle = open_bundle(folder)
    graph_io = read_graph_io(bundle.graph, gpu_graph(bundle.graph, form), metadata_of(bundle))
    return ChosenGraphs(load(folder, form, plain=True), (TreeGraph(lambda: load(folder, form)),), graph_io)


def run(bound: BoundGraph, tokens: list[int]) -> npt.NDArray[np.float32]:
    """Logits of a plain pass, which is committed."""
    logits = bound.forward(tokens).copy()
    bound.arena.commit(len(tokens))
    return logits


def plain_text(bound: BoundGraph) -> list[npt.NDArray[np.float32]]:
    """Prefill in two parts, a token, and chains of draft tokens, with a mask and without."""
    found = [run(bound, PROMPT[:12]), run(bound, PROMPT[12:]), run(bound, [9])]
    base = bound.arena.length
    chain = bound.forward([21, 22, 33], positions=np.arange(base, base + 3), tree_mask=np.tri(3, dtype=np.bool_))
    found.append(chain.copy())
    # Two of the three are accepted, and the next mask begins before the new tokens.
    bound.arena.compact(base, [0, 1])
    found.append(bound.forward([40, 41], tree_mask=np.tri(2, 4, 2, dtype=np.bool_)).copy())
    return found


def tree_and_text(bound: BoundGraph) -> list[npt.NDArray[np.float32]]:
    """A tree, of which a branch is accepted, and plain passes after it, which make the cache grow."""
    base = bound.arena.length
    found = [bound.forward(TREE.tokens, positions=base + TREE.depths, tree_mask=TREE.mask).copy()]
    bound.arena.compact(base, PATH)
    return [*found, run(bound, [50]), run(bound, list(range(60, 100))), run(bound, [51])]


@pytest.mark.parametrize("form", [WEBGPU, CUDA], ids=["float32", "float16"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_plain_passes_and_trees_share_a_cache(tmp_path: Path, family: str, form: GpuForm) -> None:
    tiny = pytest.importorskip("support.tiny_models", reason="needs the export extra")
    folder = tiny.write_bundle(tmp_path, family)
    graph, reference = joined(folder, form), load(folder, form)
    # What is read from the file is what ONNX Runtime says.
    assert graph.graph_io == reference.graph_io
    bound, expected = (each.bind(each.arena(128)) for each in (graph, reference))
    for passes, holds_trees in ((plain_text, False), (tree_and_text, True), (plain_text, True)):
        for found, wanted in zip(passes(bound), passes(expected), strict=True):
            limit = TOLERANCE[form] * max(1.0, float(np.abs(wanted).max()))
            np.testing.assert_allclose(found, wanted, atol=limit, rtol=0)
        assert (TreeGraph.name in graph.loaded) is holds_trees


def test_a_graph_for_trees_that_was_released_is_loaded_again(tiny_bundle: Path) -> None:
    graph = joined(tiny_bundle, WEBGPU)
    graph.limit_width(3)

    def tree_logits() -> npt.NDArray[np.float32]:
        bound = graph.bind(graph.arena(64))
        run(bound, PROMPT)
        return bound.forward(TREE.tokens, positions=20 + TREE.depths, tree_mask=TREE.mask).copy()

    before = tree_logits()
    graph.release(TreeGraph.name)
    assert TreeGraph.name not in graph.loaded
    np.testing.assert_array_equal(tree_logits(), before)
    graph.disable_trees()
    with pytest.raises(ValueError, match="this graph cannot verify trees"):
        tree_logits()


def test_graphs_that_do_not_fit_are_not_joined(tiny_bundle: Path) -> None:
    half, single = load(tiny_bundle, CUDA, plain=True).graph_io, load(tiny_bundle, WEBGPU).graph_io
    assert not runs_trees_beside(half, single)
    assert not runs_trees_beside(single, single)
    assert runs_trees_beside(half, load(tiny_bundle, CUDA).graph_io)


@pytest.mark.parametrize("family", ["llama", "foreign"])
def test_a_gpu_whose_form_has_a_plain_form_gets_both_graphs(
    tmp_path: Path, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """The CPU's provider stands for CUDA's. A graph that cannot be rewritten is loaded as it is, once."""
    monkeypatch.setattr(rewriting, "FORMS", {**rewriting.FORMS, CPU_PROVIDER: CUDA})
    layouts = pytest.importorskip("support.layouts", reason="needs the export extra")
    joins = family == "llama"
    bundle = open_bundle(tiny_bundle if joins else layouts.write_layout(tmp_path, layouts.LAYOUTS["optimum"]))
    graph = open_graph(bundle, SessionConfig(Device(CPU_PROVIDER, DeviceKind.GPU), 1), cache=False)
    assert isinstance(graph, ChosenGraphs if joins else GraphSession)
    bound = graph.bind(graph.arena(64))
    assert run(bound, PROMPT).shape[0] == len(PROMPT)
    if isinstance(graph, ChosenGraphs):
        assert TreeGraph.name not in graph.loaded
        bound.forward(TREE.tokens, positions=20 + TREE.depths, tree_mask=TREE.mask)
        assert TreeGraph.name in graph.loaded


def test_a_device_without_room_for_the_graph_for_trees_gets_chains(
    tiny_bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def no_room() -> GraphSession:
        raise DeviceError("cuda cannot run model.onnx: out of memory", "run the model on the CPU: --device cpu")

    complete = joined(tiny_bundle, WEBGPU)
    graph = ChosenGraphs(load(tiny_bundle, WEBGPU, plain=True), (TreeGraph(no_room),), complete.graph_io)
    with caplog.at_level(logging.WARNING):
        check = check_device(graph, open_bundle(tiny_bundle), CONFIG, cache=False)
    assert "out of memory" in caplog.text
    assert "drafts are chains" in caplog.text
    assert check.plain_correct
    assert (check.tree, check.tree_correct) == (None, False)
    assert not graph.graph_io.supports_trees
    assert run(graph.bind(graph.arena(64)), PROMPT).shape[0] == len(PROMPT)


@pytest.mark.nightly
def test_a_device_loads_the_graph_for_trees_with_the_first_tree(tiny_bundle: Path) -> None:
    """The form of CUDA on WebGPU, because no test machine has CUDA."""
    require_webgpu()
    found = run_json_script(ON_WEBGPU, tiny_bundle)
    # Loading compared plain passes with the CPU, and would have failed; it also compared a tree.
    assert found["trees_correct"]
    assert found["on_device"]
    assert found["holds_trees"] == [False, False, True]
    alone = load(tiny_bundle, WEBGPU)
    expected = alone.bind(alone.arena(64))
    run(expected, [5, 25, 17, 9, 21])
    mask = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], np.bool_)
    logits = expected.forward([7, 8, 6], positions=[5, 6, 6], tree_mask=mask)
    np.testing.assert_allclose(found["best"], -np.sort(-logits, axis=1)[:, :64], atol=1e-4)
