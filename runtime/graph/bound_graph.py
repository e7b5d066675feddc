"""What decoding uses of a graph that is bound to a KV arena, whatever runs its passes.

`BoundSession` runs one graph whose shapes vary, `BoundStaticGraphs` many graphs of fixed shapes, and `ChosenSession`
several graphs of one model. Everything outside this package is written against this protocol.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from ..kv.arena import KVArena
from .graph_io import BASE_GRAPH, Floats, GraphIO

_REPLAY_WIDTH: Final = 128
"""Number of tokens that run again in a pass where a text has images."""
_FIRST_INDICES: Final = np.arange(32)
"""Indices of the tokens of passes up to that width."""
_FIRST_INDICES.flags.writeable = False


class PassImages(NamedTuple):
    """Features of images that stand in place of the embeddings of tokens of a pass."""

    rows: npt.NDArray[np.int64]
    """Indices of these tokens in the pass, ascending."""
    features: Floats
    """`[1 + layers, n, hidden]`: in place of embeddings, and what the first layers add to their outputs."""
    positions: npt.NDArray[np.int64] | None = None
    """Positions `[3, tokens]` of all tokens of the pass in time, rows and columns; None where they have one each."""


class NewTokens(NamedTuple):
    """The tokens of a pass; see `BoundGraph.forward`."""

    ids: list[int]
    wanted: npt.NDArray[np.int64]
    """Indices of the tokens whose logits to return."""
    positions: npt.ArrayLike | None = None
    tree_mask: npt.NDArray[np.bool_] | Floats | None = None
    """As for `BoundGraph.forward`, or float32 `[n, T]`: what is added to the attention scores of all T slots."""
    images: PassImages | None = None


@dataclass(frozen=True)
class Steering:
    """An adapter and a control vector; equal to another if their names and the strength are."""

    adapter: str | None
    control: str | None
    strength: float
    """Factor on the control vector."""
    inputs: Mapping[str, Floats] = field(compare=False, repr=False)
    """The inputs of the graph that takes them, by their names."""


class ImagesOfText(Protocol):
    """The images of a text; see `images.prompt_images.PromptImages`."""

    @property
    def merged_tokens(self) -> int:
        """Number of tokens that are left out, as others stand for them (`lossy_image_tokens`)."""

    def keyed(self, token_ids: Sequence[int], /) -> list[int]:
        """The tokens of the text with keys, which depend on the content of an image, in place of image tokens."""

    def whole(self, length: int, /) -> int:
        """The largest number of tokens up to `length` that cuts no image."""

    def pass_width(self, base: int, width: int) -> int:
        """Number of tokens to run in a prefill pass after `base` cached ones, instead of `width`."""

    def placed(self, new: NewTokens, base: int) -> NewTokens:
        """The tokens of a pass after `base` cached ones, with the features of images among them."""


def keyed_ids(token_ids: Sequence[int], images: ImagesOfText | None) -> Sequence[int]:
    """The ids by which a text with these images is compared with others."""
    return token_ids if images is None else images.keyed(token_ids)


class OtherTexts(NamedTuple):
    """What ran in a pass besides the tokens of a text."""

    texts: int = 0
    """Number of other texts."""
    tokens: int = 0
    """Number of their tokens."""
    waited_s: float = 0.0
    """Seconds that the pass waited for them."""


ALONE: Final = OtherTexts()


class BoundGraph(Protocol):
    """A graph bound to a KV arena: passes that read and extend its cache.

    Attributes:
        graph_io: the graph's inputs and outputs.
        arena: the cache that passes read and extend; see `use`.
        whole_logits: whether passes return the logits of the whole vocabulary. False allows a device to return those of
            a few best tokens only, and a number far below them for all others.
        prefers_base: whether the model's own graph runs every pass that it can, as exact answers need: further graphs
            round differently.
        preferred: name of the further graph that runs every pass where `prefers_base` is not set; None to let each say
            which passes it takes.
        skips_logits: whether passes can return no logits, and then do not read the weights of the LM head.
        shares_passes: whether a pass may run together with those of other texts that are handed in at the same time. It
            rounds as a wider pass does, which exact answers and measurements must not.
        steering: what steers the passes; see `steered`.
        images: the images of the text; None for none.
        others: what else ran in the last pass.
        last_graph: name of the graph that ran the last pass: `BASE_GRAPH`, or that of a further graph.
    """

    graph_io: GraphIO
    arena: KVArena
    whole_logits: bool = True
    prefers_base: bool = False
    preferred: str | None = None
    skips_logits: bool = False
    shares_passes: bool = False
    steering: Steering | None = None
    images: ImagesOfText | None = None
    others: OtherTexts = ALONE
    last_graph: str = BASE_GRAPH

    def use(self, arena: KVArena) -> None:
        """Run over another arena of the same tensor types from now on."""
        self.arena = arena

    def steered(self, steering: Steering | None) -> Self:
        """Let passes have an adapter or a control vector from now on, or None for neither; returns itself."""
        self.steering = steering
        return self

    def release_shared(self) -> None:
        """Let go of what shared passes hold of the caches of their texts, because the answer has ended."""
        self.others = ALONE

    def prefill_width(self, preferred: int, remaining: int) -> int:
        """Number of prompt tokens to run in the next pass, given the `preferred` number and those that are left."""
        del remaining
        return preferred

    def forward(
        self,
        tokens: npt.ArrayLike,
        *,
        logits_for: npt.ArrayLike | None = None,
        positions: npt.ArrayLike | None = None,
        tree_mask: npt.NDArray[np.bool_] | None = None,
    ) -> Floats:
        """Run a pass over `n` new tokens after the committed slots. It writes their slots but does not commit them.

        Args:
            tokens: token ids, int `[n]`.
            logits_for: indices of the new tokens whose logits to return, int `[r]`; all when None. For none of them, a
                graph that cannot leave logits out returns those of the last token.
            positions: rotary positions, int `[n]`; consecutive when None. Without committed slots they must be
                consecutive.
            tree_mask: bool `[n, h + n]`, usually `[n, n]`: whether new token i attends to token j of the last `h`
                committed and the new ones; causal when None. Every token attends to all tokens before those, and none
                to a later one.

        Returns:
            Logits float32 `[r, V]`, valid until the next call.

        Raises:
            ContextError: the tokens do not fit the context.
            EdgeError: ONNX Runtime failed; the arena has no more slots than before, and with states perhaps fewer.
        """
        # Between two passes, the first call of each NumPy function takes many times as long as in a loop.
        ids: list[int] = list(tokens) if isinstance(tokens, (tuple, list)) else np.asarray(tokens, np.int64).tolist()
        # For an id outside the vocabulary the operator would return zeros instead of an error.
        lowest, highest, most = min(ids), max(ids), self.graph_io.input_vocab
        if lowest < 0 or highest >= most:
            raise ValueError(f"token ids must lie between 0 and {most - 1}, found {lowest} to {highest}")
        if tree_mask is not None and not self.graph_io.supports_trees:
            raise ValueError("this graph cannot verify trees")
        every = _FIRST_INDICES[: len(ids)] if len(ids) <= len(_FIRST_INDICES) else np.arange(len(ids))
        wanted = every if logits_for is None else np.asarray(logits_for, np.int64)
        if not wanted.size and not self.skips_logits:
            wanted = every[-1:]
        new = NewTokens(ids, wanted, positions, tree_mask)
        if self.images is None:
            return self.run(new)
        if replayed := self.arena.replay_at(self.arena.length):
            self._replay(replayed)
        return self.run(self.images.placed(new, self.arena.length))

    def _replay(self, count: int) -> None:
        """Run the last committed tokens again, from where states are known, with the images among them."""
        arena, states = self.arena, self.arena.states
        assert states is not None and self.images is not None  # noqa: S101, PT018  no others are run again
        ids, arena.replayed = states.token_ids[-count:], arena.replayed + count
        arena.rewind_to(arena.length - count)
        while ids:
            width = self.images.pass_width(arena.length, _REPLAY_WIDTH)
            self.forward(ids[:width], logits_for=(0,))
            arena.commit(len(ids[:width]))
            del ids[:width]

    @abstractmethod
    def run(self, new: NewTokens) -> Floats:
        """Run a pass over tokens that `forward` has checked."""

    def begin(self, new: NewTokens) -> Callable[[], Floats]:
        """Prepare a pass like that of `run`, so that the next pass of this thread may run it too.

        Returns:
            What runs it, if it has not been run, and returns its logits; called before any other pass of this binding.
        """
        return partial(self.run, new)

    def hidden_states(self, tokens: npt.ArrayLike, wanted: Sequence[int]) -> Floats:
        """Run a pass like `forward`, and return the hidden states of the tokens with the indices `wanted`.

        Returns:
            float32 `[r, d]`, in a new array.

        Raises:
            ContextError: as `forward`.
            EdgeError: as `forward`.
        """
        del tokens, wanted
        raise ValueError("this graph does not give hidden states")
