"""Token trees: their invariants, and that a graph gives every path the logits that it has alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from edgerun.runtime.speculation.tree import Source, Tree

VOCABULARY = 300


@st.composite
def trees(draw: st.DrawFn, tokens: int = 3, anchor: int = 0, max_nodes: int = 14) -> Tree:
    """Trees of few tokens, so that equal ones often meet; probabilities never rise along a path."""
    tokens_of_nodes, parents, probabilities, sources = [anchor], [-1], [1.0], [int(Source.ANCHOR)]
    for _ in range(draw(st.integers(0, max_nodes - 1))):
        parent, token = draw(st.integers(0, len(tokens_of_nodes) - 1)), draw(st.integers(0, tokens - 1))
        if (parent, token) not in zip(parents, tokens_of_nodes, strict=True):
            parents.append(parent)
            tokens_of_nodes.append(token)
            probabilities.append(probabilities[parent] * draw(st.integers(0, 8)) / 8)
            sources.append(draw(st.integers(1, len(Source) - 1)))
    return Tree.of(tokens_of_nodes, parents, probabilities, sources)


def path_of(tree: Tree, node: int) -> list[int]:
    """The nodes from the anchor to `node`, found through the parents."""
    path = [node]
    while tree.parents[path[0]] >= 0:
        path.insert(0, int(tree.parents[path[0]]))
    return path


def token_paths(tree: Tree) -> dict[tuple[int, ...], tuple[float, int]]:
    """Probability and source of every path of tokens."""
    return {
        tuple(tree.tokens[path_of(tree, node)].tolist()): (float(tree.path_prob[node]), int(tree.source[node]))
        for node in range(len(tree))
    }


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        ([], [], "a token, a parent, a probability and a source for every node"),
        ([1, 2], [-1], "a token, a parent, a probability and a source for every node"),
        ([1, 2], [0, 0], "do not come before"),
        ([1, 2], [-1, 1], "do not come before"),
        ([1, 2, 3], [-1, 2, 0], "do not come before"),
        ([1, 2, 3], [-1, 0, -1], "do not come before"),
        ([1, 2, 2], [-1, 0, 0], "siblings have the same token"),
        ([1, 2, 3, 2], [-1, 0, 1, 0], "siblings have the same token"),
    ],
)
def test_invalid_trees_are_refused(tokens: list[int], parents: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tree.of(tokens, parents, [1.0] * len(tokens), [0] * len(tokens))


@given(trees())
def test_depths_masks_and_paths_follow_from_the_parents(tree: Tree) -> None:
    assert (tree.tokens.dtype, tree.parents.dtype, tree.path_prob.dtype, tree.source.dtype, tree.mask.dtype) == (
        np.int32,
        np.int32,
        np.float32,
        np.uint8,
        np.bool_,
    )
    for node in range(len(tree)):
        path = path_of(tree, node)
        assert tree.path_to(node) == tuple(path)
        assert tree.depths[node] == len(path) - 1
        assert np.flatnonzero(tree.mask[node]).tolist() == path
    assert tree.is_chain == (tree.depths.tolist() == list(range(len(tree))))
    if tree.is_chain:
        assert (tree.mask == np.tri(len(tree), dtype=bool)).all()


@given(trees())
def test_a_child_is_found_by_its_token_and_no_other(tree: Tree) -> None:
    for node in range(len(tree)):
        for token in (*range(3), 9):
            found = [child for child in range(len(tree)) if (tree.parents[child], tree.tokens[child]) == (node, token)]
            assert tree.child(node, token) == (found[0] if found else None)
    # The anchor has no parent, so it is not found as a child.
    assert tree.child(len(tree), 0) is None


@given(trees(), st.data())
def test_a_subtree_keeps_its_paths_with_probabilities_and_sources(tree: Tree, data: st.DataObject) -> None:
    chosen = data.draw(st.sets(st.integers(0, len(tree) - 1), max_size=6))
    closed = {ancestor for node in chosen | {0} for ancestor in path_of(tree, node)}
    kept = tree.kept([*sorted(closed, reverse=True), 0])
    assert token_paths(kept).items() <= token_paths(tree).items()
    assert kept.tokens.tolist() == tree.tokens[sorted(closed)].tolist()


@pytest.fixture(scope="module")
def graph(tiny_bundle: Path) -> GraphSession:
    return GraphSession(tiny_bundle / "model.onnx", SessionConfig(choose_device("cpu"), 1))


@given(tree=trees(tokens=VOCABULARY, anchor=299, max_nodes=10), before=st.integers(1, 40))
@settings(max_examples=25)
def test_a_graph_gives_every_path_the_logits_that_it_has_alone(graph: GraphSession, tree: Tree, before: int) -> None:
    text = np.random.default_rng(before).integers(0, VOCABULARY, before).tolist()
    bound = graph.bind(graph.arena(64))
    bound.forward(text, logits_for=(0,))
    bound.arena.commit(before)
    logits = bound.forward(tree.tokens, positions=before + tree.depths, tree_mask=tree.mask).copy()
    assert bound.arena.length == before
    leaves = set(range(len(tree))) - set(tree.parents.tolist())
    for leaf in leaves:
        path = path_of(tree, leaf)
        alone = graph.bind(graph.arena(64)).forward([*text, *tree.tokens[path].tolist()])[before:]
        np.testing.assert_allclose(logits[path], alone, atol=1e-4)
