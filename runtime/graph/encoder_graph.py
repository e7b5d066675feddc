"""Runs a graph without a KV cache: hidden states or a vector of a text, or a score of two texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...errors import BundleError
from ...models.bundle import Bundle
from ...models.json_file import is_whole
from ...models.onnx_file.wire import operators_of, outputs_of
from .model_metadata import reject_operators
from .ort import ORT_ERRORS, run_failure, run_options
from .session import SessionConfig, graph_values, load_graph

VECTOR: Final = "sentence_embedding"
SCORE: Final = "logits"
_OUTPUTS: Final[Mapping[str, int]] = {VECTOR: 2, "last_hidden_state": 3, "token_embeddings": 3, SCORE: 2}
"""Outputs of Optimum's exports with their numbers of dimensions; the first one that a graph has is read."""
_STATES: Final = 2
"""Number of dimensions of the hidden states of one text."""
_PASS_TOKENS: Final = 2048
"""Most tokens of a forward pass of several texts, with their padding, which bounds its memory."""
_LEAST_SHARE: Final = 0.8
"""Length of the shortest text of a pass as a share of the longest, which bounds the padding."""
_WHOLE_BATCH: Final = ("DynamicQuantizeLinear", "DynamicQuantizeMatMul", "QAttention")
"""Operators with one scale for all texts of a pass, so that a text's output would depend on the others."""
_CLASSIFIER: Final = "ForSequenceClassification"
"""How transformers' names of models with a score for a text or two end."""


def encoder_output(bundle: Bundle) -> str | None:
    """The output that is read of a model without a KV cache, which gives vectors or scores; None for other models.

    Raises:
        BundleError: a file is damaged.
    """
    if bundle.manifest is not None:
        return None
    names = outputs_of(bundle.graph)
    classifies = _CLASSIFIER in str(bundle.config.get("architectures"))
    if not names <= {*_OUTPUTS, "pooler_output"} or (SCORE in names and not classifies):
        return None
    return next((name for name in _OUTPUTS if name in names), None)


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
        operators = operators_of(bundle.graph)
        reject_operators(operators, self._where)
        self._session = load_graph(bundle.graph, config)[0]
        inputs = graph_values(self._session.get_inputs())
        self._types: Final = {each.name: each.dtype for each in inputs}
        outputs = {each.name: each for each in graph_values(self._session.get_outputs())}
        self.output: Final = next((name for name in _OUTPUTS if name in outputs), "")
        """Name of the output that is read."""
        known = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
        unknown = [name for name in self._types if name not in known]
        value = outputs.get(self.output)
        if unknown or value is None or len(value.shape) != _OUTPUTS[self.output] or value.dtype.kind != "f":
            what = f"takes {unknown[0]}" if unknown else f"gives {', '.join(outputs)}"
            raise BundleError(
                f"{self._where} is not an encoder: it {what}",
                f"encoders take {', '.join(known)} and give {' or '.join(_OUTPUTS)}; edgerun.load opens others",
            )
        last = value.shape[-1]
        self.size: Final = last if isinstance(last, int) else 0
        """Length of the vectors, or number of scores; 0 where the graph leaves it open."""
        padding: Any = bundle.config.get("pad_token_id")
        self._padding: Final[int] = padding if is_whole(padding, 0) else 0
        open_batch = "attention_mask" in self._types and not any(isinstance(each.shape[0], int) for each in inputs)
        self._most_tokens: Final = (
            _PASS_TOKENS if open_batch and not any(each in operators for each in _WHOLE_BATCH) else 0
        )

    def run(
        self, texts: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
        """Yield the index and the output of each text: float32 `[n, d]` for hidden states, else `[d]`.

        Texts of similar length share a forward pass if the graph allows it.

        Args:
            texts: token ids, and type ids, of each text.

        Raises:
            EdgeError: ONNX Runtime failed.
        """
        for batch in self._batches([len(token_ids) for token_ids, _ in texts]):
            for index, output in zip(batch, self._pass([texts[each] for each in batch]), strict=True):
                length = len(texts[index][0])
                yield index, output[:length] if output.ndim == _STATES else output

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """The indices of texts that share a pass, the shortest texts first."""
        batch: list[int] = []
        for index in sorted(range(len(lengths)), key=lengths.__getitem__):
            longest = lengths[index]
            full = (len(batch) + 1) * longest > self._most_tokens
            if batch and (full or lengths[batch[0]] < _LEAST_SHARE * longest):
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch

    def _pass(self, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> npt.NDArray[np.float32]:
        width = max(len(token_ids) for token_ids, _ in texts)
        given: dict[str, list[Any]] = {
            "input_ids": [[*token_ids, *[self._padding] * (width - len(token_ids))] for token_ids, _ in texts],
            "token_type_ids": [[*types, *[0] * (width - len(types))] for _, types in texts],
            "attention_mask": [[1] * len(types) + [0] * (width - len(types)) for _, types in texts],
            "position_ids": [range(width)] * len(texts),
        }
        feeds = {name: np.array(given[name], dtype) for name, dtype in self._types.items()}
        try:
            (found,) = self._session.run([self.output], feeds, run_options())
        except ORT_ERRORS as error:
            raise run_failure(self._where, error) from error
        return np.asarray(found, np.float32)
