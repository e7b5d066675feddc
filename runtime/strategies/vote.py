"""A vote of several answers, each weighted with its probability.

Source: Zhou et al., "Bridging internal probability and self-consistency for effective and efficient LLM reasoning"
(2025): perplexity consistency, in which each different answer counts once, and not with the number of its samples.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

import numpy as np


def by_vote(answers: Mapping[int, tuple[str, float]], expression: str | None) -> dict[int, float]:
    """Order answers: first the most probable one of each group, then all others.

    A group has the answers of equal text, or of an equal last match of the expression in it: its group, or all of it.
    An answer without a match stands for its text.

    Args:
        answers: text and log-probability of each answer, by its number.
        expression: a regular expression; None to compare whole texts.

    Returns:
        Log-sum-exp of the log-probabilities of the group of each answer, the largest first, by the answer's number.
    """
    pattern = None if expression is None else re.compile(expression)

    def subject(text: str) -> object:
        found = [] if pattern is None else pattern.findall(text)
        return found[-1] if found else text.strip()

    logprobs: defaultdict[object, dict[str, float]] = defaultdict(dict)
    for text, logprob in answers.values():
        same = logprobs[subject(text)]
        same[text] = max(logprob, same.get(text, -np.inf))
    weights = {each: float(np.logaddexp.reduce(list(same.values()))) for each, same in logprobs.items()}
    group_of = {number: subject(text) for number, (text, _) in answers.items()}
    ordered = sorted(answers, key=lambda number: (-weights[group_of[number]], -answers[number][1]))
    first_of = {group_of[number]: number for number in reversed(ordered)}
    ordered.sort(key=lambda number: first_of[group_of[number]] != number)
    return {number: weights[group_of[number]] for number in ordered}
