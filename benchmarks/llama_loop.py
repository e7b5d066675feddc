"""Greedy decoding with llama.cpp and a GGUF file, through the C functions that llama-cpp-python binds."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import llama_cpp
import numpy as np
import numpy.typing as npt

from prompts import prompt_tokens

# llama.cpp writes hundreds of lines about each model.
_SILENT: Final = llama_cpp.llama_log_callback(lambda _level, _text, _data: None)


class LlamaLoop:
    """A GGUF model and one context of `capacity` slots; prompts are read in passes of 512 tokens, as by default."""

    def __init__(self, model: Path, threads: int, capacity: int, clients: int = 1) -> None:
        llama_cpp.llama_backend_init()
        llama_cpp.llama_log_set(_SILENT, None)
        self._model = llama_cpp.llama_model_load_from_file(str(model).encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = capacity
        params.n_seq_max, params.kv_unified = clients, clients > 1
        params.n_threads = params.n_threads_batch = threads
        self._batch_tokens: Final = min(int(params.n_batch), 512)
        self._context: Any = llama_cpp.llama_init_from_model(self._model, params)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._sampler = llama_cpp.llama_sampler_init_greedy()
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self.vocab: Final = int(llama_cpp.llama_vocab_n_tokens(vocab))
        self._cached = 0
        self._tokens: list[int] = []
        """The tokens of the cache of `fill`."""
        self._hybrid: Final = bool(llama_cpp.llama_model_is_hybrid(self._model))
        self._prompt_state: Any = None
        """What a hybrid model, whose states cannot be cut back, remembers after the prompt."""

    def prefill(self, tokens: int, seed: int = 0) -> float:
        """Seconds to process a prompt of `tokens` tokens and choose the next one."""
        prompt = prompt_tokens(tokens, self.vocab, seed)
        self._clear()
        started = time.perf_counter()
        self._forward(prompt)
        self._next_token()
        return time.perf_counter() - started

    def decode(self, context: int, tokens: int) -> float:
        """Seconds per token of `tokens` greedy tokens after a prompt of `context` tokens, which is read once."""
        if self._cached != context:
            self._clear()
            self._forward(prompt_tokens(context, self.vocab))
            self._cached = context
            if self._hybrid:
                self._save()
        elif self._hybrid:
            self._restore()
        else:
            llama_cpp.llama_memory_seq_rm(self._memory, 0, context, -1)
        token = 1
        started = time.perf_counter()
        for _ in range(tokens):
            self._forward([token])
            token = self._next_token()
        return (time.perf_counter() - started) / tokens

    def serve(self, clients: int, prompt: int, tokens: int, seed: int) -> dict[str, Any]:
        """Answer the prompts of that many clients at a time, as its server batches them; see `EdgeRunLoop.serve`."""
        self._clear()
        first_s = [0.0] * clients
        started = time.perf_counter()
        prompts = [prompt_tokens(prompt, self.vocab, seed + client) for client in range(clients)]
        rows = [(client, place, token) for client in range(clients) for place, token in enumerate(prompts[client])]
        next_tokens = [0] * clients
        for start in range(0, len(rows), self._batch_tokens):
            part = rows[start : start + self._batch_tokens]
            for client, token in self._decode_rows(part, prompt - 1).items():
                next_tokens[client], first_s[client] = token, time.perf_counter() - started
        for place in range(prompt, prompt + tokens - 1):
            part = [(client, place, token) for client, token in enumerate(next_tokens)]
            next_tokens = list(self._decode_rows(part, place).values())
        return {"seconds": time.perf_counter() - started, "first_s": first_s}

    def _decode_rows(self, rows: Sequence[tuple[int, int, int]], wanted: int) -> dict[int, int]:
        """Run rows of sequence, place and token; returns the next token of sequences with a row at place `wanted`."""
        batch = llama_cpp.llama_batch_init(len(rows), 0, 1)
        for row, (client, place, token) in enumerate(rows):
            batch.token[row], batch.pos[row], batch.n_seq_id[row] = token, place, 1
            batch.seq_id[row][0] = client
            batch.logits[row] = place == wanted
        batch.n_tokens = len(rows)
        self._require(llama_cpp.llama_decode(self._context, batch))
        llama_cpp.llama_batch_free(batch)
        return {
            client: int(llama_cpp.llama_sampler_sample(self._sampler, self._context, row))
            for row, (client, place, _) in enumerate(rows)
            if place == wanted
        }

    def fill(self, prompt: list[int], answer: list[int], budget_s: float, *, replay: bool) -> dict[str, Any]:
        """Complete a prompt as `EdgeRunLoop.fill` does; the cache keeps what it has in common with the last one."""
        del replay  # without drafts, every token takes a pass, whichever it is
        started = time.perf_counter()
        common = next((n for n, pair in enumerate(zip(prompt, self._tokens, strict=False)) if pair[0] != pair[1]), None)
        kept = min(len(prompt) - 1 if common is None else common, len(self._tokens), len(prompt) - 1)
        llama_cpp.llama_memory_seq_rm(self._memory, 0, kept, -1)
        self._tokens = prompt[:kept]
        pending, made = prompt[kept:], 0
        while pending and not (budget_s and time.perf_counter() - started > budget_s):
            part, pending = pending[: self._batch_tokens], pending[self._batch_tokens :]
            self._forward(part)
            self._tokens += part
            if not pending:
                made += 1
                pending = [self._next_token()] if made < len(answer) else []
        return {"seconds": time.perf_counter() - started, "read": len(prompt) - kept, "ended": made == len(answer)}

    def logits(self, text: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits of every position of a text, float32 [tokens, vocabulary]; the text is read in one pass."""
        self._clear()
        count = len(text)
        batch = llama_cpp.llama_batch_init(count, 0, 1)
        for place, token in enumerate(text):
            batch.token[place] = token
            batch.pos[place] = place
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = 0
            batch.logits[place] = 1
        batch.n_tokens = count
        self._require(llama_cpp.llama_decode(self._context, batch))
        found = np.ctypeslib.as_array(llama_cpp.llama_get_logits(self._context), (count, self.vocab)).copy()
        llama_cpp.llama_batch_free(batch)
        return found

    def weights_bytes(self) -> int:
        """Number of bytes of all tensors of the file."""
        return int(llama_cpp.llama_model_size(self._model))

    def _clear(self) -> None:
        self._clear_memory()
        self._cached = 0

    def _clear_memory(self) -> None:
        llama_cpp.llama_memory_clear(self._memory, False)

    def _save(self) -> None:
        size = llama_cpp.llama_state_seq_get_size(self._context, 0)
        self._prompt_state = (ctypes.c_uint8 * size)()
        if llama_cpp.llama_state_seq_get_data(self._context, self._prompt_state, size, 0) != size:
            raise RuntimeError("llama.cpp did not copy the state of the sequence")

    def _restore(self) -> None:
        self._clear_memory()
        size = len(self._prompt_state)
        if llama_cpp.llama_state_seq_set_data(self._context, self._prompt_state, size, 0) != size:
            raise RuntimeError("llama.cpp did not take the state of the sequence back")

    def _forward(self, tokens: Sequence[int]) -> None:
        """Append tokens to the cache; only the last one of a pass gets logits."""
        for start in range(0, len(tokens), self._batch_tokens):
            part = tokens[start : start + self._batch_tokens]
            ids = (ctypes.c_int32 * len(part))(*part)
            self._require(llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(ids, len(part))))

    def _next_token(self) -> int:
        return int(llama_cpp.llama_sampler_sample(self._sampler, self._context, -1))

    @staticmethod
    def _require(status: int) -> None:
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
