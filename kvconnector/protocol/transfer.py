"""Transfer: one request's way to its decode node, as the sender sees it: what is computed, what is
posted, what is complete."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from baton.telemetry.node_metrics import ConnectorMetrics
from kvconnector.base import BlockPush, HandoffRecord
from kvconnector.blocks import LayerRange, count_runs
from kvconnector.protocol.messages import Commit, Grant

MAX_ATTEMPTS = 3  # at writing again what arrived wrong


@dataclass(frozen=True, slots=True)
class Portions:
    """How much is posted at once, by the memory it lies in.

    Attributes:
        write_bytes: of one write at most, so that aborts and other requests never wait for much.
        in_flight_bytes: to one peer. It is refilled once a round of the I/O thread, so that it
            limits what a path can carry.
    """

    write_bytes: int
    in_flight_bytes: int


# A round is some 0.2 ms: 160 GB/s, and 1.3 TB/s, as memory of one GPU and NVLink are quick.
HOST_PORTIONS = Portions(write_bytes=8 * 2**20, in_flight_bytes=32 * 2**20)
DEVICE_PORTIONS = Portions(write_bytes=32 * 2**20, in_flight_bytes=256 * 2**20)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a push that is posted as one write.

    Attributes:
        indices: places, among the request's blocks that travel, of ``block_ids``.
        watermark: prompt tokens, and blocks that travel, that are complete once this and all before
            it has arrived.
        attempt: how often the decode node has asked for it again.
    """

    indices: tuple[int, ...]
    block_ids: tuple[int, ...]
    layers: LayerRange | None = None
    watermark: tuple[int, int] | None = None
    is_computed: Callable[[], bool] | None = None
    attempt: int = 0

    def from_place(self, first: int) -> Piece:
        """What of it lies at ``first`` or behind; maybe nothing."""
        if all(index >= first for index in self.indices):
            return self
        pairs = zip(self.indices, self.block_ids, strict=True)
        left = [(index, block_id) for index, block_id in pairs if index >= first]
        return replace(
            self,
            indices=tuple(index for index, _ in left),
            block_ids=tuple(block_id for _, block_id in left),
        )


@dataclass(slots=True)
class PushTotals:
    """What one sender has posted since it was made; for the metrics."""

    num_bytes: int = 0
    num_blocks: int = 0
    num_descriptors: int = 0
    posting_s: float = 0.0

    def add_to(self, metrics: ConnectorMetrics) -> ConnectorMetrics:
        return replace(
            metrics,
            sent_bytes=self.num_bytes,
            sent_blocks=self.num_blocks,
            descriptors=self.num_descriptors,
            posting_s=self.posting_s,
        )


@dataclass(slots=True)
class Transfer:
    """One attempt at one request.

    Attributes:
        groups: of each block that travels, its KV group; empty: there is one.
        granted: which blocks travel, and into which of the decode node's; once it has said so.
        pieces: not yet posted, in order.
        writes: posted and not yet complete, in order.
        record: what the last push brought.
        last_at: when that came.
        failure: why it ends; nothing is posted any more.
        block_ids: this node's, by their places among those that travel; of what was posted.
        attempts: how often places were asked for again, by place and layers.
        commit_is_sent: it may go on then, until the decode node has verified all of it.
    """

    request_id: str
    epoch: int
    engine_id: str
    num_blocks: int
    totals: PushTotals = field(default_factory=PushTotals)
    groups: Sequence[int] = ()
    granted: Grant | None = None
    pieces: deque[Piece] = field(default_factory=deque)
    writes: deque[Piece] = field(default_factory=deque)
    record: HandoffRecord | None = None
    last_at: float = 0.0
    num_blocks_pushed: int = 0
    num_bytes: int = 0
    num_descriptors: int = 0
    posting_s: float = 0.0
    failure: str | None = None
    block_ids: dict[int, int] = field(default_factory=dict)
    attempts: dict[tuple[int, LayerRange], int] = field(default_factory=dict)
    commit_is_sent: bool = False

    @property
    def can_post(self) -> bool:
        """Whether the next piece is granted and computed."""
        if self.granted is None or self.failure is not None or not self.pieces:
            return False
        is_computed = self.pieces[0].is_computed
        return is_computed is None or is_computed()

    def commit_record(self, engine_id: str, transport: str, now: float) -> Commit:
        """What the decode node goes on from, of the node ``engine_id``; once all is written."""
        assert self.record is not None
        return Commit(
            engine_id=engine_id,
            request_id=self.request_id,
            epoch=self.epoch,
            record=self.record,
            num_bytes=self.num_bytes,
            num_blocks=self.num_blocks_pushed,
            transport=transport,
            exposed_transfer_s=now - self.last_at,
            num_descriptors=self.num_descriptors,
            posting_s=self.posting_s,
        )

    def groups_of(self, piece: Piece) -> Sequence[int]:
        """Of each of its blocks, its KV group; empty: there is one."""
        return [self.groups[index] for index in piece.indices] if self.groups else ()

    def note_post(
        self,
        piece: Piece,
        remote: Sequence[int],
        num_bytes: int,
        posting_s: float,
        num_ranges: int = 1,
        num_layers: int = 0,
    ) -> None:
        """Count a piece that was posted, in that time, to the decode node's blocks ``remote``.

        Args:
            num_ranges: that each of its blocks was cut into, for the ranks of both nodes.
            num_layers: that blocks can be cut into.
        """
        self.block_ids.update(zip(piece.indices, piece.block_ids, strict=True))
        # Layers of neighbouring blocks do not adjoin.
        layers = piece.layers
        is_whole = layers in (None, (0, num_layers)) and num_ranges == 1
        num_descriptors = (
            count_runs(piece.block_ids, remote) if is_whole else num_ranges * len(remote)
        )
        # A block that travels in parts counts once, with its first.
        num_blocks = len(remote) if layers is None or layers[0] == 0 else 0
        if piece.attempt == 0:
            self.num_blocks_pushed += num_blocks
        self.num_bytes += num_bytes
        self.num_descriptors += num_descriptors
        self.posting_s += posting_s
        self.totals.num_bytes += num_bytes
        self.totals.num_blocks += num_blocks
        self.totals.num_descriptors += num_descriptors
        self.totals.posting_s += posting_s

    def send_again(self, indices: list[int], layers: LayerRange, attempt: int) -> None:
        """Write these once more; a doubled or late wish is granted once.

        Fails the transfer when it was in vain too often.
        """
        wanted = [i for i in indices if self.attempts.get((i, layers), 0) < attempt]
        if self.failure is not None or not wanted:
            return
        if attempt > MAX_ATTEMPTS or any(index not in self.block_ids for index in wanted):
            self.fail(f"digests of KV blocks were wrong after {attempt - 1} attempts")
            return
        self.attempts.update(dict.fromkeys(((index, layers) for index in wanted), attempt))
        block_ids = tuple(self.block_ids[index] for index in wanted)
        self.pieces.append(Piece(tuple(wanted), block_ids, layers, attempt=attempt))

    def fail(self, reason: str) -> None:
        """Post nothing more."""
        if self.failure is None:
            self.failure = reason
            self.pieces.clear()

    @property
    def waits_for_answer(self) -> bool:
        """Whether the decode node must speak next, or after what is in flight now."""
        return self.failure is None and (self.granted is None or self.commit_is_sent)

    @property
    def is_complete(self) -> bool:
        """Whether all there ever will be has arrived."""
        return bool(
            self.record and self.granted is not None and not self.pieces and not self.writes
        )


def cut(push: BlockPush, max_blocks: int) -> list[Piece]:
    """A push in pieces of at most ``max_blocks`` blocks.

    In the order of this node's block ids: neighbours that adjoin on both sides are then next to
    each other, whatever order the request has them in, and travel as one range.
    """
    order = sorted(range(len(push.block_ids)), key=push.block_ids.__getitem__)
    pieces = []
    watermark = (push.num_tokens, push.first_block + len(push.block_ids))
    for start in range(0, len(order), max_blocks):
        part = order[start : start + max_blocks]
        is_last = start + max_blocks >= len(order)
        pieces.append(
            Piece(
                indices=tuple(push.first_block + offset for offset in part),
                block_ids=tuple(push.block_ids[offset] for offset in part),
                layers=push.layers,
                watermark=watermark if is_last and push.layers is None else None,
                is_computed=push.is_computed,
            )
        )
    return pieces
