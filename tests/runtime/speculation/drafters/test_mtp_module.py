"""Multi-token-prediction modules: features over replayed tokens, exports in int4, models without a module."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx", reason="needs the export extra")

import edgerun
from edgerun import GenerateOptions
from edgerun.errors import InputError
from edgerun.export import INT4
from edgerun.runtime.kv.hybrid_arena import HybridArena
from edgerun.runtime.speculation.choice import Speculation
from edgerun.runtime.speculation.tree import Source
from support.draft_heads import bind_with_features, engine_with_eager_head
from support.targets_with_heads import CONTEXT, export_with_mtp_module
from support.tiny_models import write_bundle

MTP = Speculation.of(Source.MTP)
GREEDY = GenerateOptions(max_tokens=30, ignore_eos=True)


def test_features_survive_tokens_that_run_once_more(tmp_path: Path) -> None:
    headed = export_with_mtp_module(tmp_path)
    tokens = np.random.default_rng(3).integers(5, 300, 50).tolist()
    bound = bind_with_features(headed.open_target(), CONTEXT)
    arena = bound.arena
    assert isinstance(arena, HybridArena)
    for start in range(0, 40, 4):  # of every chain of four draft tokens, two are accepted
        bound.forward([*tokens[arena.length : arena.length + 2], 7, 8])
        arena.compact(arena.length, [0, 1])
        assert arena.length == start // 2 + 2
    arena.rewind_to(13)  # where no states are known
    bound.forward(tokens[13:20])
    arena.commit(7)
    assert arena.replayed > 0
    assert arena.features is not None
    np.testing.assert_allclose(arena.features.read(0, 20), headed.reference.features(tokens[:20]), atol=2e-4)


def test_int4_exports_draft_from_the_outside(tmp_path: Path) -> None:
    bundle = export_with_mtp_module(tmp_path, INT4).bundle
    with engine_with_eager_head(bundle) as engine:
        # Products of int4 weights in wide passes round otherwise on some processors, which changes near ties.
        plain = engine.generate("in the in the", GREEDY, exact=True, speculation=Speculation.OFF)
        reply = engine.generate("in the in the", GREEDY, exact=True, speculation=MTP)
        assert not engine.model.graph_io.supports_trees
    assert reply.text == plain.text
    assert reply.stats.by_source["mtp"].drafted > 0


def test_a_model_without_the_module_says_how_to_get_it(tmp_path: Path) -> None:
    with (
        edgerun.load(write_bundle(tmp_path), cache=False) as engine,
        pytest.raises(InputError, match="multi-token-prediction"),
    ):
        engine.generate("the", GREEDY, speculation=MTP)
