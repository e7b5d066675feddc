"""Draft heads in tests: targets whose arenas keep features, engines that draft with them all the time, wrong heads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import edgerun
from edgerun import Engine, GenerateOptions
from edgerun.export import FP32, ExportRecipe, WeightFormat, export_checkpoint
from edgerun.export.check.reference import Reference, reference_head
from edgerun.export.check.reference_operations import looked_up
from edgerun.export.checkpoint.config import read_config
from edgerun.export.checkpoint.layout import embedding_layout
from edgerun.export.checkpoint.safetensors_files import Checkpoint
from edgerun.export.drafts.feature_heads import open_eagle_head, open_mtp_module
from edgerun.export.recipe import OWN_MODULE
from edgerun.models.bundle import open_bundle
from edgerun.models.manifest import HeadKind
from edgerun.models.pairing import find_draft
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph.bound_session import BoundSession
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from edgerun.runtime.kv.features import FeatureSlots
from edgerun.runtime.result import Stats
from edgerun.runtime.speculation.choice import Speculation
from edgerun.runtime.speculation.draft_loading import DraftTarget, load_head
from edgerun.runtime.speculation.drafters.sparse_cache import load_sparse_draft
from edgerun.runtime.speculation.drafters.target_drafts import HiddenStateHead
from edgerun.runtime.speculation.tree import Source
from support.tiny_heads import write_eagle_head, write_mtp_checkpoint
from support.tiny_models import tiny_config, write_checkpoint

from .adversarial_drafters import NEARLY_FREE, FixedCost

CPU = SessionConfig(choose_device("cpu"), 1)
_FREE = {128: {1: 1e-6, 16: 1.1e-6}}
"""Seconds of a pass of a draft model that takes no time."""
_FREE_OVER_FEW_SLOTS = {**_FREE, 1024: {1: 1e-8, 16: 1.1e-8}}
"""Passes over 1,024 slots, which drafts copy, take next to no time beside those of the text, short as it is."""


def bind_with_features(target: GraphSession, context: int) -> BoundSession:
    """A session of the target whose arena keeps features."""
    arena = target.arena(context)
    assert target.graph_io.feature_size is not None
    arena.features = FeatureSlots(target.graph_io.feature_size)
    return target.bind(arena)


def run_missing(bound: BoundSession, tokens: list[int]) -> None:
    """Run what the target has not read of a sequence, without its last token."""
    if new := tokens[bound.arena.length : -1]:
        bound.forward(new)
        bound.arena.commit(len(new))


def eager_engine(bundle: Path, *, trees: bool = True, **options: Any) -> Engine:
    """An engine for which every draft token pays."""
    engine = edgerun.load(bundle, threads=1, cache=False, **options)
    if not trees:
        assert engine.model._graph is not None
        engine.model._graph.disable_trees()
    drafters = engine.model.drafters
    drafters._pass_cost = FixedCost(NEARLY_FREE)
    own = load_sparse_draft(drafters._graph, FixedCost(_FREE_OVER_FEW_SLOTS))
    drafters._resources = replace(drafters._load_resources(), new_sparse_draft=own)
    if (draft := drafters.draft_model()) is not None:
        draft.cost = FixedCost(_FREE)
    return engine


class KnowingHead(HiddenStateHead):
    """A head that knows the answer, as far as its vocabulary has it, and is wrong at every fifth token."""

    text: list[int]

    def logits(self, path: tuple[int, ...]) -> npt.NDArray[np.float32] | None:
        """The logits, with the next token of the answer, or another one, far above all others."""
        found = super().logits(path)
        sequence = [*self._token_ids, *path]
        if found is None or self.text[: len(sequence)] != sequence or len(sequence) == len(self.text):
            return found
        ids = np.arange(found.size) if self.target_ids is None else self.target_ids
        is_next = ids == self.text[len(sequence)]
        if len(sequence) % 5 == 0:
            is_next = np.roll(is_next, 1)
        return np.where(is_next, found.max() + 2, found)


def check_counts(stats: Stats, *, stopped: bool = False) -> None:
    """Check the statistics of an answer; a stop sequence may end before the last accepted token."""
    emitted = 1 + stats.accepted + stats.decode_passes
    assert stats.completion_tokens == emitted or (stopped and 0 < stats.completion_tokens < emitted)
    assert 0 <= stats.accepted <= stats.drafted
    assert stats.decode_passes < stats.target_passes
    for parts in (stats.by_source.values(), stats.by_depth):
        assert sum(part.drafted for part in parts) == stats.drafted
        assert sum(part.accepted for part in parts) == stats.accepted
        assert all(0 <= part.accepted <= part.drafted for part in parts)
    # Who got to one depth was at the depth before.
    accepted = [part.accepted for part in stats.by_depth]
    assert accepted == sorted(accepted, reverse=True)
    assert 0 <= stats.draft_s <= stats.total_s
    assert stats.target_s + stats.host_s + stats.draft_s <= stats.total_s


CONTEXT = 600


class HeadReference:
    """The features of a target and the outputs of its draft head, from the checkpoints in float64."""

    def __init__(self, folder: Path, kind: HeadKind) -> None:
        target, config = folder / "target", read_config(folder / "target")
        self._target, self._config = Checkpoint(target), config
        is_eagle = kind is HeadKind.EAGLE
        self._head = open_eagle_head(folder / "head", config) if is_eagle else open_mtp_module(target, config)

    def features(self, tokens: list[int]) -> npt.NDArray[np.float64]:
        """The residual stream entering the layers that the head reads, or after the last one, `[tokens, features]`."""
        states = Reference(self._target, self._config, CONTEXT).states(np.array(tokens))
        return np.concatenate([states[layer] for layer in self._head.features.layers], axis=-1)

    def run(self, tokens: list[int], path: tuple[int, ...], first: int = 0) -> npt.NDArray[np.float64]:
        """Logits of the head over a sequence from its token `first` on, and then a path of draft tokens."""
        features = self.features(tokens[:-1])[first:]
        following = np.array([*tokens[first + 1 :], *path])
        head, target = self._head, self._target
        embeddings = looked_up(target, embedding_layout(self._config), following)
        sources = None if head.kind is HeadKind.EAGLE else (target, target)
        return reference_head(head, head.checkpoint, embeddings, features, CONTEXT, sources)[0]


@dataclass(frozen=True)
class TargetWithHead:
    """A bundle of a target and its head, and the reference of both."""

    bundle: Path
    kind: HeadKind
    source: Source
    reference: HeadReference

    @property
    def speculation(self) -> Speculation:
        """Drafts of the head alone."""
        return Speculation.of(self.source)

    def open_target(self) -> GraphSession:
        """The graph of the target."""
        return GraphSession(self.bundle / "model.onnx", CPU)

    def open_head(self, target: GraphSession) -> HiddenStateHead:
        """The head as the runtime loads it, for a target of the same bundle."""
        bundle = open_bundle(self.bundle)
        pair = find_draft(bundle)
        assert pair.head is self.kind
        return load_head(pair, CPU, DraftTarget(bundle, target.graph_io, CONTEXT, cache=False))()


def export_with_eagle_head(
    folder: Path, weights: WeightFormat = FP32, family: str = "llama", **overrides: Any
) -> TargetWithHead:
    """Export a random target with a random EAGLE-3 head, whose settings `overrides` changes."""
    settings: dict[str, Any] = {"max_position_embeddings": CONTEXT}
    if family == "llama":
        settings["num_hidden_layers"] = 6
    target = write_checkpoint(folder / "target", family, **settings)
    head = write_eagle_head(folder / "head", tiny_config(family, **settings), **overrides)
    recipe = ExportRecipe(weights, draft=head)
    bundle = export_checkpoint(target, folder / "bundle", recipe).bundle
    return TargetWithHead(bundle, HeadKind.EAGLE, Source.EAGLE, HeadReference(folder, HeadKind.EAGLE))


def export_with_mtp_module(folder: Path, weights: WeightFormat = FP32, **overrides: object) -> TargetWithHead:
    """Export a random Qwen3.5, whose settings `overrides` changes, with its random multi-token-prediction module."""
    target = write_mtp_checkpoint(folder / "target", max_position_embeddings=CONTEXT, **overrides)
    recipe = ExportRecipe(weights, draft=OWN_MODULE)
    bundle = export_checkpoint(target, folder / "bundle", recipe).bundle
    return TargetWithHead(bundle, HeadKind.MTP, Source.MTP, HeadReference(folder, HeadKind.MTP))


def assert_accepted_tokens_run_again(headed: TargetWithHead, *, trees: bool = True) -> None:
    """Assert that a head that is mostly right, run again over accepted tokens, has the target's features of them."""
    options = GenerateOptions(max_tokens=60, ignore_eos=True)
    with eager_engine(headed.bundle, trees=trees) as engine:
        plain = engine.generate("in the other thing", options, speculation=Speculation.OFF)
        head = engine.model.drafters.draft_model()
        assert isinstance(head, HiddenStateHead)
        head.__class__ = KnowingHead
        head.text = [*engine.model.prefixes._kept[-1].token_ids.tolist(), -1]  # type: ignore[attr-defined]
        reply = engine.generate("in the other thing", options, speculation=headed.speculation)
        counts = reply.stats.by_source[str(headed.kind)]
        assert reply.text == plain.text
        assert counts.drafted > counts.accepted > 10
        assert reply.stats.decode_passes + counts.accepted == 59
        expected = headed.reference.run(head._token_ids, (21,))[-1]
        if headed.kind is HeadKind.MTP and head.target_ids is not None:  # the reference has the target's LM head
            expected = expected[head.target_ids]
        found = HiddenStateHead.logits(head, (21,))
    np.testing.assert_allclose(found, expected, atol=2e-3)
