"""A graph with the activations of its low-bit operators in float32, to tell its wiring from their rounding."""

from __future__ import annotations

from typing import Final

from onnx import ModelProto, NodeProto, TensorProto, helper

_FLOAT: Final = 1
"""The accuracy level at which operators leave activations alone."""
_CODES_OF_EXPERTS: Final = ((2, 3), (5, 6))
"""Which inputs of QMoE are codes and scales."""
_BIASES_OF_EXPERTS: Final = (4, 7)
_QUANTIZED: Final = ("expert_weight_bits", "block_size", "accuracy_level", "weights_prepacked")
"""Attributes that MoE has not."""


def with_float_activations(model: ModelProto) -> ModelProto:
    """`model`, changed: every operator with an accuracy level at full activation precision.

    QMoE has no such level for 8-bit experts; they become the float weights they stand for, and the node a MoE.
    """
    nodes = [each for node in model.graph.node for each in _in_float(node)]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def _in_float(node: NodeProto) -> list[NodeProto]:
    settings = {attribute.name: attribute for attribute in node.attribute}
    bits, block = settings.get("expert_weight_bits"), settings.get("block_size")
    if node.op_type != "QMoE" or bits is None or bits.i != 8 or block is None:
        if "accuracy_level" in settings:
            settings["accuracy_level"].i = _FLOAT
        return [node]
    before: list[NodeProto] = []
    weights = []
    for codes, scales in ((node.input[first], node.input[second]) for first, second in _CODES_OF_EXPERTS):
        middle = helper.make_tensor("middle", TensorProto.UINT8, [1], [128])
        name = f"{codes}.float"
        before += [
            helper.make_node("Shape", [scales], [f"{name}.shape"]),
            helper.make_node("ConstantOfShape", [f"{name}.shape"], [f"{name}.middle"], value=middle),
            helper.make_node(
                "DequantizeLinear",
                [codes, scales, f"{name}.middle"],
                [name],
                axis=2,
                block_size=block.i,
            ),
        ]
        weights.append(name)
    first, second = (node.input[index] if index < len(node.input) else "" for index in _BIASES_OF_EXPERTS)
    inputs = [*node.input[:2], weights[0], first, weights[1], second]
    replaced = helper.make_node("MoE", inputs, list(node.output), name=node.name, domain=node.domain)
    replaced.attribute.extend(attribute for attribute in node.attribute if attribute.name not in _QUANTIZED)
    return [*before, replaced]
