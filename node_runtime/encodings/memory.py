"""EncodingMemory: host memory for encodings of images, which a KV connector reads and writes.

    [num_units, 1, BLOCK_TOKENS, width]      an encoding has the rows of some units, in their order

The memory is host memory on all nodes: encodings are small beside KV, and peers need no GPU. Its
pages take no space before they are first written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.kv.encodings import BLOCK_TOKENS, encodings_manifest
from engine.core.images.image_plan import PixelArray
from engine.core.images.prompt_images import ImagePixels, encoding_of


class EncodingMemory:
    """Host memory of one node, whose units hold embeddings; a `kvconnector.layout.KVMemory`.

    Args:
        num_units: number of units.
        width: number of values per embedding.
        dtype: dtype of the values.

    Attributes:
        manifest: layout of a unit.
        tensor: ``[num_units, 1, BLOCK_TOKENS, width]``; its address never changes.
    """

    rank = 0

    def __init__(self, num_units: int, width: int, dtype: torch.dtype) -> None:
        self.dtype = str(dtype).removeprefix("torch.")
        self.manifest = encodings_manifest(width, self.dtype)
        self.tensor = torch.zeros(num_units, 1, BLOCK_TOKENS, width, dtype=dtype)

    def write(self, units: Sequence[int], embeddings: Tensor) -> None:
        """Write an encoding ``[num_embeddings, width]`` to its units."""
        with torch.inference_mode():
            rest = embeddings.to(device="cpu", dtype=self.tensor.dtype)
            for unit in units:
                rows, rest = rest[:BLOCK_TOKENS], rest[BLOCK_TOKENS:]
                self.tensor[unit, 0, : len(rows)] = rows

    def read(self, units: Sequence[int], num_embeddings: int) -> ImagePixels | None:
        """Return a copy of an encoding in these units, as plain values for the engine.

        Returns None if some of the encoding's values are NaN or infinite.
        """
        rows = self.tensor[list(units), 0].flatten(0, 1)[:num_embeddings]  # a copy
        if not bool(rows.isfinite().all()):
            return None
        data = rows.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return encoding_of(PixelArray("", self.dtype, tuple(rows.shape), data))
