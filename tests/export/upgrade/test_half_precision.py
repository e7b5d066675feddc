"""Conversion of half precision to float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper

from edgerun.export.check.contract_session import evaluate
from edgerun.export.graph.initializers import WeightFile
from edgerun.export.upgrade.editable import EditableGraph
from edgerun.export.upgrade.float_linears import widen
from edgerun.export.upgrade.graph_parts import in_place, to_file
from support.small_graphs import model_of


def test_half_precision_is_converted_and_tied_matrices_stay_tied(tmp_path: Path) -> None:
    table = np.random.default_rng(0).standard_normal((40, 20)).astype(np.float16)
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
        helper.make_node("Cast", ["rows"], ["typed"], to=TensorProto.FLOAT16),
        helper.make_node("Transpose", ["table"], ["transposed"]),
        helper.make_node("MatMul", ["typed", "transposed"], ["scores"]),
        helper.make_node("Cast", ["scores"], ["out"], to=TensorProto.FLOAT),
    ]
    ids = np.array([1, 3, 5])
    graph = EditableGraph(model_of(nodes, {"table": table}, {"ids": ids}, ["out"]), tmp_path)
    widen(graph)
    wide = table.astype(np.float32)
    for written in (graph.model(in_place), graph.model(in_place)):
        np.testing.assert_allclose(evaluate(written, {"ids": ids})[0], wide[ids] @ wide.T, atol=1e-5)
    with WeightFile(tmp_path / "data") as data:
        graph.model(to_file(data, lambda _: None))
        assert data.digest().bytes == wide.nbytes
