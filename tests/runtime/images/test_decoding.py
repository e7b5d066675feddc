"""Images from bytes: formats, orientations and transparency, and what is refused in one line."""

from __future__ import annotations

import base64
import struct
import zlib
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="needs the images extra")

from PIL import Image

from edgerun import InputError
from edgerun.runtime.images.decoding import MAX_BYTES, decode_image, image_bytes
from support.vision_models import random_image

PIXELS = np.random.default_rng(1).integers(0, 256, (6, 9, 3), np.uint8)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def pixels_of(data: bytes) -> np.ndarray:
    image = decode_image(data)
    assert image.mode == "RGB"
    return np.asarray(image)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "GIF", "WEBP", "JPEG"])
def test_formats(kind: str) -> None:
    image = Image.fromarray(PIXELS)
    options: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {}
    found = pixels_of(encoded(image, kind, **options))
    assert found.shape == PIXELS.shape
    if kind in ("PNG", "BMP", "WEBP"):
        np.testing.assert_array_equal(found, PIXELS)


def test_exif_turns_an_image() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    found = pixels_of(encoded(Image.fromarray(PIXELS), exif=exif))
    np.testing.assert_array_equal(found, np.rot90(PIXELS, -1))


def test_transparency_is_over_white() -> None:
    alpha = np.zeros((6, 9, 1), np.uint8)
    alpha[:3] = 255
    found = pixels_of(encoded(Image.fromarray(np.concatenate([PIXELS, alpha], axis=2))))
    np.testing.assert_array_equal(found[:3], PIXELS[:3])
    assert (found[3:] == 255).all()


def test_palettes_with_transparency_are_over_white() -> None:
    image = Image.fromarray(np.arange(4, dtype=np.uint8).reshape(2, 2), "L").convert("P")
    found = pixels_of(encoded(image, transparency=0))
    assert (found[0, 0] == 255).all()
    assert (found[1, 1] == 3).all()


def test_grey_of_16_bits_and_cmyk() -> None:
    grey = Image.fromarray(np.array([[0, 256, 65535]], np.uint16))
    np.testing.assert_array_equal(pixels_of(encoded(grey))[0, :, 0], [0, 1, 255])
    cmyk = Image.new("CMYK", (8, 8), (0, 0, 0, 0))
    assert (pixels_of(encoded(cmyk, "JPEG")) > 250).all()


def test_the_first_frame_of_an_animation() -> None:
    frames = [Image.new("RGB", (4, 4), color) for color in ("red", "blue")]
    found = pixels_of(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    np.testing.assert_array_equal(found[0, 0], [255, 0, 0])


def png_claiming(width: int, height: int) -> bytes:
    """A PNG whose header claims a size, with few bytes of pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    )


HOSTILE = {
    "empty": b"",
    "html": b"<html><body>not an image</body></html>",
    "svg": b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>',
    "truncated": random_image()[:200],
    "truncated JPEG": random_image(kind="JPEG")[:300],
    "another format": encoded(Image.fromarray(PIXELS), "TIFF"),
    "lying header": png_claiming(40, 40),
    "huge": png_claiming(60_000, 60_000),
    "wide": png_claiming(2**31 - 1, 1),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.filterwarnings("error")
def test_what_cannot_be_read_is_one_line(name: str) -> None:
    with pytest.raises(InputError) as caught:
        decode_image(HOSTILE[name])
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("seed", range(40))
def test_damaged_images_are_read_or_refused(seed: int) -> None:
    random = np.random.default_rng(seed)
    data = bytearray(random_image(seed, kind=["PNG", "JPEG", "GIF", "WEBP", "BMP"][seed % 5]))
    for place in random.integers(0, len(data), 8).tolist():
        data[place] = int(random.integers(256))
    with suppress(InputError):
        assert decode_image(bytes(data)).mode == "RGB"


def test_parts_are_bytes_paths_and_data_urls(tmp_path: Path) -> None:
    data = random_image()
    (tmp_path / "a.png").write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    for part in (
        {"type": "image", "image": data},
        {"type": "image", "image": tmp_path / "a.png"},
        {"type": "image", "image": url},
        {"type": "image_url", "image_url": {"url": url}},
    ):
        assert image_bytes(part, "part") == data


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image"},
        {"type": "image", "image": 3},
        {"type": "image", "image": "/etc/hostname"},
        {"type": "image", "image": Path("/nowhere/at/all.png")},
        {"type": "image", "image": bytes(MAX_BYTES + 1)},
        {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
        {"type": "image_url", "image_url": {"url": "file:///etc/hostname"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,????"}},
        {"type": "image_url", "image_url": None},
    ],
    ids=str,
)
def test_other_parts_are_refused(part: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="^messages"):
        image_bytes(part, "messages[0].content[0]")
