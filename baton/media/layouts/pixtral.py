"""PixtralLayout: an image's rows of placeholders, each with a mark at its end (Mistral 3).

The processor scales an image down to ``longest_edge``, and stretches both sides to multiples of the
patches that become one token::

    [IMG][IMG][IMG][IMG_BREAK][IMG][IMG][IMG][IMG_END]
"""

from __future__ import annotations

import math

from baton.api.errors import InvalidRequestError
from baton.api.images import ImageTokens
from baton.media.layouts.processor_files import ProcessorFiles
from baton.text.tokenizer import Tokenizer


class PixtralLayout:
    """The layout of Pixtral and Mistral 3; implements `ImageLayout`.

    Args:
        files: settings of the processor.
        tokenizer: the checkpoint's tokenizer.
    """

    def __init__(self, files: ProcessorFiles, tokenizer: Tokenizer) -> None:
        """Read the settings; raises ModelLoadError if they do not fit the model or tokenizer."""
        self.settings = files.settings
        self.marker = self.written = files.processor_text("image_token", "[IMG]")
        self.marker_token_id = self.placeholder_token_id = files.token_id(tokenizer, self.marker)
        self._break, self._end = (
            files.token_id(tokenizer, files.processor_text(name, default))
            for name, default in (
                ("image_break_token", "[IMG_BREAK]"),
                ("image_end_token", "[IMG_END]"),
            )
        )
        self._longest = files.image_integer("size", "longest_edge", default=1024)
        self._patch_size = token_pixels(files)
        patch_size = files.model_integer("vision_config", "patch_size", default=16)
        is_pixtral = files.model.get("model_type") == "llava"
        merge = files.model_integer("spatial_merge_size", default=1 if is_pixtral else 2)
        if patch_size * merge != self._patch_size:
            problem = f"a token has {self._patch_size} pixels a side, but {patch_size * merge} in"
            raise files.wrong("patch_size", f"{problem} config.json")

    def expand(self, width: int, height: int) -> ImageTokens:
        """Implement `ImageLayout.expand`."""
        if width < 1 or height < 1:
            raise InvalidRequestError("image", f"{width} x {height} pixels: a side is empty")
        ratio = max(height / self._longest, width / self._longest)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        rows, columns = (-(-side // self._patch_size) for side in (height, width))
        if rows < 1 or columns < 1:
            raise InvalidRequestError("image", "the image is too narrow for this model")
        row = [self.placeholder_token_id] * columns
        token_ids = [*row, self._break] * rows
        token_ids[-1] = self._end
        return ImageTokens(tuple(token_ids), (1, rows, columns))


def token_pixels(files: ProcessorFiles) -> int:
    """Return the pixels per side of the square of an image that becomes one token.

    The processor passes this number to its image processor, whose own setting has no effect.
    """
    merge = files.processor_integer("spatial_merge_size", 1)
    return files.processor_integer("patch_size", 16) * merge
