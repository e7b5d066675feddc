"""Which tokens stand for the features of an image; fewer of them, at a loss, with `lossy_image_tokens`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from .image_processor import Floats, ProcessedImage

_COLOURS: Final = 4
"""Each token is compared by the mean colours of so many parts of a side of its square."""
_DISTANCE: Final = 222
"""How much two tokens at opposite sides of a tile differ by their places alone: as by 32 levels in all 48 numbers."""


@dataclass(frozen=True)
class TileTokens:
    """The tokens that stand for a tile of an image.

    Features in one group are replaced by their mean, at the place of the middle one. The logarithm of their number is
    added to the attention that the token gets, which is then that of as many equal tokens (proportional attention).

    Source: Bolya et al., Token Merging, 2022, for proportional attention.
    """

    groups: npt.NDArray[np.int64]
    """`[features]`: the token of each feature."""
    places: npt.NDArray[np.int64]
    """`[axes, tokens]`: positions in the model, counted from the first of the tile."""
    span: int
    """Number of positions that the tile takes."""

    @cached_property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Number of features of each token."""
        return np.bincount(self.groups)

    def merged(self, features: Floats) -> Floats:
        """Features `[n, tokens, hidden]` of the tokens, of those of the tile."""
        # Not by a matrix product: the threads of NumPy's library would spin beside the next pass.
        ordered = features[:, np.argsort(self.groups, kind="stable")]
        sums: Floats = np.add.reduceat(ordered, np.cumsum(self.sizes) - self.sizes, axis=1)
        means: Floats = np.divide(sums, self.sizes[:, None], dtype=np.float32)
        return means


def tokens_of(image: ProcessedImage, slot: str, share: float) -> tuple[str, list[TileTokens]]:
    """The text that stands for an image in a prompt, and the tokens of each tile.

    Args:
        image: the image.
        slot: how its text writes the token of each feature.
        share: share of the tokens of each tile that stay.
    """
    tiles = []
    for tile, count in zip(image.tiles, image.tokens, strict=True):
        groups = np.arange(count) if share == 1 else _alike(tile, count, math.ceil(share * count))
        order = np.argsort(groups, kind="stable")
        sizes = np.bincount(groups)
        middles, ranks = np.unique(order[np.cumsum(sizes) - sizes + sizes // 2], return_inverse=True)
        # Time stands still within an image.
        places = middles[None] if image.grid is None else np.indices((1, *image.grid)).reshape(3, -1)[:, middles]
        tiles.append(TileTokens(ranks[groups], places, count if image.grid is None else max(image.grid)))
    stays = [index < each.sizes.size for each in tiles for index in range(each.groups.size)]
    parts = zip(image.text.split(slot), [*stays, False], strict=True)
    return "".join(part + slot * stay for part, stay in parts), tiles


def _alike(tile: npt.NDArray[np.uint8], features: int, count: int) -> npt.NDArray[np.int64]:
    """`count` groups of the features of a tile that look alike: the group of each, int64 `[features]`.

    Centers are chosen one after another, each the farthest one from those before; every feature goes with its nearest.
    What is compared are pixels, so that the tokens of an image are known before the tower runs, and where it does not
    run again. All of it is in whole numbers, for the same groups on every machine.

    Source: Gonzalez, Clustering to minimize the maximum intercluster distance, 1985.
    """
    from PIL import Image  # noqa: PLC0415 -- an extra

    height, width = tile.shape[:2]
    rows = round(height / math.sqrt(height * width / features))
    columns = features // rows
    small = Image.fromarray(tile).resize((columns * _COLOURS, rows * _COLOURS), Image.Resampling.BOX)
    cells = np.asarray(small, np.int32).reshape(rows, _COLOURS, columns, _COLOURS, 3)
    colours = cells.swapaxes(1, 2).reshape(features, -1)
    places = np.indices((rows, columns)).reshape(2, -1).T * _DISTANCE / max(rows, columns)
    points = np.concatenate([colours, np.rint(places)], axis=1).astype(np.int32)
    groups, nearest = np.zeros(features, np.int64), np.full(features, np.iinfo(np.int32).max)
    center = int(((points - points.sum(axis=0) // features) ** 2).sum(axis=1).argmax())
    for group in range(count):
        apart = ((points - points[center]) ** 2).sum(axis=1)
        closer = apart < nearest
        groups[closer], nearest[closer] = group, apart[closer]
        center = int(nearest.argmax())
    return groups
