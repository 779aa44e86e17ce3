"""Expand images: replace the markers of images in a prompt by the tokens of the images.

    [ text | marker | text | marker | text ]  ->  [ text | image 1 | text | image 2 | text ]

The chat template, or the client, writes one marker per image. Decodes no image.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from baton.api.errors import InvalidRequestError
from baton.api.images import ImageLayout, ImageSpan, PromptImage

DIGEST_BYTES = 16
SizedFile = tuple[bytes, int, int]
"""An image file with the width and height of its image in pixels."""


def as_written(text: str, layout: ImageLayout) -> str:
    """Return a prompt's text with images, in the form that the model's processor tokenizes."""
    return text.replace(layout.marker, layout.written)


def expand_images(
    token_ids: Sequence[int],
    images: Sequence[SizedFile],
    layout: ImageLayout,
    salt: bytes = b"",
) -> tuple[list[int], tuple[PromptImage, ...]]:
    """Return the prompt with its images' tokens, and the place and digest of each image.

    Args:
        token_ids: tokens of the prompt, with one marker per image.
        images: the images in the order of their markers.
        layout: gives the tokens that stand for an image.
        salt: key of the images' digests, at most 64 bytes; prompts with different salts share no
            encodings.

    Raises:
        InvalidRequestError: the numbers of markers and images differ, or the model does not accept
            the size of an image.
    """
    marker = layout.marker_token_id
    num_markers = token_ids.count(marker)
    if num_markers != len(images):
        raise InvalidRequestError(
            "images",
            f"the prompt must have one {layout.marker} per image, got {num_markers} for "
            f"{len(images)} images",
        )
    expanded: list[int] = []
    found: list[PromptImage] = []
    begin = 0
    for data, width, height in images:
        end = token_ids.index(marker, begin)
        expanded += token_ids[begin:end]
        begin = end + 1
        tokens = layout.expand(width, height)
        span = ImageSpan(
            first=len(expanded),
            num_tokens=len(tokens.token_ids),
            digest=image_digest(data, layout.settings, salt),
            grid=tokens.grid,
        )
        expanded += tokens.token_ids
        found.append(PromptImage(span, data))
    expanded += token_ids[begin:]
    return expanded, tuple(found)


def image_digest(data: bytes, settings: bytes, salt: bytes = b"") -> bytes:
    """Return the digest of an image file and of the image processor's settings.

    Args:
        salt: key of the digest; empty: no key.
    """
    digest = hashlib.blake2b(data, digest_size=DIGEST_BYTES, key=salt)
    digest.update(settings)
    return digest.digest()
