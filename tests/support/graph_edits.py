"""Random edits of a decoder's graph, like those of unusual exporters or of damage.

Most do not change what the model computes, so a graph that still runs must give the same tokens. The others (`harmless`
is False) may change the tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import onnx
from google.protobuf.message import DecodeError
from hypothesis import strategies as st
from onnx import TensorProto, helper

from support.tiny_models import write_json

NAMES: Final = (
    *("input_ids", "tokens", "ids", "attention_mask", "mask", "attention_bias", "position_ids", "positions", "logits"),
    *("past_key_values.0.key", "past_key_values.7.key", "past_key_values.1.value", "past_0", "past.0", "cache", "kv_0"),
    *("present.0.key", "present_1", "present.x.key", "past_key_values.-1.key", "past_key_values.00.key", "key_cache.0"),
    *("logit_rows", "seqlens_k", "total_sequence_length", "num_logits_to_keep", "use_cache_branch", "past_seq_len"),
    *("hidden_states", "inputs_embeds", "beam_idx", "past_conv.0", "encoder_hidden_states", "token_type_ids", "out"),
    *(
        "past_key_values.99999999999999999999.key",
        "K_0",
        "Past_Key_Values.0.Key",
        "k",
        "a b",
        "ä",
        "%d",
        "{}",
        "a" * 300,
    ),
)
_TYPES: Final = (
    *(TensorProto.INT64, TensorProto.INT32, TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE),
    *(TensorProto.BOOL, TensorProto.INT8, TensorProto.UINT8, TensorProto.INT16, TensorProto.BFLOAT16),
)


class GraphEdit(NamedTuple):
    """A change of a graph."""

    change: Callable[..., None]
    arguments: tuple[Any, ...]
    """The arguments of `change` after the model."""
    harmless: bool
    """Whether the graph still computes the same, so that a run must give the same tokens."""

    def apply(self, model: onnx.ModelProto) -> None:
        self.change(model, *self.arguments)


# Parts of graphs


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield a graph and the subgraphs of its nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _graphs(attribute.g)


def _read_as(model: onnx.ModelProto, old: str, new: str) -> None:
    """Let every node that reads `old` read `new`."""
    for graph in _graphs(model.graph):
        for node in graph.node:
            node.input[:] = [new if name == old else name for name in node.input]


def _write_as(model: onnx.ModelProto, old: str, new: str) -> None:
    for node in model.graph.node:
        node.output[:] = [new if name == old else name for name in node.output]
    _read_as(model, old, new)


def _value(values: Sequence[onnx.ValueInfoProto], index: int) -> onnx.ValueInfoProto:
    return values[index % len(values)]


def _caches(values: Sequence[onnx.ValueInfoProto]) -> list[onnx.ValueInfoProto]:
    """Inputs or outputs of the KV cache, found by their shapes."""
    others = ("attention_mask", "position_ids", values[0].name)
    return [value for value in values if len(_dims(value)) > 2 and value.name not in others]


def _dims(value: onnx.ValueInfoProto) -> list[int | str]:
    return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]


def _reshape(value: onnx.ValueInfoProto, dims: Sequence[int | str]) -> None:
    value.CopyFrom(helper.make_tensor_value_info(value.name, value.type.tensor_type.elem_type, list(dims)))


def _fresh(model: onnx.ModelProto, value: onnx.ValueInfoProto) -> str:
    """Return an unused name."""
    return f"{value.name}/{len(model.graph.node)}"


def _before(model: onnx.ModelProto, value: onnx.ValueInfoProto, type_: str, **attributes: Any) -> None:
    """Insert an operator between an input and its readers."""
    inner = _fresh(model, value)
    _read_as(model, value.name, inner)
    model.graph.node.insert(0, helper.make_node(type_, [value.name], [inner], inner, **attributes))


def _after(model: onnx.ModelProto, value: onnx.ValueInfoProto, type_: str, **attributes: Any) -> None:
    """Insert an operator between an output and the node that computes it."""
    inner = _fresh(model, value)
    _write_as(model, value.name, inner)
    model.graph.node.append(helper.make_node(type_, [inner], [value.name], inner, **attributes))


# Edits


def _rename(model: onnx.ModelProto, index: int, new: str, output: bool) -> None:
    values = model.graph.output if output else model.graph.input
    value = _value(values, index)
    if any(new == each.name for each in (*model.graph.input, *model.graph.output)):
        return
    if output:
        _write_as(model, value.name, new)
    else:
        _read_as(model, value.name, new)
    value.name = new


def exchange(model: onnx.ModelProto, first: int, second: int, output: bool) -> None:
    """Exchange the names of two cache inputs, or of two cache outputs."""
    caches = _caches(model.graph.output if output else model.graph.input)
    if not caches:
        return
    one, other = _value(caches, first), _value(caches, second)
    if one.name == other.name or _dims(one) != _dims(other):
        return
    names = one.name, other.name
    change = _write_as if output else _read_as
    change(model, names[0], "exchanged")
    change(model, names[1], names[0])
    change(model, "exchanged", names[1])


def _retype(model: onnx.ModelProto, index: int, type_: int, output: bool) -> None:
    value = _value(model.graph.output if output else model.graph.input, index)
    original = value.type.tensor_type.elem_type
    value.type.tensor_type.elem_type = type_
    if output:
        _after(model, value, "Cast", to=type_)
    else:
        _before(model, value, "Cast", to=original)


def _retype_caches(model: onnx.ModelProto, type_: int) -> None:
    """Change the type of every cache, like half-precision conversions do."""
    for value in _caches(model.graph.input):
        original = value.type.tensor_type.elem_type
        value.type.tensor_type.elem_type = type_
        _before(model, value, "Cast", to=original)
    for value in _caches(model.graph.output):
        value.type.tensor_type.elem_type = type_
        _after(model, value, "Cast", to=type_)


def _transpose_caches(model: onnx.ModelProto, order: Sequence[int], both: bool) -> None:
    """Permute the dimensions of all cache inputs, and with `both` of all cache outputs."""
    for value in _caches(model.graph.input):
        dims = _dims(value)
        perm = [axis for axis in order if axis < len(dims)]
        _reshape(value, [dims[axis] for axis in perm])
        _before(model, value, "Transpose", perm=[perm.index(axis) for axis in range(len(perm))])
    for value in _caches(model.graph.output) if both else ():
        dims = _dims(value)
        perm = [axis for axis in order if axis < len(dims)]
        _reshape(value, [dims[axis] for axis in perm])
        _after(model, value, "Transpose", perm=perm)


def _more_dimensions(model: onnx.ModelProto, index: int, output: bool) -> None:
    """Add a leading dimension of 1."""
    value = _value(model.graph.output if output else model.graph.input, index)
    dims = _dims(value)
    inner = _fresh(model, value)
    model.graph.initializer.append(helper.make_tensor(f"{inner}/axis", TensorProto.INT64, [1], [0]))
    _reshape(value, [1, *dims])
    if output:
        _write_as(model, value.name, inner)
        node = helper.make_node("Unsqueeze", [inner, f"{inner}/axis"], [value.name], inner)
        model.graph.node.append(node)
    else:
        _read_as(model, value.name, inner)
        model.graph.node.insert(0, helper.make_node("Squeeze", [value.name, f"{inner}/axis"], [inner], inner))


def _set_dimension(model: onnx.ModelProto, index: int, axis: int, size: int | str, output: bool) -> None:
    """Change the declared size of a dimension, which only ONNX Runtime checks."""
    value = _value(model.graph.output if output else model.graph.input, index)
    if dims := _dims(value):
        dims[axis % len(dims)] = size
        _reshape(value, dims)


def _forget_shape(model: onnx.ModelProto, index: int, output: bool) -> None:
    value = _value(model.graph.output if output else model.graph.input, index)
    value.type.tensor_type.ClearField("shape")


def _remove(model: onnx.ModelProto, index: int, what: str) -> None:
    parts = getattr(model.graph, what)
    if parts:
        del parts[index % len(parts)]


def _add_input(model: onnx.ModelProto, name: str, type_: int, dims: Sequence[int | str]) -> None:
    if all(name != value.name for value in (*model.graph.input, *model.graph.output)):
        model.graph.input.append(helper.make_tensor_value_info(name, type_, list(dims)))


def _add_output(model: onnx.ModelProto, index: int, name: str) -> None:
    """Duplicate an output under another name."""
    value = _value(model.graph.output, index)
    if all(name != each.name for each in (*model.graph.input, *model.graph.output)):
        model.graph.node.append(helper.make_node("Identity", [value.name], [name], f"{name}/copy"))
        copy = model.graph.output.add()
        copy.CopyFrom(value)
        copy.name = name


def _reorder(model: onnx.ModelProto, seed: int) -> None:
    """Reorder inputs and outputs."""
    for values in (model.graph.input, model.graph.output):
        original = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in values]
        del values[:]
        values.extend(sorted(original, key=lambda value: hash((seed, value.name))))


_INDEX, _OUTPUT = st.integers(0, 11), st.booleans()
_WORD: Final = st.sampled_from(NAMES) | st.text(min_size=1, max_size=12)
_SIZES: Final = st.sampled_from((0, 1, 2, 7, 64, -1, "sequence_length", "x", ""))
_SHAPES: Final = st.lists(_SIZES.filter(lambda size: size not in (-1, "")), max_size=5)
_PARTS: Final = st.integers(0, 99)
_HARMLESS: Final = (
    (_rename, _INDEX, _WORD, _OUTPUT),
    (exchange, _INDEX, _INDEX, _OUTPUT),
    (_retype_caches, st.sampled_from(_TYPES[2:5])),
    (_transpose_caches, st.permutations(range(4)), _OUTPUT),
    (_more_dimensions, _INDEX, _OUTPUT),
    (_set_dimension, _INDEX, st.integers(0, 4), _SIZES, _OUTPUT),
    (_forget_shape, _INDEX, _OUTPUT),
    (_add_output, _INDEX, _WORD),
    (_add_input, _WORD, st.sampled_from(_TYPES), _SHAPES),
    (_reorder, st.integers(0, 9)),
    (_remove, _PARTS, st.sampled_from(("input", "initializer"))),
)
_HARMFUL: Final = (
    (_retype, _INDEX, st.sampled_from(_TYPES), _OUTPUT),  # values that do not fit into the other type
    (_remove, _PARTS, st.sampled_from(("node", "output"))),
)
"""Functions that change a graph, and strategies for their arguments."""


def graph_edits() -> st.SearchStrategy[GraphEdit]:
    """Strategy for all edits."""
    edits = [(*each, harmless) for harmless, group in ((True, _HARMLESS), (False, _HARMFUL)) for each in group]
    return st.one_of(
        st.builds(GraphEdit, st.just(change), st.tuples(*arguments), st.just(harmless))
        for change, *arguments, harmless in edits
    )


def edit_graphs(folder: Path, edits: Iterable[GraphEdit]) -> None:
    """Edit every graph of a model."""
    for path in folder.rglob("*.onnx"):
        model = onnx.load(path, load_external_data=False)
        for edit in edits:
            edit.apply(model)
        path.write_bytes(model.SerializeToString())


BYTE_CHANGES: Final = st.lists(
    st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=8
)


def change_bytes(folder: Path, changes: Iterable[tuple[float, int]]) -> None:
    """Replace bytes of the graph, each given by its relative position and new value; weights may be among them."""
    path = next(folder.rglob("*.onnx"))
    data = bytearray(path.read_bytes())
    for position, value in changes:
        data[int(position * len(data))] = value
    path.write_bytes(data)


_JSON: Final = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3000) | st.floats() | st.sampled_from(("", "x", "%d", "input_ids")),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(("a", "decoder", "model")), inner),
    max_leaves=3,
)


class FileEdit(NamedTuple):
    """A change to a folder."""

    change: Callable[..., None]
    arguments: tuple[Any, ...]
    """The arguments of `change` after the folder."""

    def apply(self, folder: Path) -> None:
        self.change(folder, *self.arguments)


def _set_json(folder: Path, setting: tuple[str, Sequence[str]], value: Any) -> None:
    """Set a value in a JSON file, if the file and the object that holds the value exist."""
    file, keys = setting
    try:
        data = json.loads((folder / file).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    parent: Any = data
    for key in keys[:-1]:
        parent = parent.get(key) if isinstance(parent, dict) else None
    if isinstance(parent, dict):
        parent[keys[-1]] = value
        write_json(folder / file, data)


_SETTINGS: Final = (
    *(("config.json", (key,)) for key in ("vocab_size", "num_key_value_heads", "num_attention_heads", "head_dim")),
    *(("config.json", (key,)) for key in ("hidden_size", "max_position_embeddings", "eos_token_id", "text_config")),
    *(("genai_config.json", keys) for keys in (("model",), ("model", "decoder"), ("model", "context_length"))),
    *(("genai_config.json", ("model", "decoder", key)) for key in ("inputs", "outputs", "filename", "head_size")),
    *(("genai_config.json", ("model", "decoder", "inputs", key)) for key in ("input_ids", "past_key_names", "x")),
    *(("genai_config.json", ("model", "decoder", "outputs", key)) for key in ("logits", "present_value_names")),
    *(("tokenizer_config.json", (key,)) for key in ("eos_token", "chat_template")),
    ("generation_config.json", ("eos_token_id",)),
)
_FILES: Final = (
    *("model.onnx", "model.onnx_data", "model.onnx.data", "model.onnx_data_1", "config.json", "genai_config.json"),
    *("tokenizer.json", "tokenizer_config.json"),
)


def _cut(folder: Path, file: str, part: float) -> None:
    for path in folder.rglob(file):
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])


def _remove_file(folder: Path, file: str) -> None:
    for path in folder.rglob(file):
        path.unlink()


def _change_location(folder: Path, location: str) -> None:
    """Change the file name of all external weights of an intact graph."""
    for path in folder.rglob("model.onnx"):
        model = onnx.ModelProto()
        with suppress(DecodeError):
            model.ParseFromString(path.read_bytes())
            for tensor in model.graph.initializer:
                for entry in tensor.external_data:
                    if entry.key == "location":
                        entry.value = location
            path.write_bytes(model.SerializeToString())


def file_edits() -> st.SearchStrategy[FileEdit]:
    """Generate changes to the files of a model folder."""
    places = ("../../etc/passwd", "/etc/passwd", "missing", "", "config.json", ".", "a\0b", "ä")
    edits = (
        (_set_json, st.sampled_from(_SETTINGS), _JSON),
        (_cut, st.sampled_from(_FILES), st.floats(0, 0.999)),
        (_remove_file, st.sampled_from(_FILES)),
        (_change_location, st.sampled_from(places)),
    )
    return st.one_of(st.builds(FileEdit, st.just(change), st.tuples(*arguments)) for change, *arguments in edits)
