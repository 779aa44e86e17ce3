"""Fetches: cached prefixes that other nodes send to this node's prefix cache.

    EXPECTED -> STARTED, GRANTED -> received    its blocks enter the prefix cache
        `----------`--------------> lost        this node computes the prompt

A prompt waits until its fetch is received or lost, and then goes on as every prompt does: the
engine finds in the prefix cache what is there. So a lost fetch costs only time. A fetch is lost if
its holder has nothing more than this node, refuses, dies, is silent or takes too long, if its bytes
are wrong, or if this node lacks free blocks. Blocks that the holder may still write go into
quarantine. A prompt whose next missing block another fetch brings waits for that fetch. Refuses to
know: steps, the router.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.kv.block_hash import BlockHash
from baton.kv.prefixes import fetch_end, node_of, transfer_name
from baton.link.words import PrefillCommand
from baton.telemetry.ledger import BlockHolding, BlockOwner
from engine.core.request import Request
from engine.engine import Engine
from kvconnector.base import (
    HandoffRecord,
    KVReservation,
    TransferEvent,
    TransferEventKind,
    TransferKey,
)
from kvconnector.ends import Receiver
from kvconnector.peer_info import PeerInfo
from node_runtime.quarantine import Quarantine

logger = logging.getLogger(__name__)

# How long to remember an ended fetch, and a `Start` that came before its `PrefillCommand`.
MEMORY_S = 60.0
MAX_EARLY_STARTS = 10_000  # for these, a `PrefillCommand` may never come
TICK_S = 0.1
# Most of the cache's blocks that fetches and their quarantine may hold together.
MAX_SHARE = 0.5


@dataclass(slots=True)
class PrefixWait:
    """The wait of one prompt, for its receipt.

    Attributes:
        num_tokens: tokens that the prompt's own fetch brought.
        is_lost: whether the prompt's own fetch was lost.
        waited_s: seconds from the start of the wait until the prompt went on; 0 before.
    """

    num_tokens: int = 0
    is_lost: bool = False
    waited_s: float = 0.0


@dataclass(slots=True)
class _Waiter:
    """A prompt that waits for a fetch."""

    request: Request
    wait: PrefixWait
    began_at: float


@dataclass(slots=True)
class _Fetch:
    """One prefix on its way here.

    Attributes:
        engine_id: the holder's end for prefixes.
        hashes: hashes of the blocks that this node lacked when the fetch was expected.
        held_ids: blocks of the prefix that were cached here at the grant; the fetch holds them.
        block_ids: blocks that the holder may write; empty before the grant.
        parent: hash of the block before ``block_ids``; None: there is none.
        granted_hashes: hashes of ``block_ids``.
        waiters: the prompt of the fetch, unless it was cancelled, and others that need its blocks.
    """

    request_id: str
    engine_id: str
    request: Request
    hashes: list[BlockHash]
    received_at: float
    expires_at: float
    started: bool = False
    held_ids: tuple[int, ...] = ()
    block_ids: tuple[int, ...] = ()
    parent: BlockHash | None = None
    granted_hashes: tuple[BlockHash, ...] = ()
    waiters: list[_Waiter] = field(default_factory=list)

    @property
    def state(self) -> str:
        """Name of the state, for operators."""
        return "FETCHING" if self.block_ids else "EXPECTED"


@dataclass(slots=True)
class FetchCounts:
    """Counts of one node's fetches since its start."""

    started: int = 0
    received: int = 0
    lost: int = 0
    tokens: int = 0
    num_bytes: int = 0

    def by_state(self) -> dict[str, int]:
        """Return the numbers of fetches, by what became of them."""
        return {"expected": self.started, "received": self.received, "lost": self.lost}


class Fetches:
    """All prefixes that are to arrive at one node. Used on the node's thread.

    Args:
        engine: owner of the blocks; goes on with prompts.
        receiver: sends grants to holders.
        timeout_s: longest time that a prompt waits for a prefix.
        clock: returns seconds, never going back.

    Attributes:
        quarantine: blocks that holders may still write after a fetch's end.
        counts: fetches since the start.
    """

    def __init__(
        self,
        engine: Engine,
        receiver: Receiver,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._receiver, self._clock = engine, receiver, clock
        self._pool, self._manager = engine.block_pool, engine.kv_cache_manager
        self._timeout_s = timeout_s
        self._block_size = engine.kv_memory.spec.block_size
        self.quarantine = Quarantine(self._pool, receiver, clock)
        self.counts = FetchCounts()
        self._connected: set[str] = set()  # ends of holders
        self._open: dict[TransferKey, _Fetch] = {}
        self._coming: dict[BlockHash, TransferKey] = {}  # missing blocks, and what brings them
        self._early_starts: dict[tuple[TransferKey, str], tuple[float, int]] = {}
        self._ended: dict[TransferKey, float] = {}  # tombstones: when each ended, for late `Start`
        self._tick_at = 0.0

    # ------------------------------------------------------------------ prompts

    def expect(
        self, request: Request, command: PrefillCommand, received_at: float
    ) -> PrefixWait | None:
        """Let a new request wait for a prefix; None: nothing is fetched for the request.

        Call this before the engine gets the request.
        """
        if not command.fetch_engine_id:
            return None
        key, wait = (transfer_name(request.request_id), command.epoch), PrefixWait()
        now = self._clock()
        waiter = _Waiter(request, wait, now)
        lacking = self._lacking(request, command.fetch_num_tokens)
        brings = self._open.get(self._coming[lacking[0]]) if self._is_coming(lacking) else None
        engine_id = fetch_end(command.fetch_engine_id)
        if brings is not None:
            brings.waiters.append(waiter)
            request.awaits_prefix = True
        elif lacking and engine_id in self._connected:
            fetch = _Fetch(
                *(request.request_id, engine_id, request, lacking, received_at),
                expires_at=now + self._timeout_s,
                waiters=[waiter],
            )
            self._open[key] = fetch
            self._coming.update(dict.fromkeys(lacking, key))
            request.awaits_prefix = True
            self.counts.started += 1
            early = self._early_starts.pop((key, engine_id), None)
            if early is not None:
                self._start(key, fetch, early[1])
            return wait
        else:
            wait.is_lost = bool(lacking)
            self.counts.lost += wait.is_lost
        # The holder's `Start` is not needed, whether it has come or comes later.
        self._ended[key] = now
        if self._early_starts.pop((key, engine_id), None) is not None:
            self._receiver.cancel(*key, engine_id)
        return wait

    def _lacking(self, request: Request, num_tokens: int) -> list[BlockHash]:
        """Return the hashes of the blocks of a prefix that this node must get."""
        if request.needs_all_rows:
            return []
        # The engine computes at least the last token.
        num_blocks = min(num_tokens, request.num_initial_tokens - 1) // self._block_size
        num_cached, _ = self._manager.find_initial_prefix(request)
        return request.block_hashes[num_cached // self._block_size : num_blocks]

    def _is_coming(self, lacking: Sequence[BlockHash]) -> bool:
        return bool(lacking) and lacking[0] in self._coming

    def cancel(self, request_id: str, epoch: int) -> None:
        """Let a request that has ended wait no more, and expect no prefix for it."""
        key = transfer_name(request_id), epoch
        for fetch in self._open.values():
            fetch.waiters = [
                one
                for one in fetch.waiters
                if (one.request.request_id, one.request.epoch) != (request_id, epoch)
            ]
        own = self._open.get(key)
        if own is None:
            # The command may never come, and the holder's `Start` is not needed.
            self._ended.setdefault(key, self._clock())
        elif not own.waiters:
            self._end(key, own, quiet=False)

    # ------------------------------------------------------------------ holders

    def add_peer(self, peer: PeerInfo) -> None:
        """Connect the end of a holder that joined, or joined again."""
        self.quarantine.meet(peer)
        self._receiver.connect(peer)

    def lose_peer(self, engine_id: str) -> None:
        """Give up the fetches from a holder that the router has lost.

        The node may be alive: it stays connected until it sends `Quiet`, or is known to be dead.
        """
        end = fetch_end(engine_id)
        self._connected.discard(end)
        self.quarantine.lose(end)
        self._lose_all(end, "its holder is gone")

    def step(self) -> list[TransferEvent]:
        """Handle what has happened; return the events that concern peers."""
        of_peers = []
        for event in self._receiver.poll():
            match event.kind:
                case TransferEventKind.PEER_CONNECTED:
                    self._connected.add(event.engine_id)
                    of_peers.append(event)
                case TransferEventKind.PEER_FAILED:
                    self._connected.discard(event.engine_id)
                    self._lose_all(event.engine_id, "its holder cannot be reached")
                    of_peers.append(event)
                case TransferEventKind.PEER_DRAINED:
                    self.quarantine.end_drained(event.engine_id)
                case _:
                    self._settle(event)
        self._tick()
        self._receiver.expect(bool(self._open or self.quarantine))
        return of_peers

    def _settle(self, event: TransferEvent) -> None:
        key = (event.request_id, event.epoch)
        fetch = self._open.get(key)
        if fetch is None or fetch.engine_id != event.engine_id:
            self._settle_ended(key, event)
            return
        match event.kind:
            case TransferEventKind.STARTED:
                self._start(key, fetch, event.num_tokens)
            case TransferEventKind.COMMITTED:
                num_bytes = event.receipt.num_bytes if event.receipt else 0
                self._receive(key, fetch, event.record, num_bytes)
            case TransferEventKind.FAILED:
                self._lose(key, fetch, event.reason or "it was cancelled", quiet=True)
            case _:  # a watermark
                pass

    def _settle_ended(self, key: TransferKey, event: TransferEvent) -> None:
        """Apply an event of a fetch that has ended here, or whose command has not come yet."""
        match event.kind:
            case TransferEventKind.COMMITTED | TransferEventKind.FAILED:
                self.quarantine.free(key, event.engine_id)
                self._remember_early(key, event.engine_id, 0)
            case TransferEventKind.STARTED if key in self._ended:
                self._receiver.cancel(*key, event.engine_id)
            case TransferEventKind.STARTED:
                self._remember_early(key, event.engine_id, event.num_tokens)
            case _:
                pass

    def _remember_early(self, key: TransferKey, engine_id: str, num_tokens: int) -> None:
        """Keep what a holder said before the `PrefillCommand` came.

        Args:
            num_tokens: tokens that the holder has; 0: the holder sends nothing.
        """
        # The table is in the order of time, so a new entry must not keep an old place.
        self._early_starts.pop((key, engine_id), None)
        if key in self._ended:
            return
        self._early_starts[key, engine_id] = self._clock(), num_tokens
        if len(self._early_starts) > MAX_EARLY_STARTS:
            del self._early_starts[next(iter(self._early_starts))]

    # ------------------------------------------------------------------ one prefix

    def _start(self, key: TransferKey, fetch: _Fetch, num_tokens: int) -> None:
        """Grant blocks for what a holder has, once; a `Start` may come several times."""
        if fetch.started:
            return
        fetch.started = True
        if not num_tokens:  # the holder has nothing, and its `Quiet` follows
            self._lose(key, fetch, "its holder has nothing of it", quiet=True)
            return
        request, size = fetch.request, self._block_size
        num_blocks = num_tokens // size
        cached = self._manager.find_cached_blocks(request)[:num_blocks]
        most = (request.num_initial_tokens - 1) // size
        if num_tokens % size or num_blocks > most or num_blocks <= len(cached):
            self._lose(key, fetch, f"its holder has {num_tokens} tokens, useless here")
            return
        self._pool.touch(cached)
        num_new = num_blocks - len(cached)
        blocks = self._pool.allocate(num_new, extents=True) if self._has_room(num_new) else None
        if blocks is None:
            self._pool.release(reversed(cached))
            self._lose(key, fetch, "too few blocks are free")
            return
        fetch.held_ids, fetch.block_ids = tuple(cached), tuple(blocks)
        hashes, first = request.block_hashes, len(cached)
        fetch.parent = hashes[first - 1] if first else None
        fetch.granted_hashes = tuple(hashes[first:num_blocks])
        self._receiver.grant(
            KVReservation(
                request_id=key[0],
                epoch=key[1],
                engine_id=fetch.engine_id,
                block_ids=fetch.block_ids,
                first_block=first,
            )
        )

    def _has_room(self, num_blocks: int) -> bool:
        """Return whether fetches may hold more blocks, without taking those that run need."""
        held = sum(len(fetch.block_ids) for fetch in self._open.values())
        most = int(self._pool.num_blocks * MAX_SHARE)
        return held + self.quarantine.num_blocks + num_blocks <= most

    def _receive(
        self, key: TransferKey, fetch: _Fetch, record: HandoffRecord | None, num_bytes: int
    ) -> None:
        """Enter a prefix whose bytes are complete into the cache; the holder writes no more."""
        num_blocks = len(fetch.held_ids) + len(fetch.block_ids)
        wanted = num_blocks * self._block_size, fetch.granted_hashes[-1:]
        found = None if record is None else (record.num_tokens, (_hash_of(record),))
        if not fetch.block_ids or found != wanted:
            self._lose(key, fetch, "its record does not fit", quiet=True)
            return
        self._pool.cache(fetch.block_ids, fetch.granted_hashes, fetch.parent)
        num_tokens = len(fetch.block_ids) * self._block_size
        self.counts.received += 1
        self.counts.tokens += num_tokens
        self.counts.num_bytes += num_bytes
        for waiter in fetch.waiters:
            if waiter.request is fetch.request:
                waiter.wait.num_tokens = num_tokens
        self._end(key, fetch, quiet=True)

    def _lose(self, key: TransferKey, fetch: _Fetch, why: str, *, quiet: bool = False) -> None:
        """Give a prefix up, so that its prompts are computed."""
        logger.debug("a prefix of %s is lost: %s", fetch.engine_id, why)
        self.counts.lost += 1
        for waiter in fetch.waiters:
            waiter.wait.is_lost = waiter.request is fetch.request
        self._end(key, fetch, quiet=quiet)

    def _end(self, key: TransferKey, fetch: _Fetch, *, quiet: bool) -> None:
        """End a fetch and let its prompts go on.

        Its blocks are released, or in quarantine unless ``quiet``.

        Args:
            quiet: whether the holder writes no more for this fetch.
        """
        now = self._clock()
        del self._open[key]
        self._ended[key] = now
        for block_hash in fetch.hashes:
            if self._coming.get(block_hash) == key:
                del self._coming[block_hash]
        blocks, fetch.block_ids = fetch.block_ids, ()
        if fetch.started and not quiet:
            if blocks:
                self.quarantine.hold_blocks(key, fetch.engine_id, blocks, fetch.received_at)
            self._receiver.cancel(*key, fetch.engine_id)
        # The last blocks first: the cache then keeps the beginning of the prefix longest.
        self._pool.release(reversed(blocks))
        self._pool.release(reversed(fetch.held_ids))
        for waiter in fetch.waiters:
            waiter.wait.waited_s = now - waiter.began_at
            self._engine.features.end_fetch(waiter.request)

    def _lose_all(self, engine_id: str, why: str) -> None:
        """Give up all prefixes of one holder."""
        lost = [(key, one) for key, one in self._open.items() if one.engine_id == engine_id]
        for key, fetch in lost:
            self._lose(key, fetch, why)

    def _tick(self) -> None:
        """Give up what is late, run the quarantine's work, and forget old entries."""
        now = self._clock()
        if now < self._tick_at:
            return
        self._tick_at = now + TICK_S
        for key, fetch in list(self._open.items()):
            if now > fetch.expires_at:
                self._lose(key, fetch, f"not here in {self._timeout_s:g} s")
        self.quarantine.tick()
        oldest = now - MEMORY_S
        while self._early_starts and next(iter(self._early_starts.values()))[0] < oldest:
            del self._early_starts[next(iter(self._early_starts))]
        while self._ended and next(iter(self._ended.values())) < oldest:
            del self._ended[next(iter(self._ended))]

    # ------------------------------------------------------------------ what operators see

    @property
    def num_transfers(self) -> int:
        """Number of prefixes that are to arrive, or that are lost and in quarantine."""
        return len(self._open) + len(self.quarantine)

    def held(self) -> list[BlockHolding]:
        """Return the blocks of open fetches and the quarantine, for the ledger."""
        now = self._clock()
        granted = [
            BlockHolding(
                owner=BlockOwner.GRANT,
                block_ids=(*fetch.held_ids, *fetch.block_ids),
                request_id=key[0],
                epoch=key[1],
                state=fetch.state,
                peer=node_of(fetch.engine_id),
                age_s=now - fetch.received_at,
            )
            for key, fetch in self._open.items()
        ]
        return granted + self.quarantine.ledger()


def _hash_of(record: HandoffRecord) -> bytes:
    """Return the hash that identifies a record's prefix; empty if the record has none."""
    try:
        return bytes.fromhex(record.prefix)
    except ValueError:  # peers are not trusted
        return b""
