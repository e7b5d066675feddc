"""ONNX's protobuf messages for programs without the onnx package.

The runtime edits graphs for a device and makes small ones of its own, and the base install has no onnx package. The
messages are declared here for protobuf's own library, with the names and numbers of onnx.proto (ONNX 1.19); fields that
are not declared are kept when a message is read and written. Enumerations are plain integers, which have the same
encoding. The messages live in a descriptor pool of their own, so that the onnx package can be used beside them.
https://github.com/onnx/onnx/blob/main/onnx/onnx.proto
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from .wire import mapped_model

Message = Any
"""A protobuf message. Its class is made at run time, so type checkers know nothing about its fields."""

_PACKAGE: Final = "edgerun.onnx"
_SCALARS: Final[Mapping[str, FieldDescriptorProto.Type.ValueType]] = {
    "int32": FieldDescriptorProto.TYPE_INT32,
    "int64": FieldDescriptorProto.TYPE_INT64,
    "uint64": FieldDescriptorProto.TYPE_UINT64,
    "float": FieldDescriptorProto.TYPE_FLOAT,
    "double": FieldDescriptorProto.TYPE_DOUBLE,
    "string": FieldDescriptorProto.TYPE_STRING,
    "bytes": FieldDescriptorProto.TYPE_BYTES,
}
_MESSAGES: Final[Mapping[str, str]] = {
    "ModelProto": "ir_version int64 1; producer_name string 2; producer_version string 3; graph GraphProto 7;"
    "opset_import OperatorSetIdProto* 8; metadata_props StringStringEntryProto* 14; functions FunctionProto* 25",
    "OperatorSetIdProto": "domain string 1; version int64 2",
    "StringStringEntryProto": "key string 1; value string 2",
    "FunctionProto": "name string 1; node NodeProto* 7; domain string 10",
    "GraphProto": "node NodeProto* 1; name string 2; initializer TensorProto* 5; input ValueInfoProto* 11;"
    "output ValueInfoProto* 12; value_info ValueInfoProto* 13",
    "NodeProto": "input string* 1; output string* 2; name string 3; op_type string 4; attribute AttributeProto* 5;"
    "domain string 7",
    "AttributeProto": "name string 1; f float 2; i int64 3; s bytes 4; t TensorProto 5; g GraphProto 6;"
    "floats float* 7; ints int64* 8; strings bytes* 9; tensors TensorProto* 10; graphs GraphProto* 11; type int32 20",
    "TensorProto": "dims int64* 1; data_type int32 2; float_data float* 4; int32_data int32* 5; int64_data int64* 7;"
    "name string 8; raw_data bytes 9; double_data double* 10; uint64_data uint64* 11;"
    "external_data StringStringEntryProto* 13; data_location int32 14",
    "ValueInfoProto": "name string 1; type TypeProto 2",
    "TypeProto": "tensor_type TensorTypeProto 1",
    "TensorTypeProto": "elem_type int32 1; shape TensorShapeProto 2",
    "TensorShapeProto": "dim DimensionProto* 1",
    "DimensionProto": "dim_value int64 1; dim_param string 2",
}
"""Fields as `name type number`, a star for repeated ones, by message. Nested messages of onnx.proto stand beside the
others, which makes no difference in a file."""


def _declared() -> Mapping[str, Any]:
    """The message classes by name."""
    file = FileDescriptorProto(name="edgerun/onnx.proto", package=_PACKAGE, syntax="proto2")
    for message, fields in _MESSAGES.items():
        file.message_type.append(DescriptorProto(name=message, field=[_field(each) for each in fields.split(";")]))
    pool = DescriptorPool()
    pool.Add(file)
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _MESSAGES}


def _field(text: str) -> FieldDescriptorProto:
    name, kind, number = text.split()
    repeated = kind.endswith("*")
    kind = kind.removesuffix("*")
    field = FieldDescriptorProto(
        name=name,
        number=int(number),
        label=FieldDescriptorProto.LABEL_REPEATED if repeated else FieldDescriptorProto.LABEL_OPTIONAL,
        type=_SCALARS.get(kind, FieldDescriptorProto.TYPE_MESSAGE),
    )
    if kind not in _SCALARS:
        field.type_name = f".{_PACKAGE}.{kind}"
    return field


_CLASSES: Final = _declared()
ModelProto: Final[Any] = _CLASSES["ModelProto"]
OperatorSetIdProto: Final[Any] = _CLASSES["OperatorSetIdProto"]
GraphProto: Final[Any] = _CLASSES["GraphProto"]
NodeProto: Final[Any] = _CLASSES["NodeProto"]
AttributeProto: Final[Any] = _CLASSES["AttributeProto"]
TensorProto: Final[Any] = _CLASSES["TensorProto"]
ValueInfoProto: Final[Any] = _CLASSES["ValueInfoProto"]

_IR_VERSION: Final = 10
EXTERNAL: Final = 1
"""`data_location` of a tensor that lies in another file."""
_NUMBERED: Final = (np.float32, np.uint8, np.int8, np.uint16, np.int16, np.int32, np.int64)
_FURTHER: Final = {np.bool_: 9, np.float16: 10, np.float64: 11, np.uint32: 12, np.uint64: 13}
ELEMENT_TYPES: Final[Mapping[np.dtype[Any], int]] = {
    **{np.dtype(kind): number for number, kind in enumerate(_NUMBERED, 1)},
    **{np.dtype(kind): number for kind, number in _FURTHER.items()},
}
"""ONNX's number of an element type, by NumPy dtype."""
_FLOAT, _INT, _STRING, _TENSOR, _FLOATS, _INTS = 1, 2, 3, 4, 6, 7
"""`type` of an attribute."""
_FIELDS: Final = {_FLOAT: "f", _INT: "i", _STRING: "s", _TENSOR: "t", _FLOATS: "floats", _INTS: "ints"}
"""The field with the value of an attribute, by its type."""


def read_model(graph: Path) -> Message:
    """Read a model file; tensors in other files stay references to them.

    Raises:
        BundleError: the file is not an ONNX model.
    """
    with mapped_model(graph) as data:
        try:
            return ModelProto.FromString(data[:])
        except DecodeError as error:
            raise ValueError("its messages cannot be decoded") from error


def model(graph: Message, *, opset: int, microsoft: bool = True) -> Message:
    """A model of a graph: ONNX's operators of version `opset`, and com.microsoft's if `microsoft`."""
    opsets = [OperatorSetIdProto(domain="", version=opset)]
    if microsoft:
        opsets.append(OperatorSetIdProto(domain="com.microsoft", version=1))
    return ModelProto(ir_version=_IR_VERSION, producer_name="edge-run", graph=graph, opset_import=opsets)


def node(
    operator: str, inputs: Sequence[str], outputs: Sequence[str], *, name: str = "", domain: str = "", **attributes: Any
) -> Message:
    """A node. An attribute's value is an int, float, str, array, or sequence of ints or of floats."""
    return NodeProto(
        op_type=operator,
        input=inputs,
        output=outputs,
        name=name or outputs[0],
        domain=domain,
        attribute=[attribute(key, value) for key, value in attributes.items()],
    )


def attribute(name: str, value: Any) -> Message:
    """An attribute of a node; see `node` for its values."""
    if isinstance(value, str):
        return AttributeProto(name=name, s=value.encode(), type=_STRING)
    if isinstance(value, float):
        return AttributeProto(name=name, f=value, type=_FLOAT)
    if isinstance(value, int):
        return AttributeProto(name=name, i=value, type=_INT)
    if isinstance(value, np.ndarray):
        return AttributeProto(name=name, t=tensor("", value), type=_TENSOR)
    values = list(value)
    if all(isinstance(each, int) for each in values):
        return AttributeProto(name=name, ints=values, type=_INTS)
    return AttributeProto(name=name, floats=values, type=_FLOATS)


def attribute_values(of: Message) -> dict[str, Any]:
    """The attributes of a node by name: ints, floats, strings, tensor messages, and lists of ints and floats.

    Attributes of other types, such as graphs, are left out.
    """
    values = {}
    for each in of.attribute:
        if each.type in _FIELDS:
            value = getattr(each, _FIELDS[each.type])
            values[each.name] = value.decode("utf-8") if each.type == _STRING else value
            if each.type in (_FLOATS, _INTS):
                values[each.name] = list(value)
    return values


def set_attribute(of: Message, name: str, value: Any) -> None:
    """Set an attribute of a node, replacing the one of that name; see `node` for its values."""
    kept = [each for each in of.attribute if each.name != name]
    del of.attribute[:]
    of.attribute.extend([*kept, attribute(name, value)])


def tensor(name: str, array: npt.NDArray[Any]) -> Message:
    """A tensor that holds the elements of `array`, whose dtype is one of `ELEMENT_TYPES`."""
    return TensorProto(
        name=name,
        dims=array.shape,
        data_type=ELEMENT_TYPES[array.dtype],
        raw_data=np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).tobytes(),
    )


def external_tensor(
    name: str, dtype: npt.DTypeLike, shape: Sequence[int], *, location: str, offset: int, length: int
) -> Message:
    """A tensor whose `length` bytes lie in the file `location` from `offset` on."""
    proto = TensorProto(name=name, dims=shape, data_type=ELEMENT_TYPES[np.dtype(dtype)], data_location=EXTERNAL)
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        proto.external_data.add(key=key, value=str(value))
    return proto


def value_info(name: str, dtype: npt.DTypeLike, shape: Sequence[int | str]) -> Message:
    """An input or output; a dimension is a size or a symbolic name."""
    info = ValueInfoProto(name=name)
    info.type.tensor_type.elem_type = ELEMENT_TYPES[np.dtype(dtype)]
    info.type.tensor_type.shape.SetInParent()
    for size in shape:
        if isinstance(size, str):
            info.type.tensor_type.shape.dim.add(dim_param=size)
        else:
            info.type.tensor_type.shape.dim.add(dim_value=size)
    return info


def shape_of(info: Message) -> tuple[int | str | None, ...]:
    """The dimensions of an input or output: sizes, symbolic names, or None."""
    return tuple(
        dim.dim_value if dim.HasField("dim_value") else (dim.dim_param or None)
        for dim in info.type.tensor_type.shape.dim
    )
