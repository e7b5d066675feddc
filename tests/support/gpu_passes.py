"""Passes of a decoder graph without the runtime's bindings: a prompt, one more token, and a token tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from edgerun.runtime.graph.session import GraphSession
from edgerun.runtime.speculation.tree import Source, Tree

PROMPT: Final = (5, 25, 17, 9, 3, 42, 18, 7, 64, 20, 11, 12, 13, 14)
TREE: Final = Tree((9, 21, 22, 33, 34), (-1, 0, 0, 1, 2), (1.0,) * 5, (Source.OTHER,) * 5)
"""Two branches of two tokens after one."""
_CAPACITY: Final = 32
_BLOCKED: Final = np.float32(np.finfo(np.float32).min)


@dataclass(frozen=True)
class Passes:
    """What the passes returned."""

    plain: npt.NDArray[np.float32]
    """Logits of the prompt's tokens and of one after it."""
    tree: npt.NDArray[np.float32]
    """Logits of the tree's tokens."""
    best: npt.NDArray[np.int64] | None
    """The graph's own ranking of `plain`; None if it has none."""


def passes(graph: GraphSession) -> Passes:
    """Run the passes, each with the cache that the one before returned."""
    session = graph._session
    names = [each.name for each in session.get_outputs()]
    cache = {
        each.past: np.zeros((1, each.tensor_type.shape[1], _CAPACITY, each.tensor_type.shape[3]), np.float32)
        for each in graph.graph_io.cache
    }
    logits, best, base = [], [], 0
    for tokens, depths in ((PROMPT, range(len(PROMPT))), ((40,), (0,)), (TREE.token_ids, TREE.depths)):
        mask = TREE.mask if tokens is TREE.token_ids else np.tri(len(tokens), dtype=np.bool_)
        positions, total = base + np.array(depths, np.int64), base + len(tokens)
        bias = np.zeros((1, 1, len(tokens), total), np.float32)
        bias[0, 0, :, base:][~mask] = _BLOCKED
        feeds: dict[str, npt.NDArray[Any]] = {
            "input_ids": np.array(tokens)[None],
            "position_ids": positions[None],
            "attention_bias": bias,
            "seqlens_k": np.array([total - 1], np.int32),
            "total_sequence_length": np.array(total, np.int32),
            "logit_rows": np.arange(len(tokens)),
        }
        distances = positions[:, None] - np.concatenate([np.arange(base), positions])
        for window, value in graph.graph_io.window_biases.items():
            feeds[value.name] = np.where(distances >= window, _BLOCKED, bias)
        found = dict(zip(names, session.run(names, {**feeds, **cache}), strict=True))
        cache = {each.past: found[each.present] for each in graph.graph_io.cache}
        logits.append(found["logits"])
        best.append(found.get("top_ids"))
        base += len(tokens)
    ranking = None if best[0] is None or best[1] is None else np.concatenate([best[0], best[1]])
    return Passes(np.concatenate(logits[:2]), logits[2], ranking)
