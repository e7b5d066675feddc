"""Adds a draft head to its target's bundle, and checks that its graph computes what the checkpoint does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import onnx
from threadpoolctl import threadpool_limits

from ...errors import ExportError
from ...models.atomic import write_atomically
from ...models.bundle import DRAFT_GRAPH_NAME, DRAFT_WEIGHTS_NAME, GRAPH_NAME, TARGET_IDS_NAME, digest_file
from ...models.draft_heads import HeadKind
from ...models.manifest import MANIFEST_NAME, DraftPairing, FileDigest, Manifest, WeightFormat
from ...models.progress import Progress, counted
from ..bundle_content import BundleContent
from ..check.contract_session import ContractSession, ModelSession
from ..check.float_activations import with_float_activations
from ..check.head_reference import embedding_rows, reference_head, reference_medusa
from ..check.parity import TOLERANCE, QuantizedWeights, RoundedLinears, log_softmax
from ..checkpoint.config import DecoderConfig
from ..graph import inputs_outputs
from ..graph.draft_features import DraftFeatures
from ..graph.eagle_graph import EagleParts, build_eagle_head
from ..graph.initializers import Initializers
from ..graph.medusa_graph import TOP_IDS, TOP_PROBABILITIES, build_medusa_heads
from ..graph.weight_file import WeightFile
from ..recipe import DEFAULT_METHODS, INT4, ExportRecipe, HeadRequest, with_methods
from .head_checkpoint import EagleHead, TargetIds, open_eagle_head
from .medusa_checkpoint import MedusaHeads, open_medusa_heads

_STAGE: Final = "draft"
_CHECKED_TOKENS: Final = 12
_CHECKED_FEATURES: Final = 8
"""Number of those tokens that have features of the target; the others continue from the head's own states."""


@dataclass(frozen=True)
class DraftHead:
    """A draft head that fits its target."""

    head: EagleHead | MedusaHeads
    weight_format: WeightFormat
    """Format of its linears."""

    @property
    def features(self) -> DraftFeatures:
        """The hidden states that the target's graph has to give."""
        return self.head.features

    def add_to(self, folder: Path, target: BundleContent, progress: Progress) -> None:
        """Write the head into the bundle of its target; arguments and errors as for `add_eagle_head`."""
        if isinstance(self.head, EagleHead):
            add_eagle_head(folder, target, self.head, self.weight_format, progress)
        else:
            add_medusa_heads(folder, target, self.head, self.weight_format, progress)


def open_draft_head(request: HeadRequest, recipe: ExportRecipe, target: DecoderConfig) -> DraftHead:
    """Open the draft head that a recipe requests, before anything slow.

    Raises:
        CheckpointError: It is damaged, incomplete or of a variant that is not supported.
        InputError: It does not fit the target.
    """
    weight_format = request.weight_format or (recipe.body if recipe.mixed_precision is None else INT4) or INT4
    if request.kind is HeadKind.EAGLE:
        return DraftHead(open_eagle_head(request.source, target), weight_format)
    return DraftHead(open_medusa_heads(request.source, target), weight_format)


def add_medusa_heads(
    folder: Path, target: BundleContent, heads: MedusaHeads, weight_format: WeightFormat, progress: Progress
) -> None:
    """Write the graph of Medusa heads into their target's bundle; arguments and errors as for `add_eagle_head`."""
    plan = with_methods({linear.name: weight_format for linear in heads.linears}, DEFAULT_METHODS)
    total = sum(linear.weight_count for linear in heads.linears)
    with WeightFile(folder / DRAFT_WEIGHTS_NAME) as data:
        weights = Initializers(heads.checkpoint, data, counted(total, progress, _STAGE))
        graph = build_medusa_heads(target.config, heads.blocks, heads.outputs, plan, weights)
        digests = {DRAFT_WEIGHTS_NAME: data.digest()}
    (folder / DRAFT_GRAPH_NAME).write_bytes(graph.SerializeToString())
    _check_medusa(folder, heads, plan, graph)
    _name_head(folder, HeadKind.MEDUSA, None, digests)


def _check_medusa(folder: Path, heads: MedusaHeads, plan: Mapping[str, WeightFormat], graph: onnx.ModelProto) -> None:
    """Compare the graph of Medusa heads with the reference.

    Raises:
        ExportError: They differ.
    """
    features = np.random.default_rng(0).standard_normal((1, heads.config.hidden_size)).astype(np.float32)
    session = ModelSession(with_float_activations(graph), folder)
    found, ids = session.run((TOP_PROBABILITIES, TOP_IDS), {inputs_outputs.DRAFT_FEATURES: features})
    logits = reference_medusa(
        RoundedLinears(heads.checkpoint, heads.linears, plan),
        [[each.modules[0] for each in blocks] for blocks in heads.blocks],
        [each.modules[0] for each in heads.outputs],
        features[0].astype(np.float64),
    )
    expected = np.exp(log_softmax(logits))
    best = np.sort(expected, axis=-1)[:, ::-1][:, : found.shape[1]]
    difference = max(
        float(np.abs(found - best).max()), float(np.abs(found - np.take_along_axis(expected, ids, axis=-1)).max())
    )
    if not difference <= TOLERANCE:
        raise ExportError(
            f"the exported Medusa heads differ from the reference by {difference:.2g} in a probability",
            "this is a defect of the exporter: please report the heads",
        )


def add_eagle_head(
    folder: Path, target: BundleContent, head: EagleHead, weight_format: WeightFormat, progress: Progress
) -> None:
    """Write the graph of an EAGLE-3 head into its target's bundle, and name it in the manifest.

    Args:
        folder: The target's bundle, whose graph gives the features that the head reads.
        target: The content of that bundle.
        head: The head.
        weight_format: Format of the head's linears.
        progress: Receives the stage "draft".

    Raises:
        CheckpointError: A tensor cannot be read.
        ExportError: The graph does not compute what the checkpoint does.
        OSError: The disk refused a write.
    """
    plan = with_methods({linear.name: weight_format for linear in head.linears}, DEFAULT_METHODS)
    parts = EagleParts(head.config, head.projection, head.layer, head.feature_norm, head.lm_head)
    embedding = None if head.has_embedding else onnx.load(folder / GRAPH_NAME, load_external_data=False).graph
    total = sum(linear.weight_count for linear in head.linears)
    with WeightFile(folder / DRAFT_WEIGHTS_NAME) as data:
        weights = Initializers(head.checkpoint, data, counted(total, progress, _STAGE))
        graph = build_eagle_head(parts, target.context, plan, weights, embedding)
        digests = {DRAFT_WEIGHTS_NAME: data.digest()}
    (folder / DRAFT_GRAPH_NAME).write_bytes(graph.SerializeToString())
    _check_head(folder, target, head, plan, graph)
    _name_head(folder, HeadKind.EAGLE, head.target_ids, digests)


def _check_head(
    folder: Path, target: BundleContent, head: EagleHead, plan: Mapping[str, WeightFormat], graph: onnx.ModelProto
) -> None:
    """Compare a head's graph with the reference, with the target's features and continuing from its own states.

    Raises:
        ExportError: They differ.
    """
    random = np.random.default_rng(0)
    count = min(_CHECKED_TOKENS, target.context)
    given = min(_CHECKED_FEATURES, count - 1)
    tokens = random.integers(0, head.config.vocab_size, count)
    features = random.standard_normal((given, head.feature_size)).astype(np.float32)
    rounded = RoundedLinears(head.checkpoint, head.linears, plan)
    embedded = rounded if head.has_embedding else QuantizedWeights(target.source, target.config, target.plan)
    with threadpool_limits(1, user_api="blas"):
        expected = reference_head(
            rounded, head.settings, embedding_rows(embedded, tokens), features.astype(np.float64), target.context
        )
    session = ContractSession(
        folder, head.config, count, with_float_activations(graph), extra_outputs=(inputs_outputs.NEXT_STATES,)
    )
    state = np.empty((0, head.config.hidden_size), np.float32)
    for start, stop in ((0, given), *((index, index + 1) for index in range(given, count))):
        positions = np.arange(start, stop)
        bias = np.where(np.arange(stop) <= positions[:, None], np.float32(0), np.float32(-1e9))
        feeds = {inputs_outputs.DRAFT_FEATURES: features[start:stop], inputs_outputs.DRAFT_STATES: state}
        last = np.array([stop - start - 1])
        logits = session.run(tokens[start:stop], positions, bias, last, feeds)
        session.length = stop
        state = session.extra[0]
        for found, wanted in ((logits[0], expected.logits[stop - 1]), (state[0], expected.states[stop - 1])):
            difference = float(np.abs(found - wanted).max())
            if not difference <= TOLERANCE * max(1.0, float(wanted.std())):
                raise ExportError(
                    f"the exported draft head differs from the reference by {difference:.2g}",
                    "this is a defect of the exporter: please report the head",
                )


def _name_head(folder: Path, kind: HeadKind, target_ids: TargetIds | None, digests: Mapping[str, FileDigest]) -> None:
    """Name a draft head, whose graph is in the bundle, in the manifest."""
    names = [DRAFT_GRAPH_NAME]
    if target_ids is not None:
        np.save(folder / TARGET_IDS_NAME, target_ids)
        names.append(TARGET_IDS_NAME)
    path = folder / MANIFEST_NAME
    manifest = Manifest.from_json(path.read_bytes(), str(path))
    named = DraftPairing(".", "" if target_ids is None else TARGET_IDS_NAME, graph=DRAFT_GRAPH_NAME, head=kind)
    files = {**manifest.files, **digests, **{name: digest_file(folder / name) for name in names}}
    write_atomically(path, replace(manifest, draft=named, files=files).to_json().encode())
