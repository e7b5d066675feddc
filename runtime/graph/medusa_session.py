"""A graph of Medusa heads: the likeliest tokens of the next few positions from one hidden state."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ...errors import BundleError, EdgeError
from .graph_io import Floats
from .introspection import DRAFT_FEATURES
from .ort import ORT_ERRORS, error_reason, load_session, session_options
from .session import SessionConfig, graph_values

_OUTPUTS: Final = ("top_ids", "top_probabilities")
_TIMED_RUNS: Final = 3
_HINT: Final = "restore it or export the model with its heads again"


class HeadTokens(NamedTuple):
    """The likeliest tokens of every head, best first."""

    ids: npt.NDArray[np.int64]
    """int64 `[heads, count]`."""
    probabilities: Floats
    """float32 `[heads, count]`."""


class MedusaSession:
    """Loaded Medusa heads.

    Args:
        graph: their file.
        config: how to run it.

    Raises:
        BundleError: the file cannot be loaded, or has other inputs and outputs.
    """

    def __init__(self, graph: Path, config: SessionConfig) -> None:
        options = session_options(config.threads)
        if config.shares_cores or config.power.saves:
            options.add_session_config_entry("session.force_spinning_stop", "1")
        try:
            self._session = load_session(str(graph), options)
        except ORT_ERRORS as error:
            raise BundleError(f"{graph} cannot be loaded: {error_reason(error)}", _HINT) from error
        inputs = {value.name: value.shape for value in graph_values(self._session.get_inputs())}
        outputs = {value.name: value.shape for value in graph_values(self._session.get_outputs())}
        shape = inputs.get(DRAFT_FEATURES, ())
        size = shape[-1] if shape else None
        heads = outputs.get(_OUTPUTS[0], (None,))[0]
        if list(inputs) != [DRAFT_FEATURES] or set(outputs) != set(_OUTPUTS):
            raise BundleError(f"{graph} does not hold Medusa heads", _HINT)
        if not isinstance(size, int) or not isinstance(heads, int):
            raise BundleError(f"{graph} does not state the number of its heads and features", _HINT)
        self.feature_size: Final = size
        """Number of features of a token."""
        self.heads: Final = heads
        """Number of heads."""
        self.seconds: Final = min(self._timed_run() for _ in range(_TIMED_RUNS))
        """Seconds of a run, measured now."""

    def _timed_run(self) -> float:
        started = time.perf_counter()
        self.run(np.zeros(self.feature_size, np.float32))
        return time.perf_counter() - started

    def run(self, features: Floats) -> HeadTokens:
        """Run all heads on the target's hidden state float32 `[f]`.

        Raises:
            EdgeError: ONNX Runtime failed.
        """
        try:
            ids, probabilities = self._session.run(list(_OUTPUTS), {DRAFT_FEATURES: features[None]})
        except ORT_ERRORS as error:
            what = f"the Medusa heads failed to run: {error_reason(error)}"
            raise EdgeError(what, "run again with --debug and report it") from error
        return HeadTokens(ids, probabilities)
