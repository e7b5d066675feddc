"""Greedy decoding with OpenVINO GenAI and an export of optimum-intel."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import openvino
import openvino_genai

from prompts import prompt_tokens


class _TokenTimes(openvino_genai.StreamerBase):  # type: ignore[misc]
    """Keeps the time at which each token arrived."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def write(self, token: int | list[int]) -> openvino_genai.StreamingStatus:
        """Record one call; several tokens that come in one call count as that many."""
        now = time.perf_counter()
        self.times += [now] * (len(token) if isinstance(token, list) else 1)
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        """Nothing is left to do at the end."""


class OpenvinoLoop:
    """An OpenVINO GenAI pipeline with its default settings, apart from the number of threads.

    By default it keeps keys and values in 8 bits, and the cache of earlier prompts: a prompt that is to be timed must
    be a new one.
    """

    def __init__(self, model: Path, threads: int, capacity: int) -> None:
        del capacity  # its cache grows
        self._settings: Final = {"INFERENCE_NUM_THREADS": threads}
        self._pipeline = openvino_genai.LLMPipeline(str(model), "CPU", self._settings)
        self._graph: Final = model / "openvino_model.xml"
        self._whole: Any = None
        self.vocab: Final[int] = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]

    def prefill(self, tokens: int, seed: int = 0) -> float:
        """Seconds to process a prompt of `tokens` tokens and choose the next one."""
        started = time.perf_counter()
        return self._answer(prompt_tokens(tokens, self.vocab, seed), 1)[0] - started

    def decode(self, context: int, tokens: int) -> float:
        """Seconds per token of `tokens` greedy tokens after a prompt of `context` tokens."""
        times = self._answer(prompt_tokens(context, self.vocab), tokens + 1)
        return (times[-1] - times[0]) / tokens

    def logits(self, text: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits of every position of a text, float32 [tokens, vocabulary]; the pipeline computes the last alone."""
        if self._whole is None:
            self._whole = openvino.Core().compile_model(self._graph, "CPU", self._settings).create_infer_request()
        self._whole.reset_state()
        ids = np.array([text], np.int64)
        inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids), "beam_idx": np.zeros(1, np.int32)}
        inputs["position_ids"] = np.arange(len(text))[None]
        found: npt.NDArray[np.float32] = self._whole.infer(inputs)["logits"][0]
        return found

    def weights_bytes(self) -> int:
        """Number of bytes of all constants of the graph."""
        return self._graph.with_suffix(".bin").stat().st_size

    def _answer(self, prompt: list[int], tokens: int) -> list[float]:
        """The times at which the tokens of an answer arrived."""
        config = openvino_genai.GenerationConfig(
            max_new_tokens=tokens, min_new_tokens=tokens, ignore_eos=True, do_sample=False
        )
        streamer = _TokenTimes()
        self._pipeline.generate(openvino.Tensor(np.array([prompt], np.int64)), config, streamer)
        if len(streamer.times) != tokens:
            raise RuntimeError(f"an answer of {len(streamer.times)} tokens instead of {tokens}")
        return streamer.times
