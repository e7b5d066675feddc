"""Passes of a draft head, which reads hidden states beside its tokens (docs/graph-contract.md)."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from ..kv.arena import KVArena
from .bound_session import BoundSession
from .graph_io import Floats, GraphIO
from .pass_inputs import wrapped

_ZERO_ROWS: Final = 32
"""Number of zero states that are kept for passes that are only timed."""


class HeadSession(BoundSession):
    """Runs passes of a draft head. The states of the tokens with logits are those of `next_states` after a pass.

    Args:
        session: the graph's session.
        graph_io: the graph's inputs and outputs, those of a draft head among them.
        arena: an arena of the graph's cache tensors.
    """

    def __init__(self, session: ort.InferenceSession, graph_io: GraphIO, arena: KVArena) -> None:
        super().__init__(session, graph_io, arena, hidden_states=True)
        if graph_io.head is None:
            raise ValueError("the graph is not a draft head")
        self._head: Final = graph_io.head
        feature_size, state_size = graph_io.head.sizes
        self._no_features: Final = np.empty((0, feature_size), np.float32)
        self._zeros = np.zeros((_ZERO_ROWS, state_size), np.float32)
        self._fed: tuple[Floats, Floats] | None = None

    def forward_states(
        self,
        tokens: npt.ArrayLike,
        features: Floats,
        states: Floats,
        *,
        positions: npt.ArrayLike | None = None,
        tree_mask: npt.NDArray[np.bool_] | None = None,
    ) -> tuple[Floats, Floats]:
        """Run a pass like `forward` with logits of the last token.

        Args:
            tokens: token ids, int `[n]`; each is the one after the token that its hidden states belong to.
            features: the target's features float32 `[k, f]`, of the first k tokens.
            states: the head's own states float32 `[n - k, d]`, of the others.
            positions: as for `forward`.
            tree_mask: as for `forward`.

        Returns:
            Logits float32 `[V]` of the last token, valid until the next call, and its state float32 `[d]`.

        Raises:
            ContextError: as `forward`.
            EdgeError: as `forward`.
        """
        self._fed = features, states
        try:
            last = (np.size(tokens) - 1,)
            logits = self.forward(tokens, logits_for=last, positions=positions, tree_mask=tree_mask)
        finally:
            self._fed = None
        assert self._hidden is not None  # noqa: S101  bound in the constructor
        return logits[0], self._hidden.select(last, selected=True)[0]

    def _run_pass(
        self,
        ids: list[int],
        wanted: npt.NDArray[np.int64],
        positions: npt.ArrayLike | None,
        tree_mask: npt.NDArray[np.bool_] | None,
    ) -> Floats:
        features, states = self._fed or (self._no_features, self._zero_states(len(ids)))
        if len(features) + len(states) != len(ids):
            raise ValueError(f"{len(features)} features and {len(states)} states for {len(ids)} tokens")
        self._io.bind_ortvalue_input(self._head.features.name, wrapped(np.ascontiguousarray(features)))
        self._io.bind_ortvalue_input(self._head.states.name, wrapped(np.ascontiguousarray(states)))
        return super()._run_pass(ids, wanted, positions, tree_mask)

    def _zero_states(self, width: int) -> Floats:
        """States for a pass that is only timed."""
        if width > len(self._zeros):
            self._zeros = np.zeros((width, self._zeros.shape[1]), np.float32)
        return self._zeros[:width]
