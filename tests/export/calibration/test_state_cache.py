"""Caches of arrays copy session results."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from edgerun.export.calibration.divergence import PinnedArrays, RecentArrays
from edgerun.export.check.contract_session import ModelSession


def doubled(values) -> np.ndarray:
    """Twice the values, as ONNX Runtime returns them."""
    values_info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "twice", values_info[:1], values_info[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (result,) = ModelSession(model, Path()).run(["y"], {"x": np.asarray(values, np.float32)})
    return result


@pytest.mark.parametrize("keeper", ["recent", "pinned"])
def test_results_do_not_hold_their_session(tmp_path, keeper: str) -> None:
    """A session's memory stays allocated as long as one of its results."""
    result = doubled([1, 2, 3])
    assert not result.flags.owndata
    holder = weakref.ref(result)
    kept = RecentArrays(100) if keeper == "recent" else PinnedArrays(100, tmp_path)
    kept.put("a", result)
    del result
    gc.collect()
    assert holder() is None
    np.testing.assert_array_equal(kept.get("a"), [2, 4, 6])
