"""ONNX Runtime sessions of the exporter: over exported graphs, and over any model in memory.

`ContractSession` runs a graph exactly as the graph contract says. Unlike the runtime's `GraphSession`, it takes nothing
from introspection, runs graphs that are still in memory, gives full control of bias and positions, and counts kernels
that expand low-bit weights.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from google.protobuf.message import EncodeError
from onnx import ModelProto

from ...errors import ExportError
from ...models.bundle import GRAPH_NAME
from ...runtime.graph.ort import ORT_ERRORS, SILENT, VERBOSE, error_reason, load_session, run_options, session_options
from ...runtime.text.tokenizer_library import captured_stderr
from ..graph import inputs_outputs

TOLERANCE: Final = 1e-3
"""Largest difference that rounding in float32 explains."""
_BLOCKED: Final = np.float32(-1e9)
_LOG_MARK: Final = "onnxruntime:"
"""Text in every line that ONNX Runtime logs."""
_EXPANSION_MESSAGE: Final = "unpacked compute mode"
"""Text in the line that ONNX Runtime logs when a product expands its matrix to float32."""
_HINT: Final = "copy the model again if it may be damaged; else update onnxruntime"


@contextmanager
def export_errors(what: str, hint: str = "") -> Iterator[None]:
    """Within the block, errors of ONNX Runtime become an error of the export.

    Args:
        what: what failed, for the message.
        hint: what to do about it.

    Raises:
        ExportError: ONNX Runtime raised an error.
    """
    try:
        yield
    except ORT_ERRORS as error:
        raise ExportError(f"{what}: {error_reason(error)}", hint) from error


def require_close(
    found: npt.NDArray[Any],
    expected: npt.NDArray[Any],
    what: str,
    hint: str = "this is a defect of the exporter: please report the model",
    allowed: float | None = None,
) -> float:
    """Return the largest difference of a graph's outputs from the expected ones.

    Args:
        found: the outputs.
        expected: what they should be, of the same shape.
        what: "the exported graph differs from the reference", for the message.
        hint: what to do about a difference.
        allowed: the largest difference allowed; None for `TOLERANCE`, times the standard deviation if that is above 1.

    Raises:
        ExportError: it is larger, or not a number.
    """
    difference = float(np.abs(found.astype(np.float64) - expected).max())
    if allowed is None:
        allowed = TOLERANCE * max(1.0, float(expected.std(dtype=np.float64)))
    if not difference <= allowed:
        raise ExportError(f"{what} by {difference:.2g}, {allowed:.2g} is allowed", hint)
    return difference


class ContractSession:
    """A loaded graph, its KV buffers, and the number of committed slots in them (`length`)."""

    def __init__(
        self,
        bundle: Path,
        capacity: int,
        graph: ModelProto | None = None,
        *,
        extra_outputs: Sequence[str] = (),
    ) -> None:
        """Load the bundle's graph, or `graph` with the bundle's weights, with `capacity` cache slots.

        The caches have the element type and size that the graph declares. Every pass leaves the values of
        `extra_outputs`, which the contract does not have, in `extra`.

        Raises:
            ExportError: ONNX Runtime cannot load it.
        """
        self._session = _load(str(bundle / GRAPH_NAME) if graph is None else graph, bundle)
        self.buffers: list[tuple[str, str, npt.NDArray[Any]]] = []
        """Names of cache inputs and outputs, and the buffers that both are bound to."""
        for value in self._session.get_inputs():
            if value.name.startswith("past_key_values."):
                dtype = np.float16 if value.type == "tensor(float16)" else np.float32
                buffer = np.zeros((1, value.shape[1], capacity, value.shape[3]), dtype)
                self.buffers.append((value.name, value.name.replace("past_key_values", "present"), buffer))
        self._states = {
            value.name: np.zeros([size if isinstance(size, int) else 0 for size in value.shape], np.float32)
            for value in self._session.get_inputs()
            if value.name.startswith(inputs_outputs.PAST_STATES)
        }
        """The states of layers without attention before the next token, `[1, ...]`."""
        self._new_states: list[npt.NDArray[np.float32]] = []
        """What the last pass returned of them: states of the same shape, or in front of them others along axis 1."""
        self.length = 0
        self._extra_outputs = tuple(extra_outputs)
        self.extra: list[npt.NDArray[Any]] = []
        """The extra outputs of the last pass, in order."""
        self._options = run_options()

    def reset(self) -> None:
        """Begin a new text."""
        self.length = 0
        self._states = {name: np.zeros_like(state) for name, state in self._states.items()}

    def forward(self, tokens: npt.NDArray[np.int64], logits_for: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Run tokens [m] after the committed slots and commit theirs.

        Returns:
            Logits of the tokens at the indices `logits_for`, float32 [r, vocabulary].
        """
        total = self.length + len(tokens)
        positions = np.arange(self.length, total)
        bias = np.where(np.arange(total) <= positions[:, None], np.float32(0), _BLOCKED)
        logits = self.run(tokens, positions, bias, logits_for)
        self.length = total
        for (name, state), new in zip(self._states.items(), self._new_states, strict=True):
            # Without rejected tokens there are no updates to come: their input has no tokens.
            self._states[name] = np.ascontiguousarray(new[:, new.shape[1] - state.shape[1] :])
        return logits

    def forward_counting_expansions(
        self, tokens: npt.NDArray[np.int64], logits_for: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.float32], int]:
        """Run `forward`, and count the products that first expanded their low-bit matrix to float32.

        ONNX Runtime does so, in every pass, if it has no kernel for a format, and reports it only in its log.
        """
        self._options.log_severity_level = VERBOSE
        try:
            with captured_stderr() as written:
                logits = self.forward(tokens, logits_for)
        finally:
            self._options.log_severity_level = SILENT
        lines = written.decode("utf-8", errors="replace").splitlines(keepends=True)
        if sys.stderr is not None:  # show what something else wrote meanwhile, such as a progress bar
            sys.stderr.writelines(line for line in lines if _LOG_MARK not in line)
        return logits, sum(_EXPANSION_MESSAGE in line for line in lines)

    def run(
        self,
        tokens: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        bias: npt.NDArray[np.float32],
        logits_for: npt.NDArray[np.int64],
        extra_inputs: Mapping[str, npt.NDArray[Any]] | None = None,
    ) -> npt.NDArray[np.float32]:
        """Run the graph on tokens [m] at rotary positions [m] with bias [m, length + m], without committing slots.

        `extra_inputs` are inputs that the contract does not have.

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
            "logit_rows": logits_for,
            **self._states,
            **(extra_inputs or {}),
        }
        binding = self._session.io_binding()
        values = {name: ort.OrtValue.ortvalue_from_numpy(value) for name, value in feeds.items()}
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        binding.bind_output(inputs_outputs.LOGITS)
        for name in (*map(inputs_outputs.present_of, self._states), *self._extra_outputs):
            binding.bind_output(name)
        for past, present, buffer in self.buffers:
            shared = ort.OrtValue.ortvalue_from_numpy(buffer)
            binding.bind_ortvalue_input(past, shared)
            binding.bind_ortvalue_output(present, shared)
        with export_errors("the graph cannot be run", _HINT):
            self._session.run_with_iobinding(binding, self._options)
        outputs = binding.get_outputs()
        first_extra = 1 + len(self._states)
        self._new_states = [output.numpy() for output in outputs[1:first_extra]]
        self.extra = [output.numpy() for output in outputs[first_extra : first_extra + len(self._extra_outputs)]]
        logits: npt.NDArray[np.float32] = outputs[0].numpy()
        return logits


class ModelSession:
    """A model held in memory, with any inputs and outputs and its weights in a folder."""

    def __init__(self, model: ModelProto, folder: Path, threads: int = 0) -> None:
        """Load the model; `threads` is the number of intra-op threads, 0 for `default_threads`.

        Raises:
            ExportError: ONNX Runtime cannot load it.
        """
        self._session = _load(model, folder, threads)

    def run(self, outputs: Sequence[str], feeds: Mapping[str, npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
        """Compute the named outputs.

        Raises:
            ExportError: the model does not run on these inputs.
        """
        with export_errors("the model cannot be run", _HINT):
            return list(self._session.run(list(outputs), dict(feeds)))


def evaluate_passes(
    model: ModelProto, passes: Sequence[Mapping[str, npt.NDArray[Any]]], folder: Path
) -> list[list[npt.NDArray[Any]]]:
    """Compute all outputs of a model held in memory for several feeds, without graph optimizations.

    Args:
        model: the model.
        passes: what is fed, for each pass.
        folder: folder of the model's external data.

    Raises:
        ExportError: ONNX Runtime cannot run it.
    """
    options = _options(model, folder, 1)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    with export_errors("a part of the model cannot be run"):
        session = load_session(_serialized(model), options)
        return [list(session.run(None, dict(feeds))) for feeds in passes]


def _options(model: str | ModelProto, folder: Path, threads: int) -> ort.SessionOptions:
    options = session_options(threads)
    # Passes are wide here, so threads lose little by sleeping between operators, and other work gains a lot.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if isinstance(model, ModelProto) and not any(node.op_type == "MatMulNBits" for node in model.graph.node):
        # For a few passes, float matrices are fast enough as they are in the file, without a packed copy of each.
        options.add_session_config_entry("session.disable_prepacking", "1")
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    return options


def _load(model: str | ModelProto, folder: Path, threads: int = 0) -> ort.InferenceSession:
    options = _options(model, folder, threads)
    source = _serialized(model) if isinstance(model, ModelProto) else model
    with export_errors("ONNX Runtime cannot load the model", _HINT):
        return load_session(source, options)


def _serialized(model: ModelProto) -> bytes:
    """The model as one protobuf message.

    Raises:
        ExportError: it is larger than a message can be, 2 GB.
    """
    try:
        return bytes(model.SerializeToString())
    except (EncodeError, ValueError) as error:
        raise ExportError(
            "the model holds 2 GB or more in its graph file", "save it with its weights in a separate file"
        ) from error
