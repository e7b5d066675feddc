"""The steps of an upgrade: ONNX language model in, bundle folder out."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from onnx import ModelProto

from ...errors import BundleError, InputError
from ...models.bundle import GRAPH_NAME, TOKENIZER_AND_CONFIG_FILES, WEIGHTS_NAME, digest_file
from ...models.manifest import MANIFEST_NAME, FileDigest, GraphLayout, Manifest, Method, WeightFormat
from ...models.progress import Progress, counted, silent
from ...runtime.graph.graph_io import GraphValue
from ...runtime.graph.state_io import states_by_key
from ..bundle_writer import PRODUCER
from ..check.parity import Parity
from ..checkpoint.tokenizer_files import require_config_files, require_tokenizer
from ..destination import ExportResult, bundle_written_whole, require_apart
from ..graph import inputs_outputs
from ..graph.gpu_variants import write_gpu_variants
from ..graph.weight_file import WeightFile
from ..recipe import DEFAULT_CONTEXT_LIMIT, FP32, INT4, LONGEST_CONTEXT, ExportRecipe, ExportRequest
from .contract_inputs import AttentionShape, declare_cache_shape, wire_attention
from .decoder_io import POSITIONS, DecoderIO, identify_io, take_cached_branch
from .describe import WeightMatrix, architecture_of, bits_per_weight, formats_of, weight_matrices
from .edit.editable import EditableGraph, Node, read_model
from .edit.tensors import in_place, to_file
from .foreign_model import ForeignModel, find_foreign_model
from .linears.float_linears import quantize_linears
from .linears.half_precision import is_half, widen
from .linears.integer_linears import convert_integer_linears
from .linears.quantized_linears import absorb_biases, join_linears, round_activations, share_reshaped_constants
from .parity import POSITIONS_READ, Reference, measure, require_same, run_reference
from .patterns.plain_operators import fuse_operators
from .selected_logits import select_positions
from .stacked_caches import split_caches

_ATTENTION: Final = "GroupQueryAttention"
_OLDEST_OPSET: Final = 13
"""First opset in which Squeeze and similar operators take axes as an input."""
_GRAPH_ERRORS: Final = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors that occur when a graph does not follow onnx.proto or the operators' schemas: attributes of wrong types, names
that are not valid text, counts that do not match. A user sees one message for all of them."""
_SHOWN_CHARACTERS: Final = 200
_FEW_BIT_OPERATORS: Final = frozenset({"MatMulNBits", "MatMulBnb4", "QMoE", "DynamicQuantizeMatMul", "MatMulInteger"})
_COSINES: Final = 7
"""Index of the cosines among the inputs of GroupQueryAttention."""


def upgrade_model(request: ExportRequest, progress: Progress = silent) -> ExportResult:
    """Rewire an ONNX decoder of another exporter to the graph contract, and check it against its source.

    Args:
        request: its source is the .onnx file, or a folder that holds one; tokenizer and settings are beside it or one
            folder up. Its recipe has the formats for floating-point matrices, and the context. With a body of None,
            matrices are rounded to 4 bits if the whole model is in floating point, and not rounded if it is not.
            Matrices of few bits are never rounded again.
        progress: is called with the stages "reading", "writing weights" and "checking".

    Raises:
        BundleError: the source is damaged, incomplete, or of a kind that cannot be upgraded.
        InputError: the destination exists and is not a bundle, or overlaps the source.
        DestinationError: the disk refused a write.
        ExportError: the upgraded graph does not compute what the source does. After every error the destination is as
            it was before.
    """
    started = time.perf_counter()
    source, destination, recipe = request.source, request.destination, request.recipe
    if recipe.layout is not GraphLayout.EDGE:
        raise InputError("an ONNX model is upgraded to edge-run's own layout only", "leave --layout out")
    if recipe.method not in (None, Method.RTN):
        raise InputError("the weights of an ONNX model are rounded to nearest", "leave --method out")
    recipe.require_default_scales("model in ONNX")
    foreign = find_foreign_model(source)
    require_apart(source if source.is_dir() else foreign.graph, destination)
    progress("reading", 0.0)
    upgrade = _Upgrade(foreign, recipe, progress)
    with bundle_written_whole(destination) as staging:
        try:
            parity = upgrade.write(staging, request.command)
        except _GRAPH_ERRORS as error:
            raise BundleError(
                f"the graph in {foreign.graph} is damaged or of an unknown kind "
                f"({type(error).__name__}: {str(error)[:_SHOWN_CHARACTERS]})",
                "run it as it is",
            ) from error
        if recipe.gpu:
            upgrade.notes += write_gpu_variants(staging, progress)
        sizes = {file.name: file.stat().st_size for file in sorted(staging.iterdir())}
    seconds = time.perf_counter() - started
    return ExportResult(destination, sizes, upgrade.bits_per_weight, seconds, parity, notes=tuple(upgrade.notes))


@dataclass(frozen=True)
class _Rewired:
    """A graph with the contract's inputs and its source's weights."""

    graph: EditableGraph
    attention: AttentionShape
    vocab_size: int
    """Number of tokens that both embedding and LM head have."""
    reference: Reference


class _Upgrade:
    """The steps of one upgrade."""

    def __init__(self, foreign: ForeignModel, recipe: ExportRecipe, progress: Progress) -> None:
        self.notes: list[str] = []
        self.bits_per_weight = 0.0
        self._foreign = foreign
        self._recipe = recipe
        self._progress = progress
        self._context = 0

    def write(self, folder: Path, command: str) -> Parity:
        """Write every file of the bundle."""
        rewired = self._rewire()
        graph, attention, reference = rewired.graph, rewired.attention, rewired.reference
        require_tokenizer(self._foreign.folder, rewired.vocab_size)
        body, head = self._formats(graph)
        rounds = body != FP32 or head != FP32
        difference = None
        if rounds:
            source_folder = self._foreign.graph.parent
            difference = self._require_same(source_folder, attention, graph.model(in_place), reference)
        if is_half(graph):
            self._widen(graph)
        if rounds:
            quantize_linears(graph, inputs_outputs.LOGITS, body, head)
        self._tune(graph)
        matrices = weight_matrices(graph, inputs_outputs.LOGITS)
        self._write_files(folder, graph)
        if difference is None:
            difference = self._require_same(folder, attention, _read_model(folder), reference)
        parity = measure(folder, attention, reference, difference)
        require_config_files(folder, rewired.vocab_size)
        self._write_manifest(folder, matrices, attention, parity, command)
        self._progress("checking", 1.0)
        return parity

    def _rewire(self) -> _Rewired:
        """Rewire the source to the contract's inputs."""
        graph, io = self._normalized_source()
        self._context = _context_for(self._foreign, graph, self._recipe)
        if not graph.nodes_of(_ATTENTION):
            if is_half(graph):
                self._widen(graph)
            self._declare_caches(graph, io)
            fuse_operators(graph, max(self._context, POSITIONS_READ))
            io = identify_io(graph)
        attention = wire_attention(graph, io, self._context, self._foreign.head_dim)
        select_positions(graph, io.logits)
        graph.sweep()
        _remove_inputs(graph)
        matrices = weight_matrices(graph, inputs_outputs.LOGITS)
        vocab_size = architecture_of(matrices, attention, "", self._context, None).vocab_size
        self._progress("reading", 0.5)
        reference = run_reference(*self._normalized_source(), attention, vocab_size)
        self._progress("reading", 1.0)
        return _Rewired(graph, attention, vocab_size, reference)

    def _normalized_source(self) -> tuple[EditableGraph, DecoderIO]:
        """Open the source, and give it separate caches, usual input names and no integer products."""
        model = read_model(self._foreign.graph)
        take_cached_branch(model)
        graph = EditableGraph(model, self._foreign.graph.parent)
        _require_foreign(graph)
        _require_attention_alone(graph, self._foreign)
        split_caches(graph)
        convert_integer_linears(graph)
        return graph, identify_io(graph, self._foreign.input_names)

    def _declare_caches(self, graph: EditableGraph, io: DecoderIO) -> None:
        """Declare heads and channels of caches that do not declare them."""
        heads, head_dim = self._foreign.kv_heads, self._foreign.head_dim
        for cache in io.caches:
            symbolic = any(isinstance(size, str) for size in (graph.shape(cache.past) or ())[1::2])
            if symbolic and heads and head_dim:
                declare_cache_shape(graph, cache, heads, head_dim)

    def _widen(self, graph: EditableGraph) -> None:
        widen(graph)
        self.notes.append("half precision became float32, in which a CPU computes")

    def _formats(self, graph: EditableGraph) -> tuple[WeightFormat, WeightFormat]:
        """Formats for the float matrices of the layers, and for a float LM head and embedding."""
        few_bits = any(node.op in _FEW_BIT_OPERATORS for node in graph.nodes)
        if few_bits and self._recipe.body is not None:
            self.notes.append("weights that have few bits already were not rounded again")
        default = FP32 if few_bits else INT4
        return self._recipe.body or default, self._recipe.head_format or default

    def _tune(self, graph: EditableGraph) -> None:
        """Rewrite quantized linears for the CPU's kernels."""
        rounded = round_activations(graph)
        if rounded:
            self.notes.append(f"{rounded} linears without a stated precision now round activations to 8 bits")
        share_reshaped_constants(graph)
        absorb_biases(graph)
        join_linears(graph)

    def _require_same(self, folder: Path, attention: AttentionShape, model: ModelProto, reference: Reference) -> float:
        self._progress("checking", 0.0)
        difference = require_same(folder, attention, model, reference)
        self._progress("checking", 0.5)
        return difference

    def _write_files(self, folder: Path, graph: EditableGraph) -> None:
        total = sum(tensor.nbytes for tensor in graph.tensors.values())
        with WeightFile(folder / WEIGHTS_NAME) as data:
            model = graph.model(to_file(data, counted(total, self._progress, "writing weights")))
            self._digest = data.digest()
        (folder / GRAPH_NAME).write_bytes(model.SerializeToString())
        self._foreign.copy_config_files(folder)

    def _write_manifest(
        self, folder: Path, matrices: list[WeightMatrix], attention: AttentionShape, parity: Parity, command: str
    ) -> None:
        width = self._foreign.config.get("intermediate_size")
        self.bits_per_weight = bits_per_weight(matrices)
        files: dict[str, FileDigest] = {WEIGHTS_NAME: self._digest}
        files |= {
            name: digest_file(folder / name)
            for name in (GRAPH_NAME, *TOKENIZER_AND_CONFIG_FILES)
            if (folder / name).is_file()
        }
        manifest = Manifest(
            architecture=architecture_of(
                matrices, attention, self._foreign.family, self._context, width if isinstance(width, int) else None
            ),
            weights=formats_of(matrices),
            bits_per_weight=self.bits_per_weight,
            files=files,
            parity=parity.as_mapping(),
            producer=PRODUCER,
            command=command,
        )
        (folder / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")


def _context_for(foreign: ForeignModel, graph: EditableGraph, recipe: ExportRecipe) -> int:
    """Number of positions to serve, limited by the model's settings and its position tables."""
    limits = [limit for limit in (foreign.longest_context, _shortest_table(graph)) if limit is not None]
    if recipe.context is None:
        return min([DEFAULT_CONTEXT_LIMIT, *limits])
    limit = min(limits, default=LONGEST_CONTEXT)
    if recipe.context > limit:
        raise InputError(
            f"a context of {recipe.context} positions is more than this model was exported for", f"give at most {limit}"
        )
    return recipe.context


def _shortest_table(graph: EditableGraph) -> int | None:
    """Length of the shortest table that positions are looked up in; None if there is none."""
    lengths = [length for node in graph.nodes if (length := _table_length(graph, node)) is not None]
    return min(lengths, default=None)


def _table_length(graph: EditableGraph, node: Node) -> int | None:
    if node.op == "RotaryEmbedding":
        name = node.input(2 if node.domain else 1)
    elif node.op == "Gather" and node.attribute("axis", 0) == 0 and _is_positions(graph, node.input(1)):
        name = node.input(0)
    else:
        name = node.input(_COSINES) if node.op == _ATTENTION else ""
    tensor = graph.tensors.get(name)
    return tensor.shape[0] if tensor is not None and len(tensor.shape) == 2 else None


def _is_positions(graph: EditableGraph, name: str) -> bool:
    while (node := graph.producer_of(name, "Cast", "Reshape", "Squeeze", "Unsqueeze")) is not None:
        name = node.input(0)
    return name == POSITIONS


def _require_attention_alone(graph: EditableGraph, foreign: ForeignModel) -> None:
    """Check that no layer keeps a state in place of keys and values.

    Raises:
        BundleError: one does; names its input.
    """
    decoder = foreign.genai.get("decoder")
    inputs = [GraphValue(name, "", ()) for name in graph.inputs]
    states = states_by_key(inputs, decoder.get("inputs") if isinstance(decoder, dict) else None, "past")
    if states:
        name = next(iter(states.values())).name
        raise BundleError(
            f"{foreign.graph} has layers that keep a state ({name}), which cannot be upgraded",
            "run it as it is, or export its checkpoint with edge-run export",
        )


def _require_foreign(graph: EditableGraph) -> None:
    """Refuse a graph that already follows the contract, or has operators too old to be combined with its own."""
    if graph.opsets.get("", _OLDEST_OPSET) < _OLDEST_OPSET:
        raise BundleError(
            f"the model has opset {graph.opsets['']}, older than {_OLDEST_OPSET}", "export it again with a later opset"
        )
    if all(info.name in graph.inputs for info in inputs_outputs.pass_inputs()):
        raise BundleError("the model follows edge-run's graph contract already", "run it as it is")


def _remove_inputs(graph: EditableGraph) -> None:
    """Remove inputs of the source that no node reads any more.

    Raises:
        BundleError: a node reads one that the contract does not have.
    """
    kept = {info.name for info in inputs_outputs.pass_inputs()}
    for name in [name for name in graph.inputs if name not in kept and not name.startswith("past_key_values.")]:
        if graph.consumers(name):
            raise BundleError(f"the model has an unknown input {name}", "such a graph cannot be upgraded")
        del graph.inputs[name]


def _read_model(folder: Path) -> ModelProto:
    model = ModelProto()
    model.ParseFromString((folder / GRAPH_NAME).read_bytes())
    return model
