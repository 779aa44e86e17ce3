"""Read the header of an image file: its format and size, without decoding a pixel.

The file comes from a client and may kill its parser, so call this only in a worker process (see
`make_work`). Nodes also read an image's orientation with this module, so that nodes and routers
agree on the image's width.
"""

from __future__ import annotations

import io
import struct
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from baton.api.errors import InvalidRequestError
from baton.processes.worker_template import Work

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
# Errors of Pillow's parsers. Their texts are not shown, because some contain memory addresses.
_PARSER_ERRORS = (
    OSError, SyntaxError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError,
    EOFError, struct.error,
)  # fmt: skip
_ORIENTATION = 0x0112  # tag of EXIF
_FIRST_SIDEWAYS = 5  # orientations 5 to 8 swap width and height
_FIELD = "image"


class ImageHeader(msgspec.Struct, frozen=True):
    """The header of an image file.

    Attributes:
        format: a name in `FORMATS`.
        width, height: size in pixels as the image is shown, after its orientation is applied.
    """

    format: str
    width: int
    height: int


def read_header(data: bytes) -> ImageHeader:
    """Return the header of an image file.

    Raises:
        InvalidRequestError: the file is no image of a known format, or has several frames.
    """
    from PIL import Image  # imported here, because importing Pillow takes long

    # Pillow's limit of an image's size is turned off, because this module has its own limits.
    Image.MAX_IMAGE_PIXELS = None
    try:
        with (
            warnings.catch_warnings(action="ignore"),
            Image.open(io.BytesIO(data), formats=FORMATS) as image,
        ):
            return _header_of(image)
    except InvalidRequestError:
        raise
    except _PARSER_ERRORS:
        raise _refused(
            f"the image must be a whole {', '.join(FORMATS[:-1])} or {FORMATS[-1]} file"
        ) from None


def _header_of(image: Image.Image) -> ImageHeader:
    # JPEG files of phones may have previews after the picture itself.
    is_jpeg = image.format in ("JPEG", "MPO")
    if not is_jpeg and getattr(image, "is_animated", False):
        raise _refused("the image is animated: send one picture")
    width, height = image.size
    if orientation_of(image) >= _FIRST_SIDEWAYS:
        width, height = height, width
    return ImageHeader("JPEG" if is_jpeg else str(image.format), width, height)


def orientation_of(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 (upright) to 8, of an image that is not decoded yet.

    Metadata that comes after the pixels in the file is ignored, because reading it would decode the
    image.
    """
    if image.format == "PNG" and "exif" not in image.info:
        return 1
    found = image.getexif().get(_ORIENTATION, 1)
    return found if isinstance(found, int) and 1 <= found <= 8 else 1


def upright(image: Image.Image) -> Image.Image:
    """Return an image turned as its EXIF orientation says.

    Args:
        image: an open image that is not decoded yet.
    """
    from PIL import Image

    turn = Image.Transpose
    turns = {
        2: turn.FLIP_LEFT_RIGHT,
        3: turn.ROTATE_180,
        4: turn.FLIP_TOP_BOTTOM,
        5: turn.TRANSPOSE,
        6: turn.ROTATE_270,
        7: turn.TRANSVERSE,
        8: turn.ROTATE_90,
    }
    orientation = orientation_of(image)
    return image if orientation == 1 else image.transpose(turns[orientation])


def make_work(options: Mapping[str, str]) -> Work:
    """Load Pillow in a worker template, and return the function that reads a header."""
    from PIL import Image

    Image.preinit()
    # Load Pillow's parsers in the template, so that all workers share them.
    Image.init()
    return _work


def _work(data: bytes) -> bytes:
    return msgspec.json.encode(read_header(data))


def _refused(problem: str) -> InvalidRequestError:
    return InvalidRequestError(_FIELD, problem)
