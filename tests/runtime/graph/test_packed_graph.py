"""Passes over several texts at once compute what passes over each of them compute, over the same caches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgerun.errors import EdgeError
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from edgerun.runtime.prefill import prefill
from support.tiny_models import ATTENTION_FAMILIES, HYBRID_FAMILIES

CPU = SessionConfig(choose_device("cpu"), 1)
TEXTS = 3


@pytest.mark.parametrize("family", [*ATTENTION_FAMILIES, *HYBRID_FAMILIES])
def test_texts_of_a_pass_are_what_they_are_alone(tiny_bundle_of: Callable[[str, str], Path], family: str) -> None:
    graph = GraphSession(tiny_bundle_of(family, "fp32") / "model.onnx", CPU)
    others: list[Callable[[], None]] = []

    def gather(_: Callable[[], bool]) -> None:
        if others:
            others.pop()()

    shared = graph.share_passes(TEXTS, gather)
    random = np.random.default_rng(3)
    vocab = graph.graph_io.vocab_size
    alone = [graph.bind(graph.arena(100)) for _ in range(TEXTS)]
    together = [graph.bind(graph.arena(100)) for _ in range(TEXTS)]
    for index, (one, other) in enumerate(zip(alone, together, strict=True)):
        prompt = random.integers(5, vocab, 7 + 5 * index).tolist()
        prefill(one, prompt)
        prefill(other, prompt)
        other.shares_passes = True
    for turn in range(12):
        texts = random.permutation(TEXTS)[: 1 + turn % TEXTS]
        tokens = {int(text): random.integers(5, vocab, int(random.integers(1, 5))).tolist() for text in texts}
        expected = {text: alone[text].forward(each).copy() for text, each in tokens.items()}
        found: dict[int, np.ndarray] = {}

        def run(text: int, tokens: dict[int, list[int]] = tokens, found: dict[int, np.ndarray] = found) -> None:
            found[text] = together[text].forward(tokens[text]).copy()

        first, *rest = tokens
        others[:] = [lambda text=text: run(text) for text in rest]
        run(first)
        for text, logits in expected.items():
            np.testing.assert_allclose(found[text], logits, rtol=1e-4, atol=1e-4)
            assert together[text].others[:2] == (len(tokens) - 1, sum(map(len, tokens.values())) - len(tokens[text]))
            keep = int(random.integers(1, len(tokens[text]) + 1))
            alone[text].arena.commit(keep)
            together[text].arena.commit(keep)
    passes, texts_run, tokens_run = shared.totals
    assert (passes, texts_run) == (12, 4 * (1 + 2 + 3))
    assert tokens_run > texts_run


def test_texts_of_another_graph_are_spared_its_errors_and_do_not_wait_for_it(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, further = (GraphSession(tiny_bundle / "model.onnx", CPU) for _ in range(2))
    others: list[Callable[[], object]] = []
    shared = graph.share_passes(TEXTS, lambda _: [others.pop()() for _ in range(len(others))])
    further.join(shared)
    first, second, of_further = (each.bind(each.arena(100)) for each in (graph, graph, further))
    for bound in (first, second, of_further):
        bound.shares_passes = True
    expected = graph.bind(graph.arena(100)).forward([7, 8]).copy()
    shown: list[object] = []

    def fails() -> None:
        with pytest.raises(EdgeError, match="the model failed to run: no memory") as raised:
            of_further.forward([5])
        shown.append(raised.value)

    def out_of_memory(*_: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(further._session, "run_with_iobinding", out_of_memory)
    others[:] = [fails]
    np.testing.assert_array_equal(first.forward([7, 8]), expected)
    assert len(shown) == 1
    assert shared.totals[:2] == (1, 1)
    # Without a packed form, its passes run at once, and leave those of others to meet.
    monkeypatch.undo()
    monkeypatch.setattr(of_further._io.graph, "cannot_share", True)
    others[:] = [lambda: shown.append(second.forward([7, 8]).copy()), lambda: of_further.forward([5])]
    np.testing.assert_allclose(first.forward([7, 8]), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(shown[1], expected, rtol=1e-4, atol=1e-4)
    assert shared.totals[:2] == (3, 4)
