"""Passes of draft heads: of one that reads hidden states beside its tokens, and of Medusa heads.

The graph of Medusa heads gives the likeliest tokens of the next few positions from one hidden state; for the other, see
docs/graph-contract.md.
"""

from __future__ import annotations

import timeit
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from ...errors import BundleError
from ..kv.arena import KVArena
from .bound_graph import NewTokens
from .bound_session import BoundSession
from .graph_io import Floats, GraphIO
from .introspection import DRAFT_FEATURES
from .ort import ORT_ERRORS, error_reason, load_session, run_failure
from .pass_inputs import wrapped

_MEDUSA_OUTPUTS: Final = ("top_ids", "top_probabilities")
_HINT: Final = "restore it or export the model with its heads again"


class HeadSession(BoundSession):
    """Runs passes of a draft head. A pass also gives the states of the tokens with logits.

    Args:
        session: the graph's session.
        graph_io: the graph's inputs and outputs, which include the inputs of a draft head.
        arena: an arena of the graph's cache tensors.
    """

    def __init__(self, session: ort.InferenceSession, graph_io: GraphIO, arena: KVArena) -> None:
        super().__init__(session, graph_io, arena, hidden_states=True)
        assert graph_io.head is not None  # noqa: S101  `GraphSession.bind`
        self._head: Final = graph_io.head
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
        return logits[0], self._hidden.select(last)[0]

    def _run_pass(self, new: NewTokens) -> Floats:
        feature_size, state_size = self._head.sizes
        # A pass without them is only timed.
        fed = self._fed or (np.zeros((0, feature_size), np.float32), np.zeros((len(new.ids), state_size), np.float32))
        if sum(map(len, fed)) != len(new.ids):
            raise ValueError(f"{len(fed[0])} features and {len(fed[1])} states for {len(new.ids)} tokens")
        features, states = map(np.ascontiguousarray, fed)
        self._io.bind_ortvalue_input(self._head.features.name, wrapped(features))
        self._io.bind_ortvalue_input(self._head.states.name, wrapped(states))
        return super()._run_pass(new)


class MedusaSession:
    """Loaded Medusa heads.

    Args:
        graph: their file.
        options: how to run it.

    Raises:
        BundleError: the file cannot be loaded, or has other inputs and outputs.
    """

    def __init__(self, graph: Path, options: ort.SessionOptions) -> None:
        try:
            self._session = load_session(str(graph), options)
        except ORT_ERRORS as error:
            raise BundleError(f"{graph} cannot be loaded: {error_reason(error)}", _HINT) from error
        inputs = {value.name: value.shape for value in self._session.get_inputs()}
        outputs = {value.name: value.shape for value in self._session.get_outputs()}
        shape = inputs.get(DRAFT_FEATURES, ())
        size = shape[-1] if shape else None
        heads = outputs.get(_MEDUSA_OUTPUTS[0], (None,))[0]
        if list(inputs) != [DRAFT_FEATURES] or set(outputs) != set(_MEDUSA_OUTPUTS):
            raise BundleError(f"{graph} does not hold Medusa heads", _HINT)
        if not isinstance(size, int) or not isinstance(heads, int):
            raise BundleError(f"{graph} does not state the number of its heads and features", _HINT)
        self.feature_size: Final = size
        """Number of features of a token."""
        self.heads: Final = heads
        """Number of heads."""
        nothing = np.zeros(size, np.float32)
        self.seconds: Final = min(timeit.repeat(lambda: self.run(nothing), number=1, repeat=3))
        """Seconds of a run, measured now."""

    def run(self, features: Floats) -> tuple[npt.NDArray[np.int64], Floats]:
        """Run all heads on the target's hidden state float32 `[f]`.

        Returns:
            The likeliest tokens of every head, best first, and their probabilities: int64 and float32 `[heads, count]`.

        Raises:
            EdgeError: ONNX Runtime failed.
        """
        try:
            ids, probabilities = self._session.run(list(_MEDUSA_OUTPUTS), {DRAFT_FEATURES: features[None]})
        except ORT_ERRORS as error:
            raise run_failure("the Medusa heads", error) from error
        return ids, probabilities
