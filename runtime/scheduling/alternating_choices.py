"""Several answers to one prompt, generated in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace

from .request_queue import Chunks


def generate_choices(starts: Sequence[Callable[[], Chunks]]) -> Chunks:
    """Generate several answers in turn, a chunk each; every chunk says which one it belongs to.

    The first answer begins alone. Once it has text, its prompt is in the KV cache, and the others copy it from there.

    Args:
        starts: each begins to generate an answer.
    """
    with ExitStack() as answers:
        running: dict[int, Chunks] = {}
        for index, start in enumerate(starts):
            running[index] = chunks = answers.enter_context(closing(start()))
            if index == 0:
                chunk = next(chunks)
                yield replace(chunk, index=index)
                if chunk.finish_reason is not None:
                    del running[index]
        while running:
            for index, chunks in tuple(running.items()):
                chunk = next(chunks)
                if chunk.finish_reason is not None:
                    del running[index]
                yield replace(chunk, index=index)
