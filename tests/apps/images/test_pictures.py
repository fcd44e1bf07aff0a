"""Pictures of users: every kind becomes the same rows of pixels, and what is wrong is one line."""

from __future__ import annotations

import ctypes
import io
import struct
import sysconfig
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edgespec.apps import images as pictures
from edgespec.apps.images import Picture, encoder, read_file, read_picture
from edgespec.errors import UsageError
from edgespec.models.on_disk import walked

SIZE = (48, 32)


def photograph() -> Image.Image:
    """A smooth picture, as photographs are, with a corner by which one sees how it is turned."""
    x, y = np.meshgrid(np.linspace(0, 1, SIZE[0]), np.linspace(0, 1, SIZE[1]))
    pixels = np.stack([255 * x, 255 * y, 128 + 0 * x], axis=-1)
    pixels[:8, :8] = 255
    return Image.fromarray(pixels.astype(np.uint8))


def encoded(image: Image.Image, form: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def rows(picture: Picture) -> np.ndarray:
    shape = (picture.height, picture.width, 3)
    return np.frombuffer(picture.pixels, np.uint8).reshape(shape).astype(int)


def read(data: bytes) -> Picture:
    return read_picture(data, "image 2")


def refusal(data: bytes) -> str:
    with pytest.raises(UsageError, match="image 2: ") as found:
        read(data)
    assert (found.value.field, "\n" in str(found.value)) == ("images", False)
    return found.value.problem


@pytest.mark.parametrize(
    ("form", "options", "off"),
    [("PNG", {}, 0), ("BMP", {}, 0), ("WEBP", {"lossless": True}, 0), ("JPEG", {"quality": 95}, 40)],
)
def test_each_format_has_the_pixels_of_the_picture(form: str, options: dict, off: int) -> None:
    picture = read(encoded(photograph(), form, **options))
    assert (picture.width, picture.height, len(picture.digest)) == (*SIZE, 32)
    assert np.abs(rows(picture) - np.asarray(photograph(), int)).max() <= off


@pytest.mark.parametrize(
    ("mode", "form", "off"),
    [
        ("L", "PNG", 0),
        ("1", "PNG", 0),
        ("P", "GIF", 40),
        ("P", "PNG", 40),
        ("CMYK", "JPEG", 40),
        ("L", "JPEG", 20),
    ],
)
def test_other_colours_become_red_green_and_blue(mode: str, form: str, off: int) -> None:
    image = photograph().convert(mode)
    assert np.abs(rows(read(encoded(image, form))) - np.asarray(image.convert("RGB"), int)).max() <= off


def test_sixteen_bits_become_eight() -> None:
    grey = Image.fromarray(np.array([[0, 255, 256, 32768, 65535]], np.uint16))
    assert rows(read(encoded(grey, "PNG")))[0, :, 0].tolist() == [0, 0, 1, 128, 255]


@pytest.mark.parametrize(
    ("mode", "form"), [("RGBA", "PNG"), ("LA", "PNG"), ("RGBA", "WEBP"), ("RGBA", "GIF")]
)
def test_what_is_transparent_becomes_white(mode: str, form: str) -> None:
    image = Image.new("RGBA", (4, 2), (0, 0, 0, 0))
    image.paste((0, 0, 0, 255), (2, 0, 4, 2))
    options = {"lossless": True} if form == "WEBP" else {}
    assert rows(read(encoded(image.convert(mode), form, **options)))[0, :, 1].tolist() == [255, 255, 0, 0]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_that_a_camera_turned_is_upright(orientation: int) -> None:
    back = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # how Pillow's operations undo what the tag says
    image = photograph()
    turned = image.transpose(Image.Transpose(back[orientation])) if orientation in back else image
    tags = Image.Exif()
    tags[0x0112] = orientation
    for form in ("PNG", "JPEG"):
        picture = read(encoded(turned, form, exif=tags))
        assert (picture.width, picture.height) == SIZE
        assert np.abs(rows(picture) - np.asarray(image, int)).mean() < 5


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG", "MPO"])
def test_of_an_animation_the_first_picture_is_read(form: str) -> None:
    others = [Image.new("RGB", SIZE, colour) for colour in ("red", "blue")]
    data = encoded(Image.new("RGB", SIZE, "lime"), form, save_all=True, append_images=others)
    assert np.abs(rows(read(data)) - [0, 255, 0]).max() <= 3


def test_one_pixel_is_a_picture_and_the_digest_is_of_size_and_pixels() -> None:
    assert read(encoded(Image.new("RGB", (1, 1), "red"), "PNG")).pixels == b"\xff\0\0"
    wide, high = (read(encoded(Image.new("RGB", size), "PNG")) for size in ((4, 2), (2, 4)))
    assert wide.pixels == high.pixels
    assert wide.digest != high.digest
    assert wide.digest == read(encoded(Image.new("RGB", (4, 2)), "BMP")).digest


PLACES = Path(sysconfig.get_path("purelib")), Path("/usr/share/doc")


@pytest.mark.skipif(not encoder.is_built(), reason="make images")
def test_photographs_and_drawings_of_this_machine_are_as_llama_cpp_decodes_them() -> None:
    """Of packages: a photograph, icons, diagrams. llama.cpp's own decoder knows no transparency."""
    mtmd, n = encoder.load(), 0
    kinds = {".jpg", ".jpeg", ".png", ".gif", ".bmp"}
    found = [path for place in PLACES for path in walked(place, []) if path.suffix.lower() in kinds]
    for path in sorted(found, key=lambda path: -path.stat().st_size)[:20]:
        data = path.read_bytes()
        with Image.open(io.BytesIO(data)) as image:
            if image.has_transparency_data or max(image.size) > 2000 or image.getexif().get(0x0112, 1) != 1:
                continue
        buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        theirs = mtmd.mtmd_helper_bitmap_init_from_buf(None, buffer, len(data), False)
        assert theirs, path
        n_bytes = mtmd.mtmd_bitmap_get_n_bytes(theirs)
        pixels = ctypes.string_at(mtmd.mtmd_bitmap_get_data(theirs), n_bytes)
        mtmd.mtmd_bitmap_free(theirs)
        ours = read(data)
        assert (ours.width * ours.height * 3, len(ours.pixels)) == (n_bytes, n_bytes), path
        off = np.abs(rows(ours).ravel() - np.frombuffer(pixels, np.uint8).astype(int))
        assert off.mean() < 1.5, path
        n += 1
    assert n, found


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header promises that many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("size", [(20_000, 20_000), (9_000, 8_000), (65_000, 1_100)])
def test_too_many_pixels_are_refused_before_they_are_decoded(size: tuple[int, int]) -> None:
    assert "pixels" in refusal(bomb(*size))


def test_a_picture_that_is_a_line_is_refused() -> None:
    assert read(encoded(Image.new("RGB", (200, 1)), "PNG")).width == 200
    for size in ((201, 1), (2, 401)):
        assert "times" in refusal(encoded(Image.new("RGB", size), "PNG"))


@pytest.mark.parametrize("form", pictures.FORMATS)
def test_a_file_that_was_cut_is_refused(form: str) -> None:
    data = encoded(photograph(), form)
    for length in (len(data) // 2, len(data) * 3 // 4, 30, 9):
        refusal(data[:length])


@pytest.mark.parametrize("form", pictures.FORMATS)
def test_damaged_files_are_read_or_refused_in_one_line(form: str) -> None:
    data, rng = encoded(photograph(), form), np.random.default_rng(7)
    for _ in range(60):
        wrong = bytearray(data)
        for at in rng.integers(0, len(wrong), 4):
            wrong[at] ^= 1 << int(rng.integers(8))
        try:
            assert read(bytes(wrong)).pixels
        except UsageError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize("data", [b"", b"hello", b"%PDF-1.7", b"<svg xmlns='http://www.w3.org/2000/svg'/>"])
def test_what_is_no_picture_is_refused(data: bytes) -> None:
    refusal(data)


def test_other_formats_are_refused() -> None:
    for form in ("TIFF", "PPM", "ICO", "TGA"):
        assert "formats" in refusal(encoded(photograph(), form))


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "MAX_BYTES", 1000)
    file = tmp_path / "a.png"
    file.write_bytes(b"x" * 1000)
    assert len(read_file(file)) == 1000
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"y" * 10)))
    assert read_file("-") == b"y" * 10
    file.write_bytes(b"x" * 1001)
    empty = tmp_path / "empty.png"
    empty.write_bytes(b"")
    wrong = [
        file,
        empty,
        tmp_path,
        tmp_path / "none.png",
        "/dev/zero",
        "https://example.org/a.png",
        "file:///a",
    ]
    for path in wrong:
        with pytest.raises(UsageError) as found:
            read_file(path)
        assert found.value.field == "images"
        assert str(path) in str(found.value)
    with pytest.raises(UsageError):
        read(b"x" * 1001)
