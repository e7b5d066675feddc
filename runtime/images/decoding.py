"""Images from messages: their bytes within bounds, decoded to RGB by Pillow (extra `images`)."""

from __future__ import annotations

import base64
import binascii
import os
import warnings
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ...errors import InputError
from ...models.json_file import shown
from ...models.regular_file import read_regular

if TYPE_CHECKING:  # Pillow is an extra
    from PIL.Image import Image

MAX_BYTES: Final = 32 << 20
"""Most bytes of an encoded image."""
MAX_PIXELS: Final = 24 << 20
"""Most pixels of an image, 25 million: of 4 bytes, or 9 while transparency is removed."""
_KEPT_SIDE: Final = 2048
"""Most pixels of a side of a kept image; models that take as many cut it into tiles."""
_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_HINT: Final = f"give one that is {', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}"
_EXTRA: Final = 'pip install "edge-run[images]"'
_FORMS: Final = '{"type": "image", "image": bytes or Path}, or an image_url with a data: URL'


def image_bytes(part: Mapping[str, Any], where: str) -> bytes:
    """The encoded image of a content part of a message.

    A path is an `os.PathLike`, never text, so that no message that came as JSON makes edge-run read a file.

    Args:
        part: `{"type": "image", "image": ...}` with bytes, a path or a `data:` URL, or OpenAI's
            `{"type": "image_url", "image_url": {"url": ...}}` with a `data:` URL.
        where: what the part is called in errors.

    Raises:
        InputError: it has another form, is too large, or its file cannot be read.
    """
    image = part.get("image")
    if part.get("type") == "image_url":
        url = part.get("image_url")
        image = url.get("url") if isinstance(url, Mapping) else url
    if isinstance(image, os.PathLike):
        try:
            image = read_regular(Path(image), MAX_BYTES)
        except OSError as error:
            raise InputError(f"{where}: {error.filename}: {error.strerror or error}", _HINT) from error
    elif isinstance(image, str):
        head, _, encoded = image.partition(",")
        if not head.startswith("data:") or not head.endswith(";base64"):
            hint = "images are data: URLs in base64, or bytes; serve --allow-image-urls fetches others"
            raise InputError(f"{where} has the URL {shown(image)}", hint)
        try:
            image = base64.b64decode(encoded, validate=True)
        except (ValueError, binascii.Error) as error:
            raise InputError(f"{where} has a data: URL that is not base64", "encode the image again") from error
    if not isinstance(image, bytes):
        raise InputError(f"{where} is {shown(image)}", f"an image is {_FORMS}")
    if len(image) > MAX_BYTES:
        raise InputError(f"{where} has {len(image)} bytes", f"the limit is {MAX_BYTES}: make it smaller")
    return image


def data_url(image: bytes, kind: str = "application/octet-stream") -> str:
    """An encoded image as a `data:` URL of a media type."""
    return f"data:{kind};base64,{base64.b64encode(image).decode()}"


def kept_image(data: bytes) -> str:
    """An image as it is kept with a conversation: a `data:` URL of its pixels alone, without what a camera noted, as
    PNG or JPEG, whichever is smaller, with at most `_KEPT_SIDE` pixels a side.

    Raises:
        InputError: as for `decode_image`.
    """
    image = decode_image(data)
    image.thumbnail((_KEPT_SIDE, _KEPT_SIDE))
    files = {kind: BytesIO() for kind in ("png", "jpeg")}
    for kind, file in files.items():
        image.save(file, kind, **({"quality": 92} if kind == "jpeg" else {}))
    kind, file = min(files.items(), key=lambda item: item[1].tell())
    return data_url(file.getvalue(), f"image/{kind}")


def decode_image(data: bytes) -> Image:
    """Decode an image to RGB: its first frame, turned as its EXIF orientation says, over white where transparent.

    Raises:
        InputError: it is damaged, of another format, or has too many pixels, or Pillow is not installed.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError  # noqa: PLC0415 -- an extra
    except ImportError as error:
        raise InputError("images need Pillow", _EXTRA) from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what Pillow warns of is refused, or does not matter for pixels
            with Image.open(BytesIO(data), formats=_FORMATS) as image:
                width, height = image.size
                if width * height > MAX_PIXELS:
                    what = f"an image has {width} x {height} pixels"
                    raise InputError(what, f"the limit is {MAX_PIXELS} pixels: make it smaller")
                image.load()
                ImageOps.exif_transpose(image, in_place=True)
                return _rgb(image)
    except InputError:
        raise
    except Image.DecompressionBombError as error:
        raise InputError("an image has over 100 million pixels", f"the limit is {MAX_PIXELS} pixels") from error
    except UnidentifiedImageError as error:
        raise InputError("an image cannot be read: its format is not known, or it is damaged", _HINT) from error
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(f"an image cannot be read: {reason}", _HINT) from error


def _rgb(image: Image) -> Image:
    """The image in three channels of 8 bits."""
    from PIL import Image  # noqa: PLC0415 -- an extra

    if image.mode.startswith("I"):  # 16 bits of grey
        levels = np.asarray(image) >> 8
        return Image.fromarray(levels.clip(0, 255, out=levels).astype(np.uint8)).convert("RGB")
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "La", "RGBa"):
        image = image if image.mode == "RGBA" else image.convert("RGBA")
        opaque = Image.new("RGB", image.size, "white")
        opaque.paste(image, mask=image.getchannel("A"))
        return opaque
    return image if image.mode == "RGB" else image.convert("RGB")
