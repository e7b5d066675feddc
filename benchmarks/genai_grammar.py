"""ONNX Runtime GenAI free and under a schema: `genai_grammar.py MODEL THREADS TOKENS`, the schema on standard input.

Prints one JSON line with the milliseconds per token of each, medians of alternating runs. Runs under the interpreter
that has onnxruntime-genai.
"""

from __future__ import annotations

import json
import sys
import time
from statistics import median

import onnxruntime_genai as og

_ROUNDS = 5


def main() -> None:
    """Measure, and print the result."""
    model_path, threads, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    schema = sys.stdin.read()
    config = og.Config(model_path)
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
    model = og.Model(config)
    prompt = list(range(100, 300))
    times: dict[str, list[float]] = {"free": [], "grammar": []}
    lengths = []
    for number in range(_ROUNDS):
        for name in ("free", "grammar") if number % 2 else ("grammar", "free"):
            params = og.GeneratorParams(model)
            params.set_search_options(max_length=1024, do_sample=False)
            if name == "grammar":
                params.set_guidance("json_schema", schema)
            generator = og.Generator(model, params)
            generator.append_tokens(prompt)
            generator.generate_next_token()
            started, count = time.perf_counter(), 0
            while count < tokens - 1 and not generator.is_done():
                generator.generate_next_token()
                count += 1
            times[name].append((time.perf_counter() - started) / count)
            if name == "grammar":
                lengths.append(count)
    result = {f"{name}_ms_per_token": 1e3 * median(each) for name, each in times.items()}
    print(json.dumps({**result, "slowdown": median(times["grammar"]) / median(times["free"]), "tokens": lengths}))


if __name__ == "__main__":
    main()
