"""Loads draft models beside their targets, on the same device or on another one.

On another device, the draft runs while the target verifies (`draft_ahead`). On the same CPU cores the two take turns,
and threads of a session that spin while they wait for its next pass slow down the other one. Measured on 2 cores, three
draft passes to one target pass, milliseconds per round (ONNX Runtime 1.31):

| target + draft, threads of the draft | 0.5B + bundled draft | bundled pair | 1.5B + 0.5B |
|---|---|---|---|
| both spin, 2 | 31.8 | 1.20 | 139.7 |
| target spins, 1 | 17.7 | 0.86 | 91.1 |
| target spins, 2 that never spin | 17.8 | 1.03 | 87.4 |
| both stop spinning as a pass ends, 2 | 17.3 | 1.02 | 75.9 |
| one thread pool for both, 2 | 17.1 | 0.89 | 77.0 |

So both stop spinning, unless the draft is so small that a second thread gains nothing. A shared thread pool is not
faster, and in ONNX Runtime it is per process: all other sessions of the program would have to use it too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from ...errors import BundleError, InputError
from ...models.bundle import Bundle
from ...models.manifest import HeadKind
from ...models.pairing import DraftPair
from ..devices.providers import choose_device, cpu_device
from ..graph.bound_graph import BoundGraph
from ..graph.graph_io import GraphIO
from ..graph.head_session import HeadSession, MedusaSession
from ..graph.model_metadata import ModelMetadata
from ..graph.open_graph import open_graph
from ..graph.session import GraphSession, SessionConfig
from ..images.image_processors import processor_of, suits_images
from ..kv.prefix_cache import PrefixCache
from ..measure.pass_timing import MeasuringTime, load_or_measure_pass_cost
from .drafters.draft_model import DraftModel
from .drafters.interface import ModelDrafter
from .drafters.target_drafts import HiddenStateHead, MedusaDraft
from .pass_cost import PassCost
from .tree import Source

NewDraftModel: TypeAlias = Callable[[], ModelDrafter]
"""Makes a `ModelDrafter` for one more sequence, of a model that is loaded once."""

_ONE_THREAD_BELOW: Final = 16 << 20
"""Bytes of weights below which a draft runs on one thread: at 9.6 MB a pass takes 0.33 ms with one thread and 0.37 with
two, at 270 MB 14 and 10."""
_HINT: Final = "restore it or export the draft again"


@dataclass(frozen=True)
class PlacedDraft:
    """A draft model, and how it runs beside its target."""

    pair: DraftPair
    config: SessionConfig
    overlaps: bool = False
    """Whether it runs while the target does: on another device."""


class DraftTarget(NamedTuple):
    """The model that a draft is loaded for."""

    bundle: Bundle
    graph_io: GraphIO
    """Inputs and outputs of its graph."""
    context: int
    """A separate draft with a shorter context stops drafting when a sequence outgrows it."""
    cache: bool = True
    """Whether packed weights and the pass cost of the draft are kept on disk."""
    measuring: MeasuringTime | None = None
    """Counts the time in which the draft's pass cost is measured, and receives its progress."""
    prefixes: PrefixCache | None = None
    """The budget of its prefix cache holds caches of a separate draft too; None to keep none of them."""


def place_draft(pair: DraftPair, config: SessionConfig, device: str = "auto") -> tuple[SessionConfig, PlacedDraft]:
    """Choose how a draft model runs; returns the target's configuration beside it too.

    Args:
        pair: see `find_draft`.
        config: the configuration of the target alone.
        device: as for `choose_device`; `auto` for the CPU, or the target's device for a draft head.

    Raises:
        DeviceError: this machine has no such device.
        InputError: a head over the target's hidden states cannot run on another device.
    """
    default = cpu_device() if pair.head is None else config.device
    chosen = default if device == "auto" else choose_device(device)
    if chosen == config.device:
        config, draft_config = share_cores(config, pair.draft)
        return config, PlacedDraft(pair, draft_config)
    if pair.head is not None:
        what = f"a draft head runs on the model's device, {config.device}, and not on {chosen}"
        raise InputError(what, "leave the draft device out")
    threads = 1 if pair.draft.weight_bytes < _ONE_THREAD_BELOW else config.threads
    # Idle threads that spin would take the cores from what drives the other device.
    return config, PlacedDraft(pair, replace(config, device=chosen, threads=threads, shares_cores=True), overlaps=True)


def share_cores(config: SessionConfig, draft: Bundle) -> tuple[SessionConfig, SessionConfig]:
    """Configurations of the target and the draft, given the one that the target would be run with alone."""
    if draft.weight_bytes < _ONE_THREAD_BELOW:
        return config, replace(config, threads=1)
    shared = replace(config, shares_cores=True)
    return shared, shared


def load_draft(pair: DraftPair, config: SessionConfig, target: DraftTarget) -> NewDraftModel:
    """Load a draft model, as `find_draft` found it.

    Args:
        pair: the draft, with its map to the target's tokens.
        config: configuration of the draft's session; see `share_cores`.
        target: what it drafts for.

    Raises:
        BundleError: the draft cannot be loaded, or does not match the target's cache, hidden states or vocabulary.
    """
    if pair.head is HeadKind.MEDUSA:
        session = MedusaSession(pair.draft.graph, config.options())
        _require_features(pair.draft.graph, session.feature_size, target)
        return lambda: MedusaDraft(session, target.graph_io.vocab_size)
    if pair.head is not None:
        return load_head(pair, config, target)
    return load_separate_draft(pair, config, target)


def load_separate_draft(pair: DraftPair, config: SessionConfig, target: DraftTarget) -> Callable[[], DraftModel]:
    """Load a separate model as a draft. All sequences share its pass cost and the caches of finished ones.

    Raises:
        BundleError: the draft is not a model that edge-run can decode with, or its LM head does not fit the map from
            its tokens to the target's.
    """
    bundle, target_vocab = pair.draft, target.graph_io.vocab_size
    config = replace(config, kv_scales=None)  # the scales are for the target's cache, and a draft's is small
    session = open_graph(bundle, config, cache=target.cache)
    _check_vocab(pair, session.graph_io.vocab_size, target_vocab)
    limit = min(target.context, bundle.context or target.context)
    own_prefixes = None if target.prefixes is None else target.prefixes.beside(lambda: session.arena(limit))
    exchange = None if own_prefixes is None else own_prefixes.exchange
    cost = _pass_cost(bundle, config, session.bind(session.arena(limit)), target)
    sees = suits_images(target.bundle, target.graph_io)
    image_token = processor_of(target.bundle).token_id if sees else None
    ids = pair.target_ids
    return lambda: DraftModel(session.bind(session.arena(limit)), cost, target_vocab, ids, exchange, image_token)


def load_head(pair: DraftPair, config: SessionConfig, target: DraftTarget) -> Callable[[], HiddenStateHead]:
    """Load a draft head, to be attached to the arena of a generation.

    Raises:
        BundleError: the graph cannot be loaded, or does not fit the target's hidden states or vocabulary.
    """
    graph, target_vocab = pair.draft.graph, target.graph_io.vocab_size
    metadata = ModelMetadata(input_vocab=target.bundle.input_vocab, draft_head=True)
    session = GraphSession(graph, replace(config, kv_scales=None), metadata)
    own = session.graph_io
    if own.head is None or own.hidden_size != own.head.sizes[1]:
        raise BundleError(f"{graph} is not a draft head: it does not continue from its own states", _HINT)
    _require_features(graph, own.head.sizes[0], target)
    _check_vocab(pair, own.vocab_size, target_vocab)

    def bind() -> HeadSession:
        bound = session.bind(session.arena(target.context))
        assert isinstance(bound, HeadSession)  # noqa: S101  the graph has the inputs of a head
        return bound

    cost = _pass_cost(pair.draft, config, bind(), target)
    source = Source.MTP if pair.head is HeadKind.MTP else Source.EAGLE
    return lambda: HiddenStateHead(bind(), cost, target_vocab, pair.target_ids, source)


def _require_features(graph: Path, size: int, target: DraftTarget) -> None:
    """Check that a target gives the features that a head reads.

    Raises:
        BundleError: it does not.
    """
    if size != (given := target.graph_io.feature_size):
        what = f"{graph} reads {size} features of each token, and {target.bundle.graph} gives {given or 'none'}"
        raise BundleError(what, _HINT)


def _check_vocab(pair: DraftPair, vocab: int, target_vocab: int) -> None:
    """Check that a draft has the tokens of its target, or a map to them.

    A separate model may lack the target's padding, and have some of its own.

    Args:
        pair: the draft.
        vocab: number of tokens of its LM head.
        target_vocab: vocabulary size of the target.

    Raises:
        BundleError: it has neither, or the map does not fit.
    """
    ids, draft, own = pair.target_ids, f"the draft {pair.draft.folder}", pair.head is None
    problem = ""
    if ids is None:
        if vocab != target_vocab and not (own and vocab >= min(target_vocab, pair.token_count)):
            hint = "put its d2t.npy beside the graph" if own else _HINT
            raise BundleError(f"{draft} has an LM head of {vocab} tokens, but no map to the target's", hint)
    elif ids.shape != (vocab,):
        problem = f"has {ids.size} ids for a head of {vocab} tokens"
    elif ids.max() >= target_vocab:
        problem = f"has ids from {ids.min()} to {ids.max()}, but the target {target_vocab} tokens"
    if problem:
        raise BundleError(f"{draft} cannot be used: its map to the target's ids {problem}", _HINT)


def _pass_cost(bundle: Bundle, config: SessionConfig, bound: BoundGraph, target: DraftTarget) -> PassCost:
    """Cost of the draft's passes, stored or measured now."""
    return load_or_measure_pass_cost(
        bundle,
        config,
        bound,
        target.measuring,
        cache=target.cache,
        stage="measuring the speed of the draft model",
        seconds_budget=0.3,
        widths=(1, 2, 4, 8),
    )
