"""A target's session and its draft's on the same cores.

The two take turns, and a session's threads that spin while they wait for its next pass are in the other's way. Measured
on 2 cores, three draft passes to one of the target, milliseconds a round (ONNX Runtime 1.31):

| target + draft, threads of the draft | 0.5B + bundled draft | bundled pair | 1.5B + 0.5B |
|---|---|---|---|
| both spin, 2 | 31.8 | 1.20 | 139.7 |
| target spins, 1 | 17.7 | 0.86 | 91.1 |
| target spins, 2 that never spin | 17.8 | 1.03 | 87.4 |
| both stop spinning as a pass ends, 2 | 17.3 | 1.02 | 75.9 |
| one pool for both, 2 | 17.1 | 0.89 | 77.0 |

So both stop spinning, unless the draft is so small that a second thread gains it nothing. A pool for both is no faster,
and ONNX Runtime has one pool a process or none: every other session of the program would have to agree to use it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ..edge.errors import BundleError
from ..models.bundle import Bundle
from ..models.pairing import Pair
from .calibration import calibrate
from .draft.model import DraftModel, check_target_ids
from .open_graph import open_graph
from .session import SessionConfig
from .step_cost_cache import cached, save

_ONE_THREAD_BELOW: Final = 16 << 20
"""Bytes of weights that one core has read by the time two have agreed on who reads what: at 9.6 MB a pass takes 0.33 ms
with one thread and 0.37 with two, at 270 MB 14 and 10."""
_CALIBRATION_S: Final = 0.3
_WIDTHS: Final = (1, 2, 4, 8)


def taking_turns(config: SessionConfig, draft: Bundle) -> tuple[SessionConfig, SessionConfig]:
    """How to run the target and the draft if the target alone would be run with `config`."""
    if draft.weight_bytes < _ONE_THREAD_BELOW:
        return config, replace(config, threads=1)
    shared = replace(config, shares_cores=True)
    return shared, shared


def load_draft(pair: Pair, config: SessionConfig, target_vocab: int, context: int, *, cache: bool = True) -> DraftModel:
    """Load the draft model of a pair.

    Args:
        pair: see `find_draft`.
        config: the draft's; see `taking_turns`.
        target_vocab: of the target's graph.
        context: the target's. A draft with a shorter one is silent once the text has outgrown it.
        cache: whether weights packed for this machine, and what passes cost, are kept on disk.

    Raises:
        BundleError: the draft is not a model that edge-run can decode with, or its head is of other tokens than the
            pair's map says.
    """
    bundle = pair.draft
    session = open_graph(bundle, config, cache=cache)
    head = session.spec.vocab_size
    if pair.target_ids is not None:
        try:
            check_target_ids(pair.target_ids, head, target_vocab)
        except ValueError as error:
            raise BundleError(
                f"the draft {bundle.folder} cannot be used: its map to the target's ids {error}",
                "restore it or export the draft again",
            ) from error
    elif head < target_vocab and head < pair.token_count:
        raise BundleError(
            f"the draft {bundle.folder} has {pair.token_count} tokens and a head of {head}, but no map of its ids",
            "put its d2t.npy beside the graph",
        )
    bound = session.bind(session.arena(min(context, bundle.context or context)))
    cost = cached(bundle, config) if cache else None
    if cost is None:
        cost = calibrate(bound, seconds_budget=_CALIBRATION_S, widths=_WIDTHS)
        if cache:
            save(cost, bundle, config)
    return DraftModel(bound, cost, target_vocab, pair.target_ids)
