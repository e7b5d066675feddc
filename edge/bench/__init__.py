"""Compares plain and speculative decoding, over prompts or a recording.

`prompt_sets` reads conversations, `runner` measures them, `ratios` compares the modes, `bench_result` holds the
outcome, and `clients` measures several clients of one engine; the command presents both.
"""
