"""What an int8 prompt graph costs in quality is measured after prompts that it read, and judged by a stated limit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import edgerun
from edgerun.export import INT4
from edgerun.models.bundle import open_bundle
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph.bound_session import BoundSession
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from edgerun.runtime.int8_prompts.int8_graph_files import int8_graph_path
from edgerun.runtime.measure.logit_quality import KL_LIMIT, PROMPTS, measure_quality, quality_prompts
from support.tiny_models import write_bundle

CPU = SessionConfig(choose_device("cpu"), 1)


def bound_to(graph: Path) -> BoundSession:
    session = GraphSession(graph, CPU)
    return session.bind(session.arena(256))


@pytest.fixture
def bundle(tiny_bundle_of: Callable[[str, str], Path]) -> Path:
    return tiny_bundle_of("llama", "int4")


def test_a_graph_compared_with_itself_differs_by_nothing(bundle: Path) -> None:
    plain = bound_to(bundle / "model.onnx")
    fractions: list[float] = []
    texts = [list(range(20, 180)), list(range(100, 60, -1)), [7]]
    quality = measure_quality(bound_to(bundle / "model.onnx"), plain, texts, fractions.append, prompts=True)
    assert quality.mean_kl < 1e-9
    assert quality.top1_agreement == 1.0
    assert quality.positions == 64 + 20
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)


def test_an_int8_graph_differs_by_little_and_other_weights_by_much(bundle: Path, tmp_path: Path, cache: Path) -> None:
    int8_path = int8_graph_path(open_bundle(bundle), CPU)
    assert int8_path is not None
    with edgerun.load(bundle, threads=1) as engine:
        prompts = quality_prompts(engine.tokenizer)
    assert len(prompts) == PROMPTS
    assert len(set(map(tuple, prompts))) == PROMPTS
    plain = bound_to(bundle / "model.onnx")
    quality = measure_quality(bound_to(int8_path), plain, prompts[:4], prompts=True)
    assert 0 < quality.mean_kl < 0.1
    assert quality.p99_kl > quality.mean_kl
    other = write_bundle(tmp_path, "llama", weights=INT4, seed=2) / "model.onnx"
    wrong = measure_quality(bound_to(other), plain, prompts[:4], prompts=True)
    assert wrong.mean_kl > 10 * quality.mean_kl
    assert wrong.mean_kl > KL_LIMIT


def test_a_comparison_needs_a_prompt(bundle: Path) -> None:
    plain = bound_to(bundle / "model.onnx")
    with pytest.raises(ValueError, match="no text"):
        measure_quality(plain, plain, [[3]], prompts=True)
