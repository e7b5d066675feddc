"""All answers of a model of six tokens, with their log-probabilities by the float64 decoder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

import edgerun
from edgerun.export.check.reference import reference_logits
from edgerun.export.checkpoint.config import read_config
from edgerun.export.checkpoint.safetensors_files import Checkpoint
from edgerun.runtime.decode import DecodeLimits, Step
from edgerun.runtime.sampling.sampler import Sampler, SamplingParams
from edgerun.runtime.strategies.search import Search, search_steps
from support.tiny_models import write_bundle

V: Final = 6
EOS: Final = 0
PROMPT: Final = (5, 3, 5, 2)


class SixTokens:
    """A tiny model of six tokens, its session, and the probabilities of everything that it can answer."""

    def __init__(self, folder: Path, seed: int = 3) -> None:
        self.bundle = write_bundle(folder, "llama", vocab_size=V, seed=seed)
        self._checkpoint = Checkpoint(folder / "checkpoint")
        self._config = read_config(folder / "checkpoint")
        self.logprobs = cache(self._logprobs)

    def _logprobs(self, path: tuple[int, ...]) -> npt.NDArray[np.float64]:
        """Log-probabilities float64 `[V]` of the token after the prompt and a path."""
        logits = reference_logits(self._checkpoint, self._config, np.array([*PROMPT, *path]), 64)[-1].astype(np.float64)
        return logits - np.log(np.exp(logits).sum())

    def answers(self, most_tokens: int, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], float]]:
        """All answers of at most that many tokens and their log-probabilities; shorter ones end with `EOS`."""
        for token, logprob in enumerate(self.logprobs(path)):
            whole = (*path, token)
            if token == EOS or len(whole) == most_tokens:
                yield whole, float(logprob)
            else:
                yield from ((each, total + float(logprob)) for each, total in self.answers(most_tokens, whole))


def steps_of(
    engine: edgerun.Engine,
    search: Search,
    prompt: Sequence[int] = PROMPT,
    *,
    eos: Sequence[int] = (EOS,),
    most_tokens: int,
    sampling: SamplingParams | None = None,
) -> list[Step]:
    """The steps of a search over a real session."""
    bound = engine.model.new_sequence().bound
    sampler = Sampler(sampling or SamplingParams(), bound.graph_io.vocab_size)
    limits = DecodeLimits(most_tokens, frozenset(eos))
    steps = list(search_steps(search, bound, prompt, sampler, limits, None, None))
    assert bound.arena.length <= len(prompt) + sum(len(step.tokens) for step in steps)
    return steps
