"""Time to first token of a question about an image: edge-run, and llama.cpp's mtmd."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

QUESTION = "what is in this picture"


class EdgeRunVision:
    """A bundle with a vision tower."""

    def __init__(self, model: Path, threads: int, lossy_image_tokens: float = 1.0) -> None:
        import edgerun  # noqa: PLC0415 -- not in llama.cpp's environment

        self._engine = edgerun.load(model, threads=threads, lossy_image_tokens=lossy_image_tokens)

    def first_token(self, image: str, question: str = QUESTION) -> dict[str, float]:
        """Seconds to the first token of an answer about an image, tokens of its prompt, and passes."""
        data = Path(image).read_bytes()
        parts = [{"type": "image", "image": data}, {"type": "text", "text": question}]
        started = time.perf_counter()
        reply = self._engine.generate([{"role": "user", "content": parts}], max_tokens=1, ignore_eos=True)
        seconds = time.perf_counter() - started
        stats, size = reply.stats, self._engine.graph_io.cache_bytes_per_token
        tokens, reused = stats.prompt_tokens, stats.reused_tokens
        cached = {"reused": reused, "cache_bytes": tokens * size}
        return {"seconds": seconds, "tokens": tokens, "passes": stats.target_passes, **cached}


class LlamaVision:
    """A GGUF model and its mmproj file, as llama-mtmd-cli runs them: passes of up to 512 tokens."""

    def __init__(self, model: Path, mmproj: str, threads: int, capacity: int) -> None:
        import llama_cpp  # noqa: PLC0415 -- not in edge-run's environment
        from llama_cpp import mtmd_cpp  # noqa: PLC0415 -- as above

        self._llama, self._mtmd = llama_cpp, mtmd_cpp
        self._silent = llama_cpp.llama_log_callback(lambda _level, _text, _data: None)
        llama_cpp.llama_backend_init()
        llama_cpp.llama_log_set(self._silent, None)
        mtmd_cpp.mtmd_helper_log_set(self._silent, None)
        loaded = llama_cpp.llama_model_load_from_file(str(model).encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_threads, params.n_threads_batch = capacity, threads, threads
        self._context: Any = llama_cpp.llama_init_from_model(loaded, params)
        settings = mtmd_cpp.mtmd_context_params_default()
        settings.use_gpu, settings.n_threads, settings.print_timings = False, threads, False
        self._sight: Any = mtmd_cpp.mtmd_init_from_file(mmproj.encode(), loaded, settings)
        if not loaded or not self._context or not self._sight:
            raise RuntimeError(f"llama.cpp cannot load {model} with {mmproj}")
        self._sampler = llama_cpp.llama_sampler_init_greedy()

    def first_token(self, image: str) -> dict[str, float]:
        """Seconds to the first token of an answer about an image, and tokens of its prompt."""
        llama, mtmd = self._llama, self._mtmd
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        text = b"user: " + mtmd.mtmd_default_marker() + f"{QUESTION}\n".encode()
        started = time.perf_counter()
        bitmap = mtmd.mtmd_helper_bitmap_init_from_file(self._sight, image.encode(), False)
        chunks = mtmd.mtmd_input_chunks_init()
        given = mtmd.mtmd_input_text(text, len(text), False, True)
        bitmaps = (mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap)
        if mtmd.mtmd_tokenize(self._sight, chunks, mtmd.byref(given), bitmaps, 1):
            raise RuntimeError("mtmd_tokenize failed")
        past = llama.llama_pos(0)
        arguments = (self._sight, self._context, chunks, 0, 0, 512, True, mtmd.byref(past))
        if mtmd.mtmd_helper_eval_chunks(*arguments):
            raise RuntimeError("mtmd_helper_eval_chunks failed")
        llama.llama_sampler_sample(self._sampler, self._context, -1)
        seconds, tokens = time.perf_counter() - started, mtmd.mtmd_helper_get_n_tokens(chunks)
        mtmd.mtmd_input_chunks_free(chunks)
        mtmd.mtmd_bitmap_free(bitmap)
        return {"seconds": seconds, "tokens": tokens}
