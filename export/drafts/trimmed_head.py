"""Trims a draft's LM head to the tokens that matter.

Source: VocabTrim (Goel et al. 2025), FR-Spec (Zhao et al. 2025). Draft tokens are verified, so a draft's head need not
have every token: a missing one is only predicted wrong, and fewer rows have to be read at each step. The kept rows are
rows of the whole head, bit for bit, with their codes, scales and zero points. A head that shared the embedding's
matrix gets rows of its own; the embedding stays whole, so a trimmed draft reads every token. The token ids of the rows
are written beside the graph (`models.bundle.TARGET_IDS_NAME`), in ascending order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from ...errors import ExportError
from ...models.atomic import temporary_folder, write_atomically
from ...models.bundle import (
    DRAFT_GRAPH_NAME,
    DRAFT_WEIGHTS_NAME,
    GRAPH_NAME,
    TARGET_IDS_NAME,
    TOKENIZER_AND_CONFIG_FILES,
    WEIGHTS_NAME,
    Bundle,
)
from ...models.file_system import move
from ...models.progress import Progress
from ...runtime.engine_loading import load
from ...runtime.measure.bundle_timing import BundleTimer
from ...runtime.speculation.drafters.target_drafts import HiddenStateHead
from ...runtime.text.turn_markers import TokenArray
from ..bundle_content import change_manifest, read_manifest, write_manifest
from ..calibration.calibration_text import CalibrationText
from ..check.contract_session import ContractSession, require_close
from ..checkpoint.source import Float32Array
from ..graph import inputs_outputs
from ..graph.initializers import WeightFile
from ..recipe import DraftTokens
from ..upgrade.decoder_io import find_lm_head
from ..upgrade.describe import bits_per_weight, weight_matrices
from ..upgrade.editable import EditableGraph, Node
from ..upgrade.graph_parts import in_place, to_file
from . import head_size
from .head_size import Int64Array, TokenRanking

_BY_ROW: Final = (1, 2, 3, 5)
"""Inputs of MatMulNBits with a row or an element for each output: codes, scales, zero points, bias."""
_TOLERANCE: Final = 1e-4
"""Largest difference of a kept logit, relative to the standard deviation of the logits where that exceeds 1."""
_COMPARED_POSITIONS: Final = 8
"""Number of positions whose logits are compared."""
DEFAULT_TOKENS: Final = 65536
"""Number of tokens that are kept by default, in vocabularies of at least `_LARGE` tokens."""
_LARGE: Final = 2 * DEFAULT_TOKENS
"""Smallest vocabulary that is trimmed by default: below, a pass gets little shorter."""
_MAX_TEXT_TOKENS: Final = 2048
"""Number of tokens of text on which the agreement is measured."""
_ROUNDS: Final = 12
"""Number of turns in which passes are timed."""
_STAGE: Final = "draft"


def trim_head(graph: EditableGraph, kept: Int64Array) -> None:
    """Keep only the head's rows of the tokens `kept`, int64 [n], all different, in their order.

    Raises:
        BundleError: The graph has no head.
    """
    head = find_lm_head(graph)
    tokens = head_tokens(graph)
    if head.op == "MatMulNBits":
        for index in _BY_ROW:
            if head.input(index):
                _take(graph, head, index, kept, tokens, axis=0)
        graph.set_attribute(head, "N", kept.size)
    else:  # MatMul or Gemm
        _take(graph, head, 1, kept, tokens, axis=0 if head.attribute("transB", 0) else 1)
        if head.input(2) and graph.tensors[head.input(2)].shape[-1:] == (tokens,):
            _take(graph, head, 2, kept, tokens, axis=-1)
    after = graph.consumers(head.output(0))
    while after:
        for index, name in enumerate(after[0].inputs):
            if name in graph.tensors and graph.tensors[name].shape[-1:] == (tokens,):
                _take(graph, after[0], index, kept, tokens, axis=-1)
        after = graph.consumers(after[0].output(0))
    info = graph.outputs[inputs_outputs.LOGITS]
    info.type.tensor_type.shape.dim[-1].dim_value = kept.size
    graph.sweep()


def head_tokens(graph: EditableGraph) -> int:
    """Number of logits of a graph.

    Raises:
        ExportError: The graph does not state it.
    """
    shape = graph.shape(inputs_outputs.LOGITS)
    if not shape or not isinstance(shape[-1], int):
        raise ExportError("the draft's graph does not state the number of its logits", "export the draft again")
    return shape[-1]


def _take(graph: EditableGraph, node: Node, index: int, kept: Int64Array, tokens: int, axis: int) -> None:
    """Replace an initializer that a node reads by its part for the kept tokens."""
    name = node.input(index)
    converted = graph.producer_of(name, "Cast")  # scales stored in float16
    array = graph.array(name if converted is None else converted.input(0))
    if array is None:
        raise ExportError(f"a head whose input {name} is computed cannot be trimmed", "leave --draft-vocab out")
    if array.shape[axis] != tokens:  # scales and zero points may be stored flat
        array = array.reshape(tokens, -1)
    taken = graph.add_tensor(f"head.{name.rpartition('.')[2]}.kept", np.take(array, kept, axis))
    if converted is not None:
        taken = graph.add("Cast", [taken], name=f"{taken}.converted", to=converted.attribute("to")).output(0)
    graph.set_input(node, index, taken)


def write_trimmed(whole: Bundle, folder: Path, kept: Int64Array) -> None:
    """Write a draft's bundle with a trimmed head into a new or empty folder.

    Args:
        whole: The draft's bundle with its whole head and a manifest.
        folder: Folder of the new bundle.
        kept: Token ids to keep, int64 [n], ascending; both draft and target have them.

    Raises:
        ExportError: The trimmed draft computes other logits.
        OSError: The disk refused a write.
    """
    graph = EditableGraph.open(whole.graph)
    trim_head(graph, kept)
    linears = weight_matrices(graph)
    folder.mkdir(parents=True, exist_ok=True)
    with WeightFile(folder / WEIGHTS_NAME) as data:
        model = graph.model(to_file(data))
        files = {WEIGHTS_NAME: data.digest()}
    (folder / GRAPH_NAME).write_bytes(model.SerializeToString())
    np.save(folder / TARGET_IDS_NAME, kept)
    whole.copy_config_files(folder)
    manifest = read_manifest(whole.folder)
    architecture = manifest.architecture
    count = min(_COMPARED_POSITIONS, architecture.context)
    tokens = np.random.default_rng(0).integers(0, architecture.vocab_size, count)
    expected, found = (
        ContractSession(each, count).forward(tokens, np.arange(count)) for each in (whole.folder, folder)
    )
    expected = expected[:, kept]
    allowed = _TOLERANCE * max(1.0, float(expected.std()))
    require_close(found, expected, "the trimmed draft's logits differ from the whole draft's", allowed=allowed)
    manifest = replace(
        manifest,
        architecture=replace(architecture, tied_head=False),
        bits_per_weight=bits_per_weight(linears),
        bits_per_weight_read=None,
        files=files,
    )
    write_manifest(folder, manifest, (GRAPH_NAME, TARGET_IDS_NAME, *TOKENIZER_AND_CONFIG_FILES))


def trim_own_draft(folder: Path, kept: Int64Array) -> None:
    """Trim the head of a draft whose graph is in its target's bundle.

    The kept rows join the draft's own weights in `draft.onnx.data`; all other weights stay in the file of the target.

    Args:
        folder: The bundle's folder.
        kept: Token ids to keep, int64 [n], ascending.

    Raises:
        OSError: The disk refused a write.
    """
    with temporary_folder(folder, "trimmed") as new:
        with WeightFile(new / DRAFT_WEIGHTS_NAME) as data:
            model = trimmed_own_draft(folder, kept).model(to_file(data, kept=WEIGHTS_NAME))
        move(new / DRAFT_WEIGHTS_NAME, folder / DRAFT_WEIGHTS_NAME)
    write_atomically(folder / DRAFT_GRAPH_NAME, model.SerializeToString())
    np.save(folder / TARGET_IDS_NAME, kept)
    draft = read_manifest(folder).draft
    assert draft is not None  # noqa: S101 -- it has just been trimmed
    changed = [DRAFT_WEIGHTS_NAME, DRAFT_GRAPH_NAME, TARGET_IDS_NAME]
    change_manifest(folder, changed, draft=replace(draft, d2t=TARGET_IDS_NAME))


def trimmed_own_draft(folder: Path, kept: Int64Array) -> EditableGraph:
    """The graph of a bundle's own draft with a trimmed head; arguments and errors as for `trim_own_draft`."""
    graph = EditableGraph.open(folder / DRAFT_GRAPH_NAME)
    trim_head(graph, kept)
    return graph


def trim_vocabulary(folder: Path, wanted: DraftTokens, text: CalibrationText | None, progress: Progress) -> str:
    """Trim the LM head of the module in a bundle, if it is to have fewer tokens than its target.

    Args:
        folder: The bundle, whose manifest names the module with its whole LM head.
        wanted: Number of tokens, or how it is chosen: by default it is a fixed one if the vocabulary is much larger.
        text: Text of the target: tokens are counted in its calibration part, agreement is measured on the held-out one.
            None if there is none, with which nothing is trimmed.
        progress: Receives the stage "draft".

    Returns:
        A sentence on what was kept; empty if nothing was trimmed.

    Raises:
        InputError: The head cannot have that size.
        ExportError: The head cannot be trimmed, or a graph does not run.
        EdgeError: The bundle cannot be loaded.
        OSError: The disk refused a write.
    """
    vocabulary = read_manifest(folder).architecture.vocab_size
    if text is None or wanted == "all" or (wanted is None and vocabulary < _LARGE):
        return ""
    ranking, starts = head_size.ranked_text(folder, vocabulary, text)
    if wanted == "auto":
        tokens = _fastest(folder, ranking, text.held_out, starts, progress)
    else:
        tokens = int(wanted or max(DEFAULT_TOKENS, ranking.min_tokens))
    kept = ranking.kept(tokens)
    if tokens == vocabulary:
        return ""
    trim_own_draft(folder, kept)
    return (
        f"The multi-token-prediction module drafts {tokens} of {vocabulary} tokens, "
        f"{head_size.kept_share(text.held_out, starts, kept):.1%} of those in held-out answers."
    )


def _fastest(
    folder: Path, ranking: TokenRanking, texts: Sequence[TokenArray], starts: Sequence[int], progress: Progress
) -> int:
    """The number of tokens with the most expected tokens per second."""
    agreement = head_size.count_agreement(_predictions(folder, texts, starts, progress), ranking)
    smallest = folder / ".draft.smallest.onnx"
    timer = BundleTimer()
    try:
        trimmed = trimmed_own_draft(folder, ranking.kept(ranking.min_tokens))
        smallest.write_bytes(trimmed.model(in_place).SerializeToString())
        on_whole, on_smallest = timer.time_heads(folder, [folder / DRAFT_GRAPH_NAME, smallest], _ROUNDS)
    finally:
        smallest.unlink(missing_ok=True)
    (on_target,) = timer.time_passes([folder], head_size.TARGET_WIDTHS, _ROUNDS)
    return head_size.best_size(ranking, agreement, on_target, on_whole, on_smallest)


def _predictions(
    folder: Path, texts: Sequence[TokenArray], starts: Sequence[int], progress: Progress
) -> Iterable[tuple[Int64Array, Float32Array]]:
    """Preferred tokens of the target and logits of the module, token by token as in decoding.

    Raises:
        ExportError: The module does not run.
    """
    with load(folder, device="cpu", learned=False) as engine:
        module = engine.model.drafters.draft_model()
        if not isinstance(module, HiddenStateHead):
            raise ExportError(
                "the exported multi-token-prediction module does not run on this machine",
                "give the number of its tokens, or --draft-vocab all",
            )
        bound = engine.model.new_sequence().bound
        arena, done = bound.arena, 0
        for text, start in zip(texts, starts, strict=True):
            arena.rewind_to(0)
            module.attach(arena)
            module.reset(())
            # The successor of the last token is unknown, and before the second one the module has no features.
            read = text[: min(_MAX_TEXT_TOKENS - done, engine.context)].tolist()[:-1]
            for index, token in enumerate(read):
                module.append(token)
                logits = module.logits(()) if index >= max(start - 1, 1) else None
                preferred = bound.forward((token,))[0].argmax(keepdims=True)
                arena.commit(1)
                if logits is not None:
                    yield preferred, logits[None]
            done += len(read)
            progress(_STAGE, done / _MAX_TEXT_TOKENS)
            if done + 1 >= _MAX_TEXT_TOKENS:
                return
