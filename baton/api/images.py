"""Images in prompts: the place of their tokens, their digests, and models' rules for the tokens.

    prompt tokens   [ text | image 1: placeholders and marks | text | image 2 ... | text ]
                             ^ first                          ^ first + num_tokens

A model computes one embedding per placeholder token. The embedding replaces the token's own. Marks,
such as the ends of an image's rows, are ordinary tokens. The hash of a KV block includes the images
that lie in the block, because placeholders of all images are the same token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import msgspec

Grid = tuple[int, int, int]  # frames, rows and columns of an image's embeddings


class ImageSpan(msgspec.Struct, frozen=True, gc=False):
    """The tokens of one image in a prompt.

    Attributes:
        first: index of the image's first token in the prompt.
        num_tokens: number of the image's tokens, marks included.
        digest: digest of the image file and of the settings that it is processed with.
        grid: frames, rows and columns of the image's embeddings, for positions on three axes.
    """

    first: int
    num_tokens: int
    digest: bytes
    grid: Grid = (1, 1, 1)

    @property
    def end(self) -> int:
        return self.first + self.num_tokens


class PromptImage(msgspec.Struct, frozen=True, weakref=True):
    """An image of a prompt, as commands carry it.

    Attributes:
        span: the image's tokens.
        data: the image file; empty if the receiver does not encode the image.
    """

    span: ImageSpan
    data: bytes = b""


def without_files(images: Iterable[PromptImage]) -> tuple[PromptImage, ...]:
    """Return images for a receiver that does not encode them."""
    return tuple(PromptImage(image.span) for image in images)


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """The tokens that a model's prompt has for an image of some size.

    Attributes:
        token_ids: placeholders and marks, in order.
        grid: frames, rows and columns of the embeddings.
    """

    token_ids: tuple[int, ...]
    grid: Grid


class ImageLayout(Protocol):
    """A model's rule for the tokens of an image.

    Attributes:
        marker: text that the chat template writes for an image; one token.
        written: text that replaces ``marker`` in a prompt with images before the prompt is
            tokenized; it contains ``marker``.
        marker_token_id: token of ``marker``, which `expand`'s tokens replace.
        placeholder_token_id: token whose embedding is replaced by the image's.
        settings: digest of everything, besides the file, on which an encoding depends.
    """

    @property
    def marker(self) -> str: ...
    @property
    def written(self) -> str: ...
    @property
    def marker_token_id(self) -> int: ...
    @property
    def placeholder_token_id(self) -> int: ...
    @property
    def settings(self) -> bytes: ...

    def expand(self, width: int, height: int) -> ImageTokens:
        """Return the tokens of an image of ``width`` x ``height`` pixels.

        Raises:
            InvalidRequestError: the model takes no image of this size.
        """
        ...
