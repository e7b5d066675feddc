"""The adapters and control vectors that a model was loaded with, and the graph that takes them.

The graph runs beside the model's own, over the same weights: all passes of an answer with an adapter or a control
vector, and no others. Which ones an answer has is decided by inputs, which are bound when it begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from ...errors import InputError
from ...models.bundle import Bundle
from ...models.find import path_of_user
from ..arguments.load_options import LoadOptions
from ..arguments.search_options import SteeringOptions
from ..graph.bound_graph import NewTokens, Steering
from ..graph.graph_choice import STEERED, FurtherGraph
from ..graph.session import GraphSession
from .control_vectors import read_control_vector
from .lora_files import read_lora
from .steered_model import Array, SteeredModel, lora_a


class SteeredGraph(FurtherGraph):
    """The graph that takes adapters and control vectors.

    Args:
        bundle: the model.
        graph: the file from which its own graph was loaded.
        own: that graph.
        options: names and files of adapters and control vectors.

    Raises:
        CheckpointError: a file is missing, damaged, or for another model.
        InputError: the model cannot have them, or a name is missing or given twice.
    """

    name = STEERED
    required = True

    def __init__(self, bundle: Bundle, graph: Path, own: GraphSession, options: LoadOptions) -> None:
        self._graph: Final = graph
        self._own: Final = own
        model = SteeredModel(bundle, graph)
        calibration = None if bundle.manifest is None else bundle.manifest.calibration
        if options.lora and calibration is not None and calibration.awq:
            what = f"{bundle.folder} cannot have adapters: AWQ has scaled the inputs of its linears"
            raise InputError(what, "export it without awq")
        self._adapters: Final = _named("--lora", options.lora, lambda path: read_lora(path, model.linears))
        self._controls: Final = _named(
            "--control-vector",
            options.control_vectors,
            lambda path: read_control_vector(path, model.size.layers, model.size.hidden_size),
        )
        adapted = {name for name in model.linears if any(lora_a(name) in each for each in self._adapters.values())}
        self._model: Final = model.serialized(adapted, vectors=bool(self._controls))
        self._defaults: Final = model.defaults

    def takes(self, new: NewTokens, base: int) -> bool:
        """Whether it runs a pass of an answer without an adapter or a control vector: none."""
        del new, base
        return False

    def load(self) -> GraphSession:
        """Load the graph.

        Raises:
            EdgeError: it cannot be loaded.
        """
        return self._own.beside(self._graph, self._model)

    def steering(self, options: SteeringOptions) -> Steering | None:
        """The adapter and the control vector of an answer; None for the model itself.

        Raises:
            InputError: the model was not loaded with them.
        """
        adapter, control, strength = options.adapter, options.control, options.control_strength
        if adapter is None and control is None:
            return None
        vectors = _find("control", control, self._controls)
        scaled = {name: np.float32(strength) * vector for name, vector in vectors.items()}
        inputs = {**self._defaults, **_find("adapter", adapter, self._adapters), **scaled}
        return Steering(adapter, control, strength, inputs)


def _named(
    option: str, given: Sequence[str], read: Callable[[Path], Mapping[str, Array]]
) -> dict[str, Mapping[str, Array]]:
    """What `read` makes of the files of an option, by their names."""
    found: dict[str, Mapping[str, Array]] = {}
    for each in given:
        name, _, path = each.partition("=")
        if not name or not path or name in found:
            raise InputError(f"{option} is {each!r:.200}", "give NAME=PATH, every name once")
        found[name] = read(path_of_user(path, f"give {option} NAME=PATH"))
    return found


def _find(option: str, name: str | None, known: Mapping[str, Mapping[str, Array]]) -> Mapping[str, Array]:
    if name is not None and name not in known:
        raise InputError(f"{option} is {name!r:.100}", f"the model was loaded with: {', '.join(known) or 'none'}")
    return {} if name is None else known[name]
