"""Passes of a graph that keeps states of layers without attention beside its KV cache."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from ...errors import EdgeError
from ..kv.arena import KVArena
from ..kv.hybrid_arena import HybridArena
from ..kv.state_buffers import StateCheckpoint, States, StateView
from .bound_session import BoundSession
from .graph_io import Floats
from .pass_inputs import wrapped

_KEPT_VALUES: Final = 256
"""Number of state views whose OrtValues are kept: wrapping an array takes longer than binding it."""
_WIDEST_REPLAY: Final = 256
"""Number of tokens that run once more inside the next pass; more run in passes of their own before it, because the
memory of a pass grows with its width."""


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
        self._values: dict[tuple[int, int], tuple[States, list[ort.OrtValue]]] = {}
        """By address of a buffer and number of its tokens before the states, or -1 for the whole of it: the buffer, and
        OrtValues of its layers."""
        self._bound_outputs: list[tuple[str, ort.OrtValue]] = []
        """Names of the outputs with states, and the values bound to them."""

    def _run_pass(
        self,
        ids: list[int],
        wanted: npt.NDArray[np.int64],
        positions: npt.ArrayLike | None,
        tree_mask: npt.NDArray[np.bool_] | None,
    ) -> Floats:
        try:
            return self._run_from_states(ids, wanted, positions, tree_mask)
        except EdgeError:
            self._hybrid.forget_states()
            raise

    def _run_from_states(
        self,
        ids: list[int],
        wanted: npt.NDArray[np.int64],
        positions: npt.ArrayLike | None,
        tree_mask: npt.NDArray[np.bool_] | None,
    ) -> Floats:
        """Run a pass that begins where the states are known, at the committed length or before it."""
        arena = self._hybrid
        replayed = arena.move_states()
        while len(replayed) > _WIDEST_REPLAY:
            part, replayed = replayed[:_WIDEST_REPLAY], replayed[_WIDEST_REPLAY:]
            outputs = self._bind_states(len(part))
            self._run_behind(len(part) + len(replayed), part, np.zeros(1, np.int64), None)
            arena.end_replay(part, outputs)
        outputs = self._bind_states(len(replayed) + len(ids))
        if replayed:
            if positions is not None:
                start, new = arena.length - len(replayed), np.broadcast_to(np.asarray(positions, np.int64), len(ids))
                positions = np.concatenate([np.arange(start, arena.length), new])
            logits = self._run_behind(len(replayed), [*replayed, *ids], wanted + len(replayed), positions)
        else:
            logits = super()._run_pass(ids, wanted, positions, tree_mask)
        arena.end_pass(ids, outputs)
        return logits

    def _run_in_parts(
        self,
        ids: list[int],
        wanted: npt.NDArray[np.int64],
        positions: npt.ArrayLike | None,
        tree_mask: npt.NDArray[np.bool_] | None,
        width: int,
    ) -> Floats:
        logits = super()._run_in_parts(ids, wanted, positions, tree_mask, width)
        self._hybrid.join_passes(ids)
        return logits

    def _run_behind(
        self, back: int, ids: list[int], wanted: npt.NDArray[np.int64], positions: npt.ArrayLike | None
    ) -> Floats:
        """Run a pass that begins `back` tokens before the committed length, where it writes slots again."""
        arena, length = self._hybrid, self._hybrid.length
        arena.length = length - back
        try:
            logits = super()._run_pass(ids, wanted, positions, None)
        except EdgeError:
            arena.length = length
            if self._growing is not None:
                # The slots to be written again were dropped from the tensors that grow.
                arena.rewind_to(length - back)
            raise
        arena.length = length
        return logits

    def _bind_first_outputs(self, io: Any, width: int) -> None:
        super()._bind_first_outputs(io, width)
        for name, value in self._bound_outputs:
            io.bind_ortvalue_output(name, value)

    def _bind_states(self, width: int) -> StateCheckpoint:
        """Bind the states before and after a pass over `width` tokens; returns the buffers of those after it."""
        arena, tensors = self._hybrid, self.graph_io.states
        outputs, first = arena.new_outputs(width), 0
        self._bound_outputs.clear()
        for buffers, output in zip(arena.states, outputs, strict=True):
            members = tensors[first : first + buffers.state_type.layers]
            first += len(members)
            for tensor, value in zip(members, self._wrapped(buffers.past), strict=True):
                self._io.bind_ortvalue_input(tensor.past, value)
                if tensor.advanced is not None:
                    self._io.bind_ortvalue_output(tensor.advanced, value)
                    self._bound_outputs.append((tensor.advanced, value))
            if buffers.keeps(width):
                values = self._wrapped(StateView(output, -1, output))
            else:
                values = [wrapped(each[None]) for each in output]
            for tensor, value in zip(members, values, strict=True):
                self._io.bind_ortvalue_output(tensor.present, value)
                self._bound_outputs.append((tensor.present, value))
        return outputs

    def _wrapped(self, view: StateView) -> list[ort.OrtValue]:
        """OrtValues of the layers of states in a buffer that is kept."""
        key = id(view.buffer), view.first
        kept = self._values.get(key)
        if kept is None or kept[0] is not view.buffer:
            if len(self._values) >= _KEPT_VALUES:
                self._values.clear()
            kept = self._values[key] = view.buffer, [wrapped(each[None]) for each in view.states]
        return kept[1]
