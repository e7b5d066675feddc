"""ONNX language model in, bundle folder out."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from onnx import ModelProto

from ...errors import BundleError, InputError
from ...models.bundle import COMPANIONS, GRAPH_NAME, WEIGHTS_NAME, digest_file
from ...models.manifest import MANIFEST_NAME, FileDigest, GraphLayout, Manifest, Method, WeightFormat
from ...models.progress import Progress, silent
from ..bundle_writer import PRODUCER
from ..check.parity import Parity
from ..checkpoint.tokenizer_files import require_config_files, require_tokenizer
from ..destination import ExportResult, bundle_written_whole, require_apart
from ..graph import inputs_outputs
from ..graph.weight_file import WeightFile
from ..recipe import DEFAULT_CONTEXT_LIMIT, FP32, INT4, LONGEST_CONTEXT, ExportRecipe, ExportRequest
from .contract_inputs import AttentionForm, state_cache_shape, wire_attention
from .decoder_io import Ports, settle_ports
from .describe import FusedLinear, architecture_of, bits_per_weight, formats_of, fused_linears
from .edit.branches import take_cached_branch
from .edit.editable import EditableGraph
from .edit.write import InPlace, ToFile
from .foreign import ForeignModel, find_foreign
from .limits import longest_text
from .linears.float_linears import quantize_linears
from .linears.integer_linears import carry_over_integers
from .linears.shared_weights import share_reshaped
from .linears.sibling_linears import join_siblings, round_activations, take_in_biases
from .linears.widen import is_half, widen
from .parity import POSITIONS_READ, Reference, measure, reference_of, require_same
from .patterns.plain_operators import fuse_operators
from .selected_logits import select_rows
from .stacked_caches import part_caches

_FUSED: Final = "GroupQueryAttention"
_OLDEST_OPSET: Final = 13
"""First one in which Squeeze and its like take axes as an input."""
_SURPRISES: Final = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What reading a graph can run into that is not as onnx.proto and the operators have it: wrong types of attributes,
names that are no text, counts that do not match. All of it means the same to a user."""
_SHOWN: Final = 200
_OF_FEW_BITS: Final = frozenset({"MatMulNBits", "MatMulBnb4", "QMoE", "DynamicQuantizeMatMul", "MatMulInteger"})


def upgrade_model(request: ExportRequest, progress: Progress = silent) -> ExportResult:
    """Rewire an ONNX decoder that another tool exported to the graph contract, and check it against its source.

    Args:
        request: its source is the .onnx file, or a folder that holds one; tokenizer and settings lie beside it or one
            folder up. Its recipe has formats for matrices that are stored in floating point, and the context. With a
            body of None these are rounded to 4 bits if the whole model is in floating point, and left alone if it is
            not; matrices that have few bits already stay as they are.
        progress: hears stages "reading", "writing weights" and "checking".

    Raises:
        BundleError: the source is damaged, incomplete, or of a kind that cannot be upgraded.
        InputError: the destination holds something that is not a bundle's or overlaps the source.
        DestinationError: the disk refused a write.
        ExportError: the upgraded graph does not compute what the source does. As with every error, the destination is
            as it was before.
    """
    started = time.perf_counter()
    source, destination, recipe = request.source, request.destination, request.recipe
    if recipe.layout is not GraphLayout.EDGE:
        raise InputError("an ONNX model is upgraded to edge-run's own layout only", "leave --layout out")
    if recipe.method not in (None, Method.RTN):
        raise InputError("the weights of an ONNX model are rounded to nearest", "leave --method out")
    recipe.require_default_scales("model in ONNX")
    foreign = find_foreign(source)
    require_apart(source if source.is_dir() else foreign.graph, destination)
    progress("reading", 0.0)
    work = _Upgrade(foreign, recipe, progress)
    with bundle_written_whole(destination) as staging:
        try:
            parity = work.write(staging, request.command)
        except _SURPRISES as error:
            raise BundleError(
                f"the graph in {foreign.graph} is damaged or of a kind that is not known "
                f"({type(error).__name__}: {str(error)[:_SHOWN]})",
                "run it as it is",
            ) from error
        sizes = {file.name: file.stat().st_size for file in sorted(staging.iterdir())}
    return ExportResult(destination, sizes, work.bits, time.perf_counter() - started, parity, tuple(work.notes))


@dataclass(frozen=True)
class _Rewired:
    """A graph on the contract's inputs, with its source's weights."""

    graph: EditableGraph
    form: AttentionForm
    vocabulary: int
    """Tokens that both embedding and head have."""
    reference: Reference


class _Upgrade:
    """One upgrade, step by step."""

    def __init__(self, foreign: ForeignModel, recipe: ExportRecipe, progress: Progress) -> None:
        self.notes: list[str] = []
        self.bits = 0.0
        self._foreign = foreign
        self._recipe = recipe
        self._progress = progress
        self._context = 0

    def write(self, folder: Path, command: str) -> Parity:
        """Write every file of the bundle."""
        rewired = self._rewire()
        graph, form, reference = rewired.graph, rewired.form, rewired.reference
        require_tokenizer(self._foreign.folder, rewired.vocabulary)
        body, head = self._formats(graph)
        rounds = body != FP32 or head != FP32
        difference = None
        if rounds:
            difference = self._require_same(self._foreign.graph.parent, form, graph.model(InPlace()), reference)
        if is_half(graph):
            self._widen(graph)
        if rounds:
            quantize_linears(graph, inputs_outputs.LOGITS, body, head)
        self._tune(graph)
        linears = fused_linears(graph, inputs_outputs.LOGITS)
        self._write_files(folder, graph)
        if difference is None:
            written = _read_model(folder)
            difference = self._require_same(folder, form, written, reference)
        parity = measure(folder, form, reference, difference)
        require_config_files(folder, rewired.vocabulary)
        self._write_manifest(folder, linears, form, parity, command)
        self._progress("checking", 1.0)
        return parity

    def _rewire(self) -> _Rewired:
        """The source on the contract's inputs."""
        graph = EditableGraph.open(self._foreign.graph)
        _require_foreign(graph)
        take_cached_branch(graph)
        part_caches(graph)
        carry_over_integers(graph)
        ports = settle_ports(graph, self._foreign.input_names)
        self._context = _context_for(self._foreign, graph, self._recipe)
        if not graph.nodes_of(_FUSED):
            if is_half(graph):
                self._widen(graph)
            self._state_caches(graph, ports)
            fuse_operators(graph, max(self._context, POSITIONS_READ))
            ports = settle_ports(graph)
        form = wire_attention(graph, ports, self._context, self._foreign.head_dim)
        select_rows(graph, ports.logits)
        graph.forget_types()
        graph.sweep()
        _drop_unread_inputs(graph)
        vocabulary = architecture_of(
            fused_linears(graph, inputs_outputs.LOGITS), form, "", self._context, None
        ).vocab_size
        self._progress("reading", 0.5)
        untouched = EditableGraph.open(self._foreign.graph)
        take_cached_branch(untouched)
        part_caches(untouched)
        carry_over_integers(untouched)
        reference = reference_of(untouched, settle_ports(untouched, self._foreign.input_names), form, vocabulary)
        self._progress("reading", 1.0)
        return _Rewired(graph, form, vocabulary, reference)

    def _state_caches(self, graph: EditableGraph, ports: Ports) -> None:
        """Let caches say how many heads and channels they have where they leave it open."""
        heads, head_dim = self._foreign.kv_heads, self._foreign.head_dim
        for port in ports.caches:
            opened = any(isinstance(extent, str) for extent in (graph.shape(port.past) or ())[1::2])
            if opened and heads and head_dim:
                state_cache_shape(graph, port, heads, head_dim)

    def _widen(self, graph: EditableGraph) -> None:
        widen(graph)
        self.notes.append("half precision became float32, in which a CPU computes")

    def _formats(self, graph: EditableGraph) -> tuple[WeightFormat, WeightFormat]:
        """Formats for the float matrices of the layers, and for a float head and embedding."""
        few_bits = any(node.op in _OF_FEW_BITS for node in graph.nodes)
        asked = self._recipe.body
        if few_bits and asked is not None:
            self.notes.append("weights that have few bits already stay as they are")
        unasked = FP32 if few_bits else INT4
        return asked or unasked, self._recipe.head_format or unasked

    def _tune(self, graph: EditableGraph) -> None:
        opened = round_activations(graph)
        if opened:
            self.notes.append(f"{opened} linears that left it open now round activations to 8 bits")
        share_reshaped(graph)
        take_in_biases(graph)
        join_siblings(graph)

    def _require_same(self, folder: Path, form: AttentionForm, model: ModelProto, reference: Reference) -> float:
        self._progress("checking", 0.0)
        difference = require_same(folder, form, model, reference)
        self._progress("checking", 0.5)
        return difference

    def _write_files(self, folder: Path, graph: EditableGraph) -> None:
        total = sum(tensor.nbytes for tensor in graph.tensors.values())
        with WeightFile(folder / WEIGHTS_NAME) as data:
            model = graph.model(ToFile(data, _fraction_of(total, self._progress)))
            self._digest = data.digest()
        (folder / GRAPH_NAME).write_bytes(model.SerializeToString())
        self._foreign.copy_companions(folder)

    def _write_manifest(
        self, folder: Path, linears: list[FusedLinear], form: AttentionForm, parity: Parity, command: str
    ) -> None:
        width = self._foreign.config.get("intermediate_size")
        self.bits = bits_per_weight(linears)
        files: dict[str, FileDigest] = {WEIGHTS_NAME: self._digest}
        files |= {name: digest_file(folder / name) for name in (GRAPH_NAME, *COMPANIONS) if (folder / name).is_file()}
        manifest = Manifest(
            architecture=architecture_of(
                linears, form, self._foreign.family, self._context, width if isinstance(width, int) else None
            ),
            weights=formats_of(linears),
            bits_per_weight=self.bits,
            files=files,
            parity=parity.as_mapping(),
            producer=PRODUCER,
            command=command,
        )
        (folder / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")


def _context_for(foreign: ForeignModel, graph: EditableGraph, recipe: ExportRecipe) -> int:
    """Positions to serve: no more than the model's settings say, and its tables have."""
    limits = [limit for limit in (foreign.longest_context, longest_text(graph)) if limit is not None]
    if recipe.context is None:
        return min([DEFAULT_CONTEXT_LIMIT, *limits])
    limit = min(limits, default=LONGEST_CONTEXT)
    if recipe.context > limit:
        raise InputError(
            f"a context of {recipe.context} positions is more than this model was exported for", f"give at most {limit}"
        )
    return recipe.context


def _require_foreign(graph: EditableGraph) -> None:
    """Refuse a graph that follows the contract already, or is of operators too old to go with it."""
    if graph.opsets.get("", _OLDEST_OPSET) < _OLDEST_OPSET:
        raise BundleError(
            f"the model is of opset {graph.opsets['']}, before {_OLDEST_OPSET}", "export it again with a later opset"
        )
    if all(info.name in graph.inputs for info in inputs_outputs.pass_inputs()):
        raise BundleError("the model follows edge-run's graph contract already", "run it as it is")


def _drop_unread_inputs(graph: EditableGraph) -> None:
    """Forget inputs of the source that nothing reads any more."""
    kept = {info.name for info in inputs_outputs.pass_inputs()}
    for name in [name for name in graph.inputs if name not in kept and not graph.consumers(name)]:
        del graph.inputs[name]


def _read_model(folder: Path) -> ModelProto:
    model = ModelProto()
    model.ParseFromString((folder / GRAPH_NAME).read_bytes())
    return model


def _fraction_of(total: int, progress: Progress) -> Callable[[int], None]:
    """Turns counts of bytes just written into calls of `progress`."""
    written = 0

    def stored(count: int) -> None:
        nonlocal written
        written += count
        progress("writing weights", min(1.0, written / max(total, 1)))

    return stored
