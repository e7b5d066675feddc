"""A session bound to a KV arena: passes that read and extend the cache of one text.

Everything a pass reads or writes is bound once where that is possible: token, position and length buffers are written
in place, a cache in place is the arena itself, and only what changes shape (a bias that grows with the text, another
width, a cache that grows) is bound again. What a graph cannot do in one pass is done row by row: some score their last
row only, some let new rows behind a cache see each other.
"""

from __future__ import annotations

import re
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from ...errors import EdgeError
from ..kv.arena import InPlaceArena, KVArena
from ..kv.borrowed import BorrowedArena
from ..kv.growing import GrowingArena
from .graph_io import GraphIO, GraphValue, LogitsMode, Role, element_type

Floats: TypeAlias = npt.NDArray[np.float32]

LOG_NOTHING: Final = 4
"""Severity that silences ONNX Runtime: what fails is raised."""
ORT_ERRORS: Final[tuple[type[Exception], ...]] = (
    *(value for value in vars(ort_errors).values() if isinstance(value, type) and issubclass(value, Exception)),
    *(RuntimeError, TypeError, ValueError),
)
"""What ONNX Runtime raises: its own exceptions, which have no common base, and what its binding makes of others."""
_NODE_FAILED: Final = re.compile(
    r"(?:Error in execution: )?Non-zero status code returned while running (\S+ node)\. Name:'[^']*' Status Message: "
)
_BLOCKED: Final = np.float32(np.finfo(np.float32).min)
_FIRST_ROWS: Final = 512
"""Of the first pass where later ones go row by row; it may give as many rows of logits."""
_KEPT_LOGIT_ROWS: Final = 32
"""Rows of a logits buffer that outlives its pass; a prompt's, where the graph scores all of it, is let go."""


class BoundSession:
    """Runs passes that read and extend one arena.

    Args:
        session: the graph's.
        spec: what its ports are.
        arena: of the graph's cache tensors; in place or growing, as the spec says.
        first: the session for passes without cached rows, where those are a graph of their own.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        graph_io: GraphIO,
        arena: KVArena,
        first: ort.InferenceSession | None = None,
    ) -> None:
        self._session = session
        self._first = first
        self._io = session.io_binding()
        self._first_io = None if first is None else first.io_binding()
        self._run_options = ort.RunOptions()
        self._run_options.log_severity_level = LOG_NOTHING
        # No graph capture. Unless this is said, every pass throws and catches an exception looking for it: 29 us.
        self._run_options.add_run_config_entry("gpu_graph_id", "-1")
        self.graph_io: Final = graph_io
        self.arena: Final = arena
        self._bound_generation = -1
        self._width = 0
        self._rows = 0
        self._tokens = np.zeros((1, 0), _dtype(graph_io.inputs[Role.TOKENS]))
        self._positions = np.zeros(0, np.int64)
        self._row_ids = np.zeros(0, np.int64)
        self._logits = np.zeros((0, graph_io.vocab_size), _dtype(graph_io.logits))
        self._open_bias = np.zeros(0, np.float32)
        self._tree_bias = np.zeros(0, np.float32)
        self._bias: npt.NDArray[Any] = self._tree_bias
        """What is bound: a binding does not keep its array alive."""
        mask = graph_io.inputs.get(Role.MASK)
        self._ones = np.ones((1, 0), np.int64 if mask is None else _dtype(mask))
        # Widths come and go from pass to pass; wrapping an array takes longer than binding it.
        self._by_width: dict[int, tuple[npt.NDArray[Any], list[tuple[str, ort.OrtValue]]]] = {}
        self._by_rows: dict[int, tuple[ort.OrtValue, ort.OrtValue]] = {}
        self._scalars: dict[Role, npt.NDArray[Any]] = {
            role: np.zeros(tuple(1 for _ in port.shape), _dtype(port))
            for role, port in graph_io.inputs.items()
            if role in (Role.LAST_ROW, Role.TOTAL, Role.LOGITS_TO_KEEP, Role.USE_CACHE)
        }
        for role, value in self._scalars.items():
            self._bind_input(graph_io.inputs[role].name, value)

    def most_rows(self, wanted: int) -> int:
        """How many rows of a text to run in the next pass if `wanted` is what suits in general.

        Where new rows behind cached ones go one by one, a prompt is best read in the first pass, which may be wide.
        """
        return wanted if self.graph_io.wide or self.arena.length else max(wanted, _FIRST_ROWS)

    def forward(
        self,
        tokens: npt.ArrayLike,
        *,
        rows: npt.ArrayLike | None = None,
        positions: npt.ArrayLike | None = None,
        tree_mask: npt.NDArray[np.bool_] | None = None,
    ) -> Floats:
        """Run `n` new tokens after the arena's committed rows; their cache rows are written, not committed.

        Args:
            tokens: int `[n]`, ids the embedding has.
            rows: int `[r]`, which of the `n` rows to return logits for; all when None.
            positions: int `[n]`, rotary positions; consecutive when None, and always so where no row is committed yet:
                the operator takes such a pass for the beginning of a prompt and does not look at them.
            tree_mask: bool `[n, h + n]`, whether row i sees row j of the last `h` committed rows and the new ones, and
                so usually `[n, n]`; causal when None. All rows before are seen, and no row sees a later one.

        Returns:
            Logits float32 `[r, V]`, valid until the next call.

        Raises:
            ContextError: the rows do not fit the context.
            EdgeError: ONNX Runtime failed; the arena is as it was.
        """
        ids = np.asarray(tokens, np.int64)
        # The operator would answer an id outside the vocabulary with zeros instead of an error.
        if ids.min() < 0 or ids.max() >= self.graph_io.input_vocab:
            raise ValueError(
                f"token ids must lie between 0 and {self.graph_io.input_vocab - 1}, found {ids.min()} to {ids.max()}"
            )
        if tree_mask is not None and not self.graph_io.trees:
            raise ValueError("this graph cannot verify trees")
        wanted = np.arange(ids.size) if rows is None else np.asarray(rows, np.int64)
        self.arena.reserve(ids.size)
        if ids.size > 1 and not self._at_once(ids.size, wanted):
            return self._one_by_one(ids, wanted)
        return self._pass(ids, wanted, positions, tree_mask)

    def _at_once(self, width: int, wanted: npt.NDArray[np.int64]) -> bool:
        """Whether one pass over several rows gives the logits that are asked for."""
        if self.arena.length and not self.graph_io.wide:
            return False
        return self.graph_io.scores is not LogitsMode.LAST or (wanted.size == 1 and wanted[0] == width - 1)

    def _one_by_one(self, ids: npt.NDArray[np.int64], wanted: npt.NDArray[np.int64]) -> Floats:
        """A pass for each row, each behind the ones before."""
        arena, base = self.arena, self.arena.length
        plain = arena.plain
        found: dict[int, Floats] = {}
        try:
            for row in range(ids.size):
                logits = self._pass(ids[row : row + 1], np.zeros(1, np.int64), None, None)
                arena.commit(1)
                if row in wanted:
                    found[row] = logits[0].copy()
        finally:
            arena.rewind_to(base)
            arena.plain = plain
        return np.stack([found[row] for row in wanted.tolist()])

    def _pass(
        self,
        ids: npt.NDArray[np.int64],
        wanted: npt.NDArray[np.int64],
        positions: npt.ArrayLike | None,
        tree_mask: npt.NDArray[np.bool_] | None,
    ) -> Floats:
        base, width = self.arena.length, ids.size
        total = base + width
        self._bind_cache(width)
        if width != self._width:
            self._bind_width(width)
        self._tokens[0, :width] = ids
        self._positions[...] = np.arange(base, total) if positions is None else positions
        if base == 0 and positions is not None and self._positions.flat[-1] != width - 1:
            raise ValueError("a tree needs a committed row to grow from")
        given = self._bind_scores(width, wanted)
        if self.graph_io.takes_bias:
            self._bind_bias(width, total, tree_mask)
        if Role.MASK in self.graph_io.inputs:
            self._bind_mask(total)
        scalars = self._scalars
        for role, value in ((Role.LAST_ROW, total - 1), (Role.TOTAL, total), (Role.USE_CACHE, base > 0)):
            if role in scalars:
                scalars[role][...] = value
        try:
            if base or self._first is None:
                self._session.run_with_iobinding(self._io, self._run_options)
            else:
                self._run_first(width)
        except ORT_ERRORS as error:
            raise EdgeError(
                f"the model failed to run: {reason(error)}", "run again with --debug and report it"
            ) from error
        if isinstance(self.arena, GrowingArena):
            self.arena.wrote(width)
        return self._scored(given, wanted)

    def _run_first(self, width: int) -> None:
        """The pass of a graph that takes no cache: the same inputs without the past."""
        if self._first is None or self._first_io is None:
            raise ValueError("there is no graph for the first pass")
        names = {node.name for node in self._first.get_inputs()}
        self._first_io.clear_binding_inputs()
        self._first_io.clear_binding_outputs()
        arrays: dict[Role, npt.NDArray[Any]] = {Role.TOKENS: self._tokens[:, :width], Role.MASK: self._ones[:, :width]}
        if Role.POSITIONS in self.graph_io.inputs:
            arrays[Role.POSITIONS] = self._positions
        if self.graph_io.takes_bias:
            arrays[Role.BIAS] = self._bias
        for role, array in {**arrays, **self._scalars}.items():
            if role in self.graph_io.inputs and self.graph_io.inputs[role].name in names:
                self._first_io.bind_ortvalue_input(self.graph_io.inputs[role].name, _value(array))
        self._bind_growing(self._first_io, width, past=False)
        self._first_io.bind_ortvalue_output(self.graph_io.logits.name, _value(self._logits_of(self._rows)))
        self._first.run_with_iobinding(self._first_io, self._run_options)

    def _bind_input(self, name: str, array: npt.NDArray[Any]) -> None:
        self._io.bind_ortvalue_input(name, _value(array))

    def _bind_cache(self, width: int) -> None:
        arena = self.arena
        if isinstance(arena, GrowingArena):
            self._bind_growing(self._io, width, past=True)
        elif isinstance(arena, InPlaceArena | BorrowedArena) and self._bound_generation != (now := arena.generation):
            # The graph writes new rows in place: every layer's slice of the arena is both past and present.
            for values, tensor in zip(arena.tensors(), self.graph_io.cache, strict=True):
                value = _value(values)
                self._io.bind_ortvalue_input(tensor.past, value)
                self._io.bind_ortvalue_output(tensor.present, value)
            self._bound_generation = now

    def _bind_growing(self, io: Any, width: int, *, past: bool) -> None:
        if not isinstance(self.arena, GrowingArena):
            raise TypeError("only growing arenas are bound anew for every pass")
        before = self.arena.past()
        for rows, longer, tensor in zip(before, self.arena.present(width), self.graph_io.cache, strict=True):
            if past:
                io.bind_ortvalue_input(tensor.past, _value(rows))
            io.bind_ortvalue_output(tensor.present, _value(longer))

    def _bind_width(self, width: int) -> None:
        if width > self._tokens.shape[1]:
            self._tokens = np.zeros((1, width), self._tokens.dtype)
            self._by_width.clear()
        if width not in self._by_width:
            positions = self.graph_io.inputs.get(Role.POSITIONS)
            values = [(self.graph_io.inputs[Role.TOKENS].name, _value(self._tokens[:, :width]))]
            array = np.zeros((1, width), np.int64) if positions is None else _positions_array(positions, width)
            if positions is not None:
                values.append((positions.name, _value(array)))
            self._by_width[width] = array, values
        self._positions, values = self._by_width[width]
        for name, value in values:
            self._io.bind_ortvalue_input(name, value)
        self._width = width

    def _bind_scores(self, width: int, wanted: npt.NDArray[np.int64]) -> int:
        """Bind what the pass scores; returns the first row whose logits it gives."""
        scores = self.graph_io.scores
        if scores is LogitsMode.CHOSEN:
            if wanted.size != self._rows:
                self._bind_rows(wanted.size)
            self._row_ids[: wanted.size] = wanted
            return 0
        count = width
        if scores is LogitsMode.LAST:
            count = 1
        elif scores is LogitsMode.SUFFIX:
            count = width - int(wanted.min())
            self._scalars[Role.LOGITS_TO_KEEP][...] = count
        if count != self._rows:
            self._bind_rows(count)
        return width - count

    def _bind_rows(self, rows: int) -> None:
        if rows > len(self._logits) or len(self._logits) > max(rows, _KEPT_LOGIT_ROWS):
            self._row_ids = np.zeros(rows, np.int64)
            self._logits = np.empty((rows, self.graph_io.vocab_size), self._logits.dtype)
            self._by_rows.clear()
        values = self._by_rows.get(rows)
        if values is None:
            values = self._by_rows[rows] = (_value(self._row_ids[:rows]), _value(self._logits_of(rows)))
        if self.graph_io.scores is LogitsMode.CHOSEN:
            self._io.bind_ortvalue_input(self.graph_io.inputs[Role.LOGIT_ROWS].name, values[0])
        self._io.bind_ortvalue_output(self.graph_io.logits.name, values[1])
        self._rows = rows

    def _logits_of(self, rows: int) -> npt.NDArray[Any]:
        """The first rows of the logits buffer, of as many dimensions as the graph gives."""
        logits = self._logits[:rows]
        return logits[None] if len(self.graph_io.logits.shape) == 3 else logits

    def _scored(self, first: int, wanted: npt.NDArray[np.int64]) -> Floats:
        """The logits asked for, of a pass that gives them from row `first` on, or just them."""
        logits = self._logits[: self._rows]
        if self.graph_io.scores is not LogitsMode.CHOSEN and not (
            wanted.size == self._rows and np.array_equal(wanted, np.arange(first, first + self._rows))
        ):
            logits = logits[wanted - first]
        return logits.astype(np.float32, copy=False)

    def _bind_mask(self, total: int) -> None:
        if total > self._ones.shape[1]:
            self._ones = np.ones((1, max(total, self.arena.capacity)), self._ones.dtype)
        self._bind_input(self.graph_io.inputs[Role.MASK].name, self._ones[:, :total])

    def _bind_bias(self, width: int, total: int, tree_mask: npt.NDArray[np.bool_] | None) -> None:
        """Bind `[1, 1, width, total]`: zeros where causality is the operator's own, else who sees whom."""
        port = self.graph_io.inputs[Role.BIAS]
        cells = width * total
        if tree_mask is None and self.graph_io.causal:
            if cells > self._open_bias.size:
                self._open_bias = np.zeros(cells + width * self.arena.capacity, np.float32)
            self._bias = self._open_bias[:cells].reshape(1, 1, width, total)
            self._bind_input(port.name, self._bias)
            return
        if tree_mask is None:
            tree_mask = np.tri(width, dtype=np.bool_)
        if cells > self._tree_bias.size:
            self._tree_bias = np.empty(cells + width * self.arena.capacity, np.float32)
        bias = self._tree_bias[:cells].reshape(1, 1, width, total)
        masked = tree_mask.shape[1]
        bias[..., : total - masked] = 0
        bias[0, 0, :, total - masked :] = np.where(tree_mask, np.float32(0), _BLOCKED)
        self._bias = _as_mask(bias, port)
        self._bind_input(port.name, self._bias)


def _as_mask(bias: Floats, port: GraphValue) -> npt.NDArray[Any]:
    """The bias in the port's own type: truth values say what is seen, numbers what is added."""
    dtype = _dtype(port)
    if dtype == np.float32:
        return bias
    mask: npt.NDArray[Any] = bias == 0
    if dtype == np.float16:
        mask = np.maximum(bias, np.finfo(np.float16).min)
    return mask.astype(dtype)


def _dtype(port: GraphValue) -> np.dtype[Any]:
    dtype = element_type(port)
    if dtype is None:
        raise TypeError(f"{port.name} is {port.type}")
    return dtype


def _positions_array(port: GraphValue, width: int) -> npt.NDArray[Any]:
    """A buffer for positions as the graph wants them: `[1, n]`, or `[k, 1, n]`."""
    copies = port.shape[0] if len(port.shape) == 3 else None
    shape = (1, width) if len(port.shape) != 3 else (copies if isinstance(copies, int) else 3, 1, width)
    return np.zeros(shape, _dtype(port))


def _value(array: npt.NDArray[Any]) -> ort.OrtValue:
    """The array as ONNX Runtime sees it, not copied."""
    return ort.OrtValue.ortvalue_from_numpy(array)


def reason(error: Exception) -> str:
    """ONNX Runtime's message without its code, its source positions and what it says of every failure."""
    text = str(error).split(" : ", 3)[-1].strip().split("\n", 1)[0]
    return re.sub(r"/\S+\.(cc|h):\d+ ?", "", _NODE_FAILED.sub(r"\1: ", text))
