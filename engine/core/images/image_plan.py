"""The images of one step, in plain values that can go to a worker in another process."""

from __future__ import annotations

import msgspec

from baton.api.errors import is_out_of_memory

# Name of an array that has an encoding instead of pixel values, because another node has encoded
# the image.
ENCODING = "encoding of another node"
# Reason for a failure that may not happen on another node, or later on this node.
NO_MEMORY = "this node has too little memory to encode it"
# Errors that an encoder may raise for an image. Such an error must not end the node, which also
# serves other clients.
ENCODER_ERRORS = (RuntimeError, ValueError, IndexError, MemoryError)


def problem_of(error: Exception) -> str:
    """Return one of `ENCODER_ERRORS` in words, for the client whose image was not encoded."""
    if is_out_of_memory(error):
        return NO_MEMORY
    return f"the encoder failed: {type(error).__name__}"


class PixelArray(msgspec.Struct, frozen=True, gc=False):
    """One array of an image's pixel values.

    Attributes:
        name: the array's name, as the model's image processor calls it.
        dtype: name of the array's NumPy dtype.
        data: the array's bytes, in C order.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class EncodeImage(msgspec.Struct, frozen=True):
    """Tells the workers to encode an image and keep the encoding.

    Attributes:
        digest: digest of the image, which names the encoding.
        num_embeddings: rows that the encoding must have.
    """

    digest: bytes
    num_embeddings: int
    pixels: tuple[PixelArray, ...]

    @property
    def is_encoded(self) -> bool:
        """Return whether the arrays are an encoding that another node has made."""
        return bool(self.pixels) and self.pixels[0].name == ENCODING


class PlacedImage(msgspec.Struct, frozen=True):
    """Tells the workers to replace some token embeddings of a step by rows of an image's encoding.

    Attributes:
        rows: indices, among the step's tokens, of the tokens to replace; ascending.
        first: row of the encoding that replaces the first of these tokens; later tokens use the
            rows after it.
    """

    digest: bytes
    rows: list[int]
    first: int


class StepImages(msgspec.Struct, frozen=True):
    """Work that the workers must do with images in one step.

    Attributes:
        forget: encodings to drop first.
        encode: images to encode before the forward.
        placed: which token embeddings the forward takes from encodings.
    """

    forget: tuple[bytes, ...] = ()
    encode: tuple[EncodeImage, ...] = ()
    placed: tuple[PlacedImage, ...] = ()
