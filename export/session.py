"""Running an exported graph as its contract says: one buffer per layer, written in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from onnx import ModelProto

from ..models.bundle import GRAPH_NAME
from . import contract
from .config import DecoderConfig

_MASKED: Final = np.float32(-1e9)


class GraphSession:
    """A loaded graph, its key-value buffers and the number of rows in them."""

    def __init__(self, bundle: Path, config: DecoderConfig, capacity: int, graph: ModelProto | None = None) -> None:
        """Load the bundle's graph, or `graph` with the bundle's weights, with room for `capacity` positions."""
        options = ort.SessionOptions()
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(bundle))
        model = str(bundle / GRAPH_NAME) if graph is None else graph.SerializeToString()
        self._session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        shape = (1, config.kv_heads, capacity, config.head_dim)
        self.buffers = [
            (past, present, np.zeros(shape, np.float32))
            for layer in range(config.layers)
            for past, present in (
                (contract.past_key(layer), contract.present_key(layer)),
                (contract.past_value(layer), contract.present_value(layer)),
            )
        ]
        self.length = 0

    def forward(self, tokens: npt.NDArray[np.int64], logit_rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Append tokens [m] after the cached rows and return the logits of some of them, float32 [r, vocabulary]."""
        rows = len(tokens)
        total = self.length + rows
        positions = np.arange(self.length, total)
        bias = np.where(np.arange(total) <= positions[:, None], np.float32(0), _MASKED)
        logits = self.run(tokens, positions, bias, logit_rows)
        self.length = total
        return logits

    def run(
        self,
        tokens: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        bias: npt.NDArray[np.float32],
        logit_rows: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.float32]:
        """One call of the graph: tokens [m] at rotary positions [m], bias [m, length + m]; `length` stays."""
        total = bias.shape[1]
        feeds: dict[str, npt.NDArray[Any]] = {
            "input_ids": tokens[None],
            "position_ids": positions[None],
            "attention_bias": bias[None, None],
            "seqlens_k": np.array([total - 1], np.int32),
            "total_sequence_length": np.array(total, np.int32),
            "logit_rows": logit_rows,
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
        self._session.run_with_iobinding(binding)
        logits: npt.NDArray[np.float32] = binding.get_outputs()[0].numpy()
        return logits
