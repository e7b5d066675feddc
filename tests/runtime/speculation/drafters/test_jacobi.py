"""Predictions behind rejected draft tokens."""

from __future__ import annotations

from edgerun.runtime.speculation.drafters.jacobi import JacobiDrafter
from edgerun.runtime.speculation.tree import Tree


def predictions(drafter: JacobiDrafter, count: int) -> list[tuple[int, int]]:
    """Tokens and buckets along the branch that the drafter predictions."""
    state, found = drafter.state(), []
    for _ in range(count):
        (candidate,) = drafter.candidates(state)
        found.append((candidate.token, candidate.bucket))
        state = drafter.after(state, candidate.token)
    return found


def test_predictions_follow_the_sequence_and_stable_ones_are_told_apart() -> None:
    drafter = JacobiDrafter()
    drafter.reset([])
    assert predictions(drafter, 1) == [(0, 0)]
    drafter.reset([5, 6])
    assert predictions(drafter, 2) == [(6, 0), (6, 0)]
    # Both drafts of 6 were wrong: the target says 7, and 8 and 9 behind the wrong ones.
    drafter.learn_rejected([8, 9], 1)
    drafter.append(7)
    assert predictions(drafter, 3) == [(8, 1), (9, 1), (7, 0)]
    # 8 was right, so the target says 9 behind it in place of the draft; 10 behind that one, which was rejected.
    drafter.learn_rejected([10], 2)
    drafter.append(8)
    drafter.append(9)
    assert predictions(drafter, 1) == [(10, 1)]
    # 10 was wrong, and the same prediction comes behind it.
    drafter.reset([5])
    drafter.learn_rejected([3, 4, 2], 1)
    drafter.append(1)
    drafter.learn_rejected([4, 3], 1)
    drafter.append(9)
    assert predictions(drafter, 2) == [(4, 2), (3, 1)]
    # A token of a plain step takes the place of a prediction.
    drafter.append(4)
    assert predictions(drafter, 2) == [(3, 1), (4, 0)]
    assert drafter.candidates(drafter.after(drafter.state(), 30)) == ()


def test_the_first_branch_of_a_tree() -> None:
    tree = Tree.of((1, 2, 3, 4, 5), (-1, 0, 0, 1, 3), (1.0, 0.5, 0.4, 0.3, 0.2), (0, 1, 1, 1, 1))
    assert [tree.first_branch(node) for node in range(5)] == [[1, 3, 4], [3, 4], [], [4], []]
