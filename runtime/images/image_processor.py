"""An image processor: turns an image into the inputs of a vision tower, and into text with its image tokens."""

from __future__ import annotations

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
    """Inputs of the tower, `[height, width, 3]` each."""
    tokens: Sequence[int]
    """Number of features of each tile."""
    grid: tuple[int, int] | None = None
    """Rows and columns of its tokens, for a model whose positions have three axes."""


class ImageProcessor(ABC):
    """The image processor of a family.

    Attributes:
        placeholder: what the chat template writes for an image.
        slot: how the text of an image writes the token of each feature.
        resample: Pillow's filter where no setting says it: LANCZOS, BILINEAR or BICUBIC.
        bidirectional: whether the tokens of an image attend to each other, and not only to earlier ones.
        has_axes: whether the tokens of an image have positions in time, rows and columns.
    """

    placeholder: ClassVar[str]
    slot: ClassVar[str]
    resample: ClassVar[int] = 2
    bidirectional: ClassVar[bool] = False
    has_axes: ClassVar[bool] = False

    def __init__(self, bundle: Bundle) -> None:
        """Read the settings of a model.

        Raises:
            BundleError: they are missing or malformed.
        """
        self.config: Final = bundle.json_file("config.json") or bundle.genai
        vision = self.config.get("vision_config")
        self.vision: Final[Mapping[str, Any]] = vision if isinstance(vision, dict) else {}
        """Settings of the vision tower."""
        processor = bundle.json_file("processor_config.json")
        nested = processor.get("image_processor")
        images = bundle.json_file("preprocessor_config.json") or (nested if isinstance(nested, dict) else {})
        self.settings: Final[Mapping[str, Any]] = {**processor, **_settings_in_genai(processor), **images}
        self._where: Final = str(bundle.folder / "preprocessor_config.json")
        self._factor: Final = self.number("rescale_factor", 1 / 255)
        self._mean, self._std = (self._channels(name) for name in ("image_mean", "image_std"))
        token: Any = next((self.config.get(name) for name in ("image_token_id", "image_token_index")), None)
        if not is_whole(token, 0):
            raise BundleError(f"{bundle.folder}: config.json lacks image_token_id", "export the model again")
        self.token_id: Final[int] = token
        """Id of the tokens in whose places features stand."""

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
            raise self.malformed(name, value)
        return int(value)

    def number(self, name: str, default: float) -> float:
        """A setting that is a positive number; errors as for `whole`."""
        value = self.settings.get(name, default)
        if not is_finite(value) or value <= 0:
            raise self.malformed(name, value)
        return float(value)

    def side(self, name: str, key: str) -> int:
        """A number of pixels in a setting that is an object; errors as for `whole`."""
        value = self.settings.get(name)
        found: Any = value.get(key) if isinstance(value, Mapping) else value
        if not is_whole(found, 1) or found > _PIXEL_LIMIT:
            raise self.malformed(name, value)
        return int(found)

    def _channels(self, name: str) -> Floats:
        value = self.settings.get(name, [0.5, 0.5, 0.5])
        if not isinstance(value, list) or len(value) != 3 or not all(map(is_finite, value)):
            raise self.malformed(name, value)
        return np.array(value, np.float32)

    def malformed(self, name: str, value: object) -> BundleError:
        """The error of a setting that has a value of another form."""
        return BundleError(f"{self._where}: {name} is {shown(value)}", "restore the file, or export the model again")


def _settings_in_genai(processor: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an image processor among the operations in the processor_config.json of ONNX Runtime GenAI."""
    found: dict[str, Any] = {}
    section = processor.get("processor")
    listed = section.get("transforms") if isinstance(section, Mapping) else None
    for each in listed if isinstance(listed, list) else []:
        operation = each.get("operation") if isinstance(each, Mapping) else None
        attributes = operation.get("attrs") if isinstance(operation, Mapping) else None
        found |= attributes if isinstance(attributes, Mapping) else {}
    names = {"mean": "image_mean", "std": "image_std"}
    return {names.get(name, name): value for name, value in found.items()} | {"size": found}
