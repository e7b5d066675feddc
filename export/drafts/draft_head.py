"""Adds a draft head to its target's bundle, and checks that its graph computes what the checkpoint does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
from threadpoolctl import threadpool_limits

from ...errors import InputError
from ...models.bundle import DRAFT_GRAPH_NAME, DRAFT_WEIGHTS_NAME, GRAPH_NAME, TARGET_IDS_NAME
from ...models.manifest import DraftPairing, HeadKind
from ...models.progress import Progress, counted
from ...runtime.measure.logit_quality import log_softmax
from ..bundle_content import BundleContent, change_manifest
from ..calibration.calibration_text import CalibrationText
from ..check.contract_session import ContractSession, ModelSession, require_close
from ..check.parity import RoundedLinears, quantized_weights, with_float_activations
from ..check.reference import reference_head, reference_medusa
from ..check.reference_operations import looked_up
from ..checkpoint.config import DecoderConfig
from ..checkpoint.json_fields import read_json
from ..checkpoint.layer_weights import QuantPlan
from ..checkpoint.layout import embedding_layout, final_norm
from ..graph import inputs_outputs
from ..graph.head_parts import FeatureHead, build_feature_head
from ..graph.initializers import Initializers, WeightFile
from ..quantization.methods import DEFAULT_METHODS, FP32, INT4, require_expert_format, with_fitting_blocks, with_methods
from ..recipe import ExportRecipe
from .feature_heads import EAGLE_CONFIG, open_eagle_head, open_mtp_module
from .make_draft import DraftRequest
from .medusa_draft import MEDUSA_HEADS, TOP_IDS, TOP_PROBABILITIES, MedusaHeads, build_medusa_heads, open_medusa_heads
from .trimmed_head import trim_vocabulary

_STAGE: Final = "draft"
_CHECKED_TOKENS: Final = 12
_CHECKED_FEATURES: Final = 8
"""Number of those tokens that have features of the target; the others continue from the head's own states."""

Head: TypeAlias = FeatureHead | MedusaHeads


def add_draft_head(
    head: Head,
    recipe: ExportRecipe,
    folder: Path,
    target: BundleContent,
    progress: Progress,
    text: CalibrationText | None = None,
) -> str:
    """Write the graph of a head into its target's bundle, and name it in the manifest.

    Args:
        head: The head.
        recipe: The recipe of the target, with the format of the head's linears.
        folder: The target's bundle, whose graph gives the features that the head reads.
        target: The content of that bundle.
        progress: Receives the stage "draft".
        text: Text of the target by which the tokens of a module are ranked; None if there is none.

    Returns:
        A note on the head for the user; empty if there is nothing to say.

    Raises:
        CheckpointError: A tensor cannot be read.
        InputError: The LM head cannot have as few tokens.
        ExportError: The graph does not compute what the checkpoint does.
        OSError: The disk refused a write.
    """
    weight_format = recipe.draft_format or INT4
    formats = {
        linear.name: FP32 if linear.exact else with_fitting_blocks(linear, weight_format) for linear in head.linears
    }
    plan = with_methods(formats, DEFAULT_METHODS)
    total = sum(linear.weight_count for linear in head.linears)
    with WeightFile(folder / DRAFT_WEIGHTS_NAME) as data:
        weights = Initializers(head.checkpoint, data, counted(total, progress, _STAGE))
        graph = _build_graph(folder, target, head, plan, weights)
    (folder / DRAFT_GRAPH_NAME).write_bytes(graph.SerializeToString())
    names, ids = [DRAFT_WEIGHTS_NAME, DRAFT_GRAPH_NAME], ""
    if isinstance(head, FeatureHead) and head.target_ids is not None:
        ids = TARGET_IDS_NAME
        np.save(folder / ids, head.target_ids)
        names.append(ids)
    change_manifest(folder, names, draft=DraftPairing(".", ids, graph=DRAFT_GRAPH_NAME, head=head.kind))
    if isinstance(head, MedusaHeads):
        _check_medusa(folder, head, plan, graph)
        return ""
    # What is checked is what the bundle has in the end.
    note = trim_vocabulary(folder, recipe.draft_tokens, text, progress) if head.kind is HeadKind.MTP else ""
    _check_head(folder, target, head, plan)
    return note


def read_head_kind(source: Path) -> HeadKind | None:
    """The kind of draft head in a folder; None for a whole language model, or if there is no config.json.

    Raises:
        CheckpointError: config.json cannot be read.
    """
    config = read_json(source / "config.json") if (source / "config.json").is_file() else {}
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    if any(isinstance(name, str) and "eagle" in name.lower() for name in names) or EAGLE_CONFIG in config:
        return HeadKind.EAGLE
    return HeadKind.MEDUSA if MEDUSA_HEADS in config else None


def open_draft_head(request: DraftRequest, recipe: ExportRecipe, folder: Path, target: DecoderConfig) -> Head:
    """Open the draft head that an export requests, before anything slow.

    Args:
        request: The requested head.
        recipe: The recipe.
        folder: The target's checkpoint.
        target: The target.

    Raises:
        CheckpointError: It is damaged, incomplete or of a variant that is not supported.
        InputError: It does not fit the target, or its LM head cannot have that many tokens.
    """
    if request.kind is HeadKind.MTP:
        tokens = recipe.draft_tokens
        if isinstance(tokens, int) and tokens > target.vocab_size:
            raise InputError(
                f"a draft's head cannot have {tokens} tokens",
                f"give at most {target.vocab_size}, the model's vocabulary",
            )
        module = open_mtp_module(folder, target)
        for linear in module.linears:
            require_expert_format(linear, recipe.draft_format or INT4)
        return module
    if request.source is None:
        raise InputError("a draft head needs a checkpoint", "give its folder as the source")
    opened = open_eagle_head if request.kind is HeadKind.EAGLE else open_medusa_heads
    return opened(request.source, target)


def _build_graph(
    folder: Path, target: BundleContent, head: Head, plan: QuantPlan, weights: Initializers
) -> onnx.ModelProto:
    if isinstance(head, MedusaHeads):
        return build_medusa_heads(head, plan, weights)
    graph = onnx.load(folder / GRAPH_NAME, load_external_data=False).graph
    if head.kind is HeadKind.EAGLE:
        return build_feature_head(head, target.context, plan, weights, graph)
    name, added = final_norm(target.config).weight, np.float32(target.config.traits.norms_add_one)
    used, original = (source.read(name) + added for source in (target.source, target.original))
    # Where calibration multiplied the columns of the LM head, it divided the norm before it.
    factors = None
    if not np.array_equal(used, original):
        factors = (used / np.where(original == 0, 1, original)).astype(np.float32)
    return build_feature_head(head, target.context, plan, weights, graph, original, factors)


def _check_medusa(folder: Path, heads: MedusaHeads, plan: QuantPlan, graph: onnx.ModelProto) -> None:
    """Compare the graph of Medusa heads with the reference.

    Raises:
        ExportError: They differ.
    """
    features = np.random.default_rng(0).standard_normal((1, heads.config.hidden_size)).astype(np.float32)
    session = ModelSession(with_float_activations(graph), folder)
    found, ids = session.run((TOP_PROBABILITIES, TOP_IDS), {inputs_outputs.DRAFT_FEATURES: features})
    logits = reference_medusa(
        RoundedLinears(heads.checkpoint, heads.linears, plan),
        heads.heads,
        features[0].astype(np.float64),
    )
    expected = np.exp(log_softmax(logits))
    best = np.sort(expected, axis=-1)[:, ::-1][:, : found.shape[1]]
    for each in (best, np.take_along_axis(expected, ids, axis=-1)):
        require_close(found, each, "the exported Medusa heads differ from the reference")


def _check_head(folder: Path, target: BundleContent, head: FeatureHead, plan: QuantPlan) -> None:
    """Compare a head's graph with the reference, with the target's features and continuing from its own states.

    Of a module with a trimmed LM head, the logits of the kept tokens are compared.

    Raises:
        ExportError: They differ.
    """
    random = np.random.default_rng(0)
    count = min(_CHECKED_TOKENS, target.context)
    tokens = random.integers(0, head.config.vocab_size, count)
    features = random.standard_normal((min(_CHECKED_FEATURES, count - 1), head.feature_size)).astype(np.float32)
    rounded = RoundedLinears(head.checkpoint, head.linears, plan)
    used = quantized_weights(target.source, target.config, target.plan)
    exact = features.astype(np.float64)
    with threadpool_limits(1, user_api="blas"):
        embedded = looked_up(used if head.embedding is None else rounded, embedding_layout(head.config), tokens)
        of_target = (used, target.original) if head.kind is HeadKind.MTP else None
        expected, expected_states = reference_head(head, rounded, embedded, exact, target.context, of_target)
    trimmed = folder / TARGET_IDS_NAME
    if head.lm_head is None and trimmed.is_file():
        expected = expected[:, np.load(trimmed)]
    graph = with_float_activations(onnx.load(folder / DRAFT_GRAPH_NAME, load_external_data=False))
    hidden = head.config.hidden_size
    for logits, states, place in head_passes(folder, graph, tokens, features, hidden):
        last = place.stop - 1
        for found, wanted in ((logits[-1], expected[last]), (states[-1], expected_states[last])):
            require_close(found, wanted, "the exported draft head differs from the reference")


def head_passes(
    folder: Path,
    graph: onnx.ModelProto,
    tokens: npt.NDArray[np.int64],
    features: npt.NDArray[np.float32],
    hidden_size: int,
) -> Iterator[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], slice]]:
    """Run a head's graph over tokens [n]: one pass with features [k, f], then one for each further token.

    Yields:
        Logits and states of the tokens of each pass, and the places of these tokens.
    """
    session = ContractSession(folder, len(tokens), graph, extra_outputs=(inputs_outputs.NEXT_STATES,))
    states, given = np.empty((0, hidden_size), np.float32), len(features)
    for start, stop in ((0, given), *((index, index + 1) for index in range(given, len(tokens)))):
        positions = np.arange(start, stop)
        bias = np.where(np.arange(stop) <= positions[:, None], np.float32(0), np.float32(-1e9))
        feeds = {inputs_outputs.DRAFT_FEATURES: features[start:stop], inputs_outputs.DRAFT_STATES: states[-1:]}
        logits = session.run(tokens[start:stop], positions, bias, np.arange(stop - start), feeds)
        session.length = stop
        (states,) = session.extra
        yield logits, states, slice(start, stop)
