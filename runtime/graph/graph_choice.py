"""Several graphs of one model over one cache: each pass runs in the one that suits it.

A base graph runs every pass that no further graph takes. Further graphs are faster for some passes, such as those that
read a long prompt, or run what the base graph cannot, such as token trees beside a graph without a bias. Each is loaded
when the first pass needs it, in that pass's thread, and bound to the same arena as the base graph. States of layers
without attention are in that arena too: whichever graph runs a pass moves them to where it begins, and leaves them for
the next one (`HybridSession`), so any graph may follow any other.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from threading import Lock
from typing import Any, ClassVar, Final, Self

import numpy as np
import numpy.typing as npt

from ...errors import EdgeError
from ..arguments.search_options import SteeringOptions
from ..kv.arena import KVArena
from .bound_graph import BoundGraph, NewTokens, Steering
from .bound_session import BoundSession
from .graph_io import BASE_GRAPH, Floats, GraphIO, InputRole
from .memory import MappedPages, PageLimit
from .session import DecoderGraph, GraphSession
from .shared_passes import Gather, SharedPasses

STEERED: Final = "steered"
"""Name of the further graph that takes adapters and control vectors."""
IMAGES: Final = "images"
"""Name of the further graph that takes features of images."""
_log: Final = logging.getLogger(__name__)


class FurtherGraph(ABC):
    """A graph beside the base graph, which is loaded when a pass first needs it.

    Attributes:
        name: what statistics call it; unique among the graphs of a model.
        required: whether the base graph cannot run the passes that this one takes, such as token trees.
        shares_passes: whether its passes are shared where those of the base graph are.
        is_copy: whether it has a copy of the weights, of which nothing stays resident when another graph runs.
    """

    name: ClassVar[str]
    required: ClassVar[bool] = False
    shares_passes: ClassVar[bool] = False
    is_copy: ClassVar[bool] = False

    @abstractmethod
    def takes(self, new: NewTokens, base: int) -> bool | None:
        """Whether this graph runs a pass behind `base` cached tokens; None if `measure` has to find out.

        It is asked before every pass, so it must decide in a microsecond.
        """

    def prefill_width(self, preferred: int, remaining: int) -> int:
        """Number of prompt tokens to run in the next pass, of those that are `remaining`: `preferred`, or another."""
        del remaining
        return preferred

    def inputs(self, new: NewTokens) -> Mapping[str, npt.NDArray[Any]]:
        """Further inputs of a pass that this graph takes, by name."""
        del new
        return {}

    def steering(self, options: SteeringOptions) -> Steering | None:
        """As `DecoderGraph.steering`; None for a graph that takes no such inputs."""
        del options
        return None

    @abstractmethod
    def load(self, base: GraphSession) -> GraphSession | None:
        """Load the graph; None if it is not to be used now, which the next pass that it takes asks again.

        Args:
            base: the base graph. It is not kept: closing the engine frees it.

        Raises:
            EdgeError: it cannot be loaded.
        """

    def measure(self, new: NewTokens, own: BoundSession, further: BoundSession, drop: Callable[[], None]) -> None:
        """Find out whether this graph runs a pass, where `takes` does not know.

        Args:
            new: the tokens of the pass; afterwards `takes` knows whether it takes it.
            own: the base graph, bound to the arena of the pass, whose committed slots must stay as they are.
            further: this graph, bound to the same arena.
            drop: called before passes of another graph: gives back the memory of the weights that were read.

        Raises:
            ContextError: the tokens do not fit the context.
            EdgeError: ONNX Runtime failed.
        """
        raise NotImplementedError


def is_consecutive(new: NewTokens, base: int) -> bool:
    """Whether positions behind `base` are consecutive, and each token attends to all before it, given or not."""
    ids, _, positions, tree_mask, _ = new
    if positions is not None and not np.array_equal(
        np.broadcast_to(np.asarray(positions, np.int64), len(ids)), np.arange(base, base + len(ids))
    ):
        return False
    return tree_mask is None or np.array_equal(
        tree_mask, np.tri(len(ids), tree_mask.shape[1], tree_mask.shape[1] - len(ids), dtype=np.bool_)
    )


class TreeGraph(FurtherGraph):
    """The graph for token trees, beside one without a bias.

    Some providers have a fast attention kernel that takes no bias. Prefill, plain decoding and chains of draft tokens
    need none, because attention is causal itself. The session for trees has a copy of the weights; it is loaded when
    the first tree is verified.

    Args:
        load: loads it.
    """

    name = "trees"
    required = True

    def __init__(self, load: Callable[[], GraphSession]) -> None:
        self._load: Final = load

    def takes(self, new: NewTokens, base: int) -> bool:
        """Whether a pass is over a tree. Consecutive tokens need neither mask nor positions."""
        return not is_consecutive(new, base)

    def load(self, base: GraphSession) -> GraphSession:
        """Load the graph."""
        del base
        return self._load()


def runs_trees_beside(plain: GraphIO, trees: GraphIO) -> bool:
    """Whether the one graph has no bias, and the other computes trees over the same cache; neither needs probing."""
    selected = all(InputRole.LOGIT_POSITIONS in each.inputs for each in (plain, trees))
    same_cache = plain.tensor_types == trees.tensor_types
    return selected and same_cache and InputRole.BIAS not in plain.inputs and trees.supports_trees


class ChosenGraphs(DecoderGraph):
    """A base graph and further ones; the inputs and outputs are all that any of them has.

    Attributes:
        further: the further graphs; the first that takes a pass runs it.
        loaded: the further graphs that are loaded, by name.
        page_limit: how much of the weights that they map is resident: about as much as one graph needs.
        failures: why further graphs are not used after all, by name: what was wrong when they were loaded.
    """

    def __init__(self, base: GraphSession, further: Sequence[FurtherGraph], graph_io: GraphIO | None = None) -> None:
        """Join graphs of the same cache tensors.

        Args:
            base: runs every pass that no other graph takes.
            further: the other graphs.
            graph_io: inputs and outputs of all graphs together; None if the base graph has them all.
        """
        self.config, self.probe_result, self.on_cpu = base.config, base.probe_result, base.on_cpu
        self.graph_io = base.graph_io if graph_io is None else graph_io
        self.further: Final = tuple(further)
        self.failures: Final[dict[str, str]] = {}
        self.base: Final = base
        self.loaded: Final[dict[str, GraphSession]] = {}
        self._loading: Final = Lock()
        self._shared: SharedPasses | str = ""
        self.page_limit: Final = PageLimit(base.pages.size, partial(_pages, base, self.loaded))

    def limit_width(self, tokens: int) -> None:
        """Run passes over at most that many tokens from now on, in every graph."""
        super().limit_width(tokens)
        for graph in (self.base, *self.loaded.values()):
            graph.limit_width(tokens)

    def share_passes(self, texts: int, gather: Gather) -> SharedPasses | str:
        """Let texts share the passes of the model's own graph, and of others that say so."""
        self._shared = self.base.share_passes(texts, gather)
        return self._shared

    def steering(self, options: SteeringOptions) -> Steering | None:
        """The adapter and the control vector of an answer; None for the model itself."""
        found = (each.steering(options) for each in self.further)
        return next(filter(None, found), None) or super().steering(options)

    def arena(self, limit: int) -> KVArena:
        """An empty KV cache, which all graphs extend."""
        return self.base.arena(limit)

    def bind(self, arena: KVArena, *, hidden_states: bool = False) -> ChosenSession:
        """Bind to `arena`. With hidden states, which only the base graph gives, it runs all it can."""
        return ChosenSession(self, self.base.bind(arena, hidden_states=hidden_states), prefers_base=hidden_states)

    def bind_further(self, graph: FurtherGraph, arena: KVArena) -> BoundSession | None:
        """Bind a further graph, which is loaded if it is not; None if the base graph has to run its passes.

        Raises:
            EdgeError: a required graph cannot be loaded, for example because a device's memory does not hold the
                weights twice. Without the graph for trees, bindings that are made from now on have no trees.
        """
        with self._loading:
            if graph.name in self.failures:
                return None
            session = self.loaded.get(graph.name)
            if session is None:
                self.page_limit.drop()
                try:
                    session, own = graph.load(self.base), self.base.graph_io
                    types = session and (session.graph_io.tensor_types, session.graph_io.state_types)
                    if types not in (None, (own.tensor_types, own.state_types)):
                        raise EdgeError(
                            f"the graph {graph.name!r} has a cache of other tensors", "delete the cache folder"
                        )
                except EdgeError as error:
                    if graph.required:
                        if isinstance(graph, TreeGraph):
                            self.disable_trees()
                        raise
                    self.failures[graph.name] = error.what
                    _log.warning("the model's own graph runs all passes: %s", error.what)
                    return None
                if session is None:
                    return None
                if self.graph_io.widest_pass is not None:
                    session.limit_width(self.graph_io.widest_pass)
                if graph.shares_passes and not isinstance(self._shared, str):
                    session.join(self._shared)
                self.loaded[graph.name] = session
            return session.bind(arena)

    def release(self, name: str) -> None:
        """Free a further graph as soon as no binding uses it; the next binding that needs it loads it again."""
        with self._loading:
            self.loaded.pop(name, None)


def _pages(base: GraphSession, loaded: Mapping[str, GraphSession]) -> Iterator[MappedPages]:
    """What the sessions map that are loaded now, which stay alive until the last one was yielded."""
    for each in (base, *loaded.values()):
        yield each.pages


class ChosenSession(BoundGraph):
    """Several graphs bound to one arena, which extend the same cache.

    Args:
        graphs: the graphs.
        base: the base graph, bound to the arena.
        prefers_base: whether the base graph always runs every pass that it can.
    """

    def __init__(self, graphs: ChosenGraphs, base: BoundSession, *, prefers_base: bool = False) -> None:
        self.graph_io = graphs.graph_io
        self.arena = base.arena
        self.skips_logits = base.skips_logits
        self._graphs: Final = graphs
        self._base: Final = base
        self._base_has_bias: Final = InputRole.BIAS not in graphs.graph_io.inputs.keys() - base.graph_io.inputs.keys()
        self._bound: Final[dict[str, BoundSession]] = {}
        """Bindings of further graphs by name."""
        required = tuple(graph for graph in graphs.further if graph.required)
        self._further: Final = {False: required if prefers_base else graphs.further, True: required}
        """The further graphs that may take a pass, by the value of `prefers_base` when it runs."""
        self._own = base
        """The graph that runs what no further graph takes: the base graph, or the one that takes adapters."""

    def use(self, arena: KVArena) -> None:
        """Run over another arena, in all graphs, from now on."""
        self.arena = arena
        for bound in (self._base, *self._bound.values()):
            bound.use(arena)

    def steered(self, steering: Steering | None) -> Self:
        """Let all passes run in the graph that takes adapters and control vectors, or with None in the others.

        Raises:
            EdgeError: it cannot be loaded.
        """
        self.steering, self._own = steering, self._base
        if steering is not None and (steered := self.further(STEERED)) is not None:
            steered.supply(steering.inputs)
            self._own = steered
        return self

    def release_shared(self) -> None:
        """Let go of what shared passes hold of the caches of their texts."""
        for bound in (self._base, *self._bound.values()):
            bound.release_shared()

    def prefill_width(self, preferred: int, remaining: int) -> int:
        """Number of prompt tokens to run in the next pass, as the graphs want that may run it."""
        for graph in self._takers:
            preferred = graph.prefill_width(preferred, remaining)
        return self._own.prefill_width(preferred, remaining)

    def run(self, new: NewTokens) -> Floats:
        """Run a pass in the first graph that takes it."""
        bound, new = self._chosen(new)
        logits = bound.run(new)
        self.others = bound.others
        return logits

    def begin(self, new: NewTokens) -> Callable[[], Floats]:
        """Prepare a pass in the first graph that takes it; see `BoundGraph.begin`."""
        bound, new = self._chosen(new)
        return bound.begin(new)

    def _chosen(self, new: NewTokens) -> tuple[BoundSession, NewTokens]:
        """The first graph that takes a pass, and the pass as it runs there."""
        bound, base, limit = self._own, self.arena.length, self._graphs.page_limit
        is_copy = False
        self.last_graph = BASE_GRAPH
        for graph in self._takers:
            takes = graph.name == self.preferred or graph.takes(new, base)
            if takes is not False and (chosen := self._bound_to(graph)) is not None:
                if takes is None:
                    # Timed passes run alone; the graph that runs the pass itself gets the answer's setting below.
                    self._base.shares_passes = chosen.shares_passes = False
                    graph.measure(new, self._base, chosen, limit.drop)
                    limit.drop()
                    if not graph.takes(new, base):
                        continue
                self.last_graph = graph.name
                bound = chosen
                bound.supply(graph.inputs(new))
                is_copy = graph.is_copy
                break
        limit.renew(bound.pages, len(new.ids), is_copy=is_copy)
        bound.whole_logits = self.whole_logits
        bound.shares_passes = self.shares_passes
        # What another graph computes differs in rounding, so exact answers compute these slots again.
        self.arena.is_plain = bound is self._own or new.images is not None
        if not self._base_has_bias and bound is self._base:
            # What the base graph is asked for has no other positions and mask than consecutive tokens have.
            new = new._replace(positions=None, tree_mask=None)
        return bound, new

    @property
    def _takers(self) -> Sequence[FurtherGraph]:
        """The further graphs that may take the next pass."""
        return self._further[self.prefers_base] if self._own is self._base else ()

    def hidden_states(self, tokens: npt.ArrayLike, wanted: Sequence[int]) -> Floats:
        """Run a pass of the base graph, and return hidden states of the `wanted` tokens."""
        return self._base.hidden_states(tokens, wanted)

    def further(self, name: str) -> BoundSession | None:
        """The further graph of that name over the arena, loaded if it is not; None if there is none, or it cannot be.

        Raises:
            EdgeError: it is a required graph and cannot be loaded.
        """
        found = next((graph for graph in self._graphs.further if graph.name == name), None)
        return None if found is None else self._bound_to(found)

    def _bound_to(self, graph: FurtherGraph) -> BoundSession | None:
        """A further graph over the arena; None if it cannot be loaded."""
        bound = self._bound.get(graph.name) or self._graphs.bind_further(graph, self.arena)
        if bound is not None:
            self._bound[graph.name] = bound
        return bound
