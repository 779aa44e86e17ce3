"""Positions on three axes (M-RoPE): frame, row and column. Text tokens have three equal positions.

    tokens     a  b [image of 2 x 3 embeddings]  c  d
    frames     0  1    2  2  2  2  2  2          5  6
    rows       0  1    2  2  2  3  3  3          5  6
    columns    0  1    2  3  4  2  3  4          5  6       the delta is 5 - 8 = -3

An image takes only as many positions as its longest side, so the positions for RoPE of later tokens
are smaller than their indices in the sequence. After the last image, the difference (delta) is
constant. Source: Qwen2-VL (arXiv 2409.12191); equal to `get_rope_index` of transformers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from baton.api.images import ImageSpan
from engine.core.step_plan import NewRow
from engine.worker.inputs.step_columns import Ints


def position_delta(spans: Sequence[ImageSpan]) -> int:
    """Return the RoPE position of a token after all images, minus its index in the sequence."""
    return sum(max(span.grid) - span.num_tokens for span in spans)


def three_axis_positions(num_tokens: int, spans: Sequence[ImageSpan]) -> Ints:
    """Return the positions for RoPE of all tokens of a sequence, ``[3, num_tokens]``.

    Args:
        spans: the sequence's images in order; each has as many tokens as its grid has cells.
    """
    positions = np.tile(np.arange(num_tokens), (3, 1))
    delta = 0
    for span in spans:
        cells = np.indices(span.grid).reshape(3, -1)  # [3, frames * rows * columns]
        positions[:, span.first : span.end] = span.first + delta + cells
        delta += max(span.grid) - span.num_tokens
        positions[:, span.end :] = np.arange(span.end, num_tokens) + delta
    return positions


class RotaryPositions:
    """The positions for RoPE of the requests in an input batch, by row.

    Args:
        num_rows: maximum number of requests in a step.

    Attributes:
        deltas: `[num_rows]`, RoPE position minus index of tokens after all images; 0: no images.
        is_active: whether any row has images.
    """

    def __init__(self, num_rows: int) -> None:
        self.deltas = np.zeros(num_rows, dtype=np.int64)
        self.is_active = False
        self._axes: dict[int, Ints] = {}  # for each row: [3, tokens up to the last image's end]

    def place(self, new: NewRow) -> None:
        """Assign a row to a new request."""
        row = new.row
        self._axes.pop(row, None)
        self.deltas[row] = position_delta(new.images)
        if new.images:
            self._axes[row] = three_axis_positions(new.images[-1].end, new.images)
        self.is_active = bool(self._axes)

    def rotate(self, token_rows: Ints, positions: Ints) -> Ints:
        """Return the positions for RoPE of a step's tokens.

        The result is ``[3, num_tokens]`` if the step has tokens of images. Otherwise the result is
        ``[num_tokens]``, because each token's three positions are equal.

        Args:
            token_rows: `[num_tokens]`, row of each token.
            positions: `[num_tokens]`, index of each token in its sequence.
        """
        shifted = positions + self.deltas[token_rows]
        on_axes: Ints | None = None
        for row, axes in self._axes.items():
            within = (token_rows == row) & (positions < axes.shape[1])
            if within.any():
                on_axes = np.tile(shifted, (3, 1)) if on_axes is None else on_axes
                on_axes[:, within] = axes[:, positions[within]]
        return shifted if on_axes is None else on_axes
