"""Caches of arrays keep to their limit and copy session results."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from edgerun.export.calibration.divergence import PinnedArrays, RecentArrays, owned
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


def test_arrays_of_numpy_are_not_copied() -> None:
    array = np.arange(6.0)
    view = array.reshape(2, 3)[:, :2]
    assert owned(array) is array
    assert owned(view) is view
    result = doubled([1, 2])
    part = result[:1]
    assert not np.shares_memory(owned(part), result)


def test_the_least_recently_used_are_dropped() -> None:
    kept = RecentArrays(3 * 8)
    for name in "abc":
        kept.put(name, np.zeros(1))
    kept.get("a")
    kept.put("d", np.zeros(1))
    assert [name for name in "abcd" if kept.get(name) is not None] == ["a", "c", "d"]
    kept.put("large", np.zeros(4))
    assert kept.get("large") is None
    kept.clear()
    kept.put("e", np.zeros(3))
    assert [name for name in "acde" if kept.get(name) is not None] == ["e"]


def test_pinned_arrays_go_to_disk_beyond_the_limit(tmp_path) -> None:
    kept = PinnedArrays(2 * 8, tmp_path / "states")
    kept.put("a", np.ones(2))
    assert not (tmp_path / "states").exists()
    kept.put("b", np.full(2, 2.0))
    assert (tmp_path / "states").is_dir()
    np.testing.assert_array_equal(kept.get("a"), [1, 1])
    np.testing.assert_array_equal(kept.get("b"), [2, 2])
    assert "c" not in kept
