"""Runs a graph without a KV cache: hidden states or a vector of a text, or a score of two texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from ...errors import BundleError
from ...models.bundle import Bundle
from ...models.onnx_file.wire import operators_of, outputs_of
from .graph_io import element_kind, element_type
from .model_metadata import reject_operators
from .ort import ORT_ERRORS, run_failure, run_options
from .session import SessionConfig, graph_values, load_graph

VECTOR: Final = "sentence_embedding"
SCORE: Final = "logits"
_OUTPUTS: Final[Mapping[str, int]] = {VECTOR: 2, "last_hidden_state": 3, "token_embeddings": 3, SCORE: 2}
"""Outputs of Optimum's exports with their numbers of dimensions; the first one that a graph has is read."""
_CLASSIFIER: Final = "ForSequenceClassification"
"""How transformers' names of models with a score for a text or two end."""


def is_encoder(bundle: Bundle) -> bool:
    """Whether a model gives vectors or scores, and has no cache to generate text with, by the outputs of its graph.

    Raises:
        BundleError: a file is damaged.
    """
    if bundle.manifest is not None:
        return False
    names = outputs_of(bundle.graph)
    classifies = _CLASSIFIER in str(bundle.config.get("architectures"))
    return names <= {*_OUTPUTS, "pooler_output"} and (SCORE not in names or classifies)


class EncoderGraph:
    """A loaded graph of an encoder.

    Args:
        bundle: the model.
        config: how to run it.

    Raises:
        BundleError: the graph cannot be loaded, or has other inputs and outputs.
    """

    def __init__(self, bundle: Bundle, config: SessionConfig) -> None:
        self._where: Final = str(bundle.graph)
        reject_operators(operators_of(bundle.graph), self._where)
        self._session, _ = load_graph(bundle.graph, config)
        self._types: Final = {each.name: element_type(each) for each in graph_values(self._session.get_inputs())}
        outputs = {each.name: each for each in graph_values(self._session.get_outputs())}
        self.output: Final = next((name for name in _OUTPUTS if name in outputs), "")
        """Name of the output that is read."""
        known = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
        unknown = [name for name in self._types if name not in known]
        value = outputs.get(self.output)
        if unknown or value is None or len(value.shape) != _OUTPUTS[self.output] or element_kind(value) != "f":
            what = f"takes {unknown[0]}" if unknown else f"gives {', '.join(outputs)}"
            raise BundleError(
                f"{self._where} is not an encoder: it {what}",
                f"encoders take {', '.join(known)} and give {' or '.join(_OUTPUTS)}; edgerun.load opens others",
            )
        last = value.shape[-1]
        self.size: Final = last if isinstance(last, int) else 0
        """Length of the vectors, or number of scores; 0 where the graph leaves it open."""

    def run(self, token_ids: Sequence[int], type_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """The output for one text, float32 `[n, d]` for hidden states, else `[d]`.

        Raises:
            EdgeError: ONNX Runtime failed.
        """
        given = {"input_ids": token_ids, "token_type_ids": type_ids, "position_ids": range(len(token_ids))}
        ones = [1] * len(token_ids)
        feeds = {name: np.array([given.get(name, ones)], dtype) for name, dtype in self._types.items()}
        try:
            (found,) = self._session.run([self.output], feeds, run_options())
        except ORT_ERRORS as error:
            raise run_failure(self._where, error) from error
        return np.asarray(found[0], np.float32)
