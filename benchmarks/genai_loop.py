"""Greedy decoding with ONNX Runtime GenAI and an export of its model builder."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnxruntime_genai as og

from prompts import prompt_tokens


class GenaiLoop:
    """A GenAI model; a generator has a cache of `capacity` slots, and is kept for decoding after the same context.

    With `clients`, the model is an engine's, which answers so many requests at a time.
    """

    def __init__(self, model: Path, threads: int, capacity: int, clients: int = 0) -> None:
        config = og.Config(str(model))
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
        if clients:
            config.overlay(json.dumps({"engine": {"static_batching": {"max_batch_size": clients}}}))
        self._model = og.Model(config)
        self._engine = og.Engine(self._model) if clients else None
        self._weights: Final = model / "model.onnx.data"
        self._capacity = capacity
        description = json.loads((model / "genai_config.json").read_text(encoding="utf-8"))
        self.vocab: Final[int] = description["model"]["vocab_size"]
        self._decoding: tuple[int, Any] = 0, None
        layers = description["model"]["decoder"]
        self._rewinds: Final = not any("conv" in name for name in layers["inputs"])
        """Whether GenAI can return to a prompt, which it cannot for models with convolution or recurrent states."""

    def prefill(self, tokens: int, seed: int = 0) -> float:
        """Seconds to process a prompt of `tokens` tokens and choose the next one."""
        prompt = prompt_tokens(tokens, self.vocab, seed)
        self._decoding = 0, None
        generator = self._generator()
        started = time.perf_counter()
        generator.append_tokens(prompt)
        generator.generate_next_token()
        generator.get_next_tokens()
        return time.perf_counter() - started

    def decode(self, context: int, tokens: int) -> float:
        """Seconds per token of `tokens` greedy tokens after a prompt of `context` tokens.

        It is read once, or before each measurement if the model cannot return to it; that time is not counted.
        """
        cached, generator = self._decoding
        if cached != context or not self._rewinds:
            self._decoding = 0, None  # a second cache would double the peak of memory
            generator = self._generator()
            generator.append_tokens(prompt_tokens(context, self.vocab))
            self._decoding = context, generator
        else:
            generator.rewind_to(context - 1)
            generator.append_tokens(prompt_tokens(context, self.vocab)[-1:])
        generator.generate_next_token()  # from the logits of the prompt
        started = time.perf_counter()
        for _ in range(tokens):
            generator.generate_next_token()
            generator.get_next_tokens()
        seconds = time.perf_counter() - started
        if generator.token_count() != context + tokens + 1:
            raise RuntimeError(f"the answer ended after {generator.token_count() - context} tokens")
        return seconds / tokens

    def logits(self, text: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits of every position of a text, float32 [tokens, vocabulary]; the text is read in one pass."""
        generator = self._generator()
        generator.append_tokens(list(text))
        found: npt.NDArray[np.float32] = np.array(generator.get_output("logits")[0], np.float32)
        return found

    def weights_bytes(self) -> int:
        """Number of bytes of the file with the tensors."""
        return self._weights.stat().st_size

    def serve(self, clients: int, prompt: int, tokens: int, seed: int) -> dict[str, Any]:
        """Answer the prompts of that many clients at a time in GenAI's engine; see `EdgeRunLoop.serve`."""
        engine: Any = self._engine
        started = time.perf_counter()
        requests = []
        for client in range(clients):
            requests.append(engine.create_request())
            options = og.TurnOptions(requests[-1])
            options.set_do_sample(False)
            options.set_max_generated_tokens(tokens)
            options.set_min_generated_tokens(tokens)
            ids = np.array(prompt_tokens(prompt, self.vocab, seed + client), np.int32)
            requests[-1].begin_turn(ids, options)
        events = engine.create_event_buffer(clients)
        first_s: dict[int, float] = {}
        generated = 0
        while engine.has_pending_requests():
            for event in engine.run(events):
                if int(event.flags) & int(og.EngineEventFlags.TOKEN):
                    generated += 1
                    first_s.setdefault(requests.index(event.request), time.perf_counter() - started)
        seconds = time.perf_counter() - started
        for request in requests:
            request.close()
        if generated != clients * tokens:
            raise RuntimeError(f"{generated} tokens for {clients} answers of {tokens}")
        return {"seconds": seconds, "first_s": list(first_s.values())}

    def _generator(self) -> Any:
        params = og.GeneratorParams(self._model)
        params.set_search_options(max_length=self._capacity, do_sample=False)
        return og.Generator(self._model, params)
