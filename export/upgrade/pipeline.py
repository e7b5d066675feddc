"""The steps of an upgrade: ONNX language model in, bundle folder out."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Final

from onnx.inliner import inline_selected_functions

from ...errors import BundleError, InputError
from ...models.bundle import GRAPH_NAME, TOKENIZER_AND_CONFIG_FILES, WEIGHTS_NAME, Bundle
from ...models.manifest import GraphLayout, Manifest, Method
from ...models.progress import Progress, counted, silent
from ...runtime.graph.cache_io import states_by_key
from ...runtime.graph.graph_io import GraphValue
from ...runtime.graph.introspection import sizes_in_config, usual_names
from ..bundle_content import write_manifest
from ..bundle_writer import PRODUCER
from ..check.parity import Parity
from ..checkpoint.open import require_readable
from ..destination import ExportResult, bundle_written_whole, require_apart
from ..graph import inputs_outputs
from ..graph.gpu_variants import write_gpu_variants
from ..graph.initializers import WeightFile
from ..quantization.methods import FP32, INT4
from ..quantization.option_values import DeviceChoice
from ..recipe import DEFAULT_CONTEXT_LIMIT, LONGEST_CONTEXT, ExportRecipe
from . import describe
from . import quantized_linears as linears
from .attention_fusion import fuse_operators, pack_heads
from .contract_inputs import AttentionShape, declare_cache_shape, select_positions, wire_attention
from .decoder_io import POSITIONS, CacheTensor, identify_io, take_cached_branch
from .editable import EditableGraph, Node
from .float_linears import quantize_linears, widen
from .graph_parts import in_place, read_model, to_file, unsupported
from .parity import POSITIONS_READ, measure, require_same, run_reference
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


def upgrade_model(
    source: Path, destination: Path, recipe: ExportRecipe, progress: Progress = silent, *, command: str = ""
) -> ExportResult:
    """Rewire an ONNX decoder of another exporter to the graph contract, and check it against its source.

    Args:
        source: the .onnx file, or a folder that holds one; tokenizer and settings are beside it or one folder up.
        destination: as for `export_model`.
        recipe: the formats for floating-point matrices, and the context. Where `body` is None, matrices are rounded to
            4 bits if the whole model is in floating point, and not rounded if it is not. Matrices of few bits are never
            rounded again.
        progress: is called with the stages "reading", "writing weights" and "checking", and for a GPU with that of
            `write_gpu_variants`.
        command: the command line, recorded in the manifest.

    Raises:
        BundleError: the source is damaged, incomplete, or of a kind that cannot be upgraded.
        InputError: the recipe has a layout, method or scales that an upgrade cannot have, or the destination exists and
            is not a bundle, or overlaps the source.
        DestinationError: the disk refused a write.
        ExportError: the upgraded graph does not compute what the source does. After every error the destination is as
            it was before.
    """
    started = time.perf_counter()
    require_expressible(recipe, "model in ONNX")
    foreign = describe.find_foreign_model(source)
    require_apart(source if source.is_dir() else foreign.graph, destination)
    progress("reading", 0.0)
    notes: list[str] = []
    with bundle_written_whole(destination) as staging:
        try:
            manifest = _write(staging, foreign, recipe, progress, command, notes)
        except _GRAPH_ERRORS as error:
            raise unsupported(
                f"the graph in {foreign.graph} is damaged or of an unknown kind "
                f"({type(error).__name__}: {str(error)[:_SHOWN_CHARACTERS]})"
            ) from error
        if recipe.device == DeviceChoice.GPU:
            notes += write_gpu_variants(staging, progress)
        sizes = {file.name: file.stat().st_size for file in sorted(staging.iterdir())}
    seconds, parity = time.perf_counter() - started, Parity(**manifest.parity)
    return ExportResult(destination, sizes, manifest.bits_per_weight, seconds, parity, notes=tuple(notes))


def require_expressible(recipe: ExportRecipe, source: str) -> None:
    """Refuse a recipe with a layout, method or scales that an upgrade of `source` cannot have.

    Raises:
        InputError: it has.
    """
    if recipe.layout is not GraphLayout.EDGE:
        raise InputError(f"a {source} is upgraded to edge-run's own layout only", "leave --layout out")
    if recipe.method not in (None, Method.RTN):
        raise InputError(f"the weights of a {source} are rounded to nearest", "leave --method out")
    recipe.require_default_scales(source)


def _write(
    folder: Path, source: Bundle, recipe: ExportRecipe, progress: Progress, command: str, notes: list[str]
) -> Manifest:
    """Write every file of the bundle; messages for the user are added to `notes`."""
    graph, shape, context = _rewire(source, recipe, notes)
    matrices = describe.weight_matrices(graph)
    vocab_size = describe.architecture_of(matrices, shape, "", context, None).vocab_size
    progress("reading", 0.5)
    reference = run_reference(*_normalized_source(source), shape, vocab_size)
    progress("reading", 1.0)
    require_readable(source, vocab_size)
    few_bits = any(node.op in _FEW_BIT_OPERATORS for node in graph.nodes)
    if few_bits and recipe.body is not None:
        notes.append("weights that have few bits already were not rounded again")
    default = FP32 if few_bits else INT4
    body, head = recipe.body or default, recipe.head_format or default
    rounds = body != FP32 or head != FP32
    if rounds:
        difference = require_same(graph.folder, graph.model(in_place), reference, progress)
    if rounds:
        quantize_linears(graph, body, head)
    if (changed := linears.round_activations(graph)) > 0:
        notes.append(f"{changed} linears without a stated precision now round activations to 8 bits")
    for tune in (linears.share_reshaped_constants, linears.absorb_biases, linears.join_linears, pack_heads):
        tune(graph)
    matrices = describe.weight_matrices(graph)
    total = sum(tensor.nbytes for tensor in graph.tensors.values())
    with WeightFile(folder / WEIGHTS_NAME) as data:
        model = graph.model(to_file(data, counted(total, progress, "writing weights")))
    (folder / GRAPH_NAME).write_bytes(model.SerializeToString())
    describe.copy_config_files(source, folder)
    if not rounds:
        difference = require_same(folder, model, reference, progress)
    parity = measure(folder, reference, difference)
    width = size if isinstance(size := source.config.get("intermediate_size"), int) else None
    types = (source.config.get("model_type"), source.genai.get("type"))
    family = next((each for each in types if isinstance(each, str) and each), "unknown")
    manifest = Manifest(
        architecture=describe.architecture_of(matrices, shape, family, context, width),
        weights=describe.formats_of(matrices),
        bits_per_weight=describe.bits_per_weight(matrices),
        files={WEIGHTS_NAME: data.digest()},
        parity=asdict(parity),
        producer=PRODUCER,
        command=command,
    )
    progress("checking", 1.0)
    return write_manifest(folder, manifest, (GRAPH_NAME, *TOKENIZER_AND_CONFIG_FILES))


def _rewire(source: Bundle, recipe: ExportRecipe, notes: list[str]) -> tuple[EditableGraph, AttentionShape, int]:
    """The source with the contract's inputs, the shape of its attention, and the number of positions to serve."""
    graph, caches = _normalized_source(source, inline=True)
    context = _context_for(source, graph, recipe)
    sizes = sizes_in_config(source.config, source.genai)  # of axis 1 (heads) and axis 3 (channels) of a cache
    if widen(graph):
        notes.append("half precision became float32, in which a CPU computes")
    if not graph.nodes_of(_ATTENTION):
        for cache in caches:
            # Heads and channels, which some exporters leave open.
            symbolic = any(isinstance(size, str) for size in (graph.shape(cache.past) or ())[1::2])
            if symbolic and len(sizes) == 2:
                declare_cache_shape(graph, cache, sizes[1], sizes[3])
        fuse_operators(graph, max(context, POSITIONS_READ))
        caches = identify_io(graph)
    shape = wire_attention(graph, caches, context, sizes.get(3))
    select_positions(graph)
    graph.sweep()
    kept = {info.name for info in inputs_outputs.pass_inputs()}
    for name in [name for name in graph.inputs if name not in kept and not name.startswith("past_key_values.")]:
        if graph.consumers(name):
            raise BundleError(f"the model has an unknown input {name}", "such a graph cannot be upgraded")
        del graph.inputs[name]
    return graph, shape, context


def _normalized_source(source: Bundle, *, inline: bool = False) -> tuple[EditableGraph, tuple[CacheTensor, ...]]:
    """Open the source, and give it separate caches, usual input names and no integer products.

    With `inline`, the standard's Attention, which PyTorch's exporter may write, becomes plain operators.
    """
    model = read_model(source.graph)
    if inline and any(node.op_type == "Attention" and not node.domain for node in model.graph.node):
        model = inline_selected_functions(model, [("", "Attention")], inline_schema_functions=True)
    take_cached_branch(model)
    graph = EditableGraph(model, source.graph.parent)
    _require_upgradable(graph, source)
    split_caches(graph)
    linears.convert_integer_linears(graph)
    names = {usual: name for name, usual in usual_names(source.genai, 0).items()}
    return graph, identify_io(graph, names)


def _context_for(source: Bundle, graph: EditableGraph, recipe: ExportRecipe) -> int:
    """Number of positions to serve, limited by the model's settings and its position tables."""
    lengths = (source.context, *(_table_length(graph, node) for node in graph.nodes))
    limits = [length for length in lengths if length is not None]
    if recipe.context is None:
        return min([DEFAULT_CONTEXT_LIMIT, *limits])
    limit = min(limits, default=LONGEST_CONTEXT)
    if recipe.context > limit:
        raise InputError(
            f"a context of {recipe.context} positions is more than this model was exported for", f"give at most {limit}"
        )
    return recipe.context


def _table_length(graph: EditableGraph, node: Node) -> int | None:
    """Length of the table in which a node looks up positions; None if it is another node."""
    if node.op == "RotaryEmbedding":
        name = node.input(2 if node.domain else 1)
    elif node.op == "Gather" and node.attribute("axis", 0) == 0:
        positions = graph.source(node.input(1), "Cast", "Reshape", "Squeeze", "Unsqueeze") == POSITIONS
        name = node.input(0) if positions else ""
    else:
        name = node.input(_COSINES) if node.op == _ATTENTION else ""
    tensor = graph.tensors.get(name)
    return tensor.shape[0] if tensor is not None and len(tensor.shape) == 2 else None


def _require_upgradable(graph: EditableGraph, source: Bundle) -> None:
    """Refuse a graph with operators too old to be combined, with the contract's inputs, or with states for keys."""
    if graph.opsets.get("", _OLDEST_OPSET) < _OLDEST_OPSET:
        raise BundleError(
            f"the model has opset {graph.opsets['']}, older than {_OLDEST_OPSET}", "export it again with a later opset"
        )
    if all(info.name in graph.inputs for info in inputs_outputs.pass_inputs()):
        raise unsupported("the model follows edge-run's graph contract already")
    inputs = [GraphValue(name, "", ()) for name in graph.inputs]
    states = states_by_key(inputs, usual_names(source.genai, len(inputs)))
    if states:
        name = next(iter(states.values())).name
        raise BundleError(
            f"{source.graph} has layers that keep a state ({name}), which cannot be upgraded",
            "run it as it is, or export its checkpoint with edge-run export",
        )
