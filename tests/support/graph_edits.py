"""Random edits of a decoder's graph, like those of unusual exporters or of damage.

Most do not change what the model computes, so a graph that still runs must give the same tokens. The others (`harmless`
is False) may change the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper

Edit = Callable[[onnx.ModelProto], None]

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


@dataclass(frozen=True)
class GraphEdit:
    """A named change of a graph."""

    name: str
    apply: Edit
    harmless: bool = True
    """Whether the graph still computes the same, so that a run must give the same tokens."""

    def __repr__(self) -> str:
        return self.name


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


def _rename(index: int, new: str, *, output: bool) -> Edit:
    def apply(model: onnx.ModelProto) -> None:
        values = model.graph.output if output else model.graph.input
        value = _value(values, index)
        if any(new == each.name for each in (*model.graph.input, *model.graph.output)):
            return
        if output:
            _write_as(model, value.name, new)
        else:
            _read_as(model, value.name, new)
        value.name = new

    return apply


def exchange(first: int, second: int, *, output: bool) -> Edit:
    """Exchange the names of two cache inputs, or of two cache outputs."""

    def apply(model: onnx.ModelProto) -> None:
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

    return apply


def _retype(index: int, type_: int, *, output: bool) -> Edit:
    def apply(model: onnx.ModelProto) -> None:
        value = _value(model.graph.output if output else model.graph.input, index)
        original = value.type.tensor_type.elem_type
        value.type.tensor_type.elem_type = type_
        if output:
            _after(model, value, "Cast", to=type_)
        else:
            _before(model, value, "Cast", to=original)

    return apply


def _retype_caches(type_: int) -> Edit:
    """Change the type of every cache, like half-precision conversions do."""

    def apply(model: onnx.ModelProto) -> None:
        for value in _caches(model.graph.input):
            original = value.type.tensor_type.elem_type
            value.type.tensor_type.elem_type = type_
            _before(model, value, "Cast", to=original)
        for value in _caches(model.graph.output):
            value.type.tensor_type.elem_type = type_
            _after(model, value, "Cast", to=type_)

    return apply


def _transpose_caches(order: Sequence[int], *, both: bool) -> Edit:
    """Permute the dimensions of all cache inputs, and with `both` of all cache outputs."""

    def apply(model: onnx.ModelProto) -> None:
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

    return apply


def _more_dimensions(index: int, *, output: bool) -> Edit:
    """Add a leading dimension of 1."""

    def apply(model: onnx.ModelProto) -> None:
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

    return apply


def _set_dimension(index: int, axis: int, size: int | str, *, output: bool) -> Edit:
    """Change the declared size of a dimension, which only ONNX Runtime checks."""

    def apply(model: onnx.ModelProto) -> None:
        value = _value(model.graph.output if output else model.graph.input, index)
        if dims := _dims(value):
            dims[axis % len(dims)] = size
            _reshape(value, dims)

    return apply


def _forget_shape(index: int, *, output: bool) -> Edit:
    def apply(model: onnx.ModelProto) -> None:
        value = _value(model.graph.output if output else model.graph.input, index)
        value.type.tensor_type.ClearField("shape")

    return apply


def _remove(index: int, what: str) -> Edit:
    def apply(model: onnx.ModelProto) -> None:
        parts = getattr(model.graph, what)
        if parts:
            del parts[index % len(parts)]

    return apply


def _add_input(name: str, type_: int, dims: Sequence[int | str]) -> Edit:
    def apply(model: onnx.ModelProto) -> None:
        if all(name != value.name for value in (*model.graph.input, *model.graph.output)):
            model.graph.input.append(helper.make_tensor_value_info(name, type_, list(dims)))

    return apply


def _add_output(index: int, name: str) -> Edit:
    """Duplicate an output under another name."""

    def apply(model: onnx.ModelProto) -> None:
        value = _value(model.graph.output, index)
        if all(name != each.name for each in (*model.graph.input, *model.graph.output)):
            model.graph.node.append(helper.make_node("Identity", [value.name], [name], f"{name}/copy"))
            copy = model.graph.output.add()
            copy.CopyFrom(value)
            copy.name = name

    return apply


def _reorder(seed: int) -> Edit:
    """Reorder inputs and outputs."""

    def apply(model: onnx.ModelProto) -> None:
        for values in (model.graph.input, model.graph.output):
            original = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in values]
            del values[:]
            values.extend(sorted(original, key=lambda value: hash((seed, value.name))))

    return apply


def graph_edits() -> st.SearchStrategy[GraphEdit]:
    """Strategy for all edits."""
    index, output, word = st.integers(0, 11), st.booleans(), st.sampled_from(NAMES) | st.text(min_size=1, max_size=12)
    types, sizes = st.sampled_from(_TYPES), st.sampled_from((0, 1, 2, 7, 64, -1, "sequence_length", "x", ""))
    orders = st.permutations(range(4))
    harmless = st.one_of(
        st.builds(lambda a, w, o: GraphEdit(f"rename({a}, {w!r}, {o})", _rename(a, w, output=o)), index, word, output),
        st.builds(
            lambda a, b, o: GraphEdit(f"exchange({a}, {b}, {o})", exchange(a, b, output=o)), index, index, output
        ),
        st.builds(lambda k: GraphEdit(f"retype_caches({k})", _retype_caches(k)), st.sampled_from(_TYPES[2:5])),
        st.builds(
            lambda order, b: GraphEdit(f"transpose({order}, {b})", _transpose_caches(order, both=b)), orders, output
        ),
        st.builds(lambda a, o: GraphEdit(f"more_dimensions({a}, {o})", _more_dimensions(a, output=o)), index, output),
        st.builds(
            lambda a, x, s, o: GraphEdit(f"dimension({a}, {x}, {s!r}, {o})", _set_dimension(a, x, s, output=o)),
            *(index, st.integers(0, 4), sizes, output),
        ),
        st.builds(lambda a, o: GraphEdit(f"forget_shape({a}, {o})", _forget_shape(a, output=o)), index, output),
        st.builds(lambda a, w: GraphEdit(f"add_output({a}, {w!r})", _add_output(a, w)), index, word),
        st.builds(
            lambda w, k, d: GraphEdit(f"add_input({w!r}, {k}, {d})", _add_input(w, k, d)),
            *(word, types, st.lists(sizes.filter(lambda size: size not in (-1, "")), max_size=5)),
        ),
        st.builds(lambda seed: GraphEdit(f"reorder({seed})", _reorder(seed)), st.integers(0, 9)),
        st.builds(
            lambda a, w: GraphEdit(f"remove({a}, {w})", _remove(a, w)),
            *(st.integers(0, 99), st.sampled_from(("input", "initializer", "opset_import"))),
        ).filter(lambda edit: "opset" not in edit.name),
    )
    harmful = st.one_of(
        # Values that do not fit into the other type change the result.
        st.builds(
            lambda a, k, o: GraphEdit(f"retype({a}, {k}, {o})", _retype(a, k, output=o), harmless=False),
            *(index, types, output),
        ),
        st.builds(
            lambda a, w: GraphEdit(f"remove({a}, {w})", _remove(a, w), harmless=False),
            *(st.integers(0, 99), st.sampled_from(("node", "output"))),
        ),
    )
    return harmless | harmful
