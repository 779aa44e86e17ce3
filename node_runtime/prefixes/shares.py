"""Shares: cached prefixes that this node sends to other nodes.

    ShareCommand -> blocks found and held -> Start -> (granted) written -> Commit -> released
                        `---- nothing can be sent: a transfer that fails at once ----^

The node that receives a prefix is its reader. This node holds a reference to each block that it
sends, so that the prefix cache cannot evict the block. If a prompt is cancelled, the reader decides
whether the transfer ends, because other prompts of the reader may wait for the same prefix. Refuses
to know: who computes the rest of the prompt.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from baton.kv.block_hash import extra_keys_of
from baton.kv.prefixes import fetch_end, transfer_name
from baton.link.words import AbortAll, ShareCommand
from baton.telemetry.ledger import BlockHolding, BlockOwner
from engine.core.block_pool import BlockPool
from engine.engine import Engine
from kvconnector.base import (
    BlockPush,
    HandoffMetrics,
    HandoffRecord,
    TransferEvent,
    TransferEventKind,
    TransferKey,
    TransferOutcome,
)
from kvconnector.ends import Sender
from kvconnector.peer_info import PeerInfo
from node_runtime.inbox import Outbox, SideWork
from node_runtime.prefixes.held_prefix import NOTHING_HELD, find_prefix

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Share:
    """A prefix that is being sent.

    Attributes:
        num_tokens: tokens of the prefix; 0: nothing is sent.
        block_ids: this node's blocks with the prefix.
        is_ending: whether this node has asked its sender to end the transfer.
    """

    command: ShareCommand
    received_at: float
    num_tokens: int
    block_ids: tuple[int, ...]
    is_ending: bool = False


class Shares(SideWork):
    """The cached prefixes that one node sends. Used on the node's thread.

    Args:
        engine: owner of the blocks.
        sender: sends blocks to readers.
        clock: returns seconds, never going back.

    Attributes:
        num_tokens_total: number of tokens of all prefixes that were sent completely.
        ended: number of ended transfers by outcome.
    """

    def __init__(
        self, engine: Engine, sender: Sender, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine, self._sender, self._clock = engine, sender, clock
        self._open: dict[TransferKey, _Share] = {}
        engine.features.side_blocks.add_holder(self._list_blocks)
        self.num_tokens_total = 0
        self.ended: Counter[TransferOutcome] = Counter()

    # ------------------------------------------------------------------ peers

    def add_peer(self, peer: PeerInfo) -> bool:
        """Connect to the end at which another node receives prefixes."""
        self._sender.connect(peer)
        return True

    def lose_peer(self, engine_id: str) -> None:
        """Disconnect a departed node; its transfers fail."""
        self._sender.disconnect(fetch_end(engine_id))

    # ------------------------------------------------------------------ commands

    def share_prefix(self, command: ShareCommand, received_at: float) -> None:
        """Send the longest cached part of a prefix; send nothing if transfers hold too many blocks.

        Do nothing if a transfer with this command's request and epoch is open.
        """
        key = transfer_name(command.request_id), command.epoch
        if key in self._open:
            return
        found = find_prefix(
            self._engine.kv_cache_manager,
            command.prompt_token_ids,
            extra_keys_of(command.cache_salt, command.adapter),
            [image.span for image in command.images],
        )
        pool = self._engine.block_pool
        if pool.num_free_among(found.block_ids) > self._engine.features.side_blocks.num_left:
            found = NOTHING_HELD
        idle_s = _touch(pool, found.block_ids)
        self._open[key] = _Share(command, received_at, found.num_tokens, found.block_ids)
        self._sender.start(
            *key,
            fetch_end(command.reader_engine_id),
            num_tokens=found.num_tokens,
            num_blocks=len(found.block_ids),
            groups=found.groups,
        )
        if not found.num_tokens:
            self._end(key, "nothing is cached, or transfers hold too many blocks")
            return
        record = HandoffRecord(
            num_tokens=found.num_tokens,
            token_id=0,
            prefix=found.last_hash.hex(),
            idle_ms=round(1000 * idle_s),
        )
        self._sender.push(
            BlockPush(
                request_id=key[0],
                epoch=key[1],
                first_block=0,
                block_ids=found.block_ids,
                num_tokens=found.num_tokens,
                record=record,
            )
        )

    def _list_blocks(self) -> Iterator[int]:
        """Yield the blocks of each prefix that is being sent."""
        for share in self._open.values():
            yield from share.block_ids

    def abort(self, abort: AbortAll) -> None:
        """Stop sending the prefixes that an abort message concerns."""
        for key, share in list(self._open.items()):
            if abort.concerns(share.command.request_id):
                self._end(key, "its router is gone")

    def _end(self, key: TransferKey, reason: str) -> None:
        """Ask the sender to end a transfer; `step` frees its blocks once no write is in flight."""
        self._open[key].is_ending = True
        self._sender.abort(*key, reason)

    def step(self, outbox: Outbox) -> None:
        """Release the blocks of ended transfers; report peers that have connected or failed."""
        for event in self._sender.poll():
            if event.kind in (TransferEventKind.PEER_CONNECTED, TransferEventKind.PEER_FAILED):
                outbox.report_peer(event)
            else:
                self._settle(event)
        self._expire()

    def _settle(self, event: TransferEvent) -> None:
        share = self._open.pop((event.request_id, event.epoch), None)
        if share is None:
            return
        self._engine.block_pool.release(reversed(share.block_ids))
        self.ended[event.outcome] += 1
        if event.kind is TransferEventKind.COMMITTED:
            self.num_tokens_total += share.num_tokens
        elif event.reason:
            logger.debug("a prefix was not sent to %s: %s", event.engine_id, event.reason)

    def _expire(self) -> None:
        now = self._clock()
        for key, share in self._open.items():
            if not share.is_ending and now - share.received_at > share.command.timeout_s:
                self._end(key, "deadline passed")

    # ------------------------------------------------------------------ what operators see

    @property
    def num_transfers(self) -> int:
        """Number of prefixes that are being sent."""
        return len(self._open)

    def held(self) -> list[BlockHolding]:
        """Return the blocks that are being sent, for the ledger."""
        now = self._clock()
        return [
            BlockHolding(
                owner=BlockOwner.DRAINING if share.is_ending else BlockOwner.PUSH,
                block_ids=share.block_ids,
                request_id=key[0],
                epoch=key[1],
                state="SHARING",
                peer=share.command.reader_engine_id,
                age_s=now - share.received_at,
            )
            for key, share in self._open.items()
            if share.block_ids
        ]

    def add_metrics(self, metrics: HandoffMetrics) -> HandoffMetrics:
        """Return a copy of metrics with the counts of sent prefixes added; thread-safe."""
        return dataclasses.replace(
            metrics, fetches_open=self.num_transfers, shared_tokens=self.num_tokens_total
        )


def _touch(pool: BlockPool, block_ids: Sequence[int]) -> float:
    """Take a reference on each cached block; return the mean seconds since the blocks' last use."""
    gaps = pool.residency.reuse_gap
    before_s = gaps.sum_s
    pool.touch(block_ids)
    return (gaps.sum_s - before_s) / max(len(block_ids), 1)
