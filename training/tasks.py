"""Makes training conversations of several kinds from pairs."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..export.draft_training.training_batches import in_epochs
from .corpus import Pair, pair_key
from .placeholders import fill
from .rewording import reword


class Turn(NamedTuple):
    """One exchange: what the user wrote and what the model should answer."""

    user: str
    assistant: str


Chat = list[Turn]

TASK_SHARES = {"direct": 0.80, "named": 0.06, "explain": 0.04, "about": 0.02, "tool": 0.06, "follow_up": 0.02}
"""Fractions of the kinds of conversation. Direct questions are what users ask and what is evaluated; the other kinds
teach which words belong to which tool."""
NAMED_FORMS = ("{request} with {tool}", "{request} using {tool}", "{tool}: {request}", "use {tool} to {lower}")


class TaskMaker:
    """Makes training conversations from pairs.

    No conversation contains a held-out pair, in either direction: pairs are filtered before, and every turn is checked
    again after rewording.
    """

    def __init__(self, pairs: Iterable[Pair], heldout: Iterable[Pair]) -> None:
        self.forbidden = {pair.key for pair in heldout}
        self.pages: dict[str, list[Pair]] = {}
        for pair in pairs:
            if pair.about:
                self.pages.setdefault(pair.tool, []).append(pair)

    def make(self, pair: Pair, rng: random.Random) -> Chat:
        """Make a conversation about `pair`; the same generator state gives the same conversation."""
        kind = rng.choices(list(TASK_SHARES), weights=list(TASK_SHARES.values()))[0]
        chat = self._render(kind, pair, rng)
        return chat if all(self.allowed(turn) for turn in chat) else [Turn(pair.request, pair.command)]

    def allowed(self, turn: Turn) -> bool:
        """Whether a turn is not a held-out pair."""
        explained = turn.user.removeprefix("explain: ")
        return (
            pair_key(turn.user, turn.assistant) not in self.forbidden
            and pair_key(turn.assistant, explained) not in self.forbidden
        )

    def _render(self, kind: str, pair: Pair, rng: random.Random) -> Chat:
        if kind == "explain":
            return [Turn(f"explain: {pair.command}", pair.request)]
        if kind == "about" and pair.about:
            return [Turn(f"what is {pair.tool}?", pair.about)]
        if kind == "tool" and pair.about:
            return [Turn(f"which tool: {reword_words(pair.about, rng)}", pair.tool)]
        if kind == "follow_up":
            return self._follow_up(pair, rng)
        request, command = fill(pair.request, pair.command, rng) if rng.random() < 0.2 else (pair.request, pair.command)
        if kind == "named" and pair.tool and pair.tool.lower() not in request.lower():
            lower = request[:1].lower() + request[1:]
            request = rng.choice(NAMED_FORMS).format(request=request.rstrip("."), tool=pair.tool, lower=lower)
        elif rng.random() < 0.4:
            request = reword(request, rng)
        return [Turn(request, command)]

    def _follow_up(self, pair: Pair, rng: random.Random) -> Chat:
        """Two turns about one tool, with different commands."""
        first = Turn(reword(pair.request, rng), pair.command)
        others = [other for other in self.pages.get(pair.tool, []) if other.command != pair.command]
        if not others:
            return [first]
        other = rng.choice(others)
        return [first, Turn(other.request, other.command)]


def reword_words(text: str, rng: random.Random) -> str:
    """Drop about one word in eight, so that recognizing a description does not depend on single words."""
    words = re.split(r"(?<=\S)\s+", text)
    kept = [word for word in words if len(words) < 4 or rng.random() > 0.125]
    return " ".join(kept) if kept else text


def distillation_requests(pairs: Sequence[Pair], maker: TaskMaker, count: int, seed: int) -> list[str]:
    """Make `count` distinct requests from the pairs, of all kinds that the target was trained on."""
    requests: dict[str, None] = {}
    for place, index in enumerate(in_epochs(len(pairs), seed, range(2 * count))):
        requests.setdefault(maker.make(pairs[index], random.Random(f"distill/{seed}/{place}"))[0].user)
        if len(requests) == count:
            break
    return list(requests)
