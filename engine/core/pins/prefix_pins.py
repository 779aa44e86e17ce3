"""PrefixPins: keeps the blocks of pinned prefixes in the prefix cache until their time ends.

    a request begins    the blocks of its prompt are pinned
    the request ends    the blocks of its answer are pinned, too, and the pin's time starts again
    later               the time ends, or a newer pin needs the room: the blocks are ordinary again

A pinned block holds no reference. When it is free, the block pool allocates it after all other free
blocks, so a pin never delays or refuses a request. All pins together keep a bounded number of
blocks, and each owner with pins has an equal share of this number. A pin that does not fit takes
the place of its owner's oldest pins; a pin larger than the share keeps the first blocks only.
Refuses to know: tenants (an owner is a name made by the router), tensors.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from baton.kv.block_hash import BlockHash
from baton.kv.pins import PinTerms
from engine.core.block_pool import KVCacheBlock
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.metrics import PinCounts
from engine.core.pins.sessions import PrefetchBudget, SessionPrefixes
from engine.core.request import Request, RequestStatus

# Maximum number of an owner's pins, because `tick` looks at each pin.
MAX_PINS = 4096
# Maximum number of hashes that an owner's pins store, per block of the owner's share. Pins of many
# prefixes of one prompt keep few blocks, but store the hashes of these blocks many times.
HASHES_PER_BLOCK = 64
ANY_CLASS = 2**31  # finds blocks of all cache classes
TICK_S = 1.0
# Minimum seconds between two counts of the kept blocks, because a count looks at each block.
COUNT_S = 10.0


@dataclass(slots=True, eq=False)
class Pin:
    """One pinned prefix.

    Attributes:
        hashes: hashes of the prefix's logical blocks.
        names: names of the cached blocks that a hit of the whole prefix needs.
        session: name of the session that pinned the prefix; empty: no session, or several.
        expires_at: when the pin ends, by the clock of `PrefixPins`.
    """

    hashes: tuple[BlockHash, ...]
    names: tuple[BlockHash, ...]
    session: bytes
    expires_at: float


@dataclass(slots=True)
class _Owner:
    """The pins of one owner.

    Attributes:
        pins: the pins by the hash of the last block; the one used longest ago comes first.
        names: number of pins that keep each block.
        sessions: number of pins of each session.
        num_hashes: number of hashes that the pins store.
    """

    pins: dict[BlockHash, Pin] = field(default_factory=dict)
    names: Counter[BlockHash] = field(default_factory=Counter)
    sessions: Counter[bytes] = field(default_factory=Counter)
    num_hashes: int = 0

    def is_over(self, share: int) -> bool:
        """Return whether the pins are too many: by number, by blocks (a share) or by hashes."""
        if len(self.names) > share:
            return True
        takes_memory = len(self.pins) > MAX_PINS or self.num_hashes > HASHES_PER_BLOCK * share
        return takes_memory and len(self.pins) > 1

    def replace(self, pin: Pin) -> Pin | None:
        """Store a pin as the most recently used; return the earlier pin of its prefix, or None."""
        old = self.take_out(pin)
        self.pins[pin.hashes[-1]] = pin
        self.sessions[pin.session] += 1
        self.num_hashes += len(pin.hashes)
        return old

    def take_out(self, pin: Pin) -> Pin | None:
        """Remove and return the pin of the same prefix; None: there is none."""
        old = self.pins.pop(pin.hashes[-1], None)
        if old is not None:
            self.num_hashes -= len(old.hashes)
            self.sessions[old.session] -= 1
            if not self.sessions[old.session]:
                del self.sessions[old.session]
        return old


class PrefixPins:
    """The pins of one engine. Used on the engine's thread.

    Args:
        manager: owner of the prefix cache.
        max_blocks: maximum number of blocks that all pins may keep; 0: no pins.
        max_ttl_s: longest time of a pin in seconds; a longer time is shortened to it.
        counts: counts of pins, which this object writes.
        clock: returns seconds, never going back.

    Attributes:
        sessions: prefixes of the sessions' last requests.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        max_blocks: int,
        max_ttl_s: float,
        counts: PinCounts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = PinCounts() if counts is None else counts
        self._manager, self._pool = manager, manager.block_pool
        self._max_blocks, self._max_ttl_s, self._clock = max_blocks, max_ttl_s, clock
        self.sessions = SessionPrefixes(manager.block_pool.num_blocks)
        self._budget = PrefetchBudget(clock)
        self._owners: dict[bytes, _Owner] = {}
        self._kept: Counter[BlockHash] = Counter()  # number of owners that keep each block
        self._open: dict[str, tuple[Request, PinTerms]] = {}  # requests that have not ended
        self._tick_at = self._count_at = 0.0

    # ------------------------------------------------------------------ requests

    def begin(self, request: Request, terms: PinTerms) -> None:
        """Pin the prefixes that a new request names; `end` pins its answer, too."""
        self._open[request.request_id] = request, terms
        request.num_pinned_tokens = self._pin_all(request, terms, request.num_initial_tokens)

    def end(self, requests: Iterable[Request]) -> None:
        """Pin the answers of ended requests as far as they are computed, and renew the times."""
        if not self._open:
            return
        for request in requests:
            found = self._open.pop(request.request_id, None)
            if found is not None and found[0] is request:
                self._pin_all(request, found[1], request.num_computed_tokens)

    def note_finish(self, request: Request) -> None:
        """Forget a request that was aborted, because nobody calls `end` for it."""
        if not self._open or request.status is not RequestStatus.FINISHED_ABORTED:
            return
        found = self._open.get(request.request_id)
        if found is not None and found[0] is request:
            del self._open[request.request_id]

    def _pin_all(self, request: Request, terms: PinTerms, num_tokens: int) -> int:
        """Pin the prefixes of ``terms``, in the first tokens of a request.

        Returns the number of tokens in the longest pinned prefix.
        """
        manager, num_pinned = self._manager, 0
        if manager.hasher is None:
            self.counts.refused += len(terms.prefixes)
            return 0
        manager.extend_hashes(request, manager.hasher)
        every = request.block_hashes[: num_tokens // manager.block_size]
        if terms.session:
            self.sessions.remember(terms.owner, terms.session, tuple(every))
        for prefix in terms.prefixes:
            wanted = min(prefix.num_tokens or num_tokens, num_tokens)
            hashes = tuple(every[: wanted // manager.block_size])
            ttl_s = min(prefix.ttl_s, self._max_ttl_s)
            pinned = self._pin(terms.owner, hashes, terms.session, self._clock() + ttl_s)
            num_pinned = max(num_pinned, pinned * manager.block_size)
        return num_pinned

    # ------------------------------------------------------------------ hints that name a session

    def pin_session(self, owner: bytes, session: bytes, keep_s: float) -> tuple[BlockHash, ...]:
        """Pin the prefix of a session's last request, even if its blocks are not cached.

        Returns the hashes of the pinned prefix; empty if the session is unknown or has no room.
        """
        hashes, now = self.sessions.find(owner, session), self._clock()
        expires_at = now + min(keep_s, self._max_ttl_s)
        return hashes[: self._pin(owner, hashes, session, expires_at) if hashes else 0]

    def room_for_prefetch(self, owner: bytes) -> int:
        """Return how many blocks a prefetch may take; it may take no pinned block."""
        num_left = self._budget.num_left(owner, self._max_blocks // max(len(self._owners), 1))
        num_kept = len(self._kept)
        if self._pool.num_free - num_kept < num_left:
            # Blocks that are in use, or not cached, are not among the free blocks.
            kept = (self._pool.find(name, ANY_CLASS) for name in self._kept)
            num_kept = self._pool.num_free_among(one for one in kept if one is not None)
        return max(min(num_left, self._pool.num_free - num_kept), 0)

    def note_prefetch(self, owner: bytes, num_blocks: int, keep_s: float) -> None:
        """Count the blocks that a prefetch takes against its owner's share."""
        self._budget.count_prefetch(owner, num_blocks, min(keep_s, self._max_ttl_s))

    # ------------------------------------------------------------------ pins

    def _pin(
        self, owner: bytes, hashes: tuple[BlockHash, ...], session: bytes, expires_at: float
    ) -> int:
        """Pin a prefix; return how many logical blocks of it are pinned."""
        own = self._owners.get(owner) or _Owner()
        share = self._max_blocks // (len(self._owners) + (owner not in self._owners))
        hashes = self._cut(hashes, share)
        known = own.pins.get(hashes[-1]) if hashes else None
        names = self._names_of(hashes) if known is None else known.names
        if not names:
            self.counts.refused += 1
            return 0
        if owner not in self._owners:
            self._owners[owner] = own
            self._make_room_for_all()
        if known is not None:
            expires_at = max(expires_at, known.expires_at)
            session = session if session == known.session else b""
        pin = Pin(hashes, names, session, expires_at)
        self._add(own, pin)
        self._drop_covered(own, pin)
        self._make_room(own)
        self.counts.made += known is None
        return len(hashes)

    def _cut(self, hashes: tuple[BlockHash, ...], share: int) -> tuple[BlockHash, ...]:
        """Return the longest prefix whose blocks fit a share."""
        num_needed = self._manager.coordinator.num_needed
        lengths = range(len(hashes) + 1)  # a longer prefix needs as many blocks or more
        return hashes[: bisect_right(lengths, share, key=num_needed) - 1]

    def _names_of(self, hashes: tuple[BlockHash, ...]) -> tuple[BlockHash, ...]:
        """Return the names of the cached blocks that a hit of a whole prefix needs."""
        coordinator = self._manager.coordinator
        is_plain = coordinator.num_groups == 1 and not self._manager.slides
        return hashes if is_plain else coordinator.names_needed(hashes)

    def _add(self, own: _Owner, pin: Pin) -> None:
        """Add a pin as the most recently used; replace a pin of the same prefix."""
        if own.replace(pin) is None:  # pins of the same prefix keep the same blocks
            self._keep(own, pin.names)

    def _drop_covered(self, own: _Owner, pin: Pin) -> None:
        """Drop pins of shorter prefixes if this pin keeps those prefixes at least as long.

        A pin whose session may be dropped covers no pins of other sessions.
        """
        # With windows, a shorter prefix needs other blocks.
        if self._manager.slides or len(own.pins) == 1:
            return
        for block_hash in pin.hashes[:-1]:
            old = own.pins.get(block_hash)
            if old is None or old.expires_at > pin.expires_at:
                continue
            if pin.session in (b"", old.session):
                self._remove(own, old)

    def _make_room(self, own: _Owner) -> None:
        """Drop an owner's oldest pins until the rest fit its share.

        If the newest pin alone does not fit, shorten it.
        """
        share = self._max_blocks // len(self._owners)
        while own.is_over(share):
            oldest = next(iter(own.pins.values()))
            if len(own.pins) == 1:
                self._remove(own, oldest)
                hashes = self._cut(oldest.hashes, share)
                names = self._names_of(hashes)
                if names:
                    self._add(own, Pin(hashes, names, oldest.session, oldest.expires_at))
                return
            self._remove(own, oldest)
            self.counts.displaced += 1

    def _make_room_for_all(self) -> None:
        """Fit the pins of all owners to their shares, which a new owner has made smaller."""
        for owner, own in list(self._owners.items()):
            if own.pins:
                self._make_room(own)
                if not own.pins:
                    del self._owners[owner]

    def _remove(self, own: _Owner, pin: Pin) -> None:
        own.take_out(pin)
        self._let_go(own, pin.names)

    # ------------------------------------------------------------------ blocks

    def _keeps(self, block: KVCacheBlock) -> bool:
        """Return whether the pool keeps a freed block: it keeps one block per pinned content."""
        block_hash = block.block_hash
        if block_hash not in self._kept or block_hash is None:
            return False
        return self._pool.find(block_hash, ANY_CLASS) == block.block_id

    def _keep(self, own: _Owner, names: Iterable[BlockHash]) -> None:
        """Let one more pin keep blocks; free blocks that no pin kept before become pinned."""
        self._move(list(self._change(own, names, 1)))

    def _let_go(self, own: _Owner, names: Iterable[BlockHash]) -> None:
        """Let one pin fewer keep blocks; free blocks that no pin keeps any more become ordinary."""
        self._move(list(self._change(own, names, -1)))

    def _change(self, own: _Owner, names: Iterable[BlockHash], by: int) -> Iterator[BlockHash]:
        """Change the number of pins of blocks; yield those that are pinned now, or no longer."""
        for name in names:
            before = own.names[name]
            own.names[name] = before + by
            if not own.names[name]:
                del own.names[name]
            if bool(before) is (name in own.names):
                continue
            before = self._kept[name]
            self._kept[name] = before + by
            if not self._kept[name]:
                del self._kept[name]
            if bool(before) is not (name in self._kept):
                yield name

    def _move(self, names: list[BlockHash]) -> None:
        """Put free blocks where the pool puts blocks that become free now, first blocks last."""
        pool = self._pool
        pool.keeps = self._keeps if self._kept else None
        for name in reversed(names):
            block_id = pool.find(name, ANY_CLASS)
            if block_id is not None and pool.num_free_among((block_id,)):
                pool.touch((block_id,), is_use=False)
                pool.release((block_id,), is_use=False)

    # ------------------------------------------------------------------ time

    def tick(self) -> None:
        """End the pins whose time is over; call often."""
        now = self._clock()
        if now < self._tick_at:
            return
        self._tick_at = now + TICK_S
        if self._owners:
            self._end_pins(lambda pin: pin.expires_at <= now, "expired")
        self._count()

    def drop_session(self, owner: bytes, session: bytes) -> int:
        """End an owner's pins of one session, and forget its prefix; return the number of pins."""
        self.sessions.forget(owner, session)
        for request_id, (_, terms) in list(self._open.items()):
            if (terms.owner, terms.session) == (owner, session):
                del self._open[request_id]
        own = self._owners.get(owner)
        if own is None or session not in own.sessions:  # a client may drop many unknown sessions
            return 0
        return self._end_pins(lambda pin: pin.session == session, "dropped", (owner,))

    def clear(self) -> None:
        """End all pins and forget all sessions, because the prefix cache was emptied."""
        self.sessions.clear()
        self._end_pins(lambda pin: True, "dropped")

    def _end_pins(
        self, is_over: Callable[[Pin], bool], how: str, owners: Iterable[bytes] = ()
    ) -> int:
        """End the pins that a function chooses, of some owners or of all; return their number."""
        num_ended = 0
        for owner in tuple(owners) or tuple(self._owners):
            own = self._owners[owner]
            for pin in [pin for pin in own.pins.values() if is_over(pin)]:
                self._remove(own, pin)
                num_ended += 1
            if not own.pins:
                del self._owners[owner]
        if num_ended:
            setattr(self.counts, how, getattr(self.counts, how) + num_ended)
            self._count()
        return num_ended

    def _count(self) -> None:
        self.counts.open = sum(len(own.pins) for own in self._owners.values())
        if not self._kept:
            self.counts.blocks = 0
        elif (now := self._clock()) >= self._count_at:
            self._count_at = now + COUNT_S
            are_cached = (self._pool.find(name, ANY_CLASS) is not None for name in self._kept)
            self.counts.blocks = sum(are_cached)

    # ------------------------------------------------------------------ checks

    def check(self) -> None:
        """Assert the invariants; for tests."""
        kept: Counter[BlockHash] = Counter()
        for own in self._owners.values():
            assert own.pins
            names = Counter(name for pin in own.pins.values() for name in pin.names)
            assert names == own.names
            assert own.num_hashes == sum(len(pin.hashes) for pin in own.pins.values())
            assert own.sessions == Counter(pin.session for pin in own.pins.values())
            assert len(names) <= self._max_blocks // len(self._owners)
            kept.update(names.keys())
        assert kept == self._kept
        assert len(kept) <= self._max_blocks
        assert (self._pool.keeps is not None) == bool(kept)
