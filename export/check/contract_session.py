"""Running an exported graph as its contract says: one buffer per layer, written in place."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from google.protobuf.message import EncodeError
from onnx import ModelProto
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from ...errors import ExportError
from ...models.bundle import GRAPH_NAME
from ...models.zero_point_check import INPUT, zero_point_model, zero_points_work
from ..graph import contract
from .stderr_capture import standard_error_kept

_MASKED: Final = np.float32(-1e9)
_EVERYTHING: Final = 1
_NOTHING: Final = 4
"""Severities of log messages that are shown, but for the debugging of ONNX Runtime itself."""
_LOGGED: Final = "onnxruntime:"
_EXPANDED: Final = "unpacked compute mode"
"""In ONNX Runtime's message of a product that expands its matrix."""
_HINT: Final = "copy the model again if it may be damaged; else update onnxruntime"
_ORT_ERRORS: Final[tuple[type[Exception], ...]] = (
    *(value for value in vars(ort_errors).values() if isinstance(value, type) and issubclass(value, Exception)),
    *(RuntimeError, TypeError, ValueError),
)
"""What ONNX Runtime raises: its own exceptions, which have no common base, and what its binding makes of others."""


class CacheForm(Protocol):
    """What a session must know of a decoder: how large its caches are."""

    @property
    def layers(self) -> int:
        """Layers, each with a key and a value cache."""
        ...

    @property
    def kv_heads(self) -> int:
        """Heads of keys and of values."""
        ...

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        ...


class GraphSession:
    """A loaded graph, its key-value buffers and the number of rows in them."""

    def __init__(self, bundle: Path, config: CacheForm, capacity: int, graph: ModelProto | None = None) -> None:
        """Load the bundle's graph, or `graph` with the bundle's weights, with room for `capacity` positions.

        Caches are of the type that the graph declares.

        Raises:
            ExportError: ONNX Runtime cannot load it.
        """
        self._session = _opened(str(bundle / GRAPH_NAME) if graph is None else graph, bundle)
        shape = (1, config.kv_heads, capacity, config.head_dim)
        declared = {port.name: port.type for port in self._session.get_inputs()}
        dtype = np.float16 if declared.get(contract.past_key(0)) == "tensor(float16)" else np.float32
        self.buffers: list[tuple[str, str, npt.NDArray[Any]]] = [
            (past, present, np.zeros(shape, dtype))
            for layer in range(config.layers)
            for past, present in (
                (contract.past_key(layer), contract.present_key(layer)),
                (contract.past_value(layer), contract.present_value(layer)),
            )
        ]
        self.length = 0
        self._options = ort.RunOptions()
        self._options.log_severity_level = _NOTHING

    def forward(self, tokens: npt.NDArray[np.int64], logit_rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Append tokens [m] after the cached rows and return the logits of some of them, float32 [r, vocabulary]."""
        rows = len(tokens)
        total = self.length + rows
        positions = np.arange(self.length, total)
        bias = np.where(np.arange(total) <= positions[:, None], np.float32(0), _MASKED)
        logits = self.run(tokens, positions, bias, logit_rows)
        self.length = total
        return logits

    def forward_watched(
        self, tokens: npt.NDArray[np.int64], logit_rows: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.float32], int]:
        """As `forward`, and how many products expanded their matrix of few bits to float32 first, all over again.

        That is what ONNX Runtime does where it has no kernel for a format, and says in its log alone.
        """
        self._options.log_severity_level = _EVERYTHING
        try:
            with standard_error_kept() as written:
                logits = self.forward(tokens, logit_rows)
        finally:
            self._options.log_severity_level = _NOTHING
        lines = written.text.splitlines(keepends=True)
        if sys.stderr is not None:  # what something else wrote meanwhile, such as a progress bar, is shown after all
            sys.stderr.writelines(line for line in lines if _LOGGED not in line)
        return logits, sum(_EXPANDED in line for line in lines)

    def run(
        self,
        tokens: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        bias: npt.NDArray[np.float32],
        logit_rows: npt.NDArray[np.int64],
        others: Mapping[str, npt.NDArray[Any]] | None = None,
    ) -> npt.NDArray[np.float32]:
        """One call of the graph: tokens [m] at rotary positions [m], bias [m, length + m]; `length` stays.

        `others` are inputs that the contract does not have.

        Raises:
            ExportError: the graph does not run.
        """
        total = bias.shape[1]
        feeds: dict[str, npt.NDArray[Any]] = {
            "input_ids": tokens[None],
            "position_ids": positions[None],
            "attention_bias": bias[None, None],
            "seqlens_k": np.array([total - 1], np.int32),
            "total_sequence_length": np.array(total, np.int32),
            "logit_rows": logit_rows,
            **(others or {}),
        }
        binding = self._session.io_binding()
        values = {name: ort.OrtValue.ortvalue_from_numpy(value) for name, value in feeds.items()}
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        binding.bind_output(contract.LOGITS)
        for past, present, buffer in self.buffers:
            shared = ort.OrtValue.ortvalue_from_numpy(buffer)
            binding.bind_ortvalue_input(past, shared)
            binding.bind_ortvalue_output(present, shared)
        try:
            self._session.run_with_iobinding(binding, self._options)
        except _ORT_ERRORS as error:
            raise ExportError(f"the graph cannot be run: {_first_line(error)}", _HINT) from error
        logits: npt.NDArray[np.float32] = binding.get_outputs()[0].numpy()
        return logits


class FreeSession:
    """A graph of whatever inputs and outputs, held in memory, with its weights in a folder."""

    def __init__(self, model: ModelProto, folder: Path, threads: int = 0) -> None:
        """Load the model; `threads` is how many compute a run, 0 for one per physical core.

        Raises:
            ExportError: ONNX Runtime cannot load it.
        """
        self._session = _opened(model, folder, threads)

    def run(self, outputs: Sequence[str], feeds: Mapping[str, npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
        """Values of outputs in one run.

        Raises:
            ExportError: the graph does not run on these inputs.
        """
        try:
            return list(self._session.run(list(outputs), dict(feeds)))
        except _ORT_ERRORS as error:
            raise ExportError(f"the model cannot be run: {_first_line(error)}", _HINT) from error


def _first_line(error: Exception) -> str:
    """What an error says, or its kind where it says nothing."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def _as_bytes(model: ModelProto) -> bytes:
    """The model as one message.

    Raises:
        ExportError: it holds more than a message can, 2 GB.
    """
    try:
        return bytes(model.SerializeToString())
    except (EncodeError, ValueError) as error:
        raise ExportError(
            "the model holds 2 GB or more in its graph",
            "save it with its weights in a file beside it",
        ) from error


def _opened(model: str | ModelProto, folder: Path, threads: int = 0) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = _NOTHING
    options.intra_op_num_threads = threads
    # Passes are large here, so threads lose little by sleeping between parts, and what else runs gains a lot.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if isinstance(model, ModelProto) and not any(node.op_type == "MatMulNBits" for node in model.graph.node):
        # For a few passes float matrices are good enough where they lie in the file, without a copy of each.
        options.add_session_config_entry("session.disable_prepacking", "1")
    source = _as_bytes(model) if isinstance(model, ModelProto) else model
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    try:
        return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except _ORT_ERRORS as error:
        raise ExportError(f"ONNX Runtime cannot load the model: {_first_line(error)}", _HINT) from error


@cache
def multiplies_zero_points() -> bool:
    """Whether products with 4-bit weights that have zero points come out right on this machine."""
    options = ort.SessionOptions()
    options.log_severity_level = _NOTHING
    options.intra_op_num_threads = 1
    try:
        session = ort.InferenceSession(zero_point_model(), options, providers=["CPUExecutionProvider"])
        return zero_points_work(lambda rows: session.run(None, {INPUT: rows})[0])
    except _ORT_ERRORS:
        return False


def evaluate(model: ModelProto, feeds: Mapping[str, npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
    """All outputs of a small model held in memory, run once as it stands.

    Raises:
        ExportError: ONNX Runtime cannot run it.
    """
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = _NOTHING
    options.intra_op_num_threads = 1
    try:
        session = ort.InferenceSession(_as_bytes(model), options, providers=["CPUExecutionProvider"])
        return list(session.run(None, dict(feeds)))
    except _ORT_ERRORS as error:
        raise ExportError(f"a part of the model cannot be run: {_first_line(error)}") from error
