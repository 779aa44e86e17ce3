"""Data URLs: decode the images that clients put into their requests as base64."""

from __future__ import annotations

import base64
import binascii

from baton.api.errors import InvalidRequestError
from router.intake.images.image_options import ImageOptions

SCHEME = "data:"
# Maximum number of characters before the comma: the media type and its parameters
_MAX_HEAD_CHARS = 128
_BASE64 = ";base64"


def is_data_url(url: str) -> bool:
    """Return whether a URL is a data URL, which holds the content itself."""
    return url[: len(SCHEME)].lower() == SCHEME


def decode_data_url(url: str, field: str, options: ImageOptions, num_before: int) -> bytes:
    """Return the file in a data URL; check its size before decoding it.

    Args:
        field: the client's field that has the URL, for errors.
        num_before: bytes of the images that precede this one in the request.

    Raises:
        InvalidRequestError: the URL is not an image in base64, or the images are too large.
    """
    head, comma, text = url[len(SCHEME) :].partition(",")
    is_short = bool(comma) and len(head) <= _MAX_HEAD_CHARS
    kind = head.lower().replace(" ", "")
    if not (is_short and kind.startswith("image/") and kind.endswith(_BASE64)):
        raise InvalidRequestError(field, "must be a URL of the form data:image/png;base64,...")
    options.check_bytes(field, len(text) * 3 // 4 or len(text), num_before)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequestError(field, "has no valid base64 behind the comma") from None
