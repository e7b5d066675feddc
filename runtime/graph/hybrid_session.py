"""Passes of a graph that keeps states of layers without attention beside its KV cache."""

from __future__ import annotations

from itertools import islice
from typing import Any, Final

import numpy as np
import onnxruntime as ort

from ..kv.arena import KVArena
from ..kv.state_buffers import StateCheckpoint, States, StateView
from .bound_graph import NewTokens
from .bound_session import BoundSession
from .graph_io import Floats
from .pass_inputs import wrapped

_KEPT_VALUES: Final = 256
"""Number of state views whose OrtValues are kept: wrapping an array takes longer than binding it."""
_WIDEST_REPLAY: Final = 256
"""Number of tokens that run once more inside the next pass; more run in passes of their own before it, because the
memory of a pass grows with its width. None run inside where new tokens after cached ones have to run one by one."""


class HybridSession(BoundSession):
    """Runs passes that read and extend an arena with states.

    Tokens whose states the arena no longer has run again before the new ones, in the same pass.
    """

    def use(self, arena: KVArena) -> None:
        """Run over another arena, of a hybrid model too, from now on."""
        assert arena.states is not None  # noqa: S101  the graph keeps states
        super().use(arena)
        self._states = arena.states
        self._values: dict[tuple[int, int], tuple[States, list[ort.OrtValue]]] = {}
        """By address of a buffer and number of its tokens before the states, or -1 for the whole of it: the buffer, and
        OrtValues of its layers."""
        self._bound_outputs: list[tuple[str, ort.OrtValue]] = []
        """Names of the outputs with states, and the values bound to them."""

    def _run_pass(self, new: NewTokens) -> Floats:
        """Run a pass that begins where the states are known, at the committed length or before it."""
        arena, states = self.arena, self._states
        replayed = states.move_to(arena.length, arena.anchors)
        start = arena.length - len(replayed)
        if replayed:
            # Slots that run once more, in a wide pass, may differ in the last bits.
            arena.plain_length = min(arena.plain_length, start)
            arena.replayed += len(replayed)
        try:
            joined = _WIDEST_REPLAY if self.graph_io.supports_wide_passes else 0
            while len(replayed) > joined:
                part, replayed = replayed[: joined or 1], replayed[joined or 1 :]
                outputs = self._bind_states(len(part))
                self._run_from(start, NewTokens(part, np.zeros(1, np.int64)))
                states.end_replay(len(part), outputs)
                start += len(part)
            outputs = self._bind_states(len(replayed) + len(new.ids))
            if not replayed:
                logits = super()._run_pass(new)
            else:
                # A graph with states takes consecutive tokens alone.
                logits = self._run_from(start, NewTokens([*replayed, *new.ids], new.wanted + len(replayed)))
        except BaseException:  # also an interrupt, while the pass waits for others
            states.forget_states()
            raise
        states.end_pass(new.ids, outputs)
        return logits

    def _run_in_parts(self, new: NewTokens, width: int) -> Floats:
        logits = super()._run_in_parts(new, width)
        self._states.join_passes(new.ids)
        return logits

    def _run_from(self, start: int, new: NewTokens) -> Floats:
        """Run a pass that begins at a slot before the committed length, and writes slots again."""
        arena, length = self.arena, self.arena.length
        arena.length = start
        try:
            logits = super()._run_pass(new)
        except BaseException:
            arena.length = length
            if self._growing is not None:
                # The slots to be written again were dropped from the tensors that grow.
                arena.rewind_to(start)
            raise
        arena.length = length
        return logits

    def _bind_first_outputs(self, io: Any, width: int) -> None:
        super()._bind_first_outputs(io, width)
        for name, value in self._bound_outputs:
            io.bind_ortvalue_output(name, value)

    def _bind_states(self, width: int) -> StateCheckpoint:
        """Bind the states before and after a pass over `width` tokens; returns the buffers of those after it."""
        outputs = tuple(each.new_output(width) for each in self._states.buffers)
        tensors = iter(self.graph_io.states)
        self._bound_outputs.clear()
        for buffers, output in zip(self._states.buffers, outputs, strict=True):
            whole = StateView(output, -1, output)
            after = self._wrapped(whole) if buffers.keeps(width) else [wrapped(each[None]) for each in output]
            members = islice(tensors, buffers.state_type.layers)
            for value, returned, tensor in zip(self._wrapped(buffers.past), after, members, strict=True):
                self._io.bind_ortvalue_input(tensor.past, value)
                if tensor.advanced is not None:
                    self._bound_outputs.append((tensor.advanced, value))
                self._bound_outputs.append((tensor.present, returned))
        for name, value in self._bound_outputs:
            self._io.bind_ortvalue_output(name, value)
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
