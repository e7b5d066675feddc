"""A graph session bound to a KV arena: passes that read and extend its cache.

A cache that is extended in place is the arena itself, bound once; `pass_inputs.py` and `pass_outputs.py` have the other
inputs and outputs. What a graph cannot do in one pass runs token by token: some graphs compute only the last token's
logits, some let new tokens after a cache attend to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from ..kv.arena import InPlaceArena, KVArena
from ..kv.buffers import CacheBuffers, NumpyBuffers
from ..kv.growing import GrowingArena
from ..kv.state_buffers import StateCheckpoint, States, StateView
from .bound_graph import ALONE, BoundGraph, NewTokens, OtherTexts
from .graph_io import Floats, GraphIO, LogitsMode, first_slot
from .memory import MappedPages
from .ort import ACTIVATIONS, ORT_ERRORS, run_failure
from .pass_inputs import PassInputs, wrapped
from .pass_outputs import LogitsOutput, TokenOutput
from .shared_passes import SharedGraph, SharedPasses, TextBinding

_FIRST_PASS_WIDTH: Final = 512
"""Width of the first prefill pass if later tokens run one by one; it may return as many rows of logits."""
_KEPT_VALUES: Final = 256
"""Number of state views whose OrtValues are kept: wrapping an array takes longer than binding it."""
_WIDEST_REPLAY: Final = 256
"""Number of tokens that run once more inside the next pass; more run in passes of their own before it, because the
memory of a pass grows with its width. None run inside where new tokens after cached ones have to run one by one."""


class BoundSession(BoundGraph):
    """Runs passes that read and extend one arena.

    Args:
        session: the graph's session.
        graph_io: the graph's inputs and outputs.
        arena: an arena of the graph's cache tensors, in place or growing as `graph_io` says.
        first_session: session for passes without cached tokens, if those have a graph of their own.
        hidden_states: whether passes return the hidden states too; the graph must give them.
        shared: runs passes together with those of other texts, and the graph there; None if all run alone.

    Attributes:
        pages: the weights that passes read.
    """

    pages = MappedPages()
    _logits_type: ClassVar = LogitsOutput

    def __init__(
        self,
        session: ort.InferenceSession,
        graph_io: GraphIO,
        arena: KVArena,
        first_session: ort.InferenceSession | None = None,
        *,
        hidden_states: bool = False,
        shared: tuple[SharedPasses, SharedGraph] | None = None,
    ) -> None:
        self._session = session
        self._first_session = first_session
        self._shared: Final = None if shared is None else shared[0]
        self._io = session.io_binding() if shared is None else TextBinding(shared[1])
        self.graph_io = graph_io
        self._by_window: Final[dict[int, list[int]]] = {}
        """Indices of the cache tensors by the windows of their layers."""
        for index, tensor in enumerate(graph_io.cache):
            self._by_window.setdefault(tensor.window, []).append(index)
        self.use(arena)
        self._inputs: Final = PassInputs(self._io, graph_io)
        self._logits = self._logits_type(self._io, graph_io, self._inputs)
        self._hidden: Final = TokenOutput(self._io, graph_io.hidden_states, graph_io.logits) if hidden_states else None
        features = graph_io.draft_features or (None if arena.features is None else graph_io.hidden_states)
        self._features: Final = None if features is None else TokenOutput(self._io, features, graph_io.logits)
        is_selected = graph_io.logits_mode is LogitsMode.SELECTED and first_session is None
        self.skips_logits = is_selected and self._hidden is None and self._features is None
        self.host_bytes = 0
        """Bytes of logits and hidden states that were copied from a device; 0 in this process's memory."""

    def use(self, arena: KVArena) -> None:
        """Run over another arena of the same tensor types from now on."""
        self.arena = arena
        # Between two passes, asking for the class of an object with an abstract base takes 20 us.
        self._growing = arena if isinstance(arena, GrowingArena) else None
        self._in_place = arena if isinstance(arena, InPlaceArena) else None
        self._bound_slots: dict[int, tuple[object, int]] = {}
        """By the windows of layers: what is bound of their caches, the arena's generation and the first slot."""

    def release_shared(self) -> None:
        """Let go of what shared passes hold of the caches of their texts."""
        if self._shared is not None:
            self._shared.withdraw(self._io)
            self._shared.release()

    def observe(self, name: str, array: npt.NDArray[Any]) -> None:
        """Let every pass also write an output of the graph, whose shape does not change, to `array`."""
        self._io.bind_ortvalue_output(name, wrapped(array))

    def supply(self, inputs: Mapping[str, npt.NDArray[Any]]) -> None:
        """Let every pass read further inputs of the graph from arrays, which the caller keeps."""
        for name, array in inputs.items():
            self._io.bind_ortvalue_input(name, wrapped(array))

    def prefill_width(self, preferred: int, remaining: int) -> int:
        """Number of prompt tokens to run in the next pass, given the `preferred` number and those that are left.

        Larger if new tokens after cached ones run one by one: then the first pass, which may be wide, should read as
        much of the prompt as possible.
        """
        del remaining
        if self.graph_io.widest_pass is not None:
            preferred = min(preferred, self.graph_io.widest_pass)
        is_limited = not self.graph_io.supports_wide_passes and not self.arena.length
        return max(preferred, _FIRST_PASS_WIDTH) if is_limited else preferred

    def run(self, new: NewTokens) -> Floats:
        """Run a pass, or several where the graph cannot run all its tokens at a time."""
        width = len(new.ids)
        self.others = ALONE
        self.arena.reserve(width)
        if width > 1 and (part := self._part_width(width, new.wanted)) < width:
            return self._run_in_parts(new, part)
        return self._run_pass(new)

    def begin(self, new: NewTokens) -> Callable[[], Floats]:
        """Hand in a pass, which the next shared one of this thread runs too; see `BoundGraph.begin`."""
        width = len(new.ids)
        self.arena.reserve(width)
        alone = self._shared is None or not self.shares_passes or self._first_session or self.graph_io.states
        if alone or self._part_width(width, new.wanted) < width:
            return partial(self.run, new)
        self.others = ALONE
        finish = self._prepared(new)
        if self._shared is not None:
            self._shared.hand_in(self._io)
        return finish

    def hidden_states(self, tokens: npt.ArrayLike, wanted: Sequence[int]) -> Floats:
        """Run a pass, and return hidden states float32 `[r, d]` of the `wanted` tokens, in a new array."""
        if self._hidden is None:
            raise ValueError("this session was bound without hidden states")
        selected = self.graph_io.logits_mode is LogitsMode.SELECTED
        self.forward(tokens, logits_for=wanted if selected else (np.size(tokens) - 1,))
        return self._hidden.select(wanted)

    def _part_width(self, width: int, wanted: npt.NDArray[np.int64]) -> int:
        """Number of tokens of a pass over `width` ones that can run at a time and return the wanted logits."""
        graph_io = self.graph_io
        if self.arena.length and not graph_io.supports_wide_passes:
            return 1
        if graph_io.logits_mode is LogitsMode.LAST and not (wanted.size == 1 and wanted[0] == width - 1):
            return 1
        return width if graph_io.widest_pass is None else min(width, graph_io.widest_pass)

    def _run_in_parts(self, new: NewTokens, width: int) -> Floats:
        """Run passes over `width` tokens, each of which sees those before as committed."""
        ids, wanted, positions, tree_mask, _ = new
        arena, base = self.arena, self.arena.length
        places = None if positions is None else np.broadcast_to(np.asarray(positions, np.int64), len(ids))
        logits_by_index: dict[int, Floats] = {}
        try:
            for start in range(0, len(ids), width):
                stop = min(start + width, len(ids))
                inside = wanted[(wanted >= start) & (wanted < stop)]
                mask = None
                if tree_mask is not None:
                    mask = tree_mask[start:stop, : tree_mask.shape[1] - len(ids) + stop]
                # A pass gives at least one row of logits.
                rows = inside - start if inside.size else np.array([stop - start - 1])
                part = NewTokens(ids[start:stop], rows, None if places is None else places[start:stop], mask)
                logits = self._run_pass(part)
                arena.commit(stop - start)
                logits_by_index.update((int(index), logits[row].copy()) for row, index in enumerate(inside))
        finally:
            # Of a hybrid model, a pass that failed may have left fewer slots.
            arena.rewind_to(min(base, arena.length))
        return np.stack([logits_by_index[index] for index in wanted.tolist()])

    def _run_pass(self, new: NewTokens) -> Floats:
        return self._prepared(new)()

    def _prepared(self, new: NewTokens) -> Callable[[], Floats]:
        """Bind the inputs and outputs of a pass; returns what runs it and returns its logits."""
        ids, wanted, positions, tree_mask, images = new
        if images is not None and self._inputs.has_axes:
            positions = images.positions
        arena, inputs = self.arena, self._inputs
        base, width = arena.length, len(ids)
        self._bind_cache(width)
        inputs.write_tokens(ids, base, positions)
        if self._shared is not None:
            self._io.tokens = width
        first_logits = self._logits.bind(width, wanted)
        if self._hidden is not None:
            self._hidden.bind(width, self._logits.count)
        if self._features is not None:
            self._features.bind(width, self._logits.count)
        inputs.write_attention(base, arena.capacity, tree_mask)

        def finish() -> Floats:
            try:
                if base or self._first_session is None:
                    self._run_session()
                else:
                    first_io = self._first_session.io_binding()
                    self._inputs.bind_without_cache(first_io, {node.name for node in self._first_session.get_inputs()})
                    self._bind_first_outputs(first_io, width)
                    self._first_session.run_with_iobinding(first_io, ACTIVATIONS.pass_options(width))
            except ORT_ERRORS as error:
                raise run_failure("the model", error) from error
            if self._growing is not None:
                self._growing.finish_pass(width)
            if (slots := arena.features) is not None:
                if self._features is None:
                    slots.forget(base)
                else:
                    self._features.store(slots, base, width, wanted)
            return self._logits.select(first_logits, wanted)

        return finish

    def _run_session(self) -> None:
        options = ACTIVATIONS.pass_options(self._inputs.width)
        if self.shares_passes and self._shared is not None:
            self._shared.run(self._io, options)
            texts, tokens, waited_s = self._io.others
            # A pass in several parts has waited in each.
            self.others = OtherTexts(texts, tokens, self.others.waited_s + waited_s)
        else:
            self._session.run_with_iobinding(self._io, options)

    def _bind_first_outputs(self, io: Any, width: int) -> None:
        """Bind what the graph without cache inputs returns of a pass over `width` tokens."""
        self._bind_growing(io, width, with_past=False)
        self._logits.bind_to(io)
        if self._hidden is not None:
            self._hidden.bind_to(io)

    def _bind_cache(self, width: int) -> None:
        in_place = self._in_place
        if self._growing is not None:
            self._bind_growing(self._io, width, with_past=True)
        elif in_place is not None:
            generation, base = in_place.generation, in_place.length
            for window, members in self._by_window.items():
                bound = generation, first_slot(window, base) if window else 0
                if self._bound_slots.get(window) != bound:
                    # The graph writes new slots in place: the buffer of every tensor is both past and present.
                    values = self._cache_values(in_place.buffers, members, bound[1])
                    for value, tensor in zip(values, (self.graph_io.cache[index] for index in members), strict=True):
                        self._io.bind_ortvalue_input(tensor.past, value)
                        self._io.bind_ortvalue_output(tensor.present, value)
                    self._bound_slots[window] = bound

    def _cache_values(self, buffers: CacheBuffers, members: Sequence[int], first: int) -> Sequence[ort.OrtValue]:
        """The buffers of some of the tensors, from the slot `first` on."""
        assert isinstance(buffers, NumpyBuffers)  # noqa: S101  others are a device's
        return [wrapped(buffers.from_slot(index, first)) for index in members]

    def _bind_growing(self, io: Any, width: int, *, with_past: bool) -> None:
        assert self._growing is not None  # noqa: S101  other caches are bound once
        pasts = self._growing.past()
        for past, present, tensor in zip(pasts, self._growing.present(width), self.graph_io.cache, strict=True):
            if with_past:
                io.bind_ortvalue_input(tensor.past, wrapped(past))
            io.bind_ortvalue_output(tensor.present, wrapped(present))


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
