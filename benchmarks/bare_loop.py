"""The fastest plain loop over an edge-run graph that onnxruntime's Python API allows: the yardstick for the runtime.

Nothing but onnxruntime and NumPy: everything bound once, the cache written in place, logits into a buffer of our own,
no text, no sampling beyond argmax, no cancelling, no error handling.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from prompts import prompt_tokens

CHUNK_ROWS: Final = 256


class BareLoop:
    """A session over `model` (a bundle folder or an .onnx file) and one cache of `capacity` rows."""

    def __init__(
        self, model: Path, threads: int, capacity: int, config: Mapping[str, str] | None = None, chunk: int = CHUNK_ROWS
    ) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.enable_mem_pattern = False
        for key, value in (config or {}).items():
            options.add_session_config_entry(key, value)
        graph = model / "model.onnx" if model.is_dir() else model
        self._session = ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
        self._io = self._session.io_binding()
        self._chunk = chunk
        inputs = {port.name: port.shape for port in self._session.get_inputs()}
        self._names: Final = frozenset(inputs)
        self.vocab: Final[int] = self._session.get_outputs()[0].shape[-1]
        caches = [name for name in inputs if name.startswith("past_key_values.")]
        _, heads, _, size = inputs[caches[0]]
        self._cache = np.zeros((len(caches), 1, heads, capacity, size), np.float32)
        for name, rows in zip(caches, self._cache, strict=True):
            value = ort.OrtValue.ortvalue_from_numpy(rows)
            self._io.bind_ortvalue_input(name, value)
            self._io.bind_ortvalue_output(name.replace("past_key_values", "present"), value)
        self._past = np.zeros(1, np.int32)
        self._total = np.zeros((), np.int32)
        self._bind("seqlens_k", self._past)
        self._bind("total_sequence_length", self._total)
        self._open = np.zeros(capacity, np.float32)
        self._shape = (0, 0)
        self._held = 0

    def prefill(self, tokens: int) -> float:
        """Seconds from `tokens` ids and an empty cache to the next token."""
        prompt = prompt_tokens(tokens, self.vocab)
        started = time.perf_counter()
        self._prefill(prompt)
        return time.perf_counter() - started

    def decode(self, context: int, tokens: int) -> float:
        """Seconds for each of `tokens` greedy tokens after a prompt of `context`."""
        token = self._prefill(prompt_tokens(context, self.vocab))
        started = time.perf_counter()
        for position in range(context, context + tokens):
            token = int(self._forward([token], position, 1)[0].argmax())
        return (time.perf_counter() - started) / tokens

    def passes(self, context: int, rows: int, times: int) -> float:
        """Seconds of a pass over `rows` tokens after a prompt of `context`, logits for all: the median of `times`."""
        if self._held != context:
            self._prefill(prompt_tokens(context, self.vocab))
        new = prompt_tokens(rows, self.vocab)
        seconds = []
        for _ in range(times):
            started = time.perf_counter()
            self._forward(new, context, rows)
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds)

    def _prefill(self, prompt: Sequence[int]) -> int:
        for start in range(0, len(prompt), self._chunk):
            logits = self._forward(prompt[start : start + self._chunk], start, 1)
        self._held = len(prompt)
        return int(logits[0].argmax())

    def _forward(self, tokens: Sequence[int], base: int, rows: int) -> npt.NDArray[np.float32]:
        """Run `tokens` after `base` cached rows; logits of the last `rows` of them, float32 `[rows, vocabulary]`."""
        width = len(tokens)
        total = base + width
        if self._shape != (width, rows):
            self._bind_shape(width, rows)
        self._ids[0] = tokens
        self._positions[0] = np.arange(base, total)
        if "attention_bias" in self._names:
            if width * total > self._open.size:
                self._open = np.zeros(width * self._cache.shape[3], np.float32)
            self._bind("attention_bias", self._open[: width * total].reshape(1, 1, width, total))
        self._past[0] = total - 1
        self._total[...] = total
        self._session.run_with_iobinding(self._io)
        return self._logits

    def _bind_shape(self, width: int, rows: int) -> None:
        self._ids = np.zeros((1, width), np.int64)
        self._positions = np.zeros((1, width), np.int64)
        self._bind("input_ids", self._ids)
        if "position_ids" in self._names:
            self._bind("position_ids", self._positions)
        self._row_ids = np.arange(width - rows, width)
        self._bind("logit_rows", self._row_ids)
        self._logits = np.empty((rows, self.vocab), np.float32)
        self._io.bind_ortvalue_output("logits", ort.OrtValue.ortvalue_from_numpy(self._logits))
        self._shape = (width, rows)

    def _bind(self, name: str, array: npt.NDArray[np.generic]) -> None:
        self._io.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
