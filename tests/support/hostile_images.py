"""Images that are damaged, lie about themselves, or ask for too much, drawn from a seed."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from functools import cache
from io import BytesIO
from typing import Any, Final, TypeAlias

import numpy as np
from PIL import Image

from edgerun.runtime.images.decoding import MAX_PIXELS

Random: TypeAlias = np.random.Generator
_KINDS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def hostile_images(count: int, seed: int = 0) -> list[tuple[str, bytes]]:
    """Names and bytes of `count` images, each kind as often as the others."""
    made = []
    for number in range(count):
        random = np.random.default_rng((seed, number))
        name = list(_MAKERS)[number % len(_MAKERS)]
        made.append((f"{number} {name}", _MAKERS[name](random)))
    return made


def png(width: int, height: int, pixels: bytes, *, depth: int = 8, color: int = 2, before: bytes = b"") -> bytes:
    """A PNG with any header; `pixels` are compressed, `before` are chunks in front of them."""
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + before + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def chunk(kind: bytes, data: bytes, checksum: int | None = None) -> bytes:
    """A chunk of a PNG, with its own checksum or another one."""
    check = zlib.crc32(kind + data) if checksum is None else checksum
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    """The bytes of an image file."""
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def _picture(random: Random, mode: str = "RGB") -> Image.Image:
    side = int(random.integers(1, 90))
    pixels = random.integers(0, 256, (side, int(random.integers(1, 90)), 3), np.uint8)
    return Image.fromarray(pixels).convert(mode)


def _kind(random: Random) -> str:
    return _KINDS[int(random.integers(len(_KINDS)))]


def _truncated(random: Random) -> bytes:
    data = encoded(_picture(random), _kind(random))
    return data[: int(random.integers(0, len(data)))]


def _damaged(random: Random) -> bytes:
    data = bytearray(encoded(_picture(random), _kind(random)))
    for place in random.integers(0, len(data), 1 + len(data) // 50).tolist():
        data[place] = int(random.integers(256))
    return bytes(data)


@cache
def _zeros(size: int) -> bytes:
    """Many zero bytes, compressed."""
    return zlib.compress(bytes(size), 6)


def _bomb(random: Random) -> bytes:
    """Few bytes that become very many pixels."""
    width = int(random.integers(20_000, 60_000))
    return png(width, width, _zeros(30 << 20), depth=1, color=0)


def _largest(random: Random) -> bytes:
    """About as many pixels as are allowed, in few bytes."""
    width = int(random.integers(1000, 8000))
    depth, color, channels = [(8, 2, 3), (8, 6, 4), (16, 0, 2), (16, 6, 8)][int(random.integers(4))]
    height = MAX_PIXELS // width
    return png(width, height, _zeros(channels * MAX_PIXELS + (1 << 16)), depth=depth, color=color)


def _huge(random: Random) -> bytes:
    sizes = [(2**31 - 1, 1), (1, 2**31 - 1), (2**31 - 1, 2**31 - 1), (2**32 - 1, 2), (0, 0), (0, 9), (65_536, 65_536)]
    width, height = sizes[int(random.integers(len(sizes)))]
    if random.integers(2):
        return b"BM" + struct.pack(
            "<IHHIIiiHHIIiiII", 99, 0, 0, 54, 40, width >> 1, -(height >> 1), 1, 24, 0, 0, 0, 0, 0, 0
        )
    return png(width, height, zlib.compress(bytes(100)))


def _lying_header(random: Random) -> bytes:
    """Fewer or more pixels than the header says, or another number of channels or bits."""
    depth, color = [(8, 2), (16, 6), (1, 3), (8, 7), (3, 0), (16, 0)][int(random.integers(6))]
    size = random.integers(1, 200, 2).tolist()
    return png(*size, zlib.compress(bytes(int(random.integers(0, 9000)))), depth=depth, color=color)


def _animated(random: Random) -> bytes:
    frames = [_picture(random).resize((40, 40)) for _ in range(int(random.integers(2, 60)))]
    kind = ("GIF", "WEBP", "PNG")[int(random.integers(3))]
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
    return data if random.integers(2) else data[: int(random.integers(0, len(data)))]


def _channels(random: Random) -> bytes:
    """CMYK, 16 bits, palettes, transparency, one bit."""
    picture = _picture(random)
    grey = np.asarray(picture.convert("L"), np.uint16) * 257
    makers: list[Callable[[], bytes]] = [
        lambda: encoded(picture.convert("CMYK"), "JPEG"),
        lambda: encoded(Image.fromarray(grey), "PNG"),
        lambda: encoded(picture.convert("P", palette=Image.Palette.ADAPTIVE), "PNG", transparency=b"\x00\x80" * 99),
        lambda: encoded(picture.convert("RGBA"), "WEBP"),
        lambda: encoded(picture.convert("LA"), "PNG"),
        lambda: encoded(picture.convert("1"), "BMP"),
        lambda: png(9, 9, zlib.compress(bytes(10 * 9)), color=3),  # a palette is missing
    ]
    return makers[int(random.integers(len(makers)))]()


def _text(random: Random) -> bytes:
    """SVG, HTML, scripts and archives that are called images."""
    svg = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
    html = b"<!doctype html><html><body><img src=x onerror=alert(1)></body></html>"
    texts = [
        svg,
        html,
        b"\x89PNG\r\n\x1a\n" + html,
        b"GIF89a" + svg,
        b"PK\x03\x04" + bytes(99),
        b"%!PS-Adobe",
        b"\xff\xd8\xff" + html,
    ]
    return texts[int(random.integers(len(texts)))] * int(random.integers(1, 500))


def _bytes(random: Random) -> bytes:
    """Zero bytes, and bytes that mean nothing."""
    size = int(random.choice([0, 1, 8, 1000, 1 << 20]))
    return bytes(size) if random.integers(2) else random.bytes(size)


def _metadata(random: Random) -> bytes:
    """EXIF, ICC profiles, texts and physical sizes that are garbage, or bombs."""
    picture, noise = _picture(random), random.bytes(int(random.integers(0, 3000)))
    bomb = b"comment\0\0" + _zeros(40 << 20)
    orientation = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0" + bytes([int(random.integers(256)), 0, 0, 0])
    pixels = zlib.compress(bytes(10 * 28))
    makers: list[Callable[[], bytes]] = [
        lambda: encoded(picture, "JPEG", exif=b"Exif\0\0" + noise),
        lambda: encoded(picture, "JPEG", exif=orientation),
        lambda: encoded(picture, "PNG", icc_profile=noise),
        lambda: encoded(picture, "JPEG", icc_profile=noise * 40),
        lambda: png(9, 10, pixels, before=chunk(b"iCCP", bomb)),
        lambda: png(9, 10, pixels, before=chunk(b"zTXt", bomb) * 20),
        lambda: png(9, 10, pixels, before=chunk(b"eXIf", noise)),
        lambda: png(9, 10, pixels, before=chunk(b"pHYs", noise[:9], checksum=7)),
        lambda: png(9, 10, pixels, before=chunk(b"acTL", struct.pack(">II", 1 << 30, 0))),
    ]
    return makers[int(random.integers(len(makers)))]()


def _thin(random: Random) -> bytes:
    """One pixel high, or wide."""
    size = (int(random.integers(2000, 60_000)), 1)
    return encoded(Image.new("RGB", size if random.integers(2) else size[::-1], "red"), "PNG")


_MAKERS: Final[dict[str, Callable[[Random], bytes]]] = {
    "truncated": _truncated,
    "damaged": _damaged,
    "bomb": _bomb,
    "as large as may be": _largest,
    "huge": _huge,
    "lying header": _lying_header,
    "animated": _animated,
    "other channels": _channels,
    "text": _text,
    "bytes": _bytes,
    "metadata": _metadata,
    "thin": _thin,
}
