"""TilesLayout: rows and columns of tiles, and the whole image (Idefics3, SmolVLM).

The processor scales the longer side to ``size``, stretches both sides to multiples of a tile's
side, and cuts the image into tiles. An image of more than one tile also has the whole image in a
tile of its own::

    <fake_token_around_image><row_1_col_1><image>...<fake_token_around_image><row_1_col_2>...\\n
    ...
    \\n<fake_token_around_image><global-img><image>...<fake_token_around_image>
"""

from __future__ import annotations

import functools
import math

from baton.api.errors import InvalidRequestError
from baton.api.images import ImageTokens
from baton.media.layouts.processor_files import ProcessorFiles
from baton.text.tokenizer import Tokenizer

_AROUND, _IMAGE, _WHOLE = "<fake_token_around_image>", "<image>", "<global-img>"
_MAX_SIDE = 4096  # maximum pixels of the longer side after scaling
_NUM_KEPT = 256  # maximum number of cached token sequences


class TilesLayout:
    """The layout of Idefics3 and SmolVLM; implements `ImageLayout`.

    Args:
        files: settings of the processor.
        tokenizer: the checkpoint's tokenizer.
    """

    marker = written = _IMAGE

    def __init__(self, files: ProcessorFiles, tokenizer: Tokenizer) -> None:
        """Read the settings; raises ModelLoadError if they do not fit the model or tokenizer."""
        self.settings = files.settings
        self._tokenizer = tokenizer
        files.token_id(tokenizer, _AROUND)
        self.marker_token_id = self.placeholder_token_id = files.token_id(tokenizer, _IMAGE)
        self._longest = files.image_integer("size", "longest_edge", default=4 * 364)
        self._tile = files.image_integer("max_image_size", "longest_edge", default=364)
        self._splits = files.image.get("do_image_splitting", True) is not False
        self._resizes = files.image.get("do_resize", True) is not False
        self._per_tile = files.processor_integer("image_seq_len", 169)
        self._side = self._embeddings_per_side(files)
        self._kept = functools.lru_cache(_NUM_KEPT)(self._expand_tiles)

    def expand(self, width: int, height: int) -> ImageTokens:
        """Implement `ImageLayout.expand`."""
        if width < 1 or height < 1:
            raise InvalidRequestError("image", f"{width} x {height} pixels: a side is empty")
        return self._kept(*self.tiles(width, height))

    def tiles(self, width: int, height: int) -> tuple[int, int]:
        """Return the numbers of rows and columns of tiles; ``(0, 0)``: the image is not divided.

        Sizes are rounded in the same order as by the processor (``get_resize_output_image_size``,
        ``resize_for_vision_encoder``, ``split_images``).
        """
        if not self._splits:
            return 0, 0
        if self._resizes:
            height, width = _below(*_scaled(height, width, self._longest))
        tile, aspect = self._tile, width / height
        if width >= height:
            width = math.ceil(width / tile) * tile
            height = math.ceil(int(width / aspect) / tile) * tile
        else:
            height = math.ceil(height / tile) * tile
            width = math.ceil(int(height * aspect) / tile) * tile
        if height <= tile and width <= tile:
            return 0, 0
        return height // tile, width // tile

    def _expand_tiles(self, rows: int, columns: int) -> ImageTokens:
        placeholders = _IMAGE * self._per_tile
        parts = []
        for row in range(1, rows + 1):
            parts += [
                f"{_AROUND}<row_{row}_col_{column}>{placeholders}"
                for column in range(1, columns + 1)
            ]
            parts.append("\n")
        if rows:
            parts.append("\n")
        parts.append(f"{_AROUND}{_WHOLE}{placeholders}{_AROUND}")
        token_ids = self._tokenizer.encode("".join(parts), add_special_tokens=False)
        num_tiles = rows * columns + 1
        return ImageTokens(tuple(token_ids), (num_tiles, self._side, self._side))

    def _embeddings_per_side(self, files: ProcessorFiles) -> int:
        """Return the number of embeddings per side of a tile.

        Raises:
            ModelLoadError: the processor and the model's configuration give different numbers.
        """
        patch_size = files.model_integer("vision_config", "patch_size", default=32)
        scale = files.model_integer("scale_factor", default=2)
        side = self._tile // patch_size // scale
        if side**2 != self._per_tile:
            problem = (
                f"{self._per_tile} tokens per tile, but tiles of {self._tile} pixels have {side**2}"
            )
            raise files.wrong("image_seq_len", problem)
        return side


def _scaled(height: int, width: int, longest: int) -> tuple[int, int]:
    """Return height and width: the longer side is ``longest``, the shorter side an even number."""
    aspect = width / height
    if width >= height:
        width = longest
        height = int(width / aspect)
        height += height % 2
    else:
        height = longest
        width = int(height * aspect)
        width += width % 2
    return max(height, 1), max(width, 1)


def _below(height: int, width: int) -> tuple[int, int]:
    """Scale the longer side down to `_MAX_SIDE`."""
    aspect = width / height
    if width >= height and width > _MAX_SIDE:
        width = _MAX_SIDE
        height = int(width / aspect)
    elif height > width and height > _MAX_SIDE:
        height = _MAX_SIDE
        width = int(height * aspect)
    return max(height, 1), max(width, 1)
