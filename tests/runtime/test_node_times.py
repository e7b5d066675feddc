"""Times of nodes out of ONNX Runtime's own profile."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from edgerun.export import ExportRecipe, WeightFormat
from edgerun.models.bundle import open_bundle
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph.metadata import metadata_of
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from edgerun.runtime.measure.node_profile import read_passes
from support.tiny_models import write_bundle


def test_every_linear_of_every_pass_has_a_time(tmp_path: Path) -> None:
    bundle = open_bundle(write_bundle(tmp_path, weights=ExportRecipe(WeightFormat(4, 32))))
    config = SessionConfig(choose_device("cpu"), 1, profile=tmp_path / "profile")
    session = GraphSession(bundle.graph, config, metadata_of(bundle))
    bound = session.bind(session.arena(64))
    for rows in (1, 5, 2):
        bound.forward(list(range(rows)))
    file = session.end_profile()
    assert file.parent == tmp_path
    passes = read_passes(file)
    linears = {node.name for node in onnx.load(bundle.graph).graph.node if node.op_type == "MatMulNBits"}
    assert len(passes) == 3
    assert linears
    assert all(linears <= each.keys() and min(each.values()) >= 0 for each in passes)
    assert all(sum(each.values()) < 10 for each in passes)


def test_what_is_no_profile_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text("[{")
    with pytest.raises(ValueError, match=r".+"):
        read_passes(file)
