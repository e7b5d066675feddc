"""Joins a decoder that takes embeddings with the graph that makes them of token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ...errors import BundleError
from .model_messages import Message, read_model

_EMBEDDINGS: Final = "inputs_embeds"
_PREFIX: Final = "embed_tokens/"


def with_embedding(decoder: Path, embedding: Path) -> bytes | None:
    """Join a decoder with its embedding; weights in other files stay there.

    Args:
        decoder: a graph with an input `inputs_embeds`.
        embedding: a graph in the same folder whose only input are token ids, and whose only output are embeddings.

    Returns:
        The serialized model, which takes token ids; None if the decoder takes these itself.

    Raises:
        BundleError: one of them is not an ONNX model, or not such a graph.
    """
    model, part = read_model(decoder), read_model(embedding)
    taken = [value for value in model.graph.input if value.name == _EMBEDDINGS]
    if not taken:
        return None
    inputs = _own_inputs(part.graph)
    branches = any(each.HasField("g") or each.graphs for node in part.graph.node for each in node.attribute)
    if len(inputs) != 1 or len(part.graph.output) != 1 or branches:
        takes, gives = (", ".join(value.name for value in each) for each in (inputs, part.graph.output))
        raise BundleError(
            f"{embedding} does not turn token ids into embeddings: it takes {takes or 'nothing'} and gives {gives}",
            "choose an export whose decoder takes input_ids",
        )
    names = {inputs[0].name: inputs[0].name, part.graph.output[0].name: _EMBEDDINGS, "": ""}
    _rename(part.graph, names)
    model.graph.input.remove(taken[0])
    if all(value.name != inputs[0].name for value in model.graph.input):
        model.graph.input.append(inputs[0])
    nodes = [*part.graph.node, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    model.graph.initializer.extend(part.graph.initializer)
    model.functions.extend(part.functions)
    domains = {each.domain for each in model.opset_import}
    # The few operators of an embedding mean the same in all versions of ONNX's.
    model.opset_import.extend(each for each in part.opset_import if each.domain not in domains)
    serialized: bytes = model.SerializeToString()
    return serialized


def _own_inputs(graph: Message) -> list[Message]:
    """The inputs of a graph that no initializer gives."""
    given = {each.name for each in graph.initializer}
    return [value for value in graph.input if value.name not in given]


def _rename(graph: Message, names: dict[str, str]) -> None:
    """Rename the values and nodes of a graph: as `names` says, and others so that they are in no decoder."""
    for initializer in graph.initializer:
        initializer.name = names.get(initializer.name, _PREFIX + initializer.name)
    for node in graph.node:
        node.name = _PREFIX + node.name
        for values in (node.input, node.output):
            values[:] = [names.get(name, _PREFIX + name) for name in values]
