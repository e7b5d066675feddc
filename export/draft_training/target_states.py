"""The hidden states of a target that an EAGLE-3 head reads, from the graph of its bundle."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from ...errors import InputError
from ...models.bundle import Bundle
from ...models.draft_heads import feature_layers
from ...models.manifest import Architecture, GraphLayout
from ..check.contract_session import ContractSession
from ..graph.embedding_head import embedded_value

Float32Array = npt.NDArray[np.float32]

_FEWEST_LAYERS: Final = 4
_CACHE_BYTES: Final = 1 << 30


def state_layers(layers: int) -> tuple[int, ...]:
    """The layers before which a head reads the residual stream of a target with so many layers.

    They are those of published heads: 2, half of the layers and the third from the end; targets with too few layers for
    that have others.

    Raises:
        InputError: there are too few layers.
    """
    if layers < _FEWEST_LAYERS:
        raise InputError(
            f"an EAGLE-3 head reads three layers of its target, which has {layers}", "train a draft model instead"
        )
    usual = feature_layers(layers)
    return usual if usual[0] < usual[1] < usual[2] else (1, layers // 2, layers - 1)


class TargetStates:
    """Runs a target's graph over whole texts.

    Args:
        bundle: the target.
        longest: number of tokens of the longest text.

    Raises:
        InputError: the target is not a bundle of `edge-run export`, or has too few layers.
        ExportError: the graph does not run.
    """

    def __init__(self, bundle: Bundle, longest: int) -> None:
        if bundle.manifest is None or bundle.manifest.layout is not GraphLayout.EDGE:
            raise InputError(
                f"an EAGLE-3 head needs a target that edge-run exported, and {bundle.folder} is not",
                "export the target with edge-run export",
            )
        self.architecture: Final[Architecture] = bundle.manifest.architecture
        self.layers: Final = state_layers(self.architecture.layers)
        """The layers before which the residual stream is read."""
        model = onnx.load(bundle.graph, load_external_data=False)
        made = {name for node in model.graph.node for name in node.output}
        embedded = embedded_value(model.graph)
        taps = [embedded or "", *(f"layers.{layer - 1}.next_norm.residual" for layer in self.layers)]
        if not made.issuperset(taps):
            raise InputError(
                f"the graph of {bundle.folder} does not name the states of its layers", "export the target again"
            )
        for name in taps:
            model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
        self._session = ContractSession(bundle.graph.parent, self.architecture, longest, model, extra_outputs=taps)
        self._longest = longest
        self._cached: dict[bytes, tuple[Float32Array, Float32Array]] = {}
        self._cached_bytes = 0

    def embeddings(self, token_ids: npt.NDArray[np.int64]) -> Float32Array:
        """The embeddings of any tokens, float32 [n, d].

        Raises:
            ExportError: the graph does not run.
        """
        parts = range(0, len(token_ids), self._longest)
        return np.concatenate([self._run(token_ids[start : start + self._longest])[0] for start in parts])

    def read(self, token_ids: npt.NDArray[np.int64]) -> tuple[Float32Array, Float32Array]:
        """The embeddings of a text's tokens [n, d], and their states [n, 3 d], the lowest layer first.

        What was read before is kept in memory, up to a limit.

        Raises:
            ExportError: the graph does not run.
        """
        key = token_ids.tobytes()
        if (found := self._cached.get(key)) is not None:
            return found
        embedded, *states = self._run(token_ids)
        read = embedded, np.concatenate(states, axis=1)
        size = sum(each.nbytes for each in read)
        if self._cached_bytes + size <= _CACHE_BYTES:
            self._cached[key] = read
            self._cached_bytes += size
        return read

    def _run(self, token_ids: npt.NDArray[np.int64]) -> list[Float32Array]:
        """The embeddings of a text and its states before each layer, float32 [n, d] each."""
        self._session.length = 0
        self._session.forward(token_ids, np.array([len(token_ids) - 1]))
        return [each[0] for each in self._session.extra]
