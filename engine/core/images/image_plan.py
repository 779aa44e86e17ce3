"""The images of one step, in plain values that can go to a worker in another process."""

from __future__ import annotations

import msgspec

# Name of the array that is an encoding, not pixel values: another node has encoded the image.
ENCODING = "encoding of another node"


class PixelArray(msgspec.Struct, frozen=True, gc=False):
    """One array of an image's pixel values.

    Attributes:
        name: the array's name, as the model's image processor calls it.
        dtype: numpy dtype, by name.
        data: the numbers, in C order.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class EncodeImage(msgspec.Struct, frozen=True):
    """Encode an image, and keep the encoding.

    Attributes:
        digest: digest of the image, which names the encoding.
        num_embeddings: rows that the encoding must have.
    """

    digest: bytes
    num_embeddings: int
    pixels: tuple[PixelArray, ...]

    @property
    def is_encoded(self) -> bool:
        """Return whether another node has encoded the image."""
        return bool(self.pixels) and self.pixels[0].name == ENCODING


class PlacedImage(msgspec.Struct, frozen=True):
    """Replace some of a step's token embeddings by rows of an image's encoding.

    Attributes:
        rows: rows of the tokens in the step, ascending.
        first: row of the encoding that replaces the first of these tokens; later tokens use the
            rows after it.
    """

    digest: bytes
    rows: list[int]
    first: int


class StepImages(msgspec.Struct, frozen=True):
    """All that a step does with images.

    Attributes:
        forget: encodings to drop first.
        encode: images to encode after that.
        placed: encodings that the forward reads.
    """

    forget: tuple[bytes, ...] = ()
    encode: tuple[EncodeImage, ...] = ()
    placed: tuple[PlacedImage, ...] = ()
