"""GPU forms of a decoder graph: the bundle's variant, one made earlier, or one made now; each provider takes one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Final

import numpy as np

from ...models.bundle import GRAPH_NAME, Bundle
from ...models.manifest import DeviceKind, Precision
from ...models.onnx_file.graph_editor import MICROSOFT, CannotRewriteError, GraphEditor
from ...models.onnx_file.model_messages import ELEMENT_TYPES, Message, attribute_values, node, shape_of, value_info
from ...models.regular_file import read_regular
from ..graph.attention_edits import OPERATOR as ATTENTION
from ..graph.attention_edits import rotate_outside, serve_plain_passes, take_windows
from ..graph.packed_files import is_intact, packed_folder, written_folder
from ..graph.session import SessionConfig
from .expanded_codes import compute_in_float, expand_embedding, expand_matrices
from .float16_form import use_half_precision

TOP_IDS: Final = "top_ids"
"""Output: ids of the tokens with the largest logits, int64 `[R, K]`, the best first."""
TOP_LOGITS: Final = "top_logits"
"""Output: their logits, float32 `[R, K]`."""
TOP_COUNT: Final = 64
"""Largest K."""
_LOGITS: Final = "logits"
_FLOAT: Final = ELEMENT_TYPES[np.dtype(np.float32)]
REWRITING: Final = 5
"""Version of the graphs that `rewriting` makes of these forms; cached ones of other versions are not used."""
_MAX_CACHED_BYTES: Final = 64 << 20
"""Largest graph that is cached; a larger one has its weights inside and is made again at every load."""


def gpu_graph(graph: Path, form: GpuForm, *, plain: bool = False) -> bytes:
    """Make the form of a decoder graph that a GPU takes.

    Args:
        graph: the model file; the result refers to the same weights, relative to its folder.
        form: what the provider takes.
        plain: whether the result serves passes of consecutive tokens only, without a bias.

    Returns:
        The model as the bytes of a file, the same whenever it is made.

    Raises:
        BundleError: the file is not an ONNX model.
        CannotRewriteError: the graph has something that the rewriting does not know, or the provider lacks one of its
            operators.
    """
    editor = GraphEditor(graph)
    if all(each.op_type != ATTENTION for each in editor.graph.node):
        raise CannotRewriteError(f"the graph has no {ATTENTION}")
    cache = _cache_names(editor)
    if plain:
        serve_plain_passes(editor)
    else:
        rotate_outside(editor)
        # The nodes that compute these biases work with int64, for which WebGPU leaves some of them to the CPU, and are
        # ten small kernels in every pass.
        take_windows(editor)
    compute_in_float(editor)
    expand_embedding(editor, form.gathers_blocks)
    expand_matrices(editor, form.matmul_bits)
    if not form.onnx_gelu:
        _use_contrib_gelu(editor)
    if form.precision is Precision.FLOAT16:
        use_half_precision(editor, cache)
    _return_best_tokens(editor)
    editor.drop_unused(keep_inputs=not plain)
    editor.declare_microsoft()
    if form.only_operators_of and (missing := operators_outside(editor, form.only_operators_of)):
        raise CannotRewriteError(f"the provider has no kernel for {', '.join(missing)}")
    return editor.serialized()


def _cache_names(editor: GraphEditor) -> list[str]:
    """Inputs and outputs with the KV cache: what the attention operators read and write."""
    ends = {*editor.input_names, *(each.name for each in editor.graph.output)}
    attentions = [each for each in editor.graph.node if each.op_type == ATTENTION]
    names = [name for each in attentions for name in (*each.input[3:5], *each.output[1:3])]
    if not ends.issuperset(names):
        raise CannotRewriteError("the graph computes its cache in several steps")
    return names


def _use_contrib_gelu(editor: GraphEditor) -> None:
    def replaced(each: Message) -> Iterable[Message]:
        if each.op_type == "Gelu" and each.domain != MICROSOFT:
            approximate = attribute_values(each).get("approximate", "none") == "tanh"
            operator = "FastGelu" if approximate else "Gelu"
            return [node(operator, list(each.input), list(each.output), name=each.name, domain=MICROSOFT)]
        return [each]

    editor.rewrite(replaced)


def _return_best_tokens(editor: GraphEditor) -> None:
    """Add outputs with the best tokens, where the logits are a float32 matrix of a known width."""
    logits = next((each for each in editor.graph.output if each.name == _LOGITS), None)
    shape = () if logits is None else shape_of(logits)
    is_matrix = logits is not None and logits.type.tensor_type.elem_type == _FLOAT and len(shape) == 2
    if not is_matrix or not isinstance(shape[1], int):
        return
    count = min(TOP_COUNT, shape[1])
    inputs = [_LOGITS, editor.integers("top.count", count)]
    editor.graph.node.append(node("TopK", inputs, [TOP_LOGITS, TOP_IDS], axis=-1, largest=1, sorted=1))
    rows = shape[0] if shape[0] is not None else "rows"
    editor.graph.output.append(value_info(TOP_IDS, np.int64, (rows, count)))
    editor.graph.output.append(value_info(TOP_LOGITS, np.float32, (rows, count)))


@cache
def operator_table(provider: str) -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """The operators of a provider by domain and name.

    Each has `since`, the lowest operator set; `inputs` and `outputs`, names of types in order (with dots for any number
    of them); and `types`, the element types by name.
    """
    file = resources.files(__package__ or "").joinpath("operator_kernels.json")
    table: dict[str, dict[str, dict[str, Any]]] = json.loads(file.read_text(encoding="utf-8"))[provider]
    return table


def operators_outside(editor: GraphEditor, provider: str) -> list[str]:
    """Names of a graph's operators that a provider has no kernel for, sorted, without those that compute constants."""
    table = operator_table(provider)
    versions = {"" if each.domain == "ai.onnx" else each.domain: each.version for each in editor.model.opset_import}
    missing, constants = set(), {"", *editor.initializers}
    for each in editor.graph.node:
        if constants.issuperset(each.input):  # ONNX Runtime runs it on the CPU when it loads the graph
            constants.update(each.output)
            continue
        domain = "" if each.domain == "ai.onnx" else each.domain
        entry = table.get(domain, {}).get(each.op_type)
        if entry is None or versions.get(domain, 1) < entry["since"]:
            missing.add(str(each.op_type))
    return sorted(missing)


@dataclass(frozen=True)
class GpuForm:
    """A form of the GPU graph. In all of them, weights, inputs and outputs follow docs/graph-contract.md."""

    precision: Precision
    """Precision of activations, scales and cache."""
    suffix: str
    """What distinguishes its file in a bundle: `model_{suffix}.onnx`."""
    matmul_bits: frozenset[int] = frozenset({2, 4, 8})
    """Bits for which MatMulNBits has a kernel; matrices of other formats become float when the graph is loaded."""
    gathers_blocks: bool = True
    """Whether GatherBlockQuantized has a kernel. Codes with zero points are never left to it: it fails on WebGPU."""
    onnx_gelu: bool = True
    """Whether ONNX's own Gelu has a kernel; otherwise operators of com.microsoft take its place."""
    has_plain_form: bool = False
    """Whether passes of consecutive tokens have a graph of their own, because a bias takes a slow kernel."""
    only_operators_of: str = ""
    """Provider whose table of operators and types (`operator_table`) a graph has to keep to; empty for none."""


WEBGPU: Final = GpuForm(Precision.FLOAT32, "gpu")
"""Also for providers that are not listed. Float16 is left to a later version: not every adapter has it."""
CUDA: Final = GpuForm(
    # GroupQueryAttention has kernels for float16 and bfloat16 only, and fast ones only without a bias.
    Precision.FLOAT16,
    "gpu_fp16",
    matmul_bits=frozenset({4, 8}),
    has_plain_form=True,
)
DIRECTML: Final = GpuForm(
    Precision.FLOAT16,
    "gpu_dml",
    matmul_bits=frozenset({4}),
    gathers_blocks=False,
    onnx_gelu=False,
    only_operators_of="DmlExecutionProvider",
)
FORMS: Final[Mapping[str, GpuForm]] = {
    "WebGpuExecutionProvider": WEBGPU,
    "CUDAExecutionProvider": CUDA,
    "DmlExecutionProvider": DIRECTML,
}
"""Forms by name of the execution provider."""


def form_of(provider: str) -> GpuForm:
    """The form of the graph that a provider takes."""
    return FORMS.get(provider, WEBGPU)


def variant_for(bundle: Bundle, config: SessionConfig, *, cache: bool, plain: bool = False) -> Path | bytes:
    """The graph that a GPU loads for a model.

    Args:
        bundle: the model, of any tool.
        config: the device, which decides on the form of the graph.
        cache: whether to keep a graph that is made here for the next load.
        plain: whether it is to serve passes of consecutive tokens only; see `has_plain_form`.

    Returns:
        A file beside the weights, or a model as bytes, whose weights lie in the folder of `bundle.graph`. The model's
        own graph if no variant can be made of it.

    Raises:
        BundleError: the model's graph is not an ONNX model.
    """
    provider, folder = config.device.provider, None
    form = form_of(provider)
    if bundle.manifest is not None and bundle.graph.name == GRAPH_NAME:
        for variant in bundle.manifest.variants:
            fits = variant.device is DeviceKind.GPU and variant.precision is form.precision
            if fits and variant.plain is plain and (not variant.providers or provider in variant.providers):
                return bundle.graph.parent / variant.file
    if cache and bundle.graph.stat().st_size <= _MAX_CACHED_BYTES:
        digest = hashlib.sha256(read_regular(bundle.graph, _MAX_CACHED_BYTES)).hexdigest()
        folder = packed_folder("gpu-graphs", digest, REWRITING, form, plain)
        with suppress(OSError):  # another process may remove it meanwhile
            if is_intact(folder):
                return read_regular(folder / GRAPH_NAME, 2 * _MAX_CACHED_BYTES)
    try:
        model = gpu_graph(bundle.graph, form, plain=plain)
    except CannotRewriteError:
        return bundle.graph
    if folder is not None:
        # With a read-only cache the graph is made again next time.
        with suppress(OSError), written_folder(folder, len(model)) as staging:
            (staging / GRAPH_NAME).write_bytes(model)
    return model


def has_plain_form(config: SessionConfig) -> bool:
    """Whether passes of consecutive tokens are faster on a graph of their own, without a bias."""
    return config.device.kind is DeviceKind.GPU and form_of(config.device.provider).has_plain_form
