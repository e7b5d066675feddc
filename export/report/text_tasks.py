"""Tasks made of a user's text, on which an exported model is compared with the float model.

A compressed model may keep its perplexity and lose what it knows or finds (LLM-KICK, Jaiswal et al. 2024). These tasks
need no download: each question has four choices, ranked by their mean log-probability, so chance is right one time in
four.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from ...errors import InputError
from ...models.user_text import read_text
from ...runtime.engine import Engine
from ...runtime.engine_loading import load
from ...runtime.options import GenerateOptions

_QUESTIONS: Final = 40
"""Questions of each task."""
_CHOICES: Final = 4
_MIN_WORDS: Final = 400
_LONG_TOKENS: Final = 1024
"""Most tokens of the text in which a fact is hidden; at most a third of the context."""
_SHORT_WORDS: Final = 40
"""Most words of the text that other questions read."""
_ANSWER_WORDS: Final = 4
_NAMES: Final = ("Alice", "Boris", "Chloe", "David", "Elena", "Frank", "Greta", "Henry")
_EXAMPLES: Final = "12 + 7 = 19\n30 + 25 = 55\n8 + 41 = 49\n"
_Z: Final = 1.96
"""Standard deviations of a 95 % interval."""


class Question(NamedTuple):
    """A prompt and its choices, of which the first one is right."""

    prompt: str
    choices: tuple[str, ...]


@dataclass(frozen=True)
class TaskFigures:
    """How a model and the float model it was made from do at one task."""

    name: str
    questions: int
    right: int
    """Number of questions that the exported model answers rightly."""
    float_right: int
    same: int
    """Number of questions at which both choose the same."""

    @property
    def is_worse(self) -> bool:
        """Whether the float model's share of right answers is above the 95 % interval of the exported model's."""
        return self.float_right / self.questions > wilson(self.right, self.questions)[1]


def wilson(count: int, total: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson 1927)."""
    share, scale = count / total, 1 + _Z**2 / total
    middle = (share + _Z**2 / (2 * total)) / scale
    half = _Z * math.sqrt(share * (1 - share) / total + (_Z / (2 * total)) ** 2) / scale
    return max(0.0, middle - half), min(1.0, middle + half)


def read_task_text(file: Path) -> list[str]:
    """Read the words of a text file.

    Raises:
        InputError: It cannot be read, or has too few words.
    """
    words = read_text(file, "give a text file").split()
    if len(words) < _MIN_WORDS:
        raise InputError(f"{file} has {len(words)} words, too few for questions", f"give at least {_MIN_WORDS}")
    return words


def measure_tasks(words: Sequence[str], model: Path, float_model: Path, seed: int) -> list[TaskFigures]:
    """Ask two bundles the same questions about a text.

    Args:
        words: The text.
        model: The exported bundle.
        float_model: A bundle of the same checkpoint in float32.
        seed: Seed of the questions.

    Raises:
        BundleError, EdgeError: A bundle cannot be loaded or run.
    """
    answers = []
    for bundle in (model, float_model):
        with load(bundle, device="cpu", draft=None, learned=False) as engine:
            tasks = questions_about(words, engine, seed)
            answers.append([[_answer(engine, each) for each in questions] for questions in tasks.values()])
    return [
        TaskFigures(name, len(own), own.count(0), other.count(0), sum(map(int.__eq__, own, other)))
        for name, own, other in zip(tasks, *answers, strict=True)
    ]


def questions_about(words: Sequence[str], engine: Engine, seed: int) -> dict[str, list[Question]]:
    """Questions by their task; the same seed, text and tokenizer give the same ones."""
    random, tokens = np.random.default_rng(seed), min(_LONG_TOKENS, engine.model.context // 3)
    counted = len(engine.tokenizer.encode(" ".join(words[:_MIN_WORDS]), add_special_tokens=False))
    long = min(len(words), max(2 * _ANSWER_WORDS + _CHOICES, tokens * _MIN_WORDS // counted))
    short = min(_SHORT_WORDS, long)
    makers: dict[str, Callable[[np.random.Generator], Question]] = {
        f"retrieval from {long} words": lambda random: _retrieval(_piece(words, long, random), random),
        "copying": lambda random: _copying(_piece(words, short, random), random),
        "arithmetic": _addition,
        "continuing the text": lambda random: _continuing(words, short, random),
    }
    return {name: [make(random) for _ in range(_QUESTIONS)] for name, make in makers.items()}


def _answer(engine: Engine, question: Question) -> int:
    scores = engine.rank(question.prompt, question.choices, GenerateOptions(raw=True))
    return max(scores, key=lambda score: score.mean_logprob).index


def _piece(words: Sequence[str], length: int, random: np.random.Generator) -> list[str]:
    start = int(random.integers(0, len(words) - length + 1))
    return list(words[start : start + length])


def _retrieval(piece: list[str], random: np.random.Generator) -> Question:
    """Whose number is it, of the numbers that sentences hidden in a text give to names?"""
    names = random.choice(_NAMES, _CHOICES, replace=False).tolist()
    numbers = random.choice(np.arange(100, 1000), _CHOICES, replace=False).tolist()
    for name, number in zip(names, numbers, strict=True):
        piece.insert(int(random.integers(0, len(piece) + 1)), f"The number of {name} is {number}.")
    return Question(f"{' '.join(piece)}\nThe number of {names[0]} is", tuple(f" {number}" for number in numbers))


def _copying(piece: list[str], random: np.random.Generator) -> Question:
    """How does the second copy of a text go on?"""
    half = len(piece) // 2
    starts = [half, *_others(random, len(piece) - _ANSWER_WORDS, half)]
    return Question(f"{' '.join(piece)}\n{' '.join(piece[:half])}", tuple(_answers(piece, starts)))


def _continuing(words: Sequence[str], read: int, random: np.random.Generator) -> Question:
    """How does the text go on after `read` words?"""
    start = int(random.integers(read, len(words) - _ANSWER_WORDS + 1))
    starts = [start, *_others(random, len(words) - _ANSWER_WORDS, start)]
    return Question(" ".join(words[start - read : start]), tuple(_answers(words, starts)))


def _others(random: np.random.Generator, most: int, right: int) -> list[int]:
    """Places of wrong answers."""
    places: list[int] = random.choice(np.delete(np.arange(most + 1), right), _CHOICES - 1, replace=False).tolist()
    return places


def _answers(words: Sequence[str], starts: Sequence[int]) -> Iterator[str]:
    return (" " + " ".join(words[start : start + _ANSWER_WORDS]) for start in starts)


def _addition(random: np.random.Generator) -> Question:
    first, second = random.integers(1, 50, 2).tolist()
    return Question(f"{_EXAMPLES}{first} + {second} =", tuple(f" {first + second + wrong}" for wrong in (0, 1, -1, 10)))
