"""Transfer: one request's way to its decode node, as the sender sees it: what is computed, what is
posted, what is complete. Touches no transport; all of it lives on the I/O thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvconnector.base import BlockPush, PendingWrite
from kvconnector.layout import LayerRange


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a push that is posted as one write.

    Attributes:
        indices: places, among the request's blocks that travel, of ``block_ids``.
        watermark: prompt tokens that are complete once this and all before it has arrived.
    """

    indices: tuple[int, ...]
    block_ids: tuple[int, ...]
    layers: LayerRange | None = None
    watermark: int | None = None
    is_computed: Callable[[], bool] | None = None


@dataclass(slots=True)
class Write:
    """A posted piece."""

    pending: PendingWrite
    piece: Piece
    num_bytes: int


@dataclass(slots=True)
class Transfer:
    """One attempt at one request.

    Attributes:
        granted: the decode node's blocks, once it has granted them.
        pieces: not yet posted, in order.
        writes: posted and not yet complete, in order.
        last: the push that brought token 1.
        failure: why it ends; nothing is posted any more.
    """

    request_id: str
    epoch: int
    engine_id: str
    num_blocks: int
    granted: list[int] | None = None
    pieces: deque[Piece] = field(default_factory=deque)
    writes: deque[Write] = field(default_factory=deque)
    last: BlockPush | None = None
    last_at: float = 0.0
    num_blocks_pushed: int = 0
    num_bytes: int = 0
    num_descriptors: int = 0
    posting_s: float = 0.0
    failure: str | None = None

    @property
    def can_post(self) -> bool:
        """Whether the next piece is granted and computed."""
        if self.granted is None or self.failure is not None or not self.pieces:
            return False
        is_computed = self.pieces[0].is_computed
        return is_computed is None or is_computed()

    @property
    def is_complete(self) -> bool:
        """Whether all there ever will be has arrived."""
        return bool(self.last and self.granted is not None and not self.pieces and not self.writes)


def cut(push: BlockPush, max_blocks: int) -> list[Piece]:
    """A push in pieces of at most ``max_blocks`` blocks.

    In the order of this node's block ids: neighbours that adjoin on both sides are then next to
    each other, whatever order the request has them in, and travel as one range.
    """
    order = sorted(range(len(push.block_ids)), key=push.block_ids.__getitem__)
    pieces = []
    for start in range(0, len(order), max_blocks):
        part = order[start : start + max_blocks]
        is_last = start + max_blocks >= len(order)
        pieces.append(
            Piece(
                indices=tuple(push.first_block + offset for offset in part),
                block_ids=tuple(push.block_ids[offset] for offset in part),
                layers=push.layers,
                watermark=push.num_tokens if is_last and push.layers is None else None,
                is_computed=push.is_computed,
            )
        )
    return pieces
