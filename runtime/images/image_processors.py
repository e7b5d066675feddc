"""How the families turn an image into the inputs of their vision tower, and into text with its image tokens.

Parameters are those of preprocessor_config.json; sizes and rounding follow the image processors of transformers that
use Pillow. Every processor resizes 8-bit pixels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from ...errors import BundleError, InputError
from ...models.bundle import Bundle
from ...models.json_file import is_whole, shown
from ..graph.graph_io import GraphIO, InputRole
from .image_processor import Floats, ImageProcessor, ProcessedImage

if TYPE_CHECKING:  # Pillow is an extra
    from PIL.Image import Image


class Idefics3Processor(ImageProcessor):
    """Idefics3 and SmolVLM: square tiles, and the whole image once more behind them."""

    placeholder = slot = "<image>"
    resample = 1

    def process(self, image: Image) -> ProcessedImage:
        """Cut an image into tiles, unless splitting is off or one tile holds it."""
        tile, side = self.side("max_image_size", "longest_edge"), self.side("size", "longest_edge")
        tokens, around = self.whole("image_seq_len", 169), "<fake_token_around_image>"
        own, text = self.slot * tokens, ""
        tiles: list[Image] = []
        image = self.resized(image, *_by_longest_edge(image.height, image.width, side))
        if self.settings.get("do_image_splitting", True):
            image = self.resized(image, *_in_tiles(image.height, image.width, tile))
            if max(image.size) > tile:
                tiles = _cut(image, tile)
                columns, rows = (range(1, each // tile + 1) for each in image.size)
                lines = ("".join(f"{around}<row_{row}_col_{each}>{own}" for each in columns) for row in rows)
                text = "".join(f"{line}\n" for line in lines) + "\n"
        tiles.append(self.resized(image, tile, tile))
        text += f"{around}<global-img>{own}{around}"
        return ProcessedImage(text, [np.asarray(each) for each in tiles], [tokens] * len(tiles))


class Gemma3Processor(ImageProcessor):
    """Gemma 3: the whole image as one square, whose tokens attend to each other."""

    placeholder, slot, bidirectional = "<start_of_image>", "<image_soft_token>", True

    def process(self, image: Image) -> ProcessedImage:
        """Resize an image to the square of the tower."""
        tokens = self.whole("image_seq_length", self.config.get("mm_tokens_per_image") or 256)
        square = self.resized(image, self.side("size", "height"), self.side("size", "width"))
        text = f"\n\n{self.placeholder}{self.slot * tokens}<end_of_image>\n\n"
        return ProcessedImage(text, [np.asarray(square)], [tokens])


class NativeProcessor(ImageProcessor):
    """Towers of native resolution, which take flat patches that come square by square as they are merged."""

    sizes: ClassVar[tuple[tuple[str, int], tuple[str, int]]] = (("patch_size", 14), ("merge_size", 2))
    """Settings of the sizes below, and their defaults."""
    frames: int = 1
    """Number of times that a patch has the pixels of an image."""

    @property
    def patch(self) -> int:
        """Pixels of a side of a patch."""
        return self.whole(*self.sizes[0])

    @property
    def merge(self) -> int:
        """Patches of a side of the square that becomes a token."""
        return self.whole(*self.sizes[1])

    def squares(self, image: Image) -> tuple[int, int]:
        """Rows and columns of the tokens of an image."""
        step = self.patch * self.merge
        return image.height // step, image.width // step

    def inputs(self, tile: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[Any]]:
        """Flat patches with their places."""
        patch, merge = self.patch, self.merge
        channels, height, width = (pixels := self.pixel_values(tile)[0]).shape
        rows, columns = height // patch, width // patch
        apart = pixels.reshape(channels, rows // merge, merge, patch, columns // merge, merge, patch)
        apart = apart.transpose(1, 4, 2, 5, 0, 3, 6).reshape(rows * columns, channels, 1, patch * patch)
        places = np.moveaxis(np.indices((rows, columns), np.int64), 0, -1)
        places = places.reshape(rows // merge, merge, columns // merge, merge, 2).swapaxes(1, 2).reshape(-1, 2)
        return {
            "pixel_values": apart.repeat(self.frames, axis=2).reshape(rows * columns, -1),
            "patch_positions": places,
        }


class QwenProcessor(NativeProcessor):
    """Qwen2-VL to Qwen3-VL: the whole image in about its own size."""

    placeholder = slot = "<|image_pad|>"
    resample = 3
    has_axes = True

    def __init__(self, bundle: Bundle) -> None:
        """Read the settings of a model; errors as for other processors."""
        super().__init__(bundle)
        self._interleaved: Final = bundle.family == "qwen3_vl"
        self.frames = self.whole("temporal_patch_size", 2)

    @property
    def layers(self) -> int:
        """As many as layers of the tower give features (DeepStack)."""
        listed = self.vision.get("deepstack_visual_indexes", [8, 16, 24])
        return len(listed) if self._interleaved and isinstance(listed, list) else 0

    @property
    def axes(self) -> npt.NDArray[np.int64]:
        """Time, rows and columns one after another; in Qwen3-VL they alternate, and time has the rest."""
        text = self.config.get("text_config")
        text = text if isinstance(text, dict) else self.config
        rotary = text.get("rope_parameters") or text.get("rope_scaling")
        section = rotary.get("mrope_section") if isinstance(rotary, dict) else None
        if not isinstance(section, list) or len(section) != 3 or not all(is_whole(each, 0) for each in section):
            raise self.malformed("mrope_section", section)
        if not self._interleaved:
            return np.repeat(np.arange(3), section)
        axes = np.zeros(sum(section), np.int64)
        for axis in (1, 2):
            axes[axis : 3 * section[axis] : 3] = axis
        return axes

    def process(self, image: Image) -> ProcessedImage:
        """Resize an image to whole squares of patches, within the limits of its pixels."""
        size = self.settings.get("size")
        edges = size if isinstance(size, Mapping) else {}
        least, most = (
            self.whole(name, edges.get(edge) or default)
            for name, edge, default in (
                ("min_pixels", "shortest_edge", 56 * 56),
                ("max_pixels", "longest_edge", 28 * 28 * 1280),
            )
        )
        sides = _in_squares(image.height, image.width, self.patch * self.merge, least, most, smallest=0)
        image = self.resized(image, *sides)
        rows, columns = self.squares(image)
        return ProcessedImage(self.slot * (rows * columns), [np.asarray(image)], [rows * columns], (rows, columns))

    def inputs(self, tile: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[Any]]:
        """Flat patches with their places, and windows or shares of learned positions, as towers have them."""
        inputs, patch = super().inputs(tile), self.patch
        if (window := self.vision.get("window_size", 112)) and not self._interleaved:
            inputs |= _windows(inputs["patch_positions"], window // patch // self.merge * self.merge)
        if self._interleaved:
            side = int(self.vision.get("num_position_embeddings", 2304) ** 0.5)
            places = [np.linspace(0, side - 1, each // patch) for each in tile.shape[:2]]
            inputs |= _position_shares(places, side)
        return inputs


class Lfm2Processor(NativeProcessor):
    """LFM2-VL: the whole image in about its own size, or square tiles and the whole image once more behind them."""

    placeholder = slot = "<image>"
    sizes = (("encoder_patch_size", 16), ("downsample_factor", 2))

    def process(self, image: Image) -> ProcessedImage:
        """Resize an image to whole squares of patches, and cut one that is too large into tiles."""
        step, most_tiles = self.patch * self.merge, self.whole("max_tiles", 10)
        least, most = (
            self.whole(name, default) * step**2
            for name, default in (("min_image_tokens", 64), ("max_image_tokens", 256))
        )
        whole = self.resized(image, *_in_squares(image.height, image.width, step, least, most, smallest=step))
        about = math.prod(max(self.patch, round(each / step) * step) for each in image.size)
        is_large = about > most * self.number("max_pixels_tolerance", 2.0)
        tiles, names = [whole], [""]
        if is_large and most_tiles > 1 and self.settings.get("do_image_splitting", True):
            side = self.whole("tile_size", 512)
            columns, rows = _grid(image.width, image.height, side, self.whole("min_tiles", 2), most_tiles)
            tiles = _cut(self.resized(image, rows * side, columns * side), side)
            names = [f"<|img_row_{row + 1}_col_{column + 1}|>" for row in range(rows) for column in range(columns)]
            if len(tiles) > 1 and self.settings.get("use_thumbnail", True):
                tiles, names = [*tiles, whole], [*names, "<|img_thumbnail|>"]
        counts = [math.prod(self.squares(each)) for each in tiles]
        text = "".join(name + self.slot * count for name, count in zip(names, counts, strict=True))
        marked = self.settings.get("use_image_special_tokens", True)
        text = f"<|image_start|>{text}<|image_end|>" if marked else self.slot * sum(counts)
        return ProcessedImage(text, [np.asarray(each) for each in tiles], counts)

    def inputs(self, tile: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[Any]]:
        """Flat patches with their places, and shares of learned positions."""
        side = int(self.vision.get("num_patches", 256) ** 0.5)
        counts = [each // self.patch for each in tile.shape[:2]]
        places = [(np.arange(count) + 0.5) * side / count - 0.5 for count in counts]
        return super().inputs(tile) | _position_shares(places, side, [max(1, side / count) for count in counts])


def _cut(image: Image, side: int) -> list[Image]:
    """The square tiles of an image, row by row."""
    places = product(range(0, image.height, side), range(0, image.width, side))
    return [image.crop((left, top, left + side, top + side)) for top, left in places]


def _in_squares(height: int, width: int, step: int, least: int, most: int, *, smallest: int) -> tuple[int, int]:
    """Height and width in whole squares of `step` pixels, at first `smallest` or more, `least` to `most` pixels in all.

    Raises:
        InputError: one side is over 200 times as long as the other.
    """
    if max(height, width) > 200 * min(height, width):
        raise InputError(f"an image has {width} x {height} pixels", "one side may be 200 times as long as the other")
    sides = [max(smallest, round(each / step) * step) for each in (height, width)]
    if sides[0] * sides[1] > most:
        factor = math.sqrt(height * width / most)
        sides = [max(step, math.floor(each / factor / step) * step) for each in (height, width)]
    elif sides[0] * sides[1] < least:
        factor = math.sqrt(least / (height * width))
        sides = [math.ceil(each * factor / step) * step for each in (height, width)]
    return sides[0], sides[1]


def _windows(places: npt.NDArray[np.int64], side: int) -> dict[str, npt.NDArray[np.int64]]:
    """The patches of each window of `side` x `side`, int64 `[W, S]` with -1 behind the last one, and the place of each
    patch among those of all windows, int64 `[P]`."""
    number = places // side @ np.array([places[:, 1].max() // side + 1, 1])
    order = np.argsort(number, kind="stable")
    counts = np.bincount(number)
    within = np.arange(number.size) - np.repeat(np.cumsum(counts) - counts, counts)
    windows = np.full((counts.size, side * side), -1)
    windows[number[order], within] = order
    slots = np.empty(number.size, np.int64)
    slots[order] = number[order] * side * side + within
    return {"windows": windows, "window_slots": slots}


def _position_shares(
    places: Sequence[npt.NDArray[Any]], side: int, supports: Sequence[float] = (1, 1)
) -> dict[str, Floats]:
    """The shares of `side` learned positions in those at `places` along rows and columns, linear within a support."""
    found = {}
    for name, centers, support in zip(("row_weights", "column_weights"), places, supports, strict=True):
        shares = np.maximum(0, 1 - np.abs(centers[:, None] - np.arange(side)) / support)
        found[name] = (shares / shares.sum(axis=1, keepdims=True)).astype(np.float32)
    return found


def _grid(width: int, height: int, side: int, least: int, most: int) -> tuple[int, int]:
    """Columns and rows of the tiles of an image, `least` to `most` of them, in about its ratio.

    Among equal ratios the largest grid wins of which the image fills half.
    """
    found, difference = (1, 1), math.inf
    sizes = range(1, most + 1)
    grids = [(columns, rows) for columns in sizes for rows in sizes if least <= columns * rows <= most]
    for columns, rows in sorted(grids, key=math.prod):
        distance = abs(width / height - columns / rows)
        if distance < difference or (distance == difference and 2 * width * height > side**2 * columns * rows):
            found, difference = (columns, rows), distance
    return found


def _by_longest_edge(height: int, width: int, longest: int) -> tuple[int, int]:
    """Height and width with a longest edge and about the same ratio; the shorter edge is even."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        height, width = longest, int(longest * ratio)
        width += width % 2
    return max(height, 1), max(width, 1)


def _in_tiles(height: int, width: int, tile: int) -> tuple[int, int]:
    """Height and width in whole tiles: the longer edge rounded up, the other one in proportion."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        height = math.ceil(int(width / ratio) / tile) * tile
    else:
        height = math.ceil(height / tile) * tile
        width = math.ceil(int(height * ratio) / tile) * tile
    return height, width


PROCESSORS: Final[Mapping[str, type[ImageProcessor]]] = {
    "gemma3": Gemma3Processor,
    "idefics3": Idefics3Processor,
    "lfm2_vl": Lfm2Processor,
    "qwen2_5_vl": QwenProcessor,
    "qwen2_vl": QwenProcessor,
    "qwen3_vl": QwenProcessor,
    "smolvlm": Idefics3Processor,
}
"""By the `model_type` of config.json."""


def suits_images(bundle: Bundle, graph_io: GraphIO) -> bool:
    """Whether a model has a vision tower, and its graph takes the passes and the positions of images."""
    if bundle.vision is None or bundle.manifest is not None:
        return bundle.vision is not None
    positions = graph_io.inputs.get(InputRole.POSITIONS)
    has_axes = positions is not None and len(positions.shape) == 3
    return graph_io.supports_verification and (has_axes or not PROCESSORS[bundle.family].has_axes)


def processor_of(bundle: Bundle) -> ImageProcessor:
    """The image processor of a model.

    Raises:
        BundleError: its family is not known, or settings are malformed.
    """
    if bundle.family not in PROCESSORS:
        hint = "export it again with this version of edge-run"
        raise BundleError(f"{bundle.folder} has a vision tower of the family {shown(bundle.family)}", hint)
    return PROCESSORS[bundle.family](bundle)
