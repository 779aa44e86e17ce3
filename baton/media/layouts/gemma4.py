"""Gemma4Layout: placeholders between two marks, as many as the image's shape allows (Gemma 4).

The processor scales an image so that both sides are multiples of a token's side, and so that the
image has at most ``max_soft_tokens`` tokens.
"""

from __future__ import annotations

import math

from baton.api.errors import InvalidRequestError
from baton.api.images import ImageTokens
from baton.media.layouts.processor_files import ProcessorFiles
from baton.text.tokenizer import Tokenizer


class Gemma4Layout:
    """The layout of Gemma 4; implements `ImageLayout`.

    Args:
        files: settings of the processor.
        tokenizer: the checkpoint's tokenizer.
    """

    def __init__(self, files: ProcessorFiles, tokenizer: Tokenizer) -> None:
        """Read the settings; raises ModelLoadError if they do not fit the model or tokenizer."""
        self.settings = files.settings
        self.marker_token_id = files.model_integer("image_token_id", default=258_880)
        self.placeholder_token_id = self.marker_token_id
        self._begin = files.model_integer("boi_token_id", default=255_999)
        self._end = files.model_integer("eoi_token_id", default=258_882)
        self.marker = self.written = tokenizer.token_bytes(self.marker_token_id).decode()
        if files.token_id(tokenizer, self.marker) != self.marker_token_id:
            raise files.wrong("image_token_id", f"{self.marker_token_id} is no special token")
        self._most = files.image_integer("max_soft_tokens", default=280)
        self._patch_size = files.image_integer("patch_size", default=16)
        self._square = files.image_integer("pooling_kernel_size", default=3)
        for name, found, default in (
            ("patch_size", self._patch_size, 16),
            ("pooling_kernel_size", self._square, 3),
        ):
            if files.model_integer("vision_config", name, default=default) != found:
                raise files.wrong(name, f"{found}, but config.json has another number")

    def expand(self, width: int, height: int) -> ImageTokens:
        """Implement `ImageLayout.expand`."""
        if width < 1 or height < 1:
            raise InvalidRequestError("image", f"{width} x {height} pixels: a side is empty")
        rows, columns = self._sides(height, width)
        if not rows or rows * columns > self._most:
            raise InvalidRequestError("image", f"{width} x {height} pixels: too narrow")
        placeholders = (self.placeholder_token_id,) * (rows * columns)
        return ImageTokens((self._begin, *placeholders, self._end), (1, rows, columns))

    def _sides(self, height: int, width: int) -> tuple[int, int]:
        """Return the numbers of rows and columns of tokens of an image.

        Sizes are rounded as in the processor's ``get_aspect_ratio_preserving_size``.
        """
        token, most = self._square * self._patch_size, self._most
        pixels = most * self._square**2 * self._patch_size**2
        factor = math.sqrt(pixels / (height * width))
        rows, columns = math.floor(factor * height / token), math.floor(factor * width / token)
        if rows == 0 and columns:
            return 1, min(width // height, most)
        if columns == 0 and rows:
            return min(height // width, most), 1
        return rows, columns
