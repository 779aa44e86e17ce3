"""Images that stand for tokens: an image's embeddings are those of the tokens that its file lists.

A prompt with such an image must be answered like the prompt with these tokens in its place.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from baton.api.errors import InvalidRequestError
from baton.api.images import ImageSpan, ImageTokens, PromptImage
from engine.core.images.image_plan import PixelArray
from engine.core.images.prompt_images import ImagePixels, PromptImages

PLACEHOLDER, MARK = 7, 8
PROCESSOR = "tests.fakes.images.fake_images:FakeProcessor"
_MOST_TOKENS = 10_000


def file_of(token_ids: Sequence[int]) -> bytes:
    """Return the file of an image that stands for these tokens."""
    return b",".join(str(token_id).encode() for token_id in token_ids)


class FakeProcessor:
    """Reads the files; a file can also end or exhaust the process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def pixels(self, data: bytes) -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
        if data.startswith(b"\x89PNG"):  # a token per 64 pixels
            width, height = Image.open(io.BytesIO(data)).size
            return {"tokens": np.arange(width * height // 64)}
        match data:
            case b"die":
                os._exit(1)
            case b"spin":
                while True:
                    pass
            case b"bomb":
                return {"tokens": np.ones(2**34)}
            case b"bad":
                raise InvalidRequestError("image", "the file cannot be decoded")
        return {"tokens": np.array([int(one) for one in data.split(b",")], dtype=np.int64)}


def pixels_of(data: bytes) -> ImagePixels:
    """Return a file's pixel values, made in this process."""
    arrays = FakeProcessor(Path()).pixels(data)
    return ImagePixels(
        tuple(
            PixelArray(name, array.dtype.name, array.shape, array.tobytes())
            for name, array in arrays.items()
        )
    )


class FakeEncoder:
    """Encodes an image as the embeddings of its tokens.

    Attributes:
        num_encoded: number of calls.
    """

    def __init__(self, embedding: nn.Module) -> None:
        self._embedding = embedding
        self.num_encoded = 0

    def encode(self, pixels: Mapping[str, Tensor]) -> Tensor:
        self.num_encoded += 1
        tokens = pixels["tokens"]  # [num_placeholders]; -1: a number that is none
        embeddings: Tensor = self._embedding(tokens.clamp(min=0))
        return embeddings.masked_fill((tokens < 0)[:, None], torch.nan)


class FakeLayout:
    """Images of one row; a mark ends each."""

    marker, settings = "<image>", b"fake"
    written = marker
    marker_token_id, placeholder_token_id = 6, PLACEHOLDER

    def expand(self, width: int, height: int) -> ImageTokens:
        row = (*[PLACEHOLDER] * width, MARK)
        return ImageTokens(row * height, (1, height, width))


def prompt_with(
    parts: Sequence[Sequence[int] | bytes],
) -> tuple[list[int], tuple[PromptImage, ...]]:
    """Return a prompt of token runs and image files."""
    token_ids, images = list[int](), list[PromptImage]()
    for part in parts:
        if not isinstance(part, bytes):
            token_ids += part
            continue
        num_tokens = part.count(b",") + 1
        digest = hashlib.blake2b(part, digest_size=16).digest()
        images.append(PromptImage(ImageSpan(len(token_ids), num_tokens, digest), part))
        token_ids += [PLACEHOLDER] * num_tokens
    return token_ids, tuple(images)


def images_of(images: Sequence[PromptImage], token_ids: Sequence[int]) -> PromptImages:
    """Return a prompt's images as requests have them."""
    return PromptImages(images, token_ids, PLACEHOLDER, _MOST_TOKENS)
