"""GrantQueue: decides which parked request gets blocks for its KV next.

Requests are served in order of arrival, or of rank if the engine schedules by priority. A request
whose next missing block is arriving with another request first waits for that transfer:

    waiting   [ c b a ]  ->  receiving     until its transfer ends, within a budget
       ^           |
       '-- waiters of a transfer that brings their next missing block

Waiting requests hold no blocks, so they cannot block each other. Refuses to know: peers, messages.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from baton.kv.block_hash import BlockHash
from engine.core.kv_cache_manager import GrantedBlocks
from engine.core.request import Request, RequestStatus
from engine.engine import Engine

Key = tuple[str, int]  # (request_id, epoch)


@dataclass(slots=True)
class _Transfer:
    """A granted request whose KV is arriving.

    Attributes:
        num_tokens: number of tokens that arrive, which counts towards ``max_tokens``.
        hashes: hashes of the full blocks that this transfer brings.
        waiters: requests that wait for these blocks, in order of arrival.
    """

    num_tokens: int
    hashes: list[BlockHash]
    waiters: list[tuple[Key, Request]] = field(default_factory=list)


class GrantQueue:
    """Requests that wait for blocks into which prefill nodes then write KV.

    Args:
        engine: allocates the blocks.
        max_requests: maximum number of requests that receive KV at a time.
        max_tokens: maximum number of tokens whose KV may arrive at a time; a longer prompt is
            received alone. 0: as many as half the cache has room for.
    """

    def __init__(self, engine: Engine, *, max_requests: int, max_tokens: int) -> None:
        self._engine = engine
        self._max_requests = max_requests
        spec = engine.kv_memory.spec
        num_logical_blocks = engine.num_blocks // spec.num_groups
        self._max_tokens = max_tokens or num_logical_blocks * spec.block_size // 2
        self._waiting: list[tuple[Key, Request]] = []
        self._receiving: dict[Key, _Transfer] = {}
        self._num_tokens = 0
        # For each block that is being received, the transfer that writes it
        self._bringers: dict[BlockHash, Key] = {}
        # The refused first request, with the numbers of free blocks and of waiting requests when it
        # was refused. It is refused again until blocks are freed or the second number changes.
        self._refused: tuple[Key, int, int] | None = None

    def add_parked(self, key: Key, request: Request) -> None:
        """Queue a parked request; its prefill node waits for a grant."""
        self._queue(len(self._waiting), [(key, request)])

    def grant_next(self) -> tuple[Key, GrantedBlocks] | None:
        """Grant the next request its blocks; return None if no request can get blocks now."""
        while self._waiting:
            key, request = self._waiting[0]
            # The request has ended while it waited.
            if request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
                del self._waiting[0]
                continue
            if self._is_refused(key):
                return None
            num_cached, missing = self._engine.kv_cache_manager.find_initial_prefix(request)
            bringer = self._bringers.get(missing[0]) if missing else None
            if bringer is not None:
                del self._waiting[0]
                self._receiving[bringer].waiters.append((key, request))
                continue
            num_tokens = request.num_initial_tokens - num_cached
            has_budget = self._has_budget(num_tokens)
            granted = self._engine.grant(request.request_id) if has_budget else None
            if granted is None:
                self._refused = (key, self._engine.block_pool.num_free, self._engine.num_waiting)
                return None
            del self._waiting[0]
            self._receiving[key] = _Transfer(num_tokens, missing)
            self._num_tokens += num_tokens
            self._bringers.update(dict.fromkeys(missing, key))
            return key, granted
        return None

    def end_transfer(self, key: Key) -> None:
        """Remove a complete or failed transfer; queue its waiters at the front, or by rank.

        Ignores the keys of unknown transfers.
        """
        transfer = self._receiving.pop(key, None)
        if transfer is None:
            return
        self._refused = None
        self._num_tokens -= transfer.num_tokens
        for block_hash in transfer.hashes:
            if self._bringers.get(block_hash) == key:
                del self._bringers[block_hash]
        self._queue(0, transfer.waiters)

    def _queue(self, place: int, requests: list[tuple[Key, Request]]) -> None:
        """Insert requests at ``place``; if the engine goes by priority, insert each by its rank."""
        if not self._engine.by_priority:
            self._waiting[place:place] = requests
            return
        for item in requests:
            bisect.insort(self._waiting, item, key=lambda item: item[1].rank)

    def _is_refused(self, key: Key) -> bool:
        """Return whether this first request was refused and nothing has changed since."""
        if self._refused is None:
            return False
        refused, num_free, num_waiting = self._refused
        freed = self._engine.block_pool.num_free > num_free
        return refused == key and not freed and self._engine.num_waiting == num_waiting

    def _has_budget(self, num_tokens: int) -> bool:
        if not self._receiving:
            return True
        has_room = self._num_tokens + num_tokens <= self._max_tokens
        return has_room and len(self._receiving) < self._max_requests
