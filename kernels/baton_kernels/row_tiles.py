"""RowTiles: rows sorted by their weight (an expert or adapter), in tiles with one weight each.

    rows, by weight   | w0 w0 w0 | w2 | w5 w5 |
    tiles             [ w0     ][w0  ][w2     ][w5     ][no weight] ...

The device always makes the largest possible number of tiles; unused tiles, without a weight, come
last. So shapes depend only on the number of rows, and a CUDA graph can hold all launches.
Refuses to know: kernels, the weights' meaning.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowTiles:
    """The weight and the rows of each tile.

    Attributes:
        weights: ``[count]`` int64, the weight of each tile; ``num_weights``: no weight, unused
            tile.
        first_places: ``[count]`` int64, index into ``order`` of each tile's first row.
        ends: ``[num_weights]`` int64, index into ``order`` after each weight's last row.
        order: ``[num_rows]`` int64, rows sorted by weight.
        tile_rows: maximum number of rows of a tile.
    """

    weights: Tensor
    first_places: Tensor
    ends: Tensor
    order: Tensor
    tile_rows: int

    @property
    def count(self) -> int:
        """Return the number of tiles, including unused tiles."""
        return len(self.weights)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors, in the order of the kernels' arguments."""
        return self.weights, self.first_places, self.ends, self.order

    @classmethod
    def of(cls, ids: Tensor, num_weights: int, tile_rows: int) -> RowTiles:
        """Sort rows by their weight, and divide them into tiles.

        Args:
            ids: the weight of each row, from 0; ``num_weights``: this row is in no tile. Any shape
                and integer dtype.
            num_weights: number of weights.
            tile_rows: maximum number of rows of a tile.
        """
        flat = ids.flatten().long()  # [num_rows]
        num_rows = len(flat)
        order = flat.sort(stable=True).indices
        sizes = torch.zeros(num_weights + 1, dtype=torch.int64, device=ids.device)
        sizes = sizes.scatter_add_(0, flat, torch.ones_like(flat))[:num_weights]
        ends = sizes.cumsum(0)
        tiles = (sizes + (tile_rows - 1)) // tile_rows
        tile_ends = tiles.cumsum(0)
        # Of a weight's tiles, all but the last are full, which limits the number of tiles.
        most = min(num_rows, num_rows // tile_rows + min(num_weights, num_rows))
        ids_of_tiles = torch.arange(most, device=ids.device)
        weights = torch.searchsorted(tile_ends, ids_of_tiles, right=True)
        known = weights.clamp(max=num_weights - 1)
        # number of earlier tiles with the same weight
        before = ids_of_tiles - (tile_ends - tiles)[known]
        first_places = (ends - sizes)[known] + before * tile_rows
        return cls(weights, first_places, ends, order, tile_rows)
