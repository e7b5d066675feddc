"""Second moments of the gradients at the outputs of linears."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Final

import numpy as np

from ...errors import InputError
from ...models.array_file import read_array
from ..checkpoint.source import Float32Array, RowRange


class OutputMoments:
    """Second moments of gradients in the files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder: Final = folder

    def of(self, rows: RowRange) -> Float32Array | None:
        """E[g gT] for the gradients g at the outputs of some rows, float32 [N, N]; None for those without."""
        file = self._file(rows)
        return read_array(file) if file.is_file() else None

    def save(self, rows: RowRange, moments: Float32Array) -> None:
        """Keep the moments of some rows."""
        np.save(self._file(rows), moments, allow_pickle=False)

    def _file(self, rows: RowRange) -> Path:
        return self.folder / f"{rows.name}.{rows.start}.npy"


def states_after(index: int) -> RowRange:
    """What the moments of the hidden states after layer `index` are kept as, since they belong to no matrix."""
    return RowRange(f"states.{index}", 0, 0)


def require_torch(method: str | None) -> None:
    """Refuse to go on without PyTorch.

    Raises:
        InputError: it is not installed.
    """
    if find_spec("torch") is None:
        raise InputError(f"--method {method} needs PyTorch", 'install it: pip install "edge-run[train]"')
