"""PromptImages: the images of one prompt, shared by all requests with this prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from baton.api.errors import InvalidRequestError
from baton.api.images import ImageSpan, PromptImage
from engine.core.images.image_plan import ENCODING, PixelArray

DIGEST_BYTES = 16


class ImagePixels(msgspec.Struct, frozen=True, weakref=True, eq=False):
    """An image's pixel values, ready for the encoder.

    Prompts with the same image share this object. If another node has encoded the image, this
    object has the encoding instead of pixel values (`encoding_of`).
    """

    arrays: tuple[PixelArray, ...]

    @property
    def num_bytes(self) -> int:
        return sum(len(array.data) for array in self.arrays)

    @property
    def is_encoding(self) -> bool:
        """Return whether this object has an encoding that another node has made."""
        return bool(self.arrays) and self.arrays[0].name == ENCODING


def encoding_of(array: PixelArray) -> ImagePixels:
    """Wrap an encoding, ``[num_embeddings, width]``, that takes the place of pixel values."""
    return ImagePixels((PixelArray(ENCODING, array.dtype, array.shape, array.data),))


class PromptImages:
    """The images of a prompt, and their pixel values or encodings.

    Args:
        images: the images, in order.
        token_ids: the prompt.
        placeholder_token_id: id of the token whose embeddings are replaced by an image's encoding.
        most_tokens: maximum number of tokens that one image may have.

    Attributes:
        spans: token range of each image in the prompt, in order.
        places: positions in the prompt of each image's placeholders, ascending.
        files: image files by digest; empty: another node encodes the images.
        pixels: pixel values by digest; None: they are not made yet, or no longer needed.
        received: encodings that encode nodes have sent, by digest, until they are moved to
            ``pixels``.
        awaits_encodings: whether encode nodes may still send encodings; until then, no image file
            is decoded here.
        asked_at: time of the last request for the pixel values, in seconds.
        pixels_wait_s: seconds from requests for the pixel values until they were made.
        users: ids of open requests that have tokens of the images to compute.

    Raises:
        InvalidRequestError: an image does not fit the prompt, or has too many tokens.
    """

    def __init__(
        self,
        images: Sequence[PromptImage],
        token_ids: Sequence[int],
        placeholder_token_id: int,
        most_tokens: int,
    ) -> None:
        self.spans = tuple(image.span for image in images)
        self.files: Mapping[bytes, bytes] = {
            image.span.digest: image.data for image in images if image.data
        }
        self.pixels: Mapping[bytes, ImagePixels] | None = None
        self.received: dict[bytes, ImagePixels] = {}
        self.awaits_encodings = False
        self.asked_at = self.pixels_wait_s = 0.0
        self.users: set[str] = set()
        _check_spans(self.spans, len(token_ids), most_tokens)
        if self.files and len(self.files) < len({span.digest for span in self.spans}):
            raise InvalidRequestError("images", "some have a file and others have none")
        self.places = tuple(
            _places(index, span, token_ids, placeholder_token_id)
            for index, span in enumerate(self.spans)
        )

    @property
    def end(self) -> int:
        """Return the number of prompt tokens up to the end of the last image."""
        return self.spans[-1].end

    @property
    def awaits_pixels(self) -> bool:
        """Return whether the images' pixel values are needed and not made yet."""
        return self.pixels is None and bool(self.files)

    def may_compute_from(self, num_cached_tokens: int) -> bool:
        """Return whether this engine can compute the tokens after a cached prefix.

        Without image files, the engine can do so only if the prefix covers all images.
        """
        return bool(self.files) or num_cached_tokens >= self.end

    def add_user(self, request_id: str) -> None:
        """Register an open request with image tokens still to compute."""
        self.users.add(request_id)

    def remove_user(self, request_id: str) -> None:
        """Unregister a request that no longer needs images; without users, drop pixel values."""
        self.users.discard(request_id)
        if not self.users:
            self.pixels = None
            self.received.clear()


def _check_spans(spans: Sequence[ImageSpan], num_tokens: int, most_tokens: int) -> None:
    end = 0
    for index, span in enumerate(spans):
        field = f"images[{index}]"
        if span.first < end or span.num_tokens < 1 or span.end > num_tokens:
            raise InvalidRequestError(field, f"lies outside the prompt of {num_tokens} tokens")
        if len(span.digest) != DIGEST_BYTES:
            problem = f"its digest must have {DIGEST_BYTES} bytes, got {len(span.digest)}"
            raise InvalidRequestError(field, problem)
        if span.num_tokens > most_tokens:
            problem = f"has {span.num_tokens} tokens; at most {most_tokens} (encoder_cache_tokens)"
            raise InvalidRequestError(field, problem)
        end = span.end


def _places(
    index: int, span: ImageSpan, token_ids: Sequence[int], placeholder_token_id: int
) -> list[int]:
    tokens = np.array(token_ids[span.first : span.end], dtype=np.int64)
    places: list[int] = ((tokens == placeholder_token_id).nonzero()[0] + span.first).tolist()
    if not places:
        raise InvalidRequestError(f"images[{index}]", "has no placeholder in the prompt")
    return places
