"""State machine over BlockPool: blocks are free or referenced, and hits have the right contents."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.core.block_pool import BlockPool, BlocksCleared, BlocksRemoved, BlocksStored

NUM_BLOCKS = 7
PATHS = [b"", b"a", b"b", b"aa", b"ab", b"ba", b"aba"]


class BlockPoolMachine(RuleBasedStateMachine):
    """Against a model: references, a list of free blocks, the next one first, and names.

    A content's name is its path, ``ab`` behind ``a``; so that events can be checked for order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, record_events=True)
        self.references: Counter[int] = Counter()
        self.free: list[int] = []
        self.num_made = 0
        self.names: dict[int, bytes] = {}
        self.told: set[bytes] = set()  # what whoever listens to events believes

    @rule(num_blocks=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, num_blocks: int) -> None:
        block_ids = self.pool.allocate(num_blocks)
        if num_blocks > len(self.free) + NUM_BLOCKS - self.num_made:
            assert block_ids is None
            return
        num_blank = sum(block_id not in self.names for block_id in self.free)
        num_new = max(min(num_blocks - num_blank, NUM_BLOCKS - self.num_made), 0)
        self.free[:0] = range(self.num_made, self.num_made + num_new)
        self.num_made += num_new
        assert block_ids == self.free[:num_blocks]
        del self.free[:num_blocks]
        self.references.update(block_ids)
        for block_id in block_ids:
            self.names.pop(block_id, None)

    @precondition(lambda self: self.references)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        block_ids = data.draw(st.lists(st.sampled_from(sorted(self.references)), max_size=4))
        self.pool.hold(block_ids)
        self.references.update(block_ids)

    @precondition(lambda self: self.references)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = data.draw(st.permutations(sorted(self.references.elements())))
        block_ids = held[: data.draw(st.integers(0, len(held)))]
        self.pool.release(block_ids)
        for block_id in block_ids:
            self.references[block_id] -= 1
            if not self.references[block_id]:
                del self.references[block_id]
                self.free.insert(len(self.free) if block_id in self.names else 0, block_id)

    @precondition(lambda self: self.references)
    @rule(data=st.data(), start=st.sampled_from(PATHS), suffix=st.sampled_from(PATHS[1:]))
    def cache(self, data: st.DataObject, start: bytes, suffix: bytes) -> None:
        chosen: dict[int, bytes] = {}
        for length in range(1, len(suffix) + 1):
            name = start + suffix[:length]
            possible = [
                block_id
                for block_id in sorted(self.references)
                if self.names.get(block_id) in (None, name) and block_id not in chosen
            ]
            if not possible:
                break
            chosen[data.draw(st.sampled_from(possible))] = name
        self.pool.cache(chosen.keys(), chosen.values(), start or None)
        self.names |= chosen

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        block_ids = data.draw(st.lists(st.sampled_from(sorted(self.names)), max_size=4))
        num_free = self.pool.num_free_among(set(block_ids))
        assert num_free == len(set(block_ids) & set(self.free))
        self.pool.touch(block_ids)
        self.references.update(block_ids)
        self.free = [block_id for block_id in self.free if block_id not in block_ids]

    @rule()
    def reset(self) -> None:
        self.pool.reset_prefix_cache()
        self.names.clear()

    @rule()
    def listen(self) -> None:
        """Now and then only: many events come at once."""
        for event in self.pool.take_events():
            if isinstance(event, BlocksStored):
                assert event.hashes
                for parent, name in zip(
                    (event.parent or b"", *event.hashes), event.hashes, strict=False
                ):
                    assert name[:-1] == parent
                assert self.told.isdisjoint(event.hashes)
                self.told.update(event.hashes)
            elif isinstance(event, BlocksRemoved):
                assert self.told.issuperset(event.hashes)
                self.told.difference_update(event.hashes)
            else:
                assert isinstance(event, BlocksCleared)
                self.told.clear()
        assert self.told == set(self.names.values())

    @invariant()
    def counts_add_up(self) -> None:
        self.pool.check()
        assert self.pool.num_free == len(self.free) + NUM_BLOCKS - self.num_made
        assert self.pool.ref_counts() == dict(self.references)
        assert sum(self.pool.ref_counts().values()) == self.references.total()

    @invariant()
    def exactly_the_named_contents_are_found(self) -> None:
        assert self.pool.num_cached == len(set(self.names.values()))
        for name in {start + end for start in PATHS for end in PATHS[1:]}:
            block_id = self.pool.find(name)
            if block_id is None:
                assert name not in self.names.values()
            else:
                assert self.names[block_id] == name

    def teardown(self) -> None:
        self.listen()
        self.pool.release(list(self.references.elements()))
        assert self.pool.allocate(NUM_BLOCKS) is not None
        assert self.pool.num_cached == 0


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
