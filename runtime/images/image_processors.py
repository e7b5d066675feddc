"""How the families turn an image into the inputs of their vision tower, and into text with its image tokens.

Parameters are those of preprocessor_config.json; sizes and rounding follow the image processors of transformers that
use Pillow. Every processor resizes 8-bit pixels.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from ...errors import BundleError, InputError
from ...models.bundle import Bundle
from ...models.json_file import is_finite, is_whole, shown

if TYPE_CHECKING:  # Pillow is an extra
    from PIL.Image import Image

Floats = npt.NDArray[np.float32]
_PIXEL_LIMIT: Final = 4096
"""Largest side of an image in Idefics3."""


@dataclass(frozen=True)
class ProcessedImage:
    """An image as its family's tower and chat template take it."""

    text: str
    """What stands for it in a prompt, with an image token for each feature."""
    tiles: Sequence[npt.NDArray[np.uint8]]
    """Inputs of the tower, `[height, width, 3]` each, which give `tokens` features each in their order."""
    tokens: int
    grid: tuple[int, int] | None = None
    """Rows and columns of its tokens, for a model whose positions have three axes."""


class ImageProcessor(ABC):
    """The image processor of a family.

    Attributes:
        placeholder: what the chat template writes for an image.
        slot: how the text of an image writes the token of each feature.
        resample: Pillow's filter where no setting says it: LANCZOS, BILINEAR or BICUBIC.
        bidirectional: whether the tokens of an image attend to each other, and not only to earlier ones.
    """

    placeholder: ClassVar[str]
    slot: ClassVar[str]
    resample: ClassVar[int] = 2
    bidirectional: ClassVar[bool] = False

    def __init__(self, bundle: Bundle) -> None:
        """Read the settings of a model.

        Raises:
            BundleError: they are missing or malformed.
        """
        self.config: Final = bundle.json_file("config.json")
        processor = bundle.json_file("processor_config.json")
        nested = processor.get("image_processor")
        images = bundle.json_file("preprocessor_config.json") or (nested if isinstance(nested, dict) else {})
        self.settings: Final[Mapping[str, Any]] = {**processor, **images}
        self._where: Final = str(bundle.folder / "preprocessor_config.json")
        self._factor: Final = self.number("rescale_factor", 1 / 255)
        self._mean, self._std = (self._channels(name) for name in ("image_mean", "image_std"))

    @abstractmethod
    def process(self, image: Image) -> ProcessedImage:
        """Resize an image, and cut it into tiles."""

    @property
    def layers(self) -> int:
        """Number of first layers of the language model that add features of images to their outputs."""
        return 0

    @property
    def axes(self) -> npt.NDArray[np.int64] | None:
        """Which of the positions in time, rows and columns rotates each channel pair of a head; None for a model whose
        tokens have one position."""
        return None

    def inputs(self, tile: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[Any]]:
        """The inputs of the tower for a tile."""
        return {"pixel_values": self.pixel_values(tile)}

    def pixel_values(self, tile: npt.NDArray[np.uint8]) -> Floats:
        """A tile with rescaled and normalized pixels, float32 `[1, 3, height, width]`."""
        values = tile.astype(np.float32) * np.float32(self._factor)
        return np.ascontiguousarray(((values - self._mean) / self._std).transpose(2, 0, 1)[None])

    def resized(self, image: Image, height: int, width: int) -> Image:
        """The image in another size, by the filter of the settings."""
        from PIL.Image import Resampling  # noqa: PLC0415 -- an extra

        return image.resize((width, height), Resampling(self.whole("resample", self.resample, least=0)))

    def whole(self, name: str, default: int, least: int = 1) -> int:
        """A setting that is a whole number.

        Raises:
            BundleError: it is not.
        """
        value = self.settings.get(name, default)
        if not is_whole(value, least):
            raise self._malformed(name, value)
        return int(value)

    def number(self, name: str, default: float) -> float:
        """A setting that is a positive number; errors as for `whole`."""
        value = self.settings.get(name, default)
        if not is_finite(value) or value <= 0:
            raise self._malformed(name, value)
        return float(value)

    def side(self, name: str, key: str) -> int:
        """A number of pixels in a setting that is an object; errors as for `whole`."""
        value = self.settings.get(name)
        found: Any = value.get(key) if isinstance(value, Mapping) else value
        if not is_whole(found, 1) or found > _PIXEL_LIMIT:
            raise self._malformed(name, value)
        return int(found)

    def _channels(self, name: str) -> Floats:
        value = self.settings.get(name, [0.5, 0.5, 0.5])
        if not isinstance(value, list) or len(value) != 3 or not all(map(is_finite, value)):
            raise self._malformed(name, value)
        return np.array(value, np.float32)

    def _malformed(self, name: str, value: object) -> BundleError:
        return BundleError(f"{self._where}: {name} is {shown(value)}", "export the model again")


class Idefics3Processor(ImageProcessor):
    """Idefics3 and SmolVLM: square tiles, and the whole image once more behind them."""

    placeholder = slot = "<image>"
    resample = 1

    def process(self, image: Image) -> ProcessedImage:
        """Cut an image into tiles, unless splitting is off or one tile holds it."""
        tile, side = self.side("max_image_size", "longest_edge"), self.side("size", "longest_edge")
        image = self.resized(image, *_by_longest_edge(image.height, image.width, side))
        if not self.settings.get("do_image_splitting", True):
            return self._processed([self.resized(image, tile, tile)], 0, 0)
        image = self.resized(image, *_in_tiles(image.height, image.width, tile))
        rows, columns = image.height // tile, image.width // tile
        if rows == columns == 1:
            return self._processed([image], 0, 0)
        places = [(column * tile, row * tile) for row in range(rows) for column in range(columns)]
        tiles = [image.crop((left, top, left + tile, top + tile)) for left, top in places]
        return self._processed([*tiles, self.resized(image, tile, tile)], rows, columns)

    def _processed(self, tiles: Sequence[Image], rows: int, columns: int) -> ProcessedImage:
        tokens = self.whole("image_seq_len", 169)
        around, own = "<fake_token_around_image>", self.slot * tokens
        lines = [
            "".join(f"{around}<row_{row}_col_{column}>{own}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        ]
        split = "".join(lines) + "\n" if lines else ""
        return ProcessedImage(f"{split}{around}<global-img>{own}{around}", [np.asarray(each) for each in tiles], tokens)


class Gemma3Processor(ImageProcessor):
    """Gemma 3: the whole image as one square, whose tokens attend to each other."""

    placeholder, slot, bidirectional = "<start_of_image>", "<image_soft_token>", True

    def process(self, image: Image) -> ProcessedImage:
        """Resize an image to the square of the tower."""
        tokens = self.whole("image_seq_length", 256)
        square = self.resized(image, self.side("size", "height"), self.side("size", "width"))
        text = f"\n\n{self.placeholder}{self.slot * tokens}<end_of_image>\n\n"
        return ProcessedImage(text, [np.asarray(square)], tokens)


class QwenProcessor(ImageProcessor):
    """Qwen2.5-VL and Qwen3-VL: the whole image in about its own size, in patches that come square by square."""

    placeholder = slot = "<|image_pad|>"
    resample = 3

    def __init__(self, bundle: Bundle) -> None:
        """Read the settings of a model; errors as for other processors."""
        super().__init__(bundle)
        vision, text = (self.config.get(name) for name in ("vision_config", "text_config"))
        self._vision: Final[Mapping[str, Any]] = vision if isinstance(vision, dict) else {}
        text = text if isinstance(text, dict) else self.config
        rotary = text.get("rope_parameters") or text.get("rope_scaling")
        section = rotary.get("mrope_section") if isinstance(rotary, dict) else None
        if not isinstance(section, list) or len(section) != 3 or not all(is_whole(each, 0) for each in section):
            raise self._malformed("mrope_section", section)
        self._section: Final = section
        self._interleaved: Final = self.config.get("model_type") != "qwen2_5_vl"
        self._patch, self._merge = self.whole("patch_size", 14), self.whole("merge_size", 2)

    @property
    def layers(self) -> int:
        """As many as layers of the tower give features (DeepStack)."""
        listed = self._vision.get("deepstack_visual_indexes", [8, 16, 24])
        return len(listed) if self._interleaved and isinstance(listed, list) else 0

    @property
    def axes(self) -> npt.NDArray[np.int64]:
        """Time, rows and columns one after another; in Qwen3-VL they alternate, and time has the rest."""
        if not self._interleaved:
            return np.repeat(np.arange(3), self._section)
        axes = np.zeros(sum(self._section), np.int64)
        for axis in (1, 2):
            axes[axis : 3 * self._section[axis] : 3] = axis
        return axes

    def process(self, image: Image) -> ProcessedImage:
        """Resize an image to whole squares of patches, within the limits of its pixels."""
        size, step = self.settings.get("size"), self._patch * self._merge
        edges = size if isinstance(size, Mapping) else {}
        limits = [
            self.whole(name, edges.get(edge) or default)
            for name, edge, default in (
                ("min_pixels", "shortest_edge", 56 * 56),
                ("max_pixels", "longest_edge", 28 * 28 * 1280),
            )
        ]
        image = self.resized(image, *_in_squares(image.height, image.width, step, *limits))
        rows, columns = image.height // step, image.width // step
        return ProcessedImage(self.slot * (rows * columns), [np.asarray(image)], rows * columns, (rows, columns))

    def inputs(self, tile: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[Any]]:
        """Flat patches with their places, windows of patches, and shares of learned positions, as towers have them."""
        patch, merge = self._patch, self._merge
        channels, height, width = (pixels := self.pixel_values(tile)[0]).shape
        rows, columns = height // patch, width // patch
        apart = pixels.reshape(channels, rows // merge, merge, patch, columns // merge, merge, patch)
        apart = apart.transpose(1, 4, 2, 5, 0, 3, 6).reshape(rows * columns, channels, 1, patch * patch)
        frames = self.whole("temporal_patch_size", 2)
        places = np.moveaxis(np.indices((rows, columns), np.int64), 0, -1)
        places = places.reshape(rows // merge, merge, columns // merge, merge, 2).swapaxes(1, 2).reshape(-1, 2)
        inputs: dict[str, npt.NDArray[Any]] = {
            "pixel_values": apart.repeat(frames, axis=2).reshape(rows * columns, -1),
            "patch_positions": places,
        }
        if (window := self._vision.get("window_size", 112)) and not self._interleaved:
            inputs |= _windows(places, window // patch // merge * merge)
        if self._interleaved:
            side = int(self._vision.get("num_position_embeddings", 2304) ** 0.5)
            inputs |= {"row_weights": _shares(rows, side), "column_weights": _shares(columns, side)}
        return inputs


def _in_squares(height: int, width: int, step: int, least: int, most: int) -> tuple[int, int]:
    """Height and width in whole squares of `step` pixels, with `least` to `most` pixels in all.

    Raises:
        InputError: one side is over 200 times as long as the other.
    """
    if max(height, width) > 200 * min(height, width):
        raise InputError(f"an image has {width} x {height} pixels", "one side may be 200 times as long as the other")
    sides = [round(each / step) * step for each in (height, width)]
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


def _shares(count: int, side: int) -> Floats:
    """The shares of `side` learned positions in `count` positions between the first and the last of them, linear."""
    places = np.linspace(0, side - 1, count)
    shares: Floats = np.maximum(0, 1 - np.abs(places[:, None] - np.arange(side))).astype(np.float32)
    return shares


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
    "qwen2_5_vl": QwenProcessor,
    "qwen3_vl": QwenProcessor,
    "smolvlm": Idefics3Processor,
}
"""By the `model_type` of config.json."""


def processor_of(bundle: Bundle) -> ImageProcessor:
    """The image processor of a model.

    Raises:
        BundleError: its family is not known, or settings are malformed.
    """
    family: Any = bundle.json_file("config.json").get("model_type")
    if family not in PROCESSORS:
        hint = "export it again with this version of edge-run"
        raise BundleError(f"{bundle.folder} has a vision tower of the family {shown(family)}", hint)
    return PROCESSORS[family](bundle)
