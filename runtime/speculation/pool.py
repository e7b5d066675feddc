"""The drafters of one engine, with their persistent state, for the answers that it generates.

Everything is made when it is first needed. Every answer that is being generated has a set of drafters of its own, and
what they learn about the model is shared. It lasts as long as the engine; the pass cost and the recycled candidates are
saved to the cache folder when the engine closes.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from ...errors import EdgeError
from ...models.bundle import Bundle
from ...models.progress import Progress, silent
from ...models.user_folders import cache_folder, make_private
from ..arguments.load_options import LoadOptions
from ..graph.bound_graph import BoundGraph
from ..graph.session import DecoderGraph
from ..kv.arena import KVArena, shared_tokens
from ..kv.prefix_cache import PrefixCache
from ..measure.exactness import EXACTNESS_REPORTS, ExactnessReport, measure_exactness
from ..measure.measurement_store import model_key
from ..measure.pass_timing import PASS_COSTS, MeasuringTime, load_or_measure_pass_cost
from ..measure.system_load import LoadMeter
from ..options import Request
from ..scheduling.idle_thread import IdleThread
from ..scheduling.request_queue import RequestQueue
from ..scheduling.work_thread import WorkThread
from .choice import Speculation
from .draft_loading import DraftTarget, PlacedDraft, load_draft
from .drafter_set import DrafterSet, SharedDrafting
from .drafters.history_store import HistoryStore
from .drafters.interface import ModelDrafter
from .drafters.ngram import open_bundle_table
from .drafters.recycling import RecycledTable
from .drafters.sparse_cache import load_sparse_draft
from .pass_cost import PassCost
from .speculator import Speculator

_HISTORY_BYTES: Final = 64 << 20
"""Maximum size on disk of the stored conversations of one model, index included."""
_MIN_OBSERVED: Final = 256
"""Number of observed passes from which a refined pass cost is saved."""
_INDEX_PATIENCE_S: Final = 2.0
"""Seconds to wait for an idle engine; then conversations are indexed beside the answers, on a hundredth of a core."""
_INDEX_REST: Final = 100
"""Seconds of rest for each second of processor time spent on indexing."""
_log: Final = logging.getLogger("edgerun")


class DrafterPool:
    """Owns the drafters of one engine and lends each answer a set of them.

    Args:
        graph: session of the target.
        bundle: bundle of the target.
        context: maximum number of tokens of a sequence.
        draft: the draft model; None for none.
        options: what is read from disk and kept there.
        prefixes: the target's; a draft model of its own keeps caches with its budget.
        queue: the request queue of the engine; stored conversations are indexed while it is idle.
        progress: receives the progress of measurements.
    """

    def __init__(
        self,
        graph: DecoderGraph,
        bundle: Bundle,
        context: int,
        draft: PlacedDraft | None,
        options: LoadOptions,
        prefixes: PrefixCache,
        queue: RequestQueue,
        progress: Progress = silent,
    ) -> None:
        self._open_graph: DecoderGraph | None = graph
        self._bundle = bundle
        self._context = context
        self._draft = draft
        self._draft_thread = WorkThread("edge-run draft") if draft is not None and draft.overlaps else None
        self._options: Final = options
        self._prefixes: Final = prefixes
        self.measuring: Final = MeasuringTime(progress)
        """The time that measurements took."""
        key = hashlib.sha256(bundle.fingerprint.encode()).hexdigest()[:32]
        history_folder = cache_folder() / "history" / key
        self._recycled_file: Final = cache_folder() / "recycled" / key
        self._keeps_learned: Final = options.cache and options.learned
        self._store = HistoryStore(history_folder, _HISTORY_BYTES, _log.warning) if options.history else None
        self._indexing: Final = IdleThread(
            queue, self._index_history, "edge-run history", patience_s=_INDEX_PATIENCE_S, rest=_INDEX_REST
        )
        self._pass_cost: PassCost | None = None
        self._meter: Final = LoadMeter(graph.config.threads)
        """The load of other programs since the model was loaded."""
        self._disturbed = False
        """Whether other programs disturbed an answer, and what was learned from its passes."""
        self._exactness_report: ExactnessReport | None = None
        self._resources: SharedDrafting | None = None
        self._idle: list[DrafterSet] = []
        """Sets that no answer uses, the most recently used last."""

    def pass_cost(self) -> PassCost:
        """Cost of target passes: stored by an earlier engine, or measured now."""
        if self._pass_cost is None:
            bound = self._bind()
            self._pass_cost = load_or_measure_pass_cost(
                self._bundle, self._graph.config, bound, self.measuring, cache=self._options.cache, meter=self._meter
            )
        return self._pass_cost

    def draft_model(self) -> ModelDrafter | None:
        """The draft model of the set that the next answer would have; None if there is none."""
        drafters = self._take_set(())
        self._idle.append(drafters)
        return drafters.model

    def exactness_report(self, token_ids: Sequence[int]) -> ExactnessReport:
        """The exactness report of this model and machine: stored, or its noise measured now over `token_ids`."""
        if self._exactness_report is None:
            key = model_key(self._bundle, self._graph.config)
            self._exactness_report = EXACTNESS_REPORTS.load(key) if self._options.cache else None
            if self._exactness_report is None:
                with self.measuring.stage("measuring how far passes differ"):
                    bound = self._bind()
                    bound.prefers_base = True
                    self.store_exactness_report(measure_exactness(bound, token_ids))
        assert self._exactness_report is not None  # noqa: S101  stored or measured
        return self._exactness_report

    def store_exactness_report(self, exactness_report: ExactnessReport) -> None:
        """Use an exactness report from now on, and save it to the cache folder."""
        self._exactness_report = exactness_report
        if self._options.cache:
            EXACTNESS_REPORTS.save(model_key(self._bundle, self._graph.config), exactness_report)

    @contextmanager
    def answering(self, request: Request, arena: KVArena) -> Iterator[Speculator | None]:
        """Lend a speculator for one answer; None for plain decoding.

        At the end of the answer, the pass cost is doubted if its passes contradict it, unless other programs disturbed
        them.

        Args:
            request: the answer's prompt, sampling parameters and choice of drafters.
            arena: KV cache that the answer is generated in.

        Raises:
            InputError: a drafter that was asked for is not available.
        """
        choice, graph_io = request.options.speculation, self._graph.graph_io
        off = choice == Speculation.OFF or graph_io.blocks is not None
        if off or (choice.automatic and not graph_io.supports_verification):
            yield None
            return
        drafters = self._take_set(request.prompt_ids)
        meter = LoadMeter(self._graph.config.threads)
        try:
            yield drafters.speculator(request, arena)
        finally:
            if drafters.ahead is not None:
                drafters.ahead.end()  # the draft model is free again
            self._idle.append(drafters)
        if (cost := self._pass_cost) is None:
            return
        if meter.is_busy:
            self._disturbed = True
            cost.forget_strays()
        elif cost.is_contradicted:
            cost.distrust()
            self._save_pass_cost(cost)

    def store_conversation(self, token_ids: Sequence[int]) -> None:
        """Store the new tokens of a finished answer in the history, if one is kept, to be indexed soon."""
        if self._store is not None and self._store.append(token_ids):
            self._indexing.start()

    def _index_history(self, progress: Progress) -> None:
        if self._store is not None:
            self._store.reindex(lambda: progress("", 0.0))

    def close(self) -> None:
        """Save what was learned and free the memory; calling it again does nothing."""
        if self._open_graph is None:
            return
        recycled = None if self._resources is None else self._resources.recycled
        if recycled is not None and self._keeps_learned and recycled.changed:
            with suppress(OSError):
                recycled.save(self._recycled_file)
        cost = self._pass_cost
        if cost is not None and cost.observed >= _MIN_OBSERVED and not self._disturbed:
            self._save_pass_cost(cost)
        if self._indexing.close() and self._store is not None:
            self._store.index_rest()
        if self._draft_thread is not None:
            self._draft_thread.close()
        self._open_graph = self._resources = None
        self._idle.clear()

    def _save_pass_cost(self, cost: PassCost) -> None:
        if self._options.cache:
            PASS_COSTS.save(model_key(self._bundle, self._graph.config), cost)

    @property
    def _graph(self) -> DecoderGraph:
        if self._open_graph is None:
            raise EdgeError("this engine is closed", "load the model again")
        return self._open_graph

    def _bind(self) -> BoundGraph:
        """The target's session over a new arena."""
        return self._graph.bind(self._graph.arena(self._context))

    def _take_set(self, prompt_ids: Sequence[int]) -> DrafterSet:
        """Take the idle set whose latest prompt is most like a new one, as its drafters know the sequence; or make one.

        Of sets that are alike, the most recently used is taken.
        """
        if self._resources is not None and self._resources.trees is not self._graph.graph_io.supports_trees:
            self._resources = None  # the graph for trees could not be loaded
            self._idle.clear()
        if not self._idle:
            return DrafterSet(self._load_resources())
        best = max(
            range(len(self._idle)), key=lambda index: (shared_tokens(self._idle[index].prompt_ids, prompt_ids), index)
        )
        return self._idle.pop(best)

    def _load_resources(self) -> SharedDrafting:
        if self._resources is None:
            cost, graph_io = self.pass_cost(), self._graph.graph_io
            vocab_size = graph_io.vocab_size
            table = open_bundle_table(self._bundle, vocab_size, _log.warning) if self._options.cache else None
            new_draft_model = None
            if (draft := self._draft) is not None:
                cache, measuring = self._options.cache, self.measuring
                target = DraftTarget(self._bundle, graph_io, self._context, cache, measuring, self._prefixes)
                new_draft_model = load_draft(draft.pair, draft.config, target)
            recycled = RecycledTable(vocab_size)
            if self._keeps_learned:
                make_private(self._recycled_file.parent)
                recycled.load(self._recycled_file)
            self._resources = SharedDrafting(
                cost,
                vocab_size,
                graph_io.supports_trees,
                recycled,
                table,
                self._store,
                new_draft_model,
                load_sparse_draft(self._graph, cost),
                self._draft_thread,
            )
        return self._resources
