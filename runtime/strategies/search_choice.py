"""Which search an answer's options ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Final

from ...errors import InputError
from ..graph.graph_io import GraphIO
from ..options import GenerateOptions
from ..speculation.choice import DraftSampling
from . import beams
from .search import RankingSearch, Search

SEARCHES: Final[Mapping[str, Callable[[GenerateOptions], Search]]] = {"num_beams": beams.search}
"""What makes the search, for each option that asks for one."""


def search_of(options: GenerateOptions, graph_io: GraphIO) -> Search | None:
    """The search that options ask for; None for none.

    Raises:
        InputError: they ask for two, for something that a search cannot give, or the graph cannot run one.
    """
    defaults = {each.name: each.default for each in fields(options)}
    wanted = [name for name in SEARCHES if getattr(options, name) != defaults[name]]
    if not wanted:
        return None
    given = {
        **dict.fromkeys(wanted[1:], True),
        "exact": options.exact,
        "branch": options.branch,
        "grammar_aligned": options.grammar_aligned > 1,
        "draft_sampling": options.draft_sampling is not DraftSampling.OFF,
    }
    if others := [name for name, is_given in given.items() if is_given]:
        raise InputError(f"{wanted[0]} and {others[0]} are both given", "leave one of them out")
    if not graph_io.supports_trees or graph_io.states or graph_io.window_biases:
        why = (
            "whose graph cannot run several continuations in one pass: it takes no tree mask, or has states or windows"
        )
        raise InputError(f"{wanted[0]} is given for a model {why}", "choose another model, or leave it out")
    search: Search = SEARCHES[wanted[0]](options)
    if isinstance(search, RankingSearch) and options.best_of is not None:
        raise InputError(f"{wanted[0]} and best_of are both given", "n says how many of its answers are returned")
    return search
