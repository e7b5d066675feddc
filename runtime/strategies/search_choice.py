"""Which search an answer's options ask for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Final

from ...errors import InputError
from ..arguments.argument_types import refuse_beside
from ..blocks.commit_rules import check_block_options
from ..graph.graph_io import GraphIO
from ..options import GenerateOptions
from ..text.tokenizer import TextTokenizer
from .search import RankingSearch, Search

SEARCHES: Final[Mapping[str, str]] = {
    "num_beams": "beams",
    "best_first": "best_first",
    "extract": "best_first",
    "cntp": "trials",
    "adadec": "trials",
    "penalty_alpha": "contrastive",
}
"""Module in this package, for each option that asks for a search; its function `search` makes the search."""
_CONTRADICTING: Final = ("exact", "branch", "grammar_aligned", "draft_sampling", "lossy")
_ADJUSTING: Final = (
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "strategies",
    "ignore_eos",
)
"""Options without effect where the model's own probabilities of whole answers are compared."""


def search_of(options: GenerateOptions, graph_io: GraphIO, tokenizer: TextTokenizer) -> Search | None:
    """The search that options ask for; None for none.

    Raises:
        InputError: they ask for two, for something that a search cannot give, for a vote of one answer, or the graph
            cannot run a search, or they do not go with a model that fills blocks.
    """
    check_block_options(options, graph_io.blocks)
    if options.votes and not options.ranked:
        raise InputError("answers are to vote, and best_of is not above n", "give best_of, the number that vote")
    wanted = [name for name in SEARCHES if getattr(options, name) != getattr(GenerateOptions, name)]
    if not wanted:
        return None
    search: Search = import_module(f".{SEARCHES[wanted[0]]}", __package__).search(options, tokenizer)
    names = [*wanted[1:], *_CONTRADICTING]
    if isinstance(search, RankingSearch):
        names += ["temperature", "best_of", *(_ADJUSTING if search.own_probabilities else ())]
    refuse_beside(options, wanted[0], names)
    if not graph_io.supports_trees or graph_io.states or graph_io.window_biases:
        what = f"{wanted[0]} is given, and the graph takes no tree mask, or has recurrent states or windows"
        raise InputError(what, "leave it out, or choose a model that can run several continuations in one pass")
    states = graph_io.hidden_states
    if search.reads_states and (states is None or len(states.shape) != 2 or graph_io.draft_features is not None):
        what = f"{wanted[0]} is given, and the graph does not give the hidden states of the tokens with logits alone"
        raise InputError(what, "export the model with --hidden-states, and without a draft head")
    return search
