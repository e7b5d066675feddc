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

from ...errors import BundleError
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


class ImageProcessor(ABC):
    """The image processor of a family.

    Attributes:
        placeholder: what the chat template writes for an image.
        slot: how the text of an image writes the token of each feature.
        bidirectional: whether the tokens of an image attend to each other, and not only to earlier ones.
    """

    placeholder: ClassVar[str]
    slot: ClassVar[str]
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

    def pixel_values(self, tile: npt.NDArray[np.uint8]) -> Floats:
        """A tile with rescaled and normalized pixels, float32 `[1, 3, height, width]`."""
        values = tile.astype(np.float32) * np.float32(self._factor)
        return np.ascontiguousarray(((values - self._mean) / self._std).transpose(2, 0, 1)[None])

    def resized(self, image: Image, height: int, width: int) -> Image:
        """The image in another size, by the filter of the settings."""
        from PIL.Image import Resampling  # noqa: PLC0415 -- an extra

        return image.resize((width, height), Resampling(self.whole("resample", int(Resampling.BILINEAR), least=0)))

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
