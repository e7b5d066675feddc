"""Passes of a graph that keeps convolution states beside its KV cache."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from ..kv.arena import KVArena
from ..kv.hybrid_arena import KEPT_WIDTH, HybridArena, States
from .bound_session import BoundSession
from .pass_inputs import Floats, wrapped


class HybridSession(BoundSession):
    """Runs passes that read and extend a `HybridArena`.

    Tokens whose states the arena no longer has run again before the new ones, in the same pass.
    """

    def use(self, arena: KVArena) -> None:
        """See `BoundSession.use`; the arena must be of a hybrid model."""
        if not isinstance(arena, HybridArena):
            raise TypeError(f"the graph keeps states, which {type(arena).__name__} does not have")
        super().use(arena)
        self._hybrid = arena
        self._states_bound = False
        self._strip: States | None = None
        """The bound output buffer, states before new inputs."""
        self._strip_values: dict[int, tuple[States, list[ort.OrtValue]]] = {}
        """Buffers by width and OrtValues of their layers: wrapping an array takes longer than binding it."""

    def _run_pass(
        self,
        ids: list[int],
        wanted: npt.NDArray[np.int64],
        positions: npt.ArrayLike | None,
        tree_mask: npt.NDArray[np.bool_] | None,
    ) -> Floats:
        arena = self._hybrid
        replayed = arena.move_states()
        self._bind_states(arena, len(replayed) + len(ids))
        if replayed:
            logits = self._run_after(replayed, ids, wanted, positions)
        else:
            logits = super()._run_pass(ids, wanted, positions, tree_mask)
        if self._strip is not None:
            arena.end_pass(ids, self._strip)
        return logits

    def _run_after(
        self, replayed: list[int], ids: list[int], wanted: npt.NDArray[np.int64], positions: npt.ArrayLike | None
    ) -> Floats:
        """Run a pass over tokens of committed slots, which are written again, and the new ones after them."""
        arena, length = self._hybrid, self._hybrid.length
        start, width = length - len(replayed), len(ids)
        if positions is not None:
            new = np.broadcast_to(np.asarray(positions, np.int64), width)
            positions = np.concatenate([np.arange(start, length), new])
        arena.length = start
        try:
            return super()._run_pass([*replayed, *ids], wanted + len(replayed), positions, None)
        finally:
            arena.length = length

    def _bind_states(self, arena: HybridArena, width: int) -> None:
        tensors = self.graph_io.states
        if not self._states_bound:
            for tensor, state in zip(tensors, arena.states, strict=True):
                self._io.bind_ortvalue_input(tensor.past, wrapped(state[None]))
            self._states_bound = True
        strip = arena.new_strip(width)
        if strip is self._strip:
            return
        kept = self._strip_values.get(width)
        if kept is None or kept[0] is not strip:
            kept = strip, [wrapped(each[None]) for each in strip]
            if width <= KEPT_WIDTH:
                self._strip_values[width] = kept
        for tensor, value in zip(tensors, kept[1], strict=True):
            self._io.bind_ortvalue_output(tensor.present, value)
        self._strip = strip
