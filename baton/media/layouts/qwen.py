"""QwenLayout: the placeholder tokens of an image in Qwen2-VL to Qwen3.5, without marks.

A token stands for a square of patches. The processor stretches an image so that whole squares fit
into it, and so that its number of pixels is within the checkpoint's limits.
"""

from __future__ import annotations

import math

from baton.api.errors import InvalidRequestError
from baton.api.images import ImageTokens
from baton.media.layouts.processor_files import ProcessorFiles
from baton.text.tokenizer import Tokenizer

_PLACEHOLDER = "<|image_pad|>"
_MAX_ASPECT = 200


class QwenLayout:
    """The layout of Qwen's models that see images; implements `ImageLayout`.

    Args:
        files: settings of the processor.
        tokenizer: the checkpoint's tokenizer.
    """

    marker = written = _PLACEHOLDER

    def __init__(self, files: ProcessorFiles, tokenizer: Tokenizer) -> None:
        """Read the settings; raises ModelLoadError if they do not fit the model or tokenizer."""
        self.settings = files.settings
        self.marker_token_id = self.placeholder_token_id = files.token_id(tokenizer, _PLACEHOLDER)
        patch_size = files.image_integer("patch_size", default=14)
        merge = files.image_integer("merge_size", default=2)
        for name, value, of_model in (
            ("patch_size", patch_size, "patch_size"),
            ("merge_size", merge, "spatial_merge_size"),
        ):
            if files.model_integer("vision_config", of_model, default=value) != value:
                raise files.wrong(name, f"{value}, but config.json has another {of_model}")
        self._factor = patch_size * merge
        self._least, self._most = (
            files.image_integer(older, default=files.image_integer("size", name, default=default))
            for older, name, default in (
                ("min_pixels", "shortest_edge", 56 * 56),
                ("max_pixels", "longest_edge", 28 * 28 * 1280),
            )
        )

    def expand(self, width: int, height: int) -> ImageTokens:
        """Implement `ImageLayout.expand`."""
        if width < 1 or height < 1:
            raise InvalidRequestError("image", f"{width} x {height} pixels: a side is empty")
        if max(height, width) / min(height, width) > _MAX_ASPECT:
            problem = f"{width} x {height} pixels: a side is over {_MAX_ASPECT} times the other"
            raise InvalidRequestError("image", problem)
        rows, columns = self._sides(height, width)
        return ImageTokens((self.placeholder_token_id,) * (rows * columns), (1, rows, columns))

    def _sides(self, height: int, width: int) -> tuple[int, int]:
        """Return the numbers of rows and columns of tokens of an image.

        Sizes are rounded as in the processor's ``smart_resize``.
        """
        factor, least, most = self._factor, self._least, self._most
        rows, columns = round(height / factor), round(width / factor)
        if rows * columns * factor**2 > most:
            beta = math.sqrt((height * width) / most)
            rows = max(1, math.floor(height / beta / factor))
            columns = max(1, math.floor(width / beta / factor))
        elif rows * columns * factor**2 < least:
            beta = math.sqrt(least / (height * width))
            rows = math.ceil(height * beta / factor)
            columns = math.ceil(width * beta / factor)
        return rows, columns
