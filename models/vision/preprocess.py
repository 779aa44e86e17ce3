"""Preprocessor: turns an image file into the pixel values that a vision encoder reads.

The image processors of transformers compute the values. Their PIL backend is used, because it
needs no torchvision and gives the same values on every machine. A hostile file may crash its
decoder, so callers run this module in a separate process. Refuses to know: encoders, prompts.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from baton.api.errors import InvalidRequestError, ModelLoadError
from baton.media.image_header import FORMATS, upright
from baton.media.layouts.pixtral import token_pixels
from baton.media.layouts.processor_files import ProcessorFiles

if TYPE_CHECKING:
    from PIL import Image

_Array = np.ndarray[Any, np.dtype[Any]]
# Names of the image processors' arrays that encoders read. The first axis is the image, except in
# flat lists of patches.
_READ = ("pixel_values", "image_grid_thw", "image_position_ids")
_FLAT = 2


class Preprocessor:
    """The image processor of a checkpoint.

    Args:
        folder: the model folder, which contains the processor's settings.
    """

    def __init__(self, folder: Path) -> None:
        """Load the processor; raises ModelLoadError if a package or a file is missing."""
        try:
            from transformers import AutoImageProcessor
        except ImportError as error:
            raise ModelLoadError(
                f"images need transformers and Pillow: pip install 'baton-serve[images]' ({error})"
            ) from error
        files = ProcessorFiles.read(folder)
        self._options: dict[str, Any] = {}
        if files is not None and files.processor_class == "PixtralProcessor":
            self._options["patch_size"] = token_pixels(files)
        try:
            self._processor: Any = AutoImageProcessor.from_pretrained(
                folder, backend="pil", local_files_only=True, trust_remote_code=False
            )
        except (ImportError, OSError, ValueError) as error:
            line = " ".join(str(error).split())[:300]
            raise ModelLoadError(f"{folder}: image processor: {line}") from error

    def pixels(self, data: bytes) -> dict[str, _Array]:
        """Return the arrays that the encoder reads, by name.

        Args:
            data: content of an image file.

        Raises:
            InvalidRequestError: the file is no image that can be decoded.
        """
        image = decode(data)
        found: Mapping[str, Any] = self._processor(image, return_tensors="np", **self._options)
        arrays = {name: np.asarray(found[name]) for name in _READ if name in found}
        is_flat = arrays["pixel_values"].ndim == _FLAT
        return {
            name: one if is_flat and name == "pixel_values" else one[0]
            for name, one in arrays.items()
        }


def decode(data: bytes) -> Image.Image:
    """Decode the first frame of an image file, upright and in RGB, as transformers does.

    The router built the prompt for the size that `upright` returned, so this function must turn the
    image in the same way.

    Raises:
        InvalidRequestError: the file is no image that can be decoded.
    """
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None  # the reader of headers has checked the size
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return upright(image).convert("RGB")
    except Exception as error:  # for broken files, decoders raise exceptions of many types
        raise InvalidRequestError("image", "the file cannot be decoded") from error
