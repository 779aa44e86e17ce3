"""State machine over KVCacheManager: a prefix hit gives blocks with exactly this prefix."""

from __future__ import annotations

from collections import Counter

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
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import Request
from tests.fakes.engine.engine_parts import make_request

NUM_BLOCKS = 9
BLOCK_SIZE = 2
# What KV depends on: whatever the request brings, and all tokens up to its own.
Content = tuple[tuple[bytes, ...], tuple[int, ...]]

# Short ones side by side, long ones that leave hardly a block; most begin alike.
prompts = st.builds(
    lambda num_shared, own: [1] * num_shared + own,
    st.integers(1, 6) | st.integers(7, 15),
    st.lists(st.sampled_from([1, 2]), max_size=2),
)
salts = st.sampled_from([(), (), (b"salt",)])


class KVCacheManagerMachine(RuleBasedStateMachine):
    """Against a model: what each slot holds, and which blocks have a name.

    The test is the scheduler and the model runner: it writes tokens, and notes them as computed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.manager: KVCacheManager
        self.requests: dict[str, Request] = {}
        self.num_requests = 0
        self.ended: list[tuple[list[int], tuple[bytes, ...]]] = []  # tokens and salt
        self.held: list[int] = []  # by somebody else, as pushes do
        self.slots: dict[tuple[int, int], Content] = {}
        self.names: dict[int, Content] = {}  # of full blocks that can be found
        self.num_named: dict[str, int] = {}  # leading blocks of a request that had their turn

    @initialize(
        window=st.sampled_from([None, None, 1, 2, 3, 5, 8]),
        prefix_cache=st.sampled_from([True, True, True, False]),
    )
    def make(self, window: int | None, prefix_cache: bool) -> None:
        self.window = window
        self.prefix_cache = prefix_cache
        self.manager = KVCacheManager(
            NUM_BLOCKS,
            BLOCK_SIZE,
            sliding_windows=[window],
            hasher=BlockHasher(BLOCK_SIZE) if prefix_cache else None,
        )
        self.pool = self.manager.block_pool
        # What stands for blocks that slid out: nobody asked for it yet, and it is not free.
        self.null_blocks = set(self.pool.ref_counts())
        assert len(self.null_blocks) == (window is not None)

    # ------------------------------------------------------------ the model

    def content(self, request: Request, num_tokens: int) -> Content:
        return request.extra_keys, tuple(request.token_ids[:num_tokens])

    def oldest(self, num_computed_tokens: int) -> int:
        """Return the first position that the next token attends to."""
        return 0 if self.window is None else max(num_computed_tokens - self.window + 1, 0)

    def longest_hit(self, request: Request) -> int:
        """Tokens of the longest prefix of which all that will be looked at has a name."""
        if not self.prefix_cache:
            return 0
        named = set(self.names.values())
        for length in range((request.num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE, 0, -BLOCK_SIZE):
            first = self.oldest(length) // BLOCK_SIZE * BLOCK_SIZE
            ends = range(first + BLOCK_SIZE, length + 1, BLOCK_SIZE)
            looked_at = ends if self.oldest(length) < length else range(0)
            if all(self.content(request, end) in named for end in looked_at):
                return length
        return 0

    def owned(self, request: Request) -> list[int]:
        return [block_id for block_id in request.block_ids if block_id not in self.null_blocks]

    def take_new(self, block_ids: list[int]) -> None:
        """Record allocated blocks, whose earlier contents are forgotten."""
        for block_id in block_ids:
            assert block_id not in self.null_blocks
            self.names.pop(block_id, None)
            for offset in range(BLOCK_SIZE):
                self.slots.pop((block_id, offset), None)

    def check_readable(self, request: Request, num_computed_tokens: int, end: int) -> None:
        """All that tokens from ``num_computed_tokens`` on look at, before ``end``, is theirs."""
        for position in range(self.oldest(num_computed_tokens), end):
            block_id = request.block_ids[position // BLOCK_SIZE]
            found = self.slots.get((block_id, position % BLOCK_SIZE))
            assert found == self.content(request, position + 1)

    # ------------------------------------------------------------ requests

    @rule(prompt=prompts, salt=salts, spare=st.integers(0, 2))
    def begin(self, prompt: list[int], salt: tuple[bytes, ...], spare: int) -> None:
        self.begin_one(prompt, salt, spare)

    def begin_one(self, prompt: list[int], salt: tuple[bytes, ...], spare: int) -> None:
        request = make_request(f"r{self.num_requests}", prompt=prompt, extra_keys=salt)
        self.num_requests += 1
        before, num_free = self.pool.ref_counts(), self.pool.num_free
        hit = self.manager.find_cached_blocks(request)
        assert len(hit) * BLOCK_SIZE == self.longest_hit(request)
        assert self.pool.ref_counts() == before  # looking takes nothing
        woken = {block_id for block_id in hit if block_id not in before}
        needed = self.manager.num_blocks_for(len(prompt)) - len(hit) + len(woken)
        num_cached_tokens = self.manager.allocate_with_prefix(request, spare)
        if needed + spare > num_free:
            assert num_cached_tokens is None
            assert request.block_ids == []
            assert self.pool.ref_counts() == before
            return
        assert num_cached_tokens == len(hit) * BLOCK_SIZE < len(prompt)
        assert request.block_ids[: len(hit)] == hit
        assert len(request.block_ids) == self.manager.num_blocks_for(len(prompt))
        assert self.pool.num_free == num_free - needed
        self.check_readable(request, num_cached_tokens, num_cached_tokens)
        self.take_new(request.block_ids[len(hit) :])
        request.num_computed_tokens = num_cached_tokens
        self.num_named[request.request_id] = len(hit)
        self.requests[request.request_id] = request

    @precondition(lambda self: self.ended)
    @rule(num_more=st.integers(0, 3), spare=st.integers(0, 1))
    def begin_again(self, num_more: int, spare: int) -> None:
        """The next turn of what ended last: its blocks are free, and the last to be taken."""
        token_ids, salt = self.ended[-1]
        self.begin_one([*token_ids, *[1] * num_more], salt, spare)

    @rule(prompt=prompts, salt=salts)
    def arrive(self, prompt: list[int], salt: tuple[bytes, ...]) -> None:
        """A prompt whose KV a remote node wrote: of it only what will be looked at came."""
        request = make_request(f"r{self.num_requests}", prompt=prompt, extra_keys=salt)
        self.num_requests += 1
        if not self.allocate(request, len(prompt)):
            return
        self.requests[request.request_id] = request
        request.num_computed_tokens = len(prompt)
        num_slid_out = self.oldest(len(prompt)) // BLOCK_SIZE
        for position in range(num_slid_out * BLOCK_SIZE, len(prompt)):
            block_id = request.block_ids[position // BLOCK_SIZE]
            self.slots[block_id, position % BLOCK_SIZE] = self.content(request, position + 1)
        self.num_named[request.request_id] = num_slid_out
        self.manager.free_slid_out(request)
        self.manager.cache_blocks(request)
        self.name_blocks(request)

    def draw_request(self, data: st.DataObject) -> Request:
        return self.requests[data.draw(st.sampled_from(sorted(self.requests)))]

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), num_tokens=st.integers(1, 6), next_token=st.sampled_from([1, 1, 2]))
    def compute(self, data: st.DataObject, num_tokens: int, next_token: int) -> None:
        request = self.draw_request(data)
        if request.num_computed_tokens == request.num_tokens:
            request.token_ids.append(next_token)
        start = request.num_computed_tokens
        end = min(start + num_tokens, request.num_tokens)
        if not self.allocate(request, end):
            return
        for position in range(start, end):
            block_id = request.block_ids[position // BLOCK_SIZE]
            # A block with a name is never written again, nor is one that another request reads.
            assert block_id not in self.names
            assert block_id not in self.null_blocks
            others = (r for r in self.requests.values() if r is not request)
            assert all(block_id not in other.block_ids for other in others)
            self.slots[block_id, position % BLOCK_SIZE] = self.content(request, position + 1)
        self.check_readable(request, start, end)
        request.num_computed_tokens = end
        self.manager.cache_blocks(request)
        self.name_blocks(request)
        self.manager.free_slid_out(request)
        num_slid_out = self.oldest(end) // BLOCK_SIZE
        self.num_named[request.request_id] = max(self.num_named[request.request_id], num_slid_out)
        for index, block_id in enumerate(request.block_ids):
            assert (block_id in self.null_blocks) == (index < num_slid_out)

    def name_blocks(self, request: Request) -> None:
        if not self.prefix_cache:
            return
        num_full = request.num_computed_tokens // BLOCK_SIZE
        for index in range(self.num_named[request.request_id], num_full):
            self.names[request.block_ids[index]] = self.content(request, (index + 1) * BLOCK_SIZE)
        self.num_named[request.request_id] = max(self.num_named[request.request_id], num_full)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), num_more=st.integers(0, 5) | st.integers(6, 16))
    def allocate_ahead(self, data: st.DataObject, num_more: int) -> None:
        request = self.draw_request(data)
        self.allocate(request, request.num_tokens + num_more)

    def allocate(self, request: Request, num_tokens: int) -> bool:
        before, num_free = list(request.block_ids), self.pool.num_free
        missing = max(-(-num_tokens // BLOCK_SIZE) - len(before), 0)
        added = self.manager.allocate(request, num_tokens)
        if missing > num_free:
            assert added is None
            assert request.block_ids == before
            assert self.pool.num_free == num_free
            return False
        assert added is not None
        assert len(added) == missing
        assert request.block_ids == before + added
        self.take_new(added)
        return True

    @precondition(lambda self: self.requests and self.pool.num_free)
    @rule(data=st.data(), num_left=st.integers(0, 3))
    def take_nearly_all(self, data: st.DataObject, num_left: int) -> None:
        """Take blocks until little more than the next request's cached prefix is free."""
        request = self.draw_request(data)
        num_more = max(self.pool.num_free - num_left, 0)
        assert self.allocate(request, (len(request.block_ids) + num_more) * BLOCK_SIZE)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        request = self.draw_request(data)
        del self.requests[request.request_id]
        self.manager.free(request)
        assert request.block_ids == []
        self.ended.append((request.token_ids, request.extra_keys))

    # ------------------------------------------------------------ others

    @precondition(lambda self: any(self.owned(request) for request in self.requests.values()))
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        owned = {block_id for r in self.requests.values() for block_id in self.owned(r)}
        block_ids = data.draw(st.lists(st.sampled_from(sorted(owned)), max_size=3))
        self.pool.hold(block_ids)
        self.held += block_ids

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block_ids = data.draw(st.permutations(self.held))
        num_released = data.draw(st.integers(1, len(block_ids)))
        self.pool.release(block_ids[:num_released])
        self.held = list(block_ids[num_released:])

    @rule()
    def reset(self) -> None:
        self.pool.reset_prefix_cache()
        self.names.clear()

    # ------------------------------------------------------------ what must hold

    @invariant()
    def every_block_is_free_or_accounted_for(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.pool.check()
        holders = Counter(self.held)
        holders.update(block_id for r in self.requests.values() for block_id in self.owned(r))
        holders.update(self.null_blocks)
        assert self.pool.ref_counts() == dict(holders)
        assert self.pool.num_free == NUM_BLOCKS - len(holders)
        assert self.pool.num_cached == len(set(self.names.values()))

    @invariant()
    def named_blocks_hold_what_their_name_says(self) -> None:
        for block_id, (extra_keys, token_ids) in self.names.items():
            start = len(token_ids) - BLOCK_SIZE
            for offset in range(BLOCK_SIZE):
                expected = extra_keys, token_ids[: start + offset + 1]
                assert self.slots[block_id, offset] == expected

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for request in self.requests.values():
            self.manager.free(request)
        self.pool.release(self.held)
        self.pool.check()
        assert self.pool.num_free == NUM_BLOCKS - len(self.null_blocks)


TestKVCacheManager = KVCacheManagerMachine.TestCase
TestKVCacheManager.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
