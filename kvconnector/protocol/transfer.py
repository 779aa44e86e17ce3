"""Transfer: the sender's record of one request's blocks: granted, posted and complete ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kvconnector.base import BlockPush, HandoffRecord, PushTotals
from kvconnector.blocks import LayerRange, count_runs
from kvconnector.protocol.messages import Commit, Grant

MAX_ATTEMPTS = 3  # how often a block with a wrong digest is written again, at most


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a push that is posted as one write.

    Attributes:
        indices: for each of ``block_ids``, its index among the request's transferred blocks.
        watermark: how many prompt tokens, and how many transferred blocks, are complete once this
            and all earlier pieces have arrived; None: as many as before.
        is_computed: returns whether the GPU has computed the blocks by now; None: the blocks were
            computed before the push.
        attempt: how often the decode node has requested the piece's blocks again; 0: the first
            write.
    """

    indices: tuple[int, ...]
    block_ids: tuple[int, ...]
    layers: LayerRange | None = None
    watermark: tuple[int, int] | None = None
    is_computed: Callable[[], bool] | None = None
    attempt: int = 0

    def from_index(self, first: int) -> Piece:
        """Return the part of this piece from index ``first`` on; the part may be empty."""
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
class QueuedPush:
    """A push, or blocks to write again, of which a first part may have been posted.

    Attributes:
        whole: all blocks as one piece, in the order in which they are posted.
        num_posted: number of leading blocks that were posted.
    """

    whole: Piece
    num_posted: int = 0

    @classmethod
    def of(cls, push: BlockPush) -> QueuedPush:
        """Queue a push, with its blocks in order of their ids.

        Blocks that are adjacent on both nodes are then neighbours in a piece, and are written as
        one range.
        """
        order = sorted(range(len(push.block_ids)), key=push.block_ids.__getitem__)
        watermark = (push.num_tokens, push.first_block + len(push.block_ids))
        return cls(
            Piece(
                indices=tuple(push.first_block + offset for offset in order),
                block_ids=tuple(push.block_ids[offset] for offset in order),
                layers=push.layers,
                watermark=watermark if push.layers is None else None,
                is_computed=push.is_computed,
            )
        )

    @property
    def is_posted(self) -> bool:
        """Return whether all blocks were posted."""
        return self.num_posted >= len(self.whole.block_ids)

    def next_piece(self, max_blocks: int) -> Piece:
        """Return the next blocks, at most ``max_blocks``, and count them as posted."""
        whole, part = self.whole, slice(self.num_posted, self.num_posted + max_blocks)
        self.num_posted += max_blocks
        return replace(
            whole,
            indices=whole.indices[part],
            block_ids=whole.block_ids[part],
            watermark=whole.watermark if self.is_posted else None,
        )


@dataclass(slots=True)
class Transfer:
    """One attempt to hand over one request's KV: a request with one epoch.

    Attributes:
        groups: KV group of each transferred block; empty if there is only one group.
        granted: the decode node's grant; None before it comes.
        pushes: pushes with blocks that must still be posted, in order.
        writes: posted pieces that are not complete, in order.
        record: the hand-off record of the last push; None before the last push is queued.
        last_push_at: when the last push was queued.
        failure: why the transfer failed; None if it did not. A failed transfer posts nothing more.
        block_ids: this node's ids of posted blocks, by index among the transferred blocks.
        attempts: number of times that the decode node has requested layers of a block again, by the
            block's index and layers.
        commit_is_sent: whether the Commit was sent. If the decode node verifies blocks, the
            transfer stays open after the Commit.
    """

    request_id: str
    epoch: int
    engine_id: str
    num_blocks: int
    totals: PushTotals = field(default_factory=PushTotals)
    groups: Sequence[int] = ()
    granted: Grant | None = None
    pushes: deque[QueuedPush] = field(default_factory=deque)
    writes: deque[Piece] = field(default_factory=deque)
    record: HandoffRecord | None = None
    last_push_at: float = 0.0
    num_blocks_pushed: int = 0
    num_parts: int = 0  # first posts of a block's layers: one per block and range of layers
    num_bytes: int = 0
    num_descriptors: int = 0
    posting_s: float = 0.0
    failure: str | None = None
    block_ids: dict[int, int] = field(default_factory=dict)
    attempts: dict[tuple[int, LayerRange], int] = field(default_factory=dict)
    commit_is_sent: bool = False

    @property
    def can_post(self) -> bool:
        """Return whether there are blocks to post that are granted and computed."""
        if self.granted is None or self.failure is not None or not self.pushes:
            return False
        is_computed = self.pushes[0].whole.is_computed
        return is_computed is None or is_computed()

    def next_piece(self, max_blocks: int) -> Piece:
        """Return the next blocks to post, at most ``max_blocks``; call only if `can_post`."""
        push = self.pushes[0]
        piece = push.next_piece(max_blocks)
        if push.is_posted:
            self.pushes.popleft()
        return piece

    def make_commit(self, engine_id: str, transport: str, now: float) -> Commit:
        """Make the Commit message of sender ``engine_id``, after all blocks have been written."""
        assert self.record is not None
        return Commit(
            engine_id=engine_id,
            request_id=self.request_id,
            epoch=self.epoch,
            record=self.record,
            num_bytes=self.num_bytes,
            num_blocks=self.num_blocks_pushed,
            transport=transport,
            exposed_transfer_s=now - self.last_push_at,
            num_descriptors=self.num_descriptors,
            posting_s=self.posting_s,
        )

    def groups_of(self, piece: Piece) -> Sequence[int]:
        """Return the KV group of each block of a piece; empty: there is only one group."""
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
        """Count a piece that was posted to the decode node's blocks ``remote``.

        Args:
            num_ranges: number of memory ranges per block, which depends on the ranks of both nodes.
            num_layers: number of layers of a whole block.
        """
        self.block_ids.update(zip(piece.indices, piece.block_ids, strict=True))
        # The parts of neighbouring blocks are not contiguous in memory, so their ranges cannot be
        # merged.
        layers = piece.layers
        is_whole = layers in (None, (0, num_layers)) and num_ranges == 1
        num_descriptors = (
            count_runs(piece.block_ids, remote) if is_whole else num_ranges * len(remote)
        )
        # A block that is sent in ranges of layers is counted with the first range.
        num_blocks = len(remote) if layers is None or layers[0] == 0 else 0
        if piece.attempt == 0:
            self.num_blocks_pushed += num_blocks
            self.num_parts += len(remote)
        self.num_bytes += num_bytes
        self.num_descriptors += num_descriptors
        self.posting_s += posting_s
        self.totals.num_bytes += num_bytes
        self.totals.num_blocks += num_blocks
        self.totals.num_descriptors += num_descriptors
        self.totals.posting_s += posting_s

    def send_again(self, indices: list[int], layers: LayerRange, attempt: int) -> None:
        """Queue layers of blocks to be written again, because the decode node has requested them.

        Ignores repeated and late requests. Fails the transfer after too many attempts.
        """
        wanted = [i for i in dict.fromkeys(indices) if self.attempts.get((i, layers), 0) < attempt]
        if self.failure is not None or not wanted:
            return
        self.attempts.update(dict.fromkeys(((index, layers) for index in wanted), attempt))
        if attempt > MAX_ATTEMPTS or any(index not in self.block_ids for index in wanted):
            self.fail(f"digests of KV blocks were wrong after {attempt - 1} attempts")
        elif len(self.attempts) > 2 * self.num_parts:  # D also requests joined ranges
            self.fail("the decode node requested blocks again in too many ranges of layers")
        else:
            block_ids = tuple(self.block_ids[index] for index in wanted)
            again = Piece(tuple(wanted), block_ids, layers, attempt=attempt)
            self.pushes.append(QueuedPush(again))

    def fail(self, reason: str) -> None:
        """Fail the transfer, so that nothing more is posted."""
        if self.failure is None:
            self.failure = reason
            self.pushes.clear()

    @property
    def waits_for_answer(self) -> bool:
        """Return whether the sender waits for the decode node's Grant or Verified message."""
        return self.failure is None and (self.granted is None or self.commit_is_sent)

    @property
    def is_complete(self) -> bool:
        """Return whether all blocks and the hand-off record have arrived."""
        return bool(self.record and self.granted and not (self.pushes or self.writes))
