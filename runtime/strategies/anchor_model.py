"""The anchor of a model: a second model with the same tokens, near which its answers stay."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from ...errors import BundleError
from ...models.bundle import open_bundle
from ...models.find import find_model
from ...models.pairing import vocabulary_difference
from ...models.progress import Progress
from ..generation import CachedSequence
from ..graph.open_graph import open_graph
from ..graph.session import SessionConfig
from ..kv.arena import KVArena
from ..kv.prefix_cache import PrefixCache
from ..options import GenerateOptions
from ..speculation.draft_loading import DraftTarget
from .second_reader import NewSequence


class AnchorModel:
    """A loaded anchor.

    Args:
        name: the model, as `load` finds it.
        config: how the model runs that it anchors.
        target: that model.
        progress: receives the progress of reading long prompts.

    Raises:
        BundleError: the anchor is missing or damaged, has other tokens or a shorter context, or cannot verify the
            drafts of the model.
    """

    def __init__(
        self, name: str | os.PathLike[str], config: SessionConfig, target: DraftTarget, progress: Progress
    ) -> None:
        bundle, anchored = open_bundle(find_model(name)), target.bundle.folder
        if difference := vocabulary_difference(anchored, bundle.folder):
            what = f"the anchor {bundle.folder} has another vocabulary than {anchored}: {difference}"
            raise BundleError(what, "give an anchor with the same tokens")
        if (most := bundle.context or target.context) < target.context:
            what = f"the anchor {bundle.folder} has a context of {most} tokens, and {anchored} has {target.context}"
            raise BundleError(what, f"add --context {most}")
        self._graph: Final = open_graph(bundle, replace(config, kv_scales=None), cache=target.cache)
        if target.graph_io.supports_trees and not self._graph.graph_io.supports_trees:
            what = f"the anchor {bundle.folder} takes no tree mask, and {anchored} does"
            raise BundleError(what, "export the anchor with edge-run")
        self._context: Final = target.context
        self._progress: Final = progress
        prefixes = target.prefixes or PrefixCache(self._new_arena, 0)
        self._prefixes: Final = prefixes.beside(self._new_arena)

    def sequence(self, prompt_ids: Sequence[int], options: GenerateOptions) -> CachedSequence:
        """A new sequence with what earlier ones have of the prompt."""
        arena = self._prefixes.take(() if options.exact else prompt_ids)
        return CachedSequence(self._graph.bind(arena), [*prompt_ids[: arena.length]], self._progress, self._prefixes)

    def _new_arena(self) -> KVArena:
        return self._graph.arena(self._context)


def anchor_sequences(
    name: str | os.PathLike[str] | None, config: SessionConfig, target: DraftTarget, progress: Progress
) -> NewSequence | None:
    """What makes sequences of the anchor; None where none is named. Arguments and errors are those of `AnchorModel`."""
    return None if name is None else AnchorModel(name, config, target, progress).sequence
