"""Unit tests of `read_header`: sizes as shown, formats by content, and no pixel decoded."""

from __future__ import annotations

import io

import pytest
from PIL import Image, ImageFile, ImageOps

from baton.api.errors import InvalidRequestError
from baton.media.image_header import FORMATS, ImageHeader, read_header, upright
from tests.fakes.outside.hostile_images import animation, picture, png, turned


@pytest.mark.parametrize("kind", FORMATS)
def test_a_header_has_format_and_size(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(image: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", refuse)
    assert read_header(picture(kind, (31, 17))) == ImageHeader(kind, 31, 17)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_photo_has_the_size_that_is_shown(orientation: int) -> None:
    size = (30, 20) if orientation < 5 else (20, 30)
    assert read_header(turned(orientation)) == ImageHeader("JPEG", *size)


@pytest.mark.parametrize("orientation", range(10))
def test_an_image_is_turned_as_by_pillow(orientation: int) -> None:
    buffer = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.open(io.BytesIO(picture("PNG", (5, 3)))).save(buffer, "JPEG", exif=exif)
    ours, theirs = (Image.open(io.BytesIO(buffer.getvalue())) for _ in range(2))
    turned_by_pillow = ImageOps.exif_transpose(theirs)
    assert upright(ours).tobytes() == turned_by_pillow.tobytes()
    header = read_header(buffer.getvalue())
    assert (header.width, header.height) == turned_by_pillow.size


def test_orientation_behind_the_pixels_is_not_read() -> None:
    """Reading it would decode the image."""
    assert read_header(png(30, 20)) == ImageHeader("PNG", 30, 20)


@pytest.mark.parametrize("kind", ["PNG", "GIF", "WEBP"])
def test_an_animation_is_refused(kind: str) -> None:
    with pytest.raises(InvalidRequestError, match="image: the image is animated: send one picture"):
        read_header(animation(kind))


def test_an_error_shows_no_text_of_the_parser() -> None:
    with pytest.raises(InvalidRequestError) as found:
        read_header(b"\x89PNG\r\n\x1a\nnonsense")
    assert str(found.value) == "image: the image must be a whole PNG, JPEG, WEBP or GIF file"
