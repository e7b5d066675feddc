"""Vision towers that other tools exported, which take what the image processors of transformers give.

Their inputs are told by name and rank. transformers.js (onnx-community) calls the file `vision_encoder.onnx`, ONNX
Runtime GenAI `vision.onnx`; both call the output `image_features`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import BundleError
from ...models.bundle import Bundle
from ..graph.graph_io import GraphValue


def tower_inputs(
    inputs: Mapping[str, npt.NDArray[Any]], values: Sequence[GraphValue], bundle: Bundle
) -> dict[str, npt.NDArray[Any]]:
    """The inputs of another tool's tower for one image or tile.

    Args:
        inputs: those of edge-run's own tower of the family: `pixel_values`, and `patch_positions` of flat patches.
        values: the inputs of the tower.
        bundle: the model, whose genai_config.json may rename inputs.

    Raises:
        BundleError: it has another input, or takes pixels in another form.
    """
    section = bundle.genai.get("vision")
    renamed = section.get("inputs") if isinstance(section, Mapping) else None
    names = {name: usual for usual, name in renamed.items()} if isinstance(renamed, Mapping) else {}
    made = {}
    for each in values:
        array = _input(names.get(each.name, each.name), len(each.shape), inputs)
        if array is None:
            what = f"{bundle.vision} takes {each.name} of {len(each.shape)} dimensions, which edge-run does not know"
            raise BundleError(what, "export the model's checkpoint with edge-run export")
        made[each.name] = np.ascontiguousarray(array, each.dtype)
    return made


def _input(name: str, rank: int, inputs: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[Any] | None:
    """An input by its usual name and number of dimensions; None for one that is not known."""
    pixels, places = inputs["pixel_values"], inputs.get("patch_positions")
    rows, columns = pixels.shape[-2:] if places is None else places.max(axis=0) + 1
    if name == "pixel_values" and (places is None) == (rank > 3):
        if places is not None and rank == 3:  # SigLIP 2 takes patches row by row, channels last.
            ordered = pixels[np.lexsort(places.T[::-1])].reshape(len(pixels), 3, -1)
            return ordered.swapaxes(1, 2).reshape(1, len(pixels), -1)
        return pixels[(None,) * (rank - 4)]
    if name == "pixel_attention_mask":
        return np.ones((1, len(pixels)) if rank == 2 else (1, 1, rows, columns))
    if name in ("image_grid_thw", "grid_thw"):
        return np.array([[1, rows, columns]])
    return np.array([[rows, columns]]) if name in ("spatial_shapes", "image_sizes") else None
