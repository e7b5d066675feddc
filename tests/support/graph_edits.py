"""Edits of a decoder's graph, as strange exporters and bad luck make them.

Most leave the model's function as it was, so that whoever still runs the graph has to get the same tokens; the others
(`harmless` is False) may only be refused or ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper

Edit = Callable[[onnx.ModelProto], None]

WORDS: Final = (
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
_NUMBERS: Final = (
    *(TensorProto.INT64, TensorProto.INT32, TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE),
    *(TensorProto.BOOL, TensorProto.INT8, TensorProto.UINT8, TensorProto.INT16, TensorProto.BFLOAT16),
)


@dataclass(frozen=True)
class GraphEdit:
    """A change of the graph."""

    name: str
    apply: Edit
    harmless: bool = True
    """Whether the graph still computes the same, so that tokens have to be right if there are any."""

    def __repr__(self) -> str:
        return self.name


# Parts of graphs


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph and those in its nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _graphs(attribute.g)


def _read_as(model: onnx.ModelProto, old: str, new: str) -> None:
    """Every node that reads `old` reads `new`."""
    for graph in _graphs(model.graph):
        for node in graph.node:
            node.input[:] = [new if name == old else name for name in node.input]


def _write_as(model: onnx.ModelProto, old: str, new: str) -> None:
    for node in model.graph.node:
        node.output[:] = [new if name == old else name for name in node.output]
    _read_as(model, old, new)


def _port(ports: Sequence[onnx.ValueInfoProto], at: int) -> onnx.ValueInfoProto:
    return ports[at % len(ports)]


def _caches(ports: Sequence[onnx.ValueInfoProto]) -> list[onnx.ValueInfoProto]:
    """Ports of a cache, by their shapes: masks and logits come first among theirs."""
    others = ("attention_mask", "position_ids", ports[0].name)
    return [port for port in ports if len(_dims(port)) > 2 and port.name not in others]


def _dims(port: onnx.ValueInfoProto) -> list[int | str]:
    return [dim.dim_param or dim.dim_value for dim in port.type.tensor_type.shape.dim]


def _reshape(port: onnx.ValueInfoProto, dims: Sequence[int | str]) -> None:
    port.CopyFrom(helper.make_tensor_value_info(port.name, port.type.tensor_type.elem_type, list(dims)))


def _fresh(model: onnx.ModelProto, port: onnx.ValueInfoProto) -> str:
    """A name that nothing has."""
    return f"{port.name}/{len(model.graph.node)}"


def _before(model: onnx.ModelProto, port: onnx.ValueInfoProto, kind: str, **attributes: Any) -> None:
    """Put an operator between an input and its readers."""
    inner = _fresh(model, port)
    _read_as(model, port.name, inner)
    model.graph.node.insert(0, helper.make_node(kind, [port.name], [inner], inner, **attributes))


def _after(model: onnx.ModelProto, port: onnx.ValueInfoProto, kind: str, **attributes: Any) -> None:
    """Put an operator between an output and what computes it."""
    inner = _fresh(model, port)
    _write_as(model, port.name, inner)
    model.graph.node.append(helper.make_node(kind, [inner], [port.name], inner, **attributes))


# Edits


def _rename(at: int, new: str, *, output: bool) -> Edit:
    def apply(model: onnx.ModelProto) -> None:
        ports = model.graph.output if output else model.graph.input
        port = _port(ports, at)
        if any(new == each.name for each in (*model.graph.input, *model.graph.output)):
            return
        if output:
            _write_as(model, port.name, new)
        else:
            _read_as(model, port.name, new)
        port.name = new

    return apply


def exchange(first: int, second: int, *, output: bool) -> Edit:
    """Exchange the names of two caches on one side."""

    def apply(model: onnx.ModelProto) -> None:
        caches = _caches(model.graph.output if output else model.graph.input)
        if not caches:
            return
        one, other = _port(caches, first), _port(caches, second)
        if one.name == other.name or _dims(one) != _dims(other):
            return
        names = one.name, other.name
        change = _write_as if output else _read_as
        change(model, names[0], "exchanged")
        change(model, names[1], names[0])
        change(model, "exchanged", names[1])

    return apply


def _retype(at: int, kind: int, *, output: bool) -> Edit:
    def apply(model: onnx.ModelProto) -> None:
        port = _port(model.graph.output if output else model.graph.input, at)
        kept = port.type.tensor_type.elem_type
        port.type.tensor_type.elem_type = kind
        if output:
            _after(model, port, "Cast", to=kind)
        else:
            _before(model, port, "Cast", to=kept)

    return apply


def _retype_caches(kind: int) -> Edit:
    """Another type for every cache, as half-precision conversions do."""

    def apply(model: onnx.ModelProto) -> None:
        for port in _caches(model.graph.input):
            kept = port.type.tensor_type.elem_type
            port.type.tensor_type.elem_type = kind
            _before(model, port, "Cast", to=kept)
        for port in _caches(model.graph.output):
            port.type.tensor_type.elem_type = kind
            _after(model, port, "Cast", to=kind)

    return apply


def _transpose_caches(order: Sequence[int], *, both: bool) -> Edit:
    """Other orders of a cache's dimensions; on both sides, or on one, which no one can follow."""

    def apply(model: onnx.ModelProto) -> None:
        for port in _caches(model.graph.input):
            dims = _dims(port)
            perm = [axis for axis in order if axis < len(dims)]
            _reshape(port, [dims[axis] for axis in perm])
            _before(model, port, "Transpose", perm=[perm.index(axis) for axis in range(len(perm))])
        for port in _caches(model.graph.output) if both else ():
            dims = _dims(port)
            perm = [axis for axis in order if axis < len(dims)]
            _reshape(port, [dims[axis] for axis in perm])
            _after(model, port, "Transpose", perm=perm)

    return apply


def _more_dimensions(at: int, *, output: bool) -> Edit:
    """A dimension of 1 in front."""

    def apply(model: onnx.ModelProto) -> None:
        port = _port(model.graph.output if output else model.graph.input, at)
        dims = _dims(port)
        inner = _fresh(model, port)
        model.graph.initializer.append(helper.make_tensor(f"{inner}/axis", TensorProto.INT64, [1], [0]))
        _reshape(port, [1, *dims])
        if output:
            _write_as(model, port.name, inner)
            node = helper.make_node("Unsqueeze", [inner, f"{inner}/axis"], [port.name], inner)
            model.graph.node.append(node)
        else:
            _read_as(model, port.name, inner)
            model.graph.node.insert(0, helper.make_node("Squeeze", [port.name, f"{inner}/axis"], [inner], inner))

    return apply


def _set_dimension(at: int, axis: int, size: int | str, *, output: bool) -> Edit:
    """Say something else of a dimension; nothing checks a declaration but the runtime."""

    def apply(model: onnx.ModelProto) -> None:
        port = _port(model.graph.output if output else model.graph.input, at)
        if dims := _dims(port):
            dims[axis % len(dims)] = size
            _reshape(port, dims)

    return apply


def _forget_shape(at: int, *, output: bool) -> Edit:
    def apply(model: onnx.ModelProto) -> None:
        port = _port(model.graph.output if output else model.graph.input, at)
        port.type.tensor_type.ClearField("shape")

    return apply


def _remove(at: int, what: str) -> Edit:
    def apply(model: onnx.ModelProto) -> None:
        parts = getattr(model.graph, what)
        if parts:
            del parts[at % len(parts)]

    return apply


def _add_input(name: str, kind: int, dims: Sequence[int | str]) -> Edit:
    def apply(model: onnx.ModelProto) -> None:
        if all(name != port.name for port in (*model.graph.input, *model.graph.output)):
            model.graph.input.append(helper.make_tensor_value_info(name, kind, list(dims)))

    return apply


def _add_output(at: int, name: str) -> Edit:
    """An output once more."""

    def apply(model: onnx.ModelProto) -> None:
        port = _port(model.graph.output, at)
        if all(name != each.name for each in (*model.graph.input, *model.graph.output)):
            model.graph.node.append(helper.make_node("Identity", [port.name], [name], f"{name}/copy"))
            copy = model.graph.output.add()
            copy.CopyFrom(port)
            copy.name = name

    return apply


def _reorder(seed: int) -> Edit:
    """Ports in another order."""

    def apply(model: onnx.ModelProto) -> None:
        for ports in (model.graph.input, model.graph.output):
            kept = [onnx.ValueInfoProto.FromString(port.SerializeToString()) for port in ports]
            del ports[:]
            ports.extend(sorted(kept, key=lambda port: hash((seed, port.name))))

    return apply


def graph_edits() -> st.SearchStrategy[GraphEdit]:
    """Any change of a graph."""
    at, output, word = st.integers(0, 11), st.booleans(), st.sampled_from(WORDS) | st.text(min_size=1, max_size=12)
    kinds, sizes = st.sampled_from(_NUMBERS), st.sampled_from((0, 1, 2, 7, 64, -1, "sequence_length", "x", ""))
    orders = st.permutations(range(4))
    harmless = st.one_of(
        st.builds(lambda a, w, o: GraphEdit(f"rename({a}, {w!r}, {o})", _rename(a, w, output=o)), at, word, output),
        st.builds(lambda a, b, o: GraphEdit(f"exchange({a}, {b}, {o})", exchange(a, b, output=o)), at, at, output),
        st.builds(lambda k: GraphEdit(f"retype_caches({k})", _retype_caches(k)), st.sampled_from(_NUMBERS[2:5])),
        st.builds(
            lambda order, b: GraphEdit(f"transpose({order}, {b})", _transpose_caches(order, both=b)), orders, output
        ),
        st.builds(lambda a, o: GraphEdit(f"more_dimensions({a}, {o})", _more_dimensions(a, output=o)), at, output),
        st.builds(
            lambda a, x, s, o: GraphEdit(f"dimension({a}, {x}, {s!r}, {o})", _set_dimension(a, x, s, output=o)),
            *(at, st.integers(0, 4), sizes, output),
        ),
        st.builds(lambda a, o: GraphEdit(f"forget_shape({a}, {o})", _forget_shape(a, output=o)), at, output),
        st.builds(lambda a, w: GraphEdit(f"add_output({a}, {w!r})", _add_output(a, w)), at, word),
        st.builds(
            lambda w, k, d: GraphEdit(f"add_input({w!r}, {k}, {d})", _add_input(w, k, d)),
            *(word, kinds, st.lists(sizes.filter(lambda size: size not in (-1, "")), max_size=5)),
        ),
        st.builds(lambda seed: GraphEdit(f"reorder({seed})", _reorder(seed)), st.integers(0, 9)),
        st.builds(
            lambda a, w: GraphEdit(f"remove({a}, {w})", _remove(a, w)),
            *(st.integers(0, 99), st.sampled_from(("input", "initializer", "opset_import"))),
        ).filter(lambda edit: "opset" not in edit.name),
    )
    harmful = st.one_of(
        # A value that does not fit the other type changes what is computed.
        st.builds(
            lambda a, k, o: GraphEdit(f"retype({a}, {k}, {o})", _retype(a, k, output=o), harmless=False),
            *(at, kinds, output),
        ),
        st.builds(
            lambda a, w: GraphEdit(f"remove({a}, {w})", _remove(a, w), harmless=False),
            *(st.integers(0, 99), st.sampled_from(("node", "output"))),
        ),
    )
    return harmless | harmful
