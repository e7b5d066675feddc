"""llama.cpp free and under a grammar: `llama_grammar.py MODEL THREADS TOKENS`, a JSON schema on standard input.

Prints one JSON line with the milliseconds per token of each, medians of alternating runs. Runs under the interpreter
that has llama-cpp-python.
"""

from __future__ import annotations

import json
import sys
import time
from statistics import median

import llama_cpp

_ROUNDS = 5


def main() -> None:
    """Measure, and print the result."""
    model_path, threads, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    grammar = llama_cpp.LlamaGrammar.from_json_schema(sys.stdin.read(), verbose=False)
    model = llama_cpp.Llama(model_path, n_ctx=1024, n_threads=threads, n_threads_batch=threads, verbose=False)
    prompt = list(range(100, 300))
    times: dict[str, list[float]] = {"free": [], "grammar": []}
    lengths = []
    for number in range(_ROUNDS):
        for name in ("free", "grammar") if number % 2 else ("grammar", "free"):
            model.reset()
            stream = model.generate(prompt, temp=0.0, grammar=grammar if name == "grammar" else None)
            next(stream)
            started, count = time.perf_counter(), 0
            for _, token in zip(range(tokens - 1), stream, strict=False):
                count += 1
                if token == model.token_eos():
                    break
            times[name].append((time.perf_counter() - started) / count)
            if name == "grammar":
                lengths.append(count)
            stream.close()
    result = {f"{name}_ms_per_token": 1e3 * median(each) for name, each in times.items()}
    print(json.dumps({**result, "slowdown": median(times["grammar"]) / median(times["free"]), "tokens": lengths}))


if __name__ == "__main__":
    main()
