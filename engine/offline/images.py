"""Images in prompts of `LLM`: turns Pillow images, arrays and files into image files and tokens."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from baton.api.errors import InvalidRequestError
from baton.api.images import ImageLayout, PromptImage
from baton.media.expand import SizedFile, expand_images
from baton.media.image_header import read_header

# Pillow's image modes that PNG can store.
_STORED = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
_DATA_URL = "data:"


class ImagePrompt(TypedDict):
    """A prompt that has images.

    Attributes:
        prompt: a text or token ids, with the model's image marker where each image belongs.
        images: the images in order. Each is a Pillow image, an array ``[height, width, 3]`` of
            uint8, the bytes of a file, or a data URL.
    """

    prompt: str | Sequence[int]
    images: Sequence[Any]


def with_images(
    token_ids: list[int], images: Sequence[Any], layout: ImageLayout | None
) -> tuple[list[int], tuple[PromptImage, ...]]:
    """Replace the image markers in a prompt by the tokens of its images.

    Args:
        images: the images in order, in the forms that `ImagePrompt` takes.
        layout: the rule that maps an image to tokens; None: the model takes no images.

    Raises InvalidRequestError.
    """
    if not images:
        return token_ids, ()
    if layout is None:
        raise InvalidRequestError("images", "are not computed here: this model is text only")
    files = [_sized_file(image, f"images[{index}]") for index, image in enumerate(images)]
    return expand_images(token_ids, files, layout)


def take_images(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Replace images in messages by the parts that chat templates expect; return the images, too.

    A part with an image is ``{"type": "image", "image": ...}`` or OpenAI's ``image_url`` with a
    data URL.
    """
    plain: list[dict[str, Any]] = []
    images: list[Any] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str) or not isinstance(content, Sequence):
            plain.append(dict(message))
            continue
        found = [_image_of(part) for part in content]
        images += [image for image in found if image is not None]
        parts = [
            part if image is None else {"type": "image"}
            for part, image in zip(content, found, strict=True)
        ]
        plain.append({**message, "content": parts})
    return plain, images


def _image_of(part: Mapping[str, Any]) -> Any:
    """Return the image that a part of a message has; None: the part has no image."""
    match part:
        case {"type": "image", "image": image}:
            return image
        case {"type": "image_url", "image_url": {"url": str(url)} | str(url)}:
            return _from_data_url(url)
    return None


def _from_data_url(url: str) -> bytes:
    head, comma, content = url.partition(",")
    if not (url.startswith(_DATA_URL) and comma and head.endswith(";base64")):
        raise InvalidRequestError("image_url", "must be a data URL in base64")
    try:
        return base64.b64decode(content, validate=True)
    except binascii.Error as error:
        raise InvalidRequestError("image_url", f"is not base64: {error}") from None


def _sized_file(image: Any, field: str) -> SizedFile:
    """Return an image file's bytes with the image's width and height."""
    if isinstance(image, str):
        data = _from_data_url(image)
    elif isinstance(image, bytes | bytearray | memoryview):
        data = bytes(image)
    else:
        data = _png(image, field)
    try:
        header = read_header(data)
    except InvalidRequestError as error:
        raise InvalidRequestError(field, error.problem) from None
    return data, header.width, header.height


def _png(image: Any, field: str) -> bytes:
    """Return a Pillow image or an array as the bytes of a PNG file, which keeps every pixel."""
    from PIL import Image  # imported here, because importing it is slow

    if not isinstance(image, Image.Image):
        try:
            image = Image.fromarray(image)
        except (AttributeError, TypeError, ValueError) as error:
            wanted = "an image of Pillow, an array [height, width, 3] of uint8, or a file's bytes"
            raise InvalidRequestError(field, f"must be {wanted}: {error}") from None
    if image.mode not in _STORED:
        image = image.convert("RGB")
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()
