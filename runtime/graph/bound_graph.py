"""What decoding uses of a loaded graph, whatever runs its passes.

`GraphSession` and `BoundSession` run one graph whose shapes vary. `StaticGraphs` runs many graphs of fixed shapes, for
devices that compile them. Everything outside this package is written against these protocols.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..kv.arena import KVArena
from .device_loading import Assignments
from .graph_io import GraphIO
from .pass_inputs import Floats
from .probe import ProbeResult
from .session import SessionConfig


class BoundGraph(Protocol):
    """A graph bound to a KV arena: passes that read and extend its cache.

    Attributes:
        whole_logits: whether passes return the logits of the whole vocabulary. False allows a device to return those of
            a few best tokens only, and a number far below them for all others.
        base_only: whether the model's own graph runs every pass that it can, which further graphs would compute with
            other rounding: for exact answers.
    """

    whole_logits: bool
    base_only: bool

    @property
    def last_graph(self) -> str:
        """Name of the graph that ran the last pass: `BASE_GRAPH`, or that of a further graph."""

    @property
    def graph_io(self) -> GraphIO:
        """The graph's inputs and outputs."""

    @property
    def arena(self) -> KVArena:
        """The cache that passes read and extend; see `use`."""

    def use(self, arena: KVArena) -> None:
        """Run over another arena of the same tensor types from now on."""

    def prefill_width(self, preferred: int, remaining: int) -> int:
        """Number of prompt tokens to run in the next pass, given the `preferred` number and those that are left."""

    def forward(
        self,
        tokens: npt.ArrayLike,
        *,
        logits_for: npt.ArrayLike | None = None,
        positions: npt.ArrayLike | None = None,
        tree_mask: npt.NDArray[np.bool_] | None = None,
    ) -> Floats:
        """Run a pass over `n` new tokens after the committed slots. It writes their slots but does not commit them.

        Args:
            tokens: token ids, int `[n]`.
            logits_for: indices of the new tokens whose logits to return, int `[r]`; all when None.
            positions: rotary positions, int `[n]`; consecutive when None. Without committed slots they must be
                consecutive.
            tree_mask: bool `[n, h + n]`, usually `[n, n]`: whether new token i attends to token j of the last `h`
                committed and the new ones; causal when None. Every token attends to all tokens before those, and none
                to a later one.

        Returns:
            Logits float32 `[r, V]`, valid until the next call.

        Raises:
            ContextError: the tokens do not fit the context.
            EdgeError: ONNX Runtime failed; the arena is unchanged.
        """

    def hidden_states(self, tokens: npt.ArrayLike, wanted: Sequence[int]) -> Floats:
        """Run a pass like `forward`, and return the hidden states of the tokens with the indices `wanted`.

        Returns:
            float32 `[r, d]`, in a new array.

        Raises:
            ContextError: as `forward`.
            EdgeError: as `forward`.
        """


class DecoderGraph(Protocol):
    """A loaded decoder, whose sequences each have an arena and a binding."""

    @property
    def config(self) -> SessionConfig:
        """How the graph is run."""

    @property
    def graph_io(self) -> GraphIO:
        """The graph's inputs and outputs."""

    @property
    def probe_result(self) -> ProbeResult | None:
        """What probing the graph showed; None if its inputs and outputs say everything."""

    @property
    def assignments(self) -> Assignments:
        """Which provider runs the nodes."""

    def disable_trees(self) -> None:
        """Let drafts be chains from now on, because the device computes trees wrongly."""

    def limit_width(self, tokens: int) -> None:
        """Run passes over at most that many tokens from now on, because the device computes wider ones wrongly."""

    def arena(self, limit: int) -> KVArena:
        """An empty KV cache of this graph's tensor types, for a context of `limit` tokens."""

    def bind(self, arena: KVArena, *, hidden_states: bool = False) -> BoundGraph:
        """Bind to `arena`, over which passes then run, with `hidden_states` if the graph gives them."""
