"""Fetches: cached prefixes that other nodes send to this node's prefix cache.

    received          its blocks enter the prefix cache
    lost              this node computes the prompt

A prompt waits until its fetch is received or lost. Then the engine computes the prompt, and uses
the blocks that the prefix cache has, as for every prompt. So a lost fetch costs only time.
`IncomingTransfers` has the earlier states. A fetch is also lost if its holder has no more blocks
than this node, if its bytes are wrong, or if this node lacks free blocks. A prompt waits for the
fetch of another prompt if this fetch brings at least half of the missing blocks. Refuses to know:
steps, the router.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from baton.kv.block_hash import BlockHash
from baton.kv.prefixes import share_end, transfer_name
from baton.kv.residency import SecondsHistogram
from baton.link.words import RequestCommand
from engine.core.request import Request
from engine.engine import Engine
from kvconnector.base import HandoffRecord, TransferEvent, TransferKey
from kvconnector.ends import Receiver
from node_runtime.incoming.transfers import IncomingTransfer, IncomingTransfers, TransferWords
from node_runtime.prefixes.held_prefix import groups_of
from node_runtime.prefixes.prefix_wait import PrefixWait

logger = logging.getLogger(__name__)

WORDS = TransferWords(sender="holder", granted="FETCHING")


@dataclass(slots=True)
class _Waiter:
    """A prompt that waits for a fetch."""

    request: Request
    wait: PrefixWait
    began_at: float


@dataclass(slots=True, kw_only=True)
class _Fetch(IncomingTransfer):
    """A prefix that another node sends; ``held_ids`` are its blocks that were cached at the grant.

    Attributes:
        request: the request for which the router planned the fetch.
        hashes: hashes of the blocks that this node lacked when the fetch was expected.
        last_hash: hash of the last of these blocks.
        waiters: the fetch's own prompt, unless it was cancelled, and others that need its blocks.
        num_cached: number of the prefix's logical blocks that were cached here at the grant; a
            logical block is one block in each KV group.
        num_blocks: number of all logical blocks of the prefix.
    """

    request: Request
    hashes: frozenset[BlockHash]
    last_hash: BlockHash
    waiters: list[_Waiter]
    num_cached: int = 0
    num_blocks: int = 0


@dataclass(slots=True)
class FetchCounts:
    """Counts of one node's fetches since its start.

    Attributes:
        started: number of prefixes that were expected.
        lost: number of prefixes that did not come, also because their holder was not connected.
        tokens, num_bytes: tokens and bytes of the received prefixes.
        ages: times from the last use of a received prefix's blocks until the blocks were sent.
    """

    started: int = 0
    received: int = 0
    lost: int = 0
    tokens: int = 0
    num_bytes: int = 0
    ages: SecondsHistogram = field(default_factory=SecondsHistogram)

    def by_state(self) -> dict[str, int]:
        """Return the numbers of fetches by state."""
        return {"expected": self.started, "received": self.received, "lost": self.lost}


class Fetches:
    """All prefixes that other nodes send to one node. Used on the node's thread.

    Args:
        engine: owner of the blocks; resumes prompts.
        receiver: sends grants to holders.
        timeout_s: longest time that a prompt waits for a prefix.
        clock: returns seconds, never going back.

    Attributes:
        incoming: the transfers of the prefixes.
        counts: fetches since the start.
    """

    def __init__(
        self,
        engine: Engine,
        receiver: Receiver,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._clock = engine, clock
        self._pool, self._manager = engine.block_pool, engine.kv_cache_manager
        self._timeout_s = timeout_s
        self._block_size = engine.kv_memory.spec.block_size
        self.counts = FetchCounts()
        self.incoming: IncomingTransfers[_Fetch] = IncomingTransfers(
            self, WORDS, self._pool, receiver, clock
        )
        self._side_blocks = engine.features.side_blocks
        self._side_blocks.add_holder(self._list_blocks)

    # ------------------------------------------------------------------ prompts

    def expect(
        self, request: Request, command: RequestCommand, received_at: float
    ) -> PrefixWait | None:
        """Let a new request wait for a prefix; return the wait, or None if nothing is fetched.

        Call this before the engine gets the request.
        """
        if not command.fetch_engine_id:
            return None
        key, wait = (transfer_name(request.request_id), command.epoch), PrefixWait()
        now = self._clock()
        waiter = _Waiter(request, wait, now)
        lacking = self._lacking(request, command.fetch_num_tokens)
        other = self._find_open(lacking)
        engine_id = share_end(command.fetch_engine_id)
        if other is not None:
            other.waiters.append(waiter)
            request.awaits_prefix = True
        elif lacking and self.incoming.can_come(key, engine_id):
            fetch = _Fetch(
                engine_id=engine_id,
                received_at=received_at,
                expires_at=now + self._timeout_s,
                request=request,
                hashes=frozenset(lacking),
                last_hash=lacking[-1],
                waiters=[waiter],
            )
            request.awaits_prefix = True
            self.counts.started += 1
            self.incoming.expect(key, fetch)
            return wait
        else:
            wait.is_lost = bool(lacking)
            self.counts.lost += wait.is_lost
        self.incoming.refuse(key, engine_id)
        return wait

    def _lacking(self, request: Request, num_tokens: int) -> list[BlockHash]:
        """Return the hashes of those blocks of a prefix that this node lacks and can use."""
        if request.needs_all_rows:
            return []
        # The engine computes at least the last token.
        num_blocks = min(num_tokens, request.num_initial_tokens - 1) // self._block_size
        num_cached, _ = self._manager.find_initial_prefix(request)
        return request.block_hashes[num_cached // self._block_size : num_blocks]

    def _find_open(self, lacking: Sequence[BlockHash]) -> _Fetch | None:
        """Return the open fetch that brings most of a prompt's missing blocks.

        Returns None if every open fetch brings less than half of these blocks: then the prompt's
        own fetch saves more.
        """
        fetches = self.incoming.open.values()
        if not lacking or not fetches:
            return None
        best = max(fetches, key=lambda fetch: self._num_brought(fetch, lacking))
        return best if 2 * self._num_brought(best, lacking) >= len(lacking) else None

    def _num_brought(self, fetch: _Fetch, lacking: Sequence[BlockHash]) -> int:
        """Return how many of a prompt's missing blocks a fetch brings if it is not lost."""
        if lacking[0] not in fetch.hashes:
            return 0
        if self._manager.slides:  # the fetch brings only the window at its end
            return lacking.index(fetch.last_hash) + 1 if fetch.last_hash in lacking else 0
        return sum(block_hash in fetch.hashes for block_hash in lacking)

    def cancel(self, request_id: str, epoch: int) -> None:
        """Stop waiting for a request that has ended, and expect no prefix for it."""
        key = transfer_name(request_id), epoch
        for fetch in self.incoming.open.values():
            fetch.waiters = [
                one
                for one in fetch.waiters
                if (one.request.request_id, one.request.epoch) != (request_id, epoch)
            ]
        own = self.incoming.open.get(key)
        if own is None:
            # A command or a `Start` for this request may still come; then refuse it.
            self.incoming.note_ended(key)
        elif not own.waiters:
            self._end(key, own, quiet=False)

    # ------------------------------------------------------------------ one prefix

    def start(self, key: TransferKey, fetch: _Fetch, num_tokens: int) -> None:
        """Grant blocks for the tokens that a holder has."""
        if not num_tokens:  # the holder's `Quiet` follows
            self.lose(key, fetch, "its holder has no part of the prefix", quiet=True)
            return
        manager, size = self._manager, self._block_size
        hit, num_blocks = manager.find_cached_blocks(fetch.request), num_tokens // size
        num_cached = len(hit) // manager.num_groups
        most = (fetch.request.num_initial_tokens - 1) // size
        if num_tokens % size or not num_cached < num_blocks <= most:
            self.lose(key, fetch, f"its holder's {num_tokens} tokens are of no use here")
            return
        places = manager.handoff_places(num_tokens)
        first = bisect.bisect_left(places, len(hit))
        held, num_new = [hit[place] for place in places[:first]], len(places) - first
        # The cached blocks of this prompt count only for later transfers: otherwise, a prompt whose
        # cached beginning has half of all blocks could fetch nothing.
        has_room = num_new <= self._side_blocks.num_left
        self._pool.touch(held)
        blocks = self._pool.allocate(num_new, extents=True) if has_room else None
        if blocks is None:
            self._pool.release(reversed(held))
            self.lose(key, fetch, "too few blocks are free")
            return
        fetch.held_ids, fetch.num_cached, fetch.num_blocks = tuple(held), num_cached, num_blocks
        self.incoming.grant(key, fetch, blocks, first, groups_of(manager, places))

    def _list_blocks(self) -> Iterator[int]:
        """Yield the blocks that open fetches hold, and blocks that other nodes may still write."""
        for fetch in self.incoming.open.values():
            yield from fetch.held_ids
            yield from fetch.block_ids
        yield from self.incoming.quarantine.list_blocks()

    def receive(self, key: TransferKey, fetch: _Fetch, event: TransferEvent) -> None:
        """Cache a prefix whose bytes are complete."""
        record, hashes = event.record, fetch.request.block_hashes[: fetch.num_blocks]
        num_tokens = fetch.num_blocks * self._block_size
        wanted = num_tokens, hashes[-1:]
        found = None if record is None else (record.num_tokens, [_hash_of(record)])
        if record is None or not fetch.block_ids or found != wanted:
            self.lose(key, fetch, "its commit record does not fit", quiet=True)
            return
        self._cache(fetch, hashes)
        num_tokens -= fetch.num_cached * self._block_size
        self.counts.received += 1
        self.counts.tokens += num_tokens
        self.counts.ages.note_many(record.idle_ms / 1e3, num_tokens // self._block_size)
        self.counts.num_bytes += event.receipt.num_bytes if event.receipt else 0
        for waiter in fetch.waiters:
            if waiter.request is fetch.request:
                waiter.wait.num_tokens = num_tokens
        self._end(key, fetch, quiet=True)

    def _cache(self, fetch: _Fetch, hashes: Sequence[BlockHash]) -> None:
        """Enter the fetched blocks of all groups into the prefix cache."""
        coordinator, num_groups = self._manager.coordinator, self._manager.num_groups
        # Blocks that slid out of a window were not sent; the null block stands for them.
        blocks = [coordinator.null_block or 0] * (fetch.num_blocks * num_groups)
        places = self._manager.handoff_places(fetch.num_blocks * self._block_size)
        for place, block_id in zip(places, (*fetch.held_ids, *fetch.block_ids), strict=True):
            blocks[place] = block_id
        coordinator.cache(blocks, hashes, fetch.num_cached, fetch.num_blocks)

    def lose(self, key: TransferKey, fetch: _Fetch, why: str, *, quiet: bool = False) -> None:
        """Give up a prefix; this node then computes its blocks for all waiting prompts."""
        logger.debug("a prefix of %s is lost: %s", fetch.engine_id, why)
        self.counts.lost += 1
        for waiter in fetch.waiters:
            waiter.wait.is_lost = waiter.request is fetch.request
        self._end(key, fetch, quiet=quiet)

    def _end(self, key: TransferKey, fetch: _Fetch, *, quiet: bool) -> None:
        """End a fetch and resume its prompts; see `IncomingTransfers.end`."""
        self.incoming.end(key, fetch, quiet=quiet)
        for waiter in fetch.waiters:
            waiter.wait.waited_s = self._clock() - waiter.began_at
            self._engine.features.end_fetch(waiter.request)


def _hash_of(record: HandoffRecord) -> bytes:
    """Return the hash that identifies a record's prefix; empty if the record has none."""
    try:
        return bytes.fromhex(record.prefix)
    except ValueError:  # peers are not trusted
        return b""
