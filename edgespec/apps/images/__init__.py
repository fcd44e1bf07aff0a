"""Images in prompts (docs/server.md): pictures from files and requests, as the pixels that an encoder reads.

Nothing is fetched. What the header tells of a picture's size is looked at before anything is decoded.
"""

from __future__ import annotations

import hashlib
import io
import re
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from edgespec.errors import UsageError, describe_os_error

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_BYTES = 64 << 20
"""Most bytes of a picture's file."""
MAX_PIXELS = 64_000_000
"""Most pixels: 192 MB once they are decoded."""
LONGEST = 200
"""Most times that a side is as long as the other: for longer pictures encoders have no places."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats that are read, whatever a file is called. Others have decoders that few have tried to break."""

_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


class Picture(msgspec.Struct, frozen=True):
    """A decoded picture: what an encoder reads of it."""

    width: int
    """Pixels, as are those of `height`."""
    height: int
    pixels: bytes
    """Three bytes a pixel, red, green and blue, row by row from the top."""

    @property
    def digest(self) -> bytes:
        """SHA-256 of the size and the pixels."""
        return hashlib.sha256(b"%d x %d " % (self.width, self.height) + self.pixels).digest()


def read_file(path: str | Path) -> bytes:
    """Return the content of a picture's file, "-": of standard input.

    Raises UsageError for an address, a file that cannot be read, and one of more than `MAX_BYTES`.
    """
    if _ADDRESS.match(str(path)):
        raise _refused(str(path), "an address, and edgespec fetches nothing; download the picture first")
    try:
        if str(path) == "-":
            data = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            with Path(path).expanduser().open("rb") as file:
                data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(describe_os_error(error), field="images") from None
    _check_bytes(data, str(path))
    return data


def read_picture(data: bytes, name: str) -> Picture:
    """Return the picture in the bytes of a file, upright and in RGB: of an animation its first picture.

    What is transparent becomes white. `name` is the picture's in errors. Raises UsageError for what is no
    picture of `FORMATS`, is cut or damaged, or exceeds `MAX_BYTES`, `MAX_PIXELS` or `LONGEST`.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError:
        raise _refused(name, "no Pillow, which reads pictures: make images, or pip install pillow") from None
    _check_bytes(data, name)
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # MAX_PIXELS is below where it warns
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise _refused(name, f"{width} x {height} pixels; at most {MAX_PIXELS:,} are read")
            if max(width, height) > LONGEST * min(width, height):
                raise _refused(
                    name, f"{width} x {height}: one side is over {LONGEST} times the other; cut it"
                )
            upright = _in_rgb(ImageOps.exif_transpose(image))
            return Picture(*upright.size, upright.tobytes())
    except UnidentifiedImageError:
        raise _refused(name, f"no picture, or in none of the formats {', '.join(FORMATS)}") from None
    except Image.DecompressionBombError:
        raise _refused(name, f"too many pixels; at most {MAX_PIXELS:,} are read") from None
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001 - decoders raise anything for bytes that are wrong
        said = " ".join(str(error).split()) or type(error).__name__
        raise _refused(name, f"a picture that is cut or damaged: {said}") from None


def _check_bytes(data: bytes, name: str) -> None:
    if len(data) > MAX_BYTES:
        raise _refused(name, f"more than {MAX_BYTES >> 20} MiB; make the picture smaller")
    if not data:
        raise _refused(name, "empty")


def _in_rgb(image: Image) -> Image:
    from PIL.Image import alpha_composite, new

    if image.mode.startswith("I"):  # 16 bits of grey: Pillow would make all above 255 white
        image = image.point(lambda grey: grey / 256).convert("L")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = alpha_composite(new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def _refused(name: str, problem: str) -> UsageError:
    return UsageError(f"{name}: {problem}", field="images")
