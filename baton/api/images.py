"""Images in prompts: where their tokens are, their digests, and each model's rule for the tokens.

    prompt tokens   [ text | image 1: placeholders and marks | text | image 2 ... | text ]
                             ^ first                          ^ first + num_tokens

A model encodes an image to one embedding per placeholder token, which replaces the token's own
embedding. Marks, such as the ends of an image's rows, are ordinary tokens. The hash of a KV block
includes the images that lie in the block, because placeholders of all images are the same token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import msgspec

Grid = tuple[int, int, int]  # numbers of frames, rows and columns of embeddings


class ImageSpan(msgspec.Struct, frozen=True, gc=False):
    """The tokens of one image in a prompt.

    Attributes:
        first: index of the image's first token in the prompt.
        num_tokens: number of the image's tokens, marks included.
        digest: digest of the image file and of the settings that it is processed with.
        grid: numbers of frames, rows and columns of the image's embeddings, from which models with
            positions on three axes compute positions.
    """

    first: int
    num_tokens: int
    digest: bytes
    grid: Grid = (1, 1, 1)

    @property
    def end(self) -> int:
        return self.first + self.num_tokens


class PromptImage(msgspec.Struct, frozen=True, weakref=True):
    """An image of a prompt, in the form in which routers send it to nodes.

    Attributes:
        span: the image's tokens in the prompt.
        data: the image file; empty if the receiver does not encode the image.
    """

    span: ImageSpan
    data: bytes = b""


def without_files(images: Iterable[PromptImage]) -> tuple[PromptImage, ...]:
    """Return copies of images without their files, for a receiver that does not encode them."""
    return tuple(PromptImage(image.span) for image in images)


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """The tokens that stand for an image of a given size in a model's prompts.

    Attributes:
        token_ids: placeholders and marks, in order.
        grid: numbers of frames, rows and columns of the embeddings.
    """

    token_ids: tuple[int, ...]
    grid: Grid


class ImageLayout(Protocol):
    """A model's rule for the tokens of an image.

    Attributes:
        marker: text of a single token, which the chat template writes for an image.
        written: text that replaces ``marker`` in a prompt with images before the prompt is
            tokenized; it contains ``marker``.
        marker_token_id: id of the token of ``marker``, which is replaced by the tokens of `expand`.
        placeholder_token_id: id of the token whose embedding is replaced by an embedding of the
            image.
        settings: digest of everything that an encoding depends on, except the image file.
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
            InvalidRequestError: the model does not accept images of this size.
        """
        ...
