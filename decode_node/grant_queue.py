"""GrantQueue: which parked request gets blocks next.

First come first served, but for one that would receive what is on its way here already:

    waiting   [ c b a ]  ->  receiving     until its transfer ends; a budget of its own
       ^           |
       '-- behind: waits for another's transfer that brings the next block it lacks

Who waits holds no block, so nobody waits for ever. Knows no peer and no message.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from baton.block_hash import BlockHash
from engine.core.kv_cache_manager import GrantedBlocks
from engine.core.request import Request, RequestStatus
from engine.engine import Engine

Key = tuple[str, int]  # (request_id, epoch)


@dataclass(slots=True)
class _Transfer:
    """A granted request whose KV is on its way.

    Attributes:
        num_tokens: of the budget.
        hashes: of the full blocks that nobody else brings.
        behind: who waits for them, first come first.
    """

    num_tokens: int
    hashes: list[BlockHash]
    behind: list[tuple[Key, Request]] = field(default_factory=list)


class GrantQueue:
    """Requests that want blocks for KV to arrive in.

    Args:
        engine: gives the blocks.
        max_requests: most that receive at a time.
        max_tokens: most tokens that are received at a time, but for one request alone, which may
            have more; 0: half of the KV cache.
    """

    def __init__(self, engine: Engine, *, max_requests: int, max_tokens: int) -> None:
        self._engine = engine
        self._max_requests = max_requests
        spec = engine.kv_memory.spec
        num_logical_blocks = engine.num_blocks // spec.num_groups
        self._max_tokens = max_tokens or num_logical_blocks * spec.block_size // 2
        self._waiting: deque[tuple[Key, Request]] = deque()
        self._receiving: dict[Key, _Transfer] = {}
        self._num_tokens = 0
        self._coming: dict[BlockHash, Key] = {}
        # The head that got nothing when it was looked up, and how many blocks were free and how
        # many requests in line then. To look it up takes time for each block of its prompt.
        self._refused: tuple[Key, int, int] | None = None

    def add(self, key: Key, request: Request) -> None:
        """Queue a parked request whose prefill node waits for its grant."""
        self._waiting.append((key, request))

    def take(self) -> tuple[Key, GrantedBlocks] | None:
        """The next request that has blocks now; None while there are none, or no budget."""
        while self._waiting:
            key, request = self._waiting[0]
            if request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS:  # it ended meanwhile
                self._waiting.popleft()
                continue
            if self._is_refused(key):
                return None
            num_cached, lacking = self._engine.find_initial_prefix(request)
            brings = self._coming.get(lacking[0]) if lacking else None
            if brings is not None:
                self._waiting.popleft()
                self._receiving[brings].behind.append((key, request))
                continue
            num_tokens = request.num_initial_tokens - num_cached
            has_budget = self._has_budget(num_tokens)
            granted = self._engine.grant(request.request_id) if has_budget else None
            if granted is None:
                self._refused = (key, self._engine.block_pool.num_free, self._engine.num_waiting)
                return None
            self._waiting.popleft()
            self._receiving[key] = _Transfer(num_tokens, lacking)
            self._num_tokens += num_tokens
            self._coming.update(dict.fromkeys(lacking, key))
            return key, granted
        return None

    def end(self, key: Key) -> None:
        """A transfer ended, well or not: who waited for it is next; harmless if there was none."""
        transfer = self._receiving.pop(key, None)
        if transfer is None:
            return
        self._refused = None
        self._num_tokens -= transfer.num_tokens
        for block_hash in transfer.hashes:
            if self._coming.get(block_hash) == key:
                del self._coming[block_hash]
        self._waiting.extendleft(reversed(transfer.behind))

    def _is_refused(self, key: Key) -> bool:
        """Whether the head would get nothing again: no transfer ended since, and none was freed."""
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
