"""The fastest decode loop that onnxruntime's Python API allows, as a baseline.

It runs an edge-run graph with onnxruntime and NumPy only: everything is bound once, the cache is written in place and
logits into a buffer of its own. There is no text, no sampling except argmax, no cancelling, no error handling.
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

CHUNK_TOKENS: Final = 256


class BareLoop:
    """A session of `model` (a bundle folder or an .onnx file) and one cache of `capacity` slots."""

    def __init__(
        self,
        model: Path,
        threads: int,
        capacity: int,
        config: Mapping[str, str] | None = None,
        chunk: int = CHUNK_TOKENS,
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
        inputs = {each.name: each.shape for each in self._session.get_inputs()}
        self._names: Final = frozenset(inputs)
        self.vocab: Final[int] = self._session.get_outputs()[0].shape[-1]
        caches = [name for name in inputs if name.startswith("past_key_values.")]
        _, heads, _, size = inputs[caches[0]]
        self._cache = np.zeros((len(caches), 1, heads, capacity, size), np.float32)
        for name, slots in zip(caches, self._cache, strict=True):
            value = ort.OrtValue.ortvalue_from_numpy(slots)
            self._io.bind_ortvalue_input(name, value)
            self._io.bind_ortvalue_output(name.replace("past_key_values", "present"), value)
        self._last_slot = np.zeros(1, np.int32)
        self._total = np.zeros((), np.int32)
        self._bind("seqlens_k", self._last_slot)
        self._bind("total_sequence_length", self._total)
        self._no_mask = np.zeros(capacity, np.float32)
        self._bound_widths = (0, 0)
        self._cached = 0

    def prefill(self, tokens: int, seed: int = 0) -> float:
        """Seconds to process a prompt of `tokens` tokens and choose the next one."""
        prompt = prompt_tokens(tokens, self.vocab, seed)
        started = time.perf_counter()
        self._prefill(prompt)
        return time.perf_counter() - started

    def decode(self, context: int, tokens: int) -> float:
        """Seconds per token of `tokens` greedy tokens after a prompt of `context` tokens, which is read once."""
        if self._cached != context:
            self._prefill(prompt_tokens(context, self.vocab))
        token = 1
        started = time.perf_counter()
        for position in range(context, context + tokens):
            token = int(self._forward([token], position, 1)[0].argmax())
        return (time.perf_counter() - started) / tokens

    def passes(self, context: int, width: int, repeats: int) -> float:
        """Median seconds of a pass over `width` tokens, with logits of all, after a prompt of `context` tokens."""
        if self._cached != context:
            self._prefill(prompt_tokens(context, self.vocab))
        new = prompt_tokens(width, self.vocab)
        seconds = []
        for _ in range(repeats):
            started = time.perf_counter()
            self._forward(new, context, width)
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds)

    def _prefill(self, prompt: Sequence[int]) -> None:
        for start in range(0, len(prompt), self._chunk):
            logits = self._forward(prompt[start : start + self._chunk], start, 1)
        logits[0].argmax()  # the next token, which belongs to the time of a prompt
        self._cached = len(prompt)

    def _forward(self, tokens: Sequence[int], base: int, selected: int) -> npt.NDArray[np.float32]:
        """Run `tokens` after `base` cached ones; returns logits of the last ones, float32 [selected, vocabulary]."""
        width = len(tokens)
        total = base + width
        if self._bound_widths != (width, selected):
            self._bind_widths(width, selected)
        self._ids[0] = tokens
        self._positions[0] = np.arange(base, total)
        if "attention_bias" in self._names:
            if width * total > self._no_mask.size:
                self._no_mask = np.zeros(width * self._cache.shape[3], np.float32)
            self._bind("attention_bias", self._no_mask[: width * total].reshape(1, 1, width, total))
        self._last_slot[0] = total - 1
        self._total[...] = total
        self._session.run_with_iobinding(self._io)
        return self._logits

    def _bind_widths(self, width: int, selected: int) -> None:
        self._ids = np.zeros((1, width), np.int64)
        self._positions = np.zeros((1, width), np.int64)
        self._bind("input_ids", self._ids)
        if "position_ids" in self._names:
            self._bind("position_ids", self._positions)
        self._selected = np.arange(width - selected, width)
        self._bind("logit_rows", self._selected)
        self._logits = np.empty((selected, self.vocab), np.float32)
        self._io.bind_ortvalue_output("logits", ort.OrtValue.ortvalue_from_numpy(self._logits))
        self._bound_widths = (width, selected)

    def _bind(self, name: str, array: npt.NDArray[np.generic]) -> None:
        self._io.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
