"""Beam search and diverse beam search: the texts of the largest scores, searched in breadth.

Sources: transformers 5, `GenerationMixin._beam_search` with `early_stopping=False`, whose tokens this gives; for groups
Vijayakumar et al., "Diverse beam search" (2016), as transformers 4 has it: the groups of a step choose one after the
other, and a token loses `diversity_penalty` for every beam of the groups before that has taken it.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import count
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from ...errors import InputError
from ..decode import FinishReason
from ..sampling.sampler import largest_indices
from .search import Continuation, RankingSearch, SearchRun

if TYPE_CHECKING:
    from ..options import GenerateOptions
    from ..text.tokenizer import TextTokenizer


class Group:
    """The beams of a group, whose scores are log-probabilities after penalties, and those that have ended, whose scores
    count for the choice; the best first.

    Args:
        size: number of beams of the group.
        width: number of beams of all groups.
        length_penalty: as the option.
    """

    def __init__(self, size: int, width: int, length_penalty: float) -> None:
        self.running = [Continuation()]
        self.ended: list[Continuation] = []
        self.chosen: list[int] = []
        """The tokens of the last step, without those that end a text."""
        self._size: Final = size
        self._width: Final = width
        self._length_penalty: Final = length_penalty

    def advance(self, run: SearchRun, totals: npt.NDArray[np.float64], logits: npt.NDArray[np.float32]) -> None:
        """Take the best continuations of the running beams by one token.

        Args:
            run: the search.
            totals: scores float64 `[k, V]` of every continuation.
            logits: logits float32 `[k, V]` of the model after every beam.
        """
        flat, vocab_size = totals.ravel(), totals.shape[1]
        kept = max(2, 1 + len(run.limits.eos)) * self._size
        found = largest_indices(flat, kept, np.empty(flat.size, np.bool_))
        found = found[np.argsort(-flat[found], kind="stable")][:kept]
        beams, self.running, self.chosen = self.running, [], []
        for rank, at in enumerate(found[flat[found] > -np.inf].tolist()):
            index, token = divmod(at, vocab_size)
            path = run.extended(beams[index], token, logits[index], self._width)._replace(score=float(flat[at]))
            if path.finish is not FinishReason.STOP and len(self.chosen) < self._size:
                self.chosen.append(token)
            if path.finish is None and len(self.running) < self._size:
                self.running.append(path)
            elif path.finish is not None and rank < self._size:
                self.ended.append(path._replace(score=self._normalized(path)))
        self.ended = sorted(self.ended, key=lambda beam: -beam.score)[: self._size]
        full = len(self.ended) == self._size and self.running
        if full and self._normalized(self.running[0]) <= self.ended[-1].score:
            self.running = []

    def _normalized(self, path: Continuation) -> float:
        return path.score / math.pow(len(path.tokens), self._length_penalty)


class BeamSearch(RankingSearch):
    """Beam search; the arguments are the options of these names."""

    def __init__(
        self, n: int, num_beams: int, beam_groups: int, diversity_penalty: float, length_penalty: float
    ) -> None:
        super().__init__(n)
        self._diversity_penalty: Final = diversity_penalty
        self._groups: Final = [Group(num_beams // beam_groups, num_beams, length_penalty) for _ in range(beam_groups)]

    def best(self, run: SearchRun) -> list[Continuation]:
        """Search in breadth: one pass for all beams a token."""
        forest, groups = run.forest, self._groups
        self._advance(run, np.broadcast_to(run.logits, (len(groups), run.logits.size)))
        while running := [beam for group in groups for beam in group.running]:
            parents = forest.keep([beam.node for beam in running])
            nodes = count(forest.size)
            for group in groups:
                group.running = [beam._replace(node=next(nodes)) for beam in group.running]
            self._advance(run, forest.extend(parents, [beam.tokens[-1] for beam in running]))
        return sorted((beam for group in groups for beam in group.ended), key=lambda beam: -beam.score)

    def _advance(self, run: SearchRun, logits: npt.NDArray[np.float32]) -> None:
        """Let every group choose, by the logits float32 `[k, V]` after the running beams of all groups."""
        taken: Counter[int] = Counter()
        first = 0
        for group in self._groups:
            if not group.running:
                continue
            own = logits[first : first + len(group.running)]
            first += len(own)
            totals = np.array(
                [
                    beam.score + run.scores(beam.tokens, row).astype(np.float64)
                    for beam, row in zip(group.running, own, strict=True)
                ]
            )
            totals[:, list(taken)] -= self._diversity_penalty * np.array(list(taken.values()))
            group.advance(run, totals, own)
            taken.update(group.chosen)


def search(options: GenerateOptions, _: TextTokenizer) -> BeamSearch:
    """The search that options ask for.

    Raises:
        InputError: they do not go together.
    """
    beams, groups = options.num_beams, options.beam_groups
    if options.n > beams:
        raise InputError(f"n is {options.n} and num_beams is {beams}", "at most as many answers as beams are found")
    if beams % groups:
        raise InputError(f"num_beams is {beams} and beam_groups is {groups}", "groups must have equally many beams")
    return BeamSearch(options.n, beams, groups, options.diversity_penalty, options.length_penalty)
