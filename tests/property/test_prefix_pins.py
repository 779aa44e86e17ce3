"""State machine over PrefixPins: shares hold, and no request fails that would run without pins."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from baton.kv.block_hash import BlockHasher
from baton.kv.pins import PinTerms, PrefixPin
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.pins.prefix_pins import ANY_CLASS, TICK_S, PrefixPins
from engine.core.request import Request, RequestStatus
from tests.fakes.engine.engine_parts import make_request

NUM_BLOCKS, BLOCK_SIZE, MAX_PINNED = 12, 2, 5
OWNERS = [b"", b"a", b"b"]

prompts = st.builds(
    lambda num_shared, own: [1] * num_shared + own,
    st.integers(1, 9) | st.integers(10, 20),
    st.lists(st.sampled_from([1, 2]), max_size=2),
)
prefixes = st.lists(
    st.builds(PrefixPin, st.sampled_from([1.0, 10.0, 1000.0]), st.sampled_from([0, 0, 3, 7, 99])),
    max_size=2,
)


class PrefixPinsMachine(RuleBasedStateMachine):
    """Runs equal requests over a cache with pins and over a cache without pins."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.num_requests = 0
        self.pinned: KVCacheManager
        self.plain: KVCacheManager
        self.pairs: dict[str, tuple[Request, Request]] = {}  # in the cache with pins, and without

    @initialize(window=st.sampled_from([None, None, 1, 3, 5]))
    def make(self, window: int | None) -> None:
        self.window = window
        self.pinned, self.plain = (
            KVCacheManager(
                NUM_BLOCKS,
                BLOCK_SIZE,
                sliding_windows=(window,),
                hasher=BlockHasher(BLOCK_SIZE),
            )
            for _ in range(2)
        )
        self.pins = PrefixPins(self.pinned, MAX_PINNED, 100.0, clock=lambda: self.now)

    @rule(prompt=prompts, owner=st.sampled_from(OWNERS), prefixes=prefixes)
    def begin(self, prompt: list[int], owner: bytes, prefixes: list[PrefixPin]) -> None:
        """Start and compute a request of a tenant, whose salt only this tenant has."""
        name = f"r{self.num_requests}"
        self.num_requests += 1
        keys = (owner,) if owner else ()
        pair = (
            make_request(name, prompt=prompt, extra_keys=keys),
            make_request(name, prompt=prompt, extra_keys=keys),
        )
        if prefixes:
            self.pins.begin(pair[0], PinTerms(owner, owner, tuple(prefixes)))
        begun = [
            manager.allocate_with_prefix(request)
            for manager, request in zip((self.pinned, self.plain), pair, strict=True)
        ]
        if self.window is None:  # with a window, which blocks a hit needs depends on its length
            assert (begun[0] is None) == (begun[1] is None)
        if None in begun:
            for manager, request in zip((self.pinned, self.plain), pair, strict=True):
                manager.free(request)
            pair[0].status = RequestStatus.FINISHED_ABORTED
            return
        for manager, request in zip((self.pinned, self.plain), pair, strict=True):
            request.num_computed_tokens = request.num_tokens
            manager.cache_blocks(request)
            manager.free_slid_out(request)
        self.pairs[name] = pair

    @precondition(lambda self: self.pairs)
    @rule(data=st.data(), num_tokens=st.integers(1, 5))
    def decode(self, data: st.DataObject, num_tokens: int) -> None:
        pair = self.pairs[data.draw(st.sampled_from(sorted(self.pairs)))]
        begun = []
        for manager, request in zip((self.pinned, self.plain), pair, strict=True):
            target = request.num_tokens + num_tokens
            begun.append(manager.allocate(request, target) is not None)
            if begun[-1]:
                request.token_ids += [3] * num_tokens
                request.num_computed_tokens = target
                manager.cache_blocks(request)
                manager.free_slid_out(request)
        if self.window is None:
            assert begun[0] == begun[1]

    @precondition(lambda self: self.pairs)
    @rule(data=st.data(), is_aborted=st.booleans())
    def end(self, data: st.DataObject, is_aborted: bool) -> None:
        pair = self.pairs.pop(data.draw(st.sampled_from(sorted(self.pairs))))
        for manager, request in zip((self.pinned, self.plain), pair, strict=True):
            manager.free(request)
        pair[0].status = RequestStatus.FINISHED_ABORTED
        if not is_aborted:
            self.pins.end(pair[:1])

    @rule(seconds=st.sampled_from([0.5, 2.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.pins.tick()
        assert all(
            pin.expires_at > self.now - TICK_S
            for own in self.pins._owners.values()
            for pin in own.pins.values()
        )

    @rule(owner=st.sampled_from(OWNERS))
    def drop(self, owner: bytes) -> None:
        """Ending a session's pins leaves the pins of other tenants."""
        others = self.open_pins() - self.open_pins(owner)
        self.pins.drop_session(owner, owner)
        assert self.open_pins() == others

    def open_pins(self, owner: bytes | None = None) -> set[tuple[bytes, bytes]]:
        return {
            (name, last)
            for name, own in self.pins._owners.items()
            for last in own.pins
            if owner in (None, name)
        }

    @rule()
    def flush(self) -> None:
        for manager in (self.pinned, self.plain):
            manager.block_pool.reset_prefix_cache()
        self.pins.clear()

    @invariant()
    def the_books_agree_and_shares_hold(self) -> None:
        if not hasattr(self, "pins"):
            return
        self.pinned.block_pool.check()
        self.pins.check()
        if self.window is None:
            assert self.pinned.block_pool.num_free == self.plain.block_pool.num_free

    @invariant()
    def free_blocks_are_behind_the_fence_exactly_if_pinned(self) -> None:
        if not hasattr(self, "pins"):
            return
        pool = self.pinned.block_pool
        block, behind = pool._fence.next, set[int]()
        while block is not pool._tail:
            behind.add(block.block_id)
            block = block.next
        # Shortage moves the fence only to allocate the block at once, so the sets stay equal.
        found = {pool.find(name, ANY_CLASS) for name in self.pins._kept} - {None}
        assert behind == {one for one in found if one is not None and pool.num_free_among((one,))}
        assert len(behind) <= MAX_PINNED


TestPrefixPins = PrefixPinsMachine.TestCase
TestPrefixPins.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
