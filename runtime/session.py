"""One ONNX Runtime session over one graph, and its binding to a KV arena.

Everything a pass reads or writes is bound once: token, position and length buffers are written in place, the cache is
the arena itself, and only what changes shape (a bias that grows with the text, another width) is bound again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from ..edge.errors import BundleError, EdgeError
from .device import Device, put_on
from .graph_spec import GraphSpec, Port, introspect
from .kv import KVArena
from .residency import drop_file_pages

Floats: TypeAlias = npt.NDArray[np.float32]

RUNTIME_VERSION: Final[str] = ort.__version__
"""Of ONNX Runtime."""
_BLOCKED: Final = np.float32(np.finfo(np.float32).min)
_LOG_NOTHING: Final = 4
_ORT_ERRORS: Final[tuple[type[Exception], ...]] = (
    *(value for value in vars(ort_errors).values() if isinstance(value, type) and issubclass(value, Exception)),
    *(RuntimeError, TypeError, ValueError),
)
"""What ONNX Runtime raises: its own exceptions, which have no common base, and what its binding makes of others."""


@dataclass(frozen=True)
class SessionConfig:
    """How a graph is run: on which device, with how many threads (0: one per physical core)."""

    device: Device
    threads: int = 0
    shares_cores: bool = False
    """Whether another session takes turns with this one. Threads that wait for more work by spinning, as they do
    otherwise, would take the cores from it: a target of 17 ms a pass beside a draft model then takes 31."""


def write_prepacked(graph: Path, destination: Path) -> None:
    """Write a twin of `graph` whose weights are stored as this machine's kernels want them, beside the originals.

    Raises:
        BundleError: the file is not a model.
    """
    options = ort.SessionOptions()
    options.log_severity_level = _LOG_NOTHING
    options.optimized_model_filepath = str(destination)
    for key, value in {
        "session.optimized_model_external_initializers_file_name": f"{destination.name}.data",
        # Shapes have to stay in the graph itself, or it cannot be checked when it is loaded.
        "session.optimized_model_external_initializers_min_size_in_bytes": "1024",
        "session.save_external_prepacked_constant_initializers": "1",
    }.items():
        options.add_session_config_entry(key, value)
    try:
        ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"], enable_fallback=0)
    except _ORT_ERRORS as error:
        raise BundleError(f"{graph} cannot be prepacked: {_reason(error)}") from error


class GraphSession:
    """A loaded graph. `spec` says what its ports are."""

    def __init__(self, graph: Path, config: SessionConfig, input_vocab: int | None = None) -> None:
        """Load `graph`; `input_vocab` is its embedding's size where that is not its head's.

        Raises:
            BundleError: the file is not a model, or not one that edge-run can decode with.
        """
        options = ort.SessionOptions()
        options.log_severity_level = _LOG_NOTHING
        options.intra_op_num_threads = config.threads
        options.inter_op_num_threads = 1
        # The bias changes shape with every token; remembering an allocation plan per shape would only grow.
        options.enable_mem_pattern = False
        if config.shares_cores:
            options.add_session_config_entry("session.force_spinning_stop", "1")
        try:
            self._session = ort.InferenceSession(
                # Falling back would try again without a word, and print to standard output.
                str(graph),
                options,
                providers=put_on(options, config.device),
                enable_fallback=0,
            )
        except _ORT_ERRORS as error:
            raise BundleError(
                f"{graph} cannot be loaded: {_reason(error)}", "give a complete model made by edge-run export"
            ) from error
        # Loading has read all weights to pack them; only rows of the embedding are read from the file again.
        drop_file_pages(graph.with_name(f"{graph.name}.data"))
        self.config: Final = config
        self.spec: Final[GraphSpec] = introspect(
            [Port(node.name, node.type, tuple(node.shape)) for node in self._session.get_inputs()],
            [Port(node.name, node.type, tuple(node.shape)) for node in self._session.get_outputs()],
            str(graph),
            input_vocab,
        )

    def arena(self, limit: int) -> KVArena:
        """An empty arena of this graph's shape for a context of `limit` tokens."""
        return KVArena(self.spec.layers, self.spec.kv_heads, self.spec.head_dim, limit)

    def bind(self, arena: KVArena) -> BoundSession:
        """The session ready to run passes over `arena`."""
        return BoundSession(self._session, self.spec, arena)


class BoundSession:
    """Runs passes that read and extend one arena."""

    def __init__(self, session: ort.InferenceSession, spec: GraphSpec, arena: KVArena) -> None:
        self._session = session
        self._io = session.io_binding()
        self._run_options = ort.RunOptions()
        self._run_options.log_severity_level = _LOG_NOTHING
        # No graph capture. Unless this is said, every pass throws and catches an exception looking for it: 29 us.
        self._run_options.add_run_config_entry("gpu_graph_id", "-1")
        self.spec: Final = spec
        self.arena: Final = arena
        self._bound_generation = -1
        self._width = 0
        self._rows = 0
        self._tokens = np.zeros(0, np.int64)
        self._positions = np.zeros(0, np.int64)
        self._row_ids = np.zeros(0, np.int64)
        self._logits = np.zeros((0, spec.vocab_size), np.float32)
        self._open_bias = np.zeros(0, np.float32)
        self._tree_bias = np.zeros(0, np.float32)
        # Widths come and go from pass to pass; wrapping an array takes longer than binding it.
        self._by_width: dict[int, list[tuple[str, ort.OrtValue]]] = {}
        self._by_rows: dict[int, tuple[ort.OrtValue, ort.OrtValue]] = {}
        self._past = np.zeros(1, np.int32)
        self._total = np.zeros((), np.int32)
        self._bind_input("seqlens_k", self._past)
        self._bind_input("total_sequence_length", self._total)

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
        if ids.min() < 0 or ids.max() >= self.spec.input_vocab:
            raise ValueError(
                f"token ids must lie between 0 and {self.spec.input_vocab - 1}, found {ids.min()} to {ids.max()}"
            )
        base, width = self.arena.length, ids.size
        self.arena.reserve(width)
        total = base + width
        if self._bound_generation != self.arena.generation:
            self._bind_cache()
        if width != self._width:
            self._bind_width(width)
        self._tokens[:width] = ids
        self._positions[:width] = np.arange(base, total) if positions is None else positions
        if base == 0 and positions is not None and self._positions[width - 1] != width - 1:
            raise ValueError("a tree needs a committed row to grow from")
        wanted = np.arange(width) if rows is None else np.asarray(rows, np.int64)
        if wanted.size != self._rows:
            self._bind_rows(wanted.size)
        self._row_ids[: wanted.size] = wanted
        if self.spec.takes_bias:
            self._bind_bias(width, total, tree_mask)
        elif tree_mask is not None:
            raise ValueError("this graph takes no attention_bias, so it cannot verify trees")
        self._past[0] = total - 1
        self._total[...] = total
        try:
            self._session.run_with_iobinding(self._io, self._run_options)
        except _ORT_ERRORS as error:
            raise EdgeError(
                f"the model failed to run: {_reason(error)}", "run again with --debug and report it"
            ) from error
        return self._logits[: wanted.size]

    def _bind_input(self, name: str, array: npt.NDArray[np.generic]) -> None:
        self._io.bind_ortvalue_input(name, _value(array))

    def _bind_cache(self) -> None:
        """Bind every layer's slice of the arena as both past and present: the graph writes new rows in place."""
        slices = self.arena.data.reshape(-1, 1, *self.arena.data.shape[2:])
        for values, past, present in zip(slices, self.spec.cache_inputs, self.spec.cache_outputs, strict=True):
            value = _value(values)
            self._io.bind_ortvalue_input(past, value)
            self._io.bind_ortvalue_output(present, value)
        self._bound_generation = self.arena.generation

    def _bind_width(self, width: int) -> None:
        if width > self._tokens.size:
            self._tokens = np.zeros(width, np.int64)
            self._positions = np.zeros(width, np.int64)
            self._by_width.clear()
        values = self._by_width.get(width)
        if values is None:
            values = [("input_ids", _value(self._tokens[:width].reshape(1, width)))]
            if self.spec.takes_positions:
                values.append(("position_ids", _value(self._positions[:width].reshape(1, width))))
            self._by_width[width] = values
        for name, value in values:
            self._io.bind_ortvalue_input(name, value)
        self._width = width

    def _bind_rows(self, rows: int) -> None:
        if rows > len(self._logits):
            self._row_ids = np.zeros(rows, np.int64)
            self._logits = np.empty((rows, self.spec.vocab_size), np.float32)
            self._by_rows.clear()
        values = self._by_rows.get(rows)
        if values is None:
            values = self._by_rows[rows] = (_value(self._row_ids[:rows]), _value(self._logits[:rows]))
        self._io.bind_ortvalue_input("logit_rows", values[0])
        self._io.bind_ortvalue_output("logits", values[1])
        self._rows = rows

    def _bind_bias(self, width: int, total: int, tree_mask: npt.NDArray[np.bool_] | None) -> None:
        """Bind float32 `[1, 1, width, total]`: zeros (causality is the operator's own), or the new rows' tree."""
        cells = width * total
        if tree_mask is None:
            if cells > self._open_bias.size:
                self._open_bias = np.zeros(cells + width * self.arena.capacity, np.float32)
            self._bind_input("attention_bias", self._open_bias[:cells].reshape(1, 1, width, total))
            return
        if cells > self._tree_bias.size:
            self._tree_bias = np.empty(cells + width * self.arena.capacity, np.float32)
        bias = self._tree_bias[:cells].reshape(1, 1, width, total)
        masked = tree_mask.shape[1]
        bias[..., : total - masked] = 0
        bias[0, 0, :, total - masked :] = np.where(tree_mask, np.float32(0), _BLOCKED)
        self._bind_input("attention_bias", bias)


def _value(array: npt.NDArray[np.generic]) -> ort.OrtValue:
    """The array as ONNX Runtime sees it, not copied."""
    return ort.OrtValue.ortvalue_from_numpy(array)


def _reason(error: Exception) -> str:
    """ONNX Runtime's message without its code and its source positions."""
    text = str(error).split(" : ", 3)[-1].strip().split("\n", 1)[0]
    return re.sub(r"/\S+\.(cc|h):\d+ ?", "", text)
