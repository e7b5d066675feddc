"""How much a model gains from the draft in its bundle, measured on given texts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from ...errors import InputError
from ..engine import Engine, load
from ..generation import CachedSequence
from ..options import GenerateOptions
from ..result import Reply, Stats
from ..speculation.choice import Speculation
from ..speculation.tree import Source
from .agreement import agreeing

if TYPE_CHECKING:
    from ...export.drafts.frequencies import Markers
    from ...export.workbench import Acceptance, TokenArray

_GIVEN: Final = 4
"""One in so many tokens of a text without turns, the first ones, stands for what it answers."""
_WARM_UP_TOKENS: Final = 16


class _Text(NamedTuple):
    """Token ids, and where the answer begins in them."""

    tokens: list[int]
    start: int


class DraftJudge:
    """Replays texts with guesses of the bundle's draft alone, and without any: a `Judge`.

    Every text is decoded both ways, one right after the other, so that a busy machine disturbs both alike.

    Args:
        device: as for `load`.
        threads: as for `load`.
        most_tokens: of the texts that are looked at; those after them are left out.
    """

    def __init__(self, device: str = "auto", threads: int | None = None, most_tokens: int = 2048) -> None:
        self._device = device
        self._threads = threads
        self._most = most_tokens

    def __call__(self, bundle: Path, texts: Sequence[TokenArray]) -> Acceptance:
        """Measure it.

        Args:
            bundle: a model's folder with a draft.
            texts: token ids of whole texts, each ending with what a model answered.

        Raises:
            BundleError: there is no such model, or it is damaged.
            InputError: it has no draft, or no text is long enough.
        """
        from ...export.drafts.frequencies import read_markers  # noqa: PLC0415 -- an extra
        from ...export.workbench import Acceptance  # noqa: PLC0415

        with load(bundle, device=self._device, threads=self._threads, learned=False) as engine:
            draft = engine.model.drafters.draft_model()
            if draft is None:
                raise InputError(f"{bundle} has no draft to judge", "export it with --draft or --draft-layers")
            chosen = self._chosen(engine, texts, read_markers(engine.bundle.folder))
            bound = engine.model.new_sequence().bound
            # What follows a text's last token is nothing that anybody would guess.
            same = sum(agreeing(bound, draft, text.tokens[:-1], text.start - 1) for text in chosen)
            plain, guessing = _replays(engine, chosen)
        return Acceptance(
            agreement=same / sum(len(text.tokens) - text.start for text in chosen),
            tokens_per_pass=_decoded(guessing) / sum(stats.decode_passes for stats in guessing),
            plain_seconds=_seconds(plain) / _decoded(plain),
            # By ratios of neighbours, which a change of the machine's speed in between leaves as they are.
            speculative_seconds=_seconds(plain)
            / _decoded(plain)
            * statistics.median(
                _seconds([with_guesses]) / _seconds([without])
                for with_guesses, without in zip(guessing, plain, strict=True)
            ),
        )

    def _chosen(self, engine: Engine, texts: Sequence[TokenArray], markers: Markers) -> list[_Text]:
        """The first texts, cut to the model's context; none so short that nothing is decoded after its first token.

        Raises:
            InputError: there is none.
        """
        from ...export.drafts.frequencies import answer_start  # noqa: PLC0415 -- an extra

        found: list[_Text] = []
        left = self._most
        for text in texts:
            cut = text[: min(engine.context, left)]
            start = answer_start(cut, markers) or max(1, len(cut) // _GIVEN)
            if start + 2 <= len(cut):
                found.append(_Text(cut.tolist(), start))
                left -= len(cut)
        if not found:
            raise InputError("no text is long enough to judge a draft by", "give texts of more tokens")
        return found


def _replays(engine: Engine, texts: Sequence[_Text]) -> tuple[list[Stats], list[Stats]]:
    """Accounts of each text, plain and with guesses of the draft."""
    ways = (Speculation.OFF, Speculation.of(Source.MODEL))
    caches = [engine.model.new_sequence() for _ in ways]
    # First passes allocate memory: let nobody be charged for it.
    for way, cache in zip(ways, caches, strict=True):
        first = texts[0]
        _replay(engine, cache, _Text(first.tokens[: first.start + _WARM_UP_TOKENS], first.start), way)
    found: list[list[Stats]] = [[], []]
    for number, text in enumerate(texts):
        for turn in ((0, 1), (1, 0))[number % 2]:
            found[turn].append(_replay(engine, caches[turn], text, ways[turn]))
    return found[0], found[1]


def _replay(engine: Engine, cache: CachedSequence, text: _Text, way: Speculation) -> Stats:
    cache.token_ids.clear()
    options = GenerateOptions(temperature=0.0, speculation=way)
    return Reply.of(engine.model.replay(cache, text.tokens[: text.start], text.tokens[text.start :], options)).stats


def _decoded(accounts: Sequence[Stats]) -> int:
    """Tokens after the first of each text, which reading the prompt gives."""
    return sum(stats.completion_tokens - 1 for stats in accounts)


def _seconds(accounts: Sequence[Stats]) -> float:
    """What those tokens took."""
    return sum(stats.total_s - stats.first_token_s for stats in accounts)
