"""Changes the low-bit operators of a graph to float32 activations."""

from __future__ import annotations

from typing import Final

from onnx import ModelProto, NodeProto, TensorProto, helper

_FLOAT32_ACCURACY: Final = 1
"""Accuracy level at which operators do not quantize activations."""
_QMOE_CODES_AND_SCALES: Final = ((2, 3), (5, 6))
"""Input indices of codes and scales in QMoE, for the first and the second matrix of an expert."""
_QMOE_BIASES: Final = (4, 7)
_QMOE_ONLY: Final = ("expert_weight_bits", "block_size", "accuracy_level", "weights_prepacked")
"""Attributes of QMoE that MoE does not have."""


def with_float_activations(model: ModelProto) -> ModelProto:
    """Change every operator of `model` that has an accuracy level to float32 activations, in place.

    With float activations, an exported graph and its reference differ by float32 rounding only. QMoE has no such level
    for 8-bit experts, so their weights are dequantized in the graph and the node becomes a MoE.

    Returns:
        `model`.
    """
    nodes = [each for node in model.graph.node for each in _with_float32(node)]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def _with_float32(node: NodeProto) -> list[NodeProto]:
    attributes = {attribute.name: attribute for attribute in node.attribute}
    bits, block = attributes.get("expert_weight_bits"), attributes.get("block_size")
    if node.op_type != "QMoE" or bits is None or bits.i != 8 or block is None:
        if "accuracy_level" in attributes:
            attributes["accuracy_level"].i = _FLOAT32_ACCURACY
        return [node]
    dequantize: list[NodeProto] = []
    weights = []
    for codes, scales in ((node.input[first], node.input[second]) for first, second in _QMOE_CODES_AND_SCALES):
        zero_point = helper.make_tensor("zero_point", TensorProto.UINT8, [1], [128])
        name = f"{codes}.float"
        dequantize += [
            helper.make_node("Shape", [scales], [f"{name}.shape"]),
            helper.make_node("ConstantOfShape", [f"{name}.shape"], [f"{name}.zero_point"], value=zero_point),
            helper.make_node(
                "DequantizeLinear",
                [codes, scales, f"{name}.zero_point"],
                [name],
                axis=2,
                block_size=block.i,
            ),
        ]
        weights.append(name)
    first, second = (node.input[index] if index < len(node.input) else "" for index in _QMOE_BIASES)
    inputs = [*node.input[:2], weights[0], first, weights[1], second]
    moe = helper.make_node("MoE", inputs, list(node.output), name=node.name, domain=node.domain)
    moe.attribute.extend(attribute for attribute in node.attribute if attribute.name not in _QMOE_ONLY)
    return [*dequantize, moe]
